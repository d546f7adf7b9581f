#include "evenkeel/zero_optim/checkpoint/parameter_file.h"

#include <cstdint>
#include <cstring>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "evenkeel/comm/arith/convert.h"
#include "evenkeel/comm/status.h"

namespace evenkeel {
namespace {

bool CanBecome(DType from, DType to) {
  return from == to || (IsFloat(from) && IsFloat(to) && SizeOf(from) < SizeOf(to));
}

absl::Status CheckFits(const SafetensorsFile::Tensor& stored, const NamedTensor& wanted) {
  if (stored.shape == wanted.shape && CanBecome(stored.dtype, wanted.value.dtype))
    return absl::OkStatus();
  const auto text = [](DType dtype, const std::vector<int64_t>& shape) {
    return absl::StrCat(ToString(dtype), "[", absl::StrJoin(shape, ","), "]");
  };
  return absl::InvalidArgumentError(
      absl::StrCat("tensor ", wanted.name, " is ", text(stored.dtype, stored.shape),
                   ", the model has ", text(wanted.value.dtype, wanted.shape)));
}

void Copy(const SafetensorsFile::Tensor& from, const TensorView& to) {
  if (to.data == nullptr || to.count == 0) return;
  if (from.dtype == to.dtype) {
    std::memcpy(to.data, from.bytes.data(), from.bytes.size());
    return;
  }
  std::vector<char> aligned(from.bytes.begin(),
                            from.bytes.end());  // In a file elements lie at any address.
  ConvertFloats(TensorView(aligned.data(), to.count, from.dtype), to);
}

absl::Status CheckHost(std::span<const NamedTensor> tensors) {
  for (const NamedTensor& tensor : tensors) {
    if (tensor.value.device == Device::Cpu()) continue;
    return absl::InvalidArgumentError(absl::StrCat("tensor ", tensor.name, " is on ",
                                                   ToString(tensor.value.device),
                                                   "; copy it to the host first"));
  }
  return absl::OkStatus();
}

}  // namespace

std::vector<NamedTensor> TensorsOf(const ParameterSet& params,
                                   const ParameterFileOptions& options) {
  std::vector<NamedTensor> tensors;
  for (int i = 0; i < params.size(); ++i) {
    const TensorView value = options.values.empty() ? params[i].value : options.values[i];
    const std::span<const int64_t> shape = params.shape(i);
    tensors.push_back({params[i].name, {shape.begin(), shape.end()}, value});
    if (shape.empty()) tensors.back().shape = {value.count};
  }
  tensors.insert(tensors.end(), options.buffers.begin(), options.buffers.end());
  return tensors;
}

absl::Status CopyTensors(std::span<const SafetensorsFile::Tensor> stored,
                         std::span<const NamedTensor> tensors) {
  EK_RETURN_IF_ERROR(CheckHost(tensors));
  absl::flat_hash_map<absl::string_view, const SafetensorsFile::Tensor*> unused;
  for (const auto& tensor : stored) unused[tensor.name] = &tensor;
  std::vector<const SafetensorsFile::Tensor*> found;
  for (const NamedTensor& tensor : tensors) {
    const auto one = unused.extract(tensor.name);
    if (one.empty()) return absl::InvalidArgumentError(absl::StrCat("has no tensor ", tensor.name));
    found.push_back(one.mapped());
    EK_RETURN_IF_ERROR(CheckFits(*found.back(), tensor));
  }
  for (const auto& tensor : stored) {
    if (!unused.contains(tensor.name)) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("has a tensor ", tensor.name, ", which the model does not have"));
  }
  for (size_t i = 0; i < found.size(); ++i) Copy(*found[i], tensors[i].value);
  return absl::OkStatus();
}

absl::Status SaveParameters(const ParameterSet& params, const std::string& path,
                            const ParameterFileOptions& options) {
  const std::vector<NamedTensor> tensors = TensorsOf(params, options);
  EK_RETURN_IF_ERROR(CheckHost(tensors));
  std::map<std::string, std::string> metadata = options.metadata;
  metadata.insert({"format", "pt"});
  return WriteSafetensors(path, tensors, metadata);
}

absl::Status LoadParameters(const std::string& path, ParameterSet& params,
                            const ParameterFileOptions& options) {
  EK_ASSIGN_OR_RETURN(const SafetensorsFile file, SafetensorsFile::Read(path));
  return Annotate(CopyTensors(file.tensors(), TensorsOf(params, options)), path);
}

}  // namespace evenkeel
