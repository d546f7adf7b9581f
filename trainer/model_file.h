// A model's parameters and buffers in a safetensors file.
//
//   EK_RETURN_IF_ERROR(SaveModel(*model, "model.safetensors", {{"epoch", "3"}}));
//   EK_RETURN_IF_ERROR(LoadModel("model.safetensors", *model));
//
// Tensors have the parameters' and buffers' names and shapes. Loading wants each of them and no others, in the model's
// dtype or in a narrower float, which loses nothing; it checks all before it changes one. Saving adds what the model
// says of itself (Model::metadata()), and {"format", "pt"}, without which some Python software refuses a file.
//
// Errors: InvalidArgument for a file that is malformed or of another model, naming the tensor; the file system's own.

#ifndef EVENKEEL_TRAINER_MODEL_FILE_H_
#define EVENKEEL_TRAINER_MODEL_FILE_H_

#include <map>
#include <span>
#include <string>

#include "absl/status/status.h"
#include "evenkeel/trainer/model.h"
#include "evenkeel/zero_optim/safetensors.h"

namespace evenkeel {

absl::Status SaveModel(const Model& model, const std::string& path,
                       const std::map<std::string, std::string>& metadata = {});
absl::Status LoadModel(const std::string& path, Model& model);
// From tensors that were read already, and have the names that the model gives them.
absl::Status LoadModel(std::span<const SafetensorsFile::Tensor> tensors, Model& model);

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_MODEL_FILE_H_
