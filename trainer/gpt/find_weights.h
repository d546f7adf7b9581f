// Returns the file with a model's weights for a path.
//
//   FindWeights("gpt2.safetensors");      // itself
//   FindWeights("gpt2");                  // "gpt2/model.safetensors"
//   // "checkpoints/step-000000120/model.safetensors": the newest checkpoint's
//   FindWeights("checkpoints");
//
// A folder of checkpoints has a folder step-N for each, under that name only when it is complete.
//
// Threads: reads folders, safe from any thread.
// Errors:  NotFound with the path and the files it lacks; the file system's own.

#ifndef EVENKEEL_TRAINER_GPT_FIND_WEIGHTS_H_
#define EVENKEEL_TRAINER_GPT_FIND_WEIGHTS_H_

#include <string>

#include "absl/status/statusor.h"

namespace evenkeel {

absl::StatusOr<std::string> FindWeights(const std::string& path);

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_GPT_FIND_WEIGHTS_H_
