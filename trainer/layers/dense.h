// A fully connected layer: output = input * weight^T + bias.
//
//   DenseShape shape{.batch = 8, .inputs = 784, .outputs = 64};
//   EK_RETURN_IF_ERROR(DenseForward<float>(shape, input, weight, bias, output));
//   ...
//   DenseBackwardBias<float>(shape, diff_output, bias_target);
//   EK_RETURN_IF_ERROR(DenseBackwardWeight<float>(shape, input, diff_output, weight_target));
//   EK_RETURN_IF_ERROR(DenseBackwardInput<float>(shape, weight, diff_output, diff_input));
//
// float32 runs on oneDNN's matrix product; float64, which oneDNN lacks, on plain loops: it is there to check float32.
//
// Shapes:  row-major; input [batch, inputs], weight [outputs, inputs], bias [outputs], output [batch, outputs].
// Threads: pure functions; memory of different calls must not overlap.

#ifndef EVENKEEL_TRAINER_LAYERS_DENSE_H_
#define EVENKEEL_TRAINER_LAYERS_DENSE_H_

#include <cstdint>

#include "absl/status/status.h"
#include "evenkeel/trainer/gradient_sink.h"

namespace evenkeel {

struct DenseShape {
  int64_t batch = 0;
  int64_t inputs = 0;
  int64_t outputs = 0;
};

// T is float or double, in all of them.
template <typename T>
absl::Status DenseForward(const DenseShape& shape, const T* input, const T* weight, const T* bias, T* output);

template <typename T>
void DenseBackwardBias(const DenseShape& shape, const T* diff_output, GradTarget<T> bias);

template <typename T>
absl::Status DenseBackwardWeight(const DenseShape& shape, const T* input, const T* diff_output, GradTarget<T> weight);

template <typename T>
absl::Status DenseBackwardInput(const DenseShape& shape, const T* weight, const T* diff_output, T* diff_input);

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_LAYERS_DENSE_H_
