#include "evenkeel/trainer/model_file.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/zero_optim/safetensors.h"

namespace evenkeel {
namespace {

// Everything that belongs into the file.
std::vector<NamedTensor> TensorsOf(const Model& model) {
  std::vector<NamedTensor> tensors;
  const ParameterSet& parameters = model.parameters();
  for (int i = 0; i < parameters.size(); ++i) {
    const auto shape = model.shape(i);
    tensors.push_back({parameters[i].name, {shape.begin(), shape.end()}, parameters[i].value});
  }
  for (const NamedBuffer& buffer : model.buffers()) tensors.push_back({buffer.name, buffer.shape, buffer.value});
  return tensors;
}

bool CanBecome(DType from, DType to) { return from == to || (from == DType::kFloat32 && to == DType::kFloat64); }

absl::Status CheckFits(const SafetensorsFile::Tensor* stored, const NamedTensor& wanted) {
  if (stored == nullptr) return absl::InvalidArgumentError(absl::StrCat("has no tensor ", wanted.name));
  if (stored->shape == wanted.shape && CanBecome(stored->dtype, wanted.value.dtype)) return absl::OkStatus();
  const auto text = [](DType dtype, const std::vector<int64_t>& shape) {
    return absl::StrCat(ToString(dtype), "[", absl::StrJoin(shape, ","), "]");
  };
  return absl::InvalidArgumentError(absl::StrCat("tensor ", wanted.name, " is ", text(stored->dtype, stored->shape),
                                                 ", the model has ", text(wanted.value.dtype, wanted.shape)));
}

void Copy(const SafetensorsFile::Tensor& from, const TensorView& to) {
  if (from.dtype == to.dtype) {
    std::memcpy(to.data, from.bytes.data(), from.bytes.size());
    return;
  }
  std::vector<float> values(to.count);
  std::memcpy(values.data(), from.bytes.data(), from.bytes.size());
  std::ranges::copy(values, to.as<double>().begin());
}

absl::Status Load(const SafetensorsFile& file, std::span<const NamedTensor> wanted) {
  for (const NamedTensor& tensor : wanted) EK_RETURN_IF_ERROR(CheckFits(file.Find(tensor.name), tensor));
  for (const auto& stored : file.tensors()) {
    if (std::ranges::find(wanted, stored.name, &NamedTensor::name) != wanted.end()) continue;
    return absl::InvalidArgumentError(absl::StrCat("has a tensor ", stored.name, ", the model has none"));
  }
  for (const NamedTensor& tensor : wanted) Copy(*file.Find(tensor.name), tensor.value);
  return absl::OkStatus();
}

}  // namespace

absl::Status SaveModel(const Model& model, const std::string& path,
                       const std::map<std::string, std::string>& metadata) {
  return WriteSafetensors(path, TensorsOf(model), metadata);
}

absl::Status LoadModel(const std::string& path, Model& model) {
  EK_ASSIGN_OR_RETURN(const SafetensorsFile file, SafetensorsFile::Read(path));
  return Annotate(Load(file, TensorsOf(model)), path);
}

}  // namespace evenkeel
