#include "evenkeel/trainer/models/model_file.h"

#include <cstring>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "evenkeel/comm/arith/convert.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/types.h"
#include "evenkeel/zero_optim/checkpoint/file_io.h"

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
  if (from.dtype == to.dtype) {
    std::memcpy(to.data, from.bytes.data(), from.bytes.size());
    return;
  }
  std::vector<char> aligned(from.bytes.begin(),
                            from.bytes.end());  // In a file elements lie at any address.
  ConvertFloats(TensorView(aligned.data(), to.count, from.dtype), to);
}

}  // namespace

absl::StatusOr<ModelTensors> TensorsOf(const Model& model) {
  ModelTensors tensors{.metadata = model.metadata()};
  EK_ASSIGN_OR_RETURN(tensors.host, model.ToHost());
  const ParameterSet& parameters = model.parameters();
  for (int i = 0; i < parameters.size(); ++i) {
    const auto shape = model.shape(i);
    tensors.all.push_back(
        {parameters[i].name, {shape.begin(), shape.end()}, tensors.host.values[i]});
  }
  for (size_t i = 0; i < tensors.host.buffers.size(); ++i) {
    const NamedBuffer& buffer = model.buffers()[i];
    tensors.all.push_back({buffer.name, buffer.shape, tensors.host.buffers[i]});
  }
  return tensors;
}

absl::Status SaveTensors(const ModelTensors& tensors, const std::string& path,
                         const std::map<std::string, std::string>& metadata) {
  std::map<std::string, std::string> all = metadata;
  all.insert(tensors.metadata.begin(), tensors.metadata.end());
  all.insert({"format", "pt"});
  return WriteSafetensors(path, tensors.all, all);
}

absl::Status SaveModel(const Model& model, const std::string& path,
                       const std::map<std::string, std::string>& metadata) {
  EK_ASSIGN_OR_RETURN(const ModelTensors tensors, TensorsOf(model));
  return SaveTensors(tensors, path, metadata);
}

absl::Status SaveModelFolder(const Model& model, const std::string& folder,
                             const std::map<std::string, std::string>& metadata) {
  for (const auto& [name, text] : model.companions()) {
    const absl::string_view pieces[] = {text};
    EK_RETURN_IF_ERROR(WriteFileAtomically(absl::StrCat(folder, "/", name), pieces));
  }
  return SaveModel(model, absl::StrCat(folder, "/", kModelFile), metadata);
}

absl::Status LoadModel(const std::string& path, Model& model) {
  EK_ASSIGN_OR_RETURN(const SafetensorsFile file, SafetensorsFile::Read(path));
  return Annotate(LoadModel(file.tensors(), model), path);
}

absl::Status LoadModel(std::span<const SafetensorsFile::Tensor> tensors, Model& model) {
  absl::flat_hash_map<absl::string_view, const SafetensorsFile::Tensor*> unused;
  for (const auto& tensor : tensors) unused[tensor.name] = &tensor;
  EK_ASSIGN_OR_RETURN(const ModelTensors own, TensorsOf(model));
  const std::vector<NamedTensor>& wanted = own.all;
  std::vector<const SafetensorsFile::Tensor*> found;
  for (const NamedTensor& tensor : wanted) {
    const auto stored = unused.extract(tensor.name);
    if (stored.empty())
      return absl::InvalidArgumentError(absl::StrCat("has no tensor ", tensor.name));
    found.push_back(stored.mapped());
    EK_RETURN_IF_ERROR(CheckFits(*found.back(), tensor));
  }
  for (const auto& tensor : tensors) {
    if (!unused.contains(tensor.name)) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("has a tensor ", tensor.name, ", which the model does not have"));
  }
  for (size_t i = 0; i < wanted.size(); ++i) Copy(*found[i], wanted[i].value);
  return model.FromHost(own.host);
}

}  // namespace evenkeel
