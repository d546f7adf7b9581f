// A model's parameters and buffers in a safetensors file.
//
//   EK_RETURN_IF_ERROR(SaveModel(*model, "model.safetensors", {{"epoch", "3"}}));
//   EK_RETURN_IF_ERROR(LoadModel("model.safetensors", *model));
//   // in an existing folder: model.safetensors, for a gpt with what transformers needs beside it
//   EK_RETURN_IF_ERROR(SaveModelFolder(*model, "gpt"));
//
// A file as SaveParameters() writes it (zero_optim/checkpoint/parameter_file.h), with the buffers
// and Model::metadata(). A model that is a plan is only compared with it.
//
// Errors: InvalidArgument for a file that is malformed or of another model, naming the tensor; the
//         file system's own.

#ifndef EVENKEEL_TRAINER_MODELS_MODEL_FILE_H_
#define EVENKEEL_TRAINER_MODELS_MODEL_FILE_H_

#include <map>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "evenkeel/trainer/models/cnn.h"
#include "evenkeel/trainer/models/model.h"
#include "evenkeel/zero_optim/checkpoint/safetensors.h"

namespace evenkeel {

inline constexpr char kModelFile[] = "model.safetensors";  // In a folder.

// The tensors of a model's file, on the host, and its metadata: enough to write the file later,
// without the model, from a copy of the tensors.
struct ModelTensors {
  HostTensors host;
  std::vector<NamedTensor> all;  // The same: values, then buffers.
  std::map<std::string, std::string> metadata;

  std::span<NamedTensor> buffers() { return std::span(all).subspan(host.values.size()); }
};
absl::StatusOr<ModelTensors> TensorsOf(const Model& model);

absl::Status SaveTensors(const ModelTensors& tensors, const std::string& path,
                         const std::map<std::string, std::string>& metadata = {});
absl::Status SaveModel(const Model& model, const std::string& path,
                       const std::map<std::string, std::string>& metadata = {});
// Each file is complete or absent, and the weights are written last.
absl::Status SaveModelFolder(const Model& model, const std::string& folder,
                             const std::map<std::string, std::string>& metadata = {});
absl::Status LoadModel(const std::string& path, Model& model);
// Loads tensors that have been read already and have the model's names.
absl::Status LoadModel(std::span<const SafetensorsFile::Tensor> tensors, Model& model);

// Return sizes by the shapes in a file: the units of an mlp's hidden layers; a cnn's widths and
// blocks per stage. InvalidArgument for a file of another kind of model.
absl::StatusOr<std::vector<int>> HiddenUnitsOf(const SafetensorsFile& file);
absl::StatusOr<CnnOptions> CnnSizesOf(const SafetensorsFile& file);

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_MODELS_MODEL_FILE_H_
