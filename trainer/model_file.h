// A model's parameters and buffers in a safetensors file.
//
//   EK_RETURN_IF_ERROR(SaveModel(*model, "model.safetensors", {{"epoch", "3"}}));
//   EK_RETURN_IF_ERROR(LoadModel("model.safetensors", *model));
//
// Tensors have the parameters' and buffers' names and shapes. Loading wants each of them and no others, in the model's
// dtype, or in float32 for a model in float64; it checks all before it changes one.
//
// Errors: InvalidArgument for a file that is malformed or of another model, naming the tensor; the file system's own.

#ifndef EVENKEEL_TRAINER_MODEL_FILE_H_
#define EVENKEEL_TRAINER_MODEL_FILE_H_

#include <map>
#include <string>

#include "absl/status/status.h"
#include "evenkeel/trainer/model.h"

namespace evenkeel {

absl::Status SaveModel(const Model& model, const std::string& path,
                       const std::map<std::string, std::string>& metadata = {});
absl::Status LoadModel(const std::string& path, Model& model);

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_MODEL_FILE_H_
