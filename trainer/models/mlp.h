// A perceptron: 784 pixels, layers of rectified units, 10 classes.
//
//   EK_ASSIGN_OR_RETURN(std::unique_ptr<Model> model,
//                       MakeMlp({.hidden = {1024, 1024}, .seed = 1}));
//
// Parameters: fc1.weight [hidden[0], 784], fc1.bias [hidden[0]], and so on to the last layer's,
// which has 10 outputs; all uniform in +-1/sqrt(inputs of the layer), as in PyTorch's Linear.
// No buffers.
//
// float64 computes everything in double precision, slowly: it is the reference for float32.
//
// Errors: InvalidArgument unless there are 1 to 16 hidden layers of 1 to 65536 units and the dtype
//         is float32 or float64; ResourceExhausted if memory for parameters and gradients runs
//         out.

#ifndef EVENKEEL_TRAINER_MODELS_MLP_H_
#define EVENKEEL_TRAINER_MODELS_MLP_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "evenkeel/comm/types.h"
#include "evenkeel/trainer/data/image_shape.h"
#include "evenkeel/trainer/models/model.h"

namespace evenkeel {

struct MlpOptions {
  static constexpr size_t kMaxLayers = 16;
  static constexpr int kMaxUnits = 65536;

  ImageShape image;
  std::vector<int> hidden = {64};  // Units of each layer except the last.
  DType dtype = DType::kFloat32;
  uint64_t seed = 0;
  bool is_plan = false;  // See model.h.
};

absl::StatusOr<std::unique_ptr<Model>> MakeMlp(const MlpOptions& options);

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_MODELS_MLP_H_
