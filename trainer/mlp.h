// The two-layer perceptron: 784 pixels, `hidden` rectified units, 10 classes.
//
//   EK_ASSIGN_OR_RETURN(std::unique_ptr<Model> model, MakeMlp({.hidden = 64, .seed = 1}));
//
// Parameters: fc1.weight [hidden, 784], fc1.bias [hidden], fc2.weight [10, hidden], fc2.bias [10], all uniform in
// +-1/sqrt(inputs of the layer), as PyTorch's Linear has them. No buffers.
//
// float64 computes everything in double precision, slowly: the reference that float32 is compared with.
//
// Errors: InvalidArgument unless hidden is 1 to 65536 and the dtype float32 or float64.

#ifndef EVENKEEL_TRAINER_MLP_H_
#define EVENKEEL_TRAINER_MLP_H_

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "evenkeel/comm/types.h"
#include "evenkeel/trainer/model.h"

namespace evenkeel {

struct MlpOptions {
  int hidden = 64;
  DType dtype = DType::kFloat32;
  uint64_t seed = 0;
};

absl::StatusOr<std::unique_ptr<Model>> MakeMlp(const MlpOptions& options);

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_MLP_H_
