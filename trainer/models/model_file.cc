#include "evenkeel/trainer/models/model_file.h"

#include "absl/strings/str_cat.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/files/file_io.h"
#include "evenkeel/zero_optim/checkpoint/parameter_file.h"

namespace evenkeel {
namespace {

// Returns the weight of a layer; null if there is none with so many dimensions.
const SafetensorsFile::Tensor* FindWeight(const SafetensorsFile& file, const std::string& layer,
                                          size_t dimensions) {
  const SafetensorsFile::Tensor* const weight = file.Find(layer + ".weight");
  return weight != nullptr && weight->shape.size() == dimensions ? weight : nullptr;
}

std::vector<NamedTensor> BuffersOf(const Model& model, const HostTensors& host) {
  std::vector<NamedTensor> tensors;
  for (size_t i = 0; i < host.buffers.size(); ++i) {
    const NamedBuffer& buffer = model.buffers()[i];
    tensors.push_back({buffer.name, buffer.shape, host.buffers[i]});
  }
  return tensors;
}

}  // namespace

absl::StatusOr<ModelTensors> TensorsOf(const Model& model) {
  ModelTensors tensors{.metadata = model.metadata()};
  EK_ASSIGN_OR_RETURN(tensors.host, model.ToHost());
  const std::vector<NamedTensor> buffers = BuffersOf(model, tensors.host);
  tensors.all = TensorsOf(model.parameters(), {.buffers = buffers, .values = tensors.host.values});
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
  for (const auto& [name, text] : model.companions())
    EK_RETURN_IF_ERROR(WriteFileAtomically(absl::StrCat(folder, "/", name), text));
  return SaveModel(model, absl::StrCat(folder, "/", kModelFile), metadata);
}

absl::Status LoadModel(const std::string& path, Model& model) {
  EK_ASSIGN_OR_RETURN(const SafetensorsFile file, SafetensorsFile::Read(path));
  return Annotate(LoadModel(file.tensors(), model), path);
}

absl::Status LoadModel(std::span<const SafetensorsFile::Tensor> tensors, Model& model) {
  EK_ASSIGN_OR_RETURN(const ModelTensors own, TensorsOf(model));
  EK_RETURN_IF_ERROR(CopyTensors(tensors, own.all));
  return model.FromHost(own.host);
}

absl::StatusOr<std::vector<int>> HiddenUnitsOf(const SafetensorsFile& file) {
  std::vector<int> units;
  const SafetensorsFile::Tensor* weight = nullptr;
  for (int layer = 1; (weight = FindWeight(file, absl::StrCat("fc", layer), 2)); ++layer)
    units.push_back(static_cast<int>(weight->shape[0]));
  if (units.size() < 2)
    return absl::InvalidArgumentError("has no tensors fc1.weight and fc2.weight, as an mlp has");
  units.pop_back();  // The classes.
  return units;
}

absl::StatusOr<CnnOptions> CnnSizesOf(const SafetensorsFile& file) {
  CnnOptions sizes{.widths = {}};
  const auto add = [&](const SafetensorsFile::Tensor* weight) {
    if (weight != nullptr) sizes.widths.push_back(static_cast<int>(weight->shape[0]));
  };
  add(FindWeight(file, "stem", 4));
  int blocks = 0;
  while (true) {
    const std::string name = absl::StrCat("block", blocks + 1);
    if (FindWeight(file, name + ".conv1", 4) == nullptr) break;
    add(FindWeight(file, name + ".shortcut", 4));  // The first block of a stage has one.
    ++blocks;
  }
  const int stages = static_cast<int>(sizes.widths.size()) - 1;
  if (stages < 0 || (stages == 0 ? blocks > 0 : blocks % stages != 0))
    return absl::InvalidArgumentError(
        "lacks tensors of a cnn: stem.weight, block1.conv1.weight, ...");
  if (stages > 0) sizes.blocks_per_stage = blocks / stages;
  return sizes;
}

}  // namespace evenkeel
