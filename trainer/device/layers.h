// Layers on a device: each a call that puts its kernels on the stream and returns.
//
//   EK_RETURN_IF_ERROR(DeviceDense(work, shape, input, weight, bias, {DType::kFloat32, scores}));
//   // work.loss() and gradients
//   EK_RETURN_IF_ERROR(DeviceClassLoss(work, scores, labels, samples, kClasses, weight));
//   EK_RETURN_IF_ERROR(DeviceDenseBackwardParameters(work, shape, weight_index, bias_index, input,
//                                                    scores, sink));
//
// They compute what the layers of trainer/layers do, and add in another order: sums agree to
// float32's rounding. In one build on one device each run gives the same bits.
//
// Types:     what goes from layer to layer, and the matrices, are of one type: float32, bfloat16 or
//            float16. Everything is computed in float32 and then rounded; biases, statistics, norm
//            weights and all parameters' gradients are float32, and so is what a loss is given.
// Shapes:    matrices [rows, columns]; images [batch, channels, side, side]; statistics and norm
//            weights [channels].
// Ownership: all pointers are the device's memory, and stay until the stream has come by.
// Threads:   those of `work`.
// Errors:    the runtime's and DeviceMath's.

#ifndef EVENKEEL_TRAINER_DEVICE_LAYERS_H_
#define EVENKEEL_TRAINER_DEVICE_LAYERS_H_

#include <cstdint>
#include <optional>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "evenkeel/comm/types.h"
#include "evenkeel/trainer/device/device_work.h"
#include "evenkeel/trainer/device/math.h"
#include "evenkeel/trainer/layers/batch_norm_relu.h"
#include "evenkeel/trainer/layers/gradient_sink.h"

namespace evenkeel {

struct DeviceDenseShape {
  DType dtype = DType::kFloat32;  // The type of inputs, weights and gradients of outputs.
  int64_t batch = 0;
  int64_t inputs = 0;
  int64_t outputs = 0;
};

// output [batch, outputs] = input [batch, inputs] * weight [outputs, inputs]^T + bias. An output of
// the shape's type, or float32.
absl::Status DeviceDense(DeviceWork& work, const DeviceDenseShape& shape, const void* input,
                         const void* weight, const float* bias, TypedPointer output);
// The gradients of weight and bias, parameters of these indices.
absl::Status DeviceDenseBackwardParameters(DeviceWork& work, const DeviceDenseShape& shape,
                                           int weight, int bias, const void* input,
                                           const void* diff_output, GradientSink& sink);
absl::Status DeviceDenseBackwardInput(DeviceWork& work, const DeviceDenseShape& shape,
                                      const void* weight, const void* diff_output,
                                      void* diff_input);

// `values` in the type that products take: themselves, or rounded in `copy`.
absl::StatusOr<const void*> DeviceRounded(DeviceWork& work, const float* values, int64_t count,
                                          DType dtype, DeviceBuffer& copy);
// In place.
absl::Status DeviceRelu(DeviceWork& work, TypedPointer data, int64_t count);
// diff stays where `output`, the rectifier's, is positive.
absl::Status DeviceReluBackward(DeviceWork& work, const void* output, TypedPointer diff,
                                int64_t count);
// to += from.
absl::Status DeviceAddTo(DeviceWork& work, const void* from, TypedPointer to, int64_t count);

// Softmax and cross-entropy of a few classes, into work.loss(). Scores become the gradient of the
// mean loss times `weight`; without one they stay.
absl::Status DeviceClassLoss(DeviceWork& work, float* scores, const uint8_t* labels,
                             int64_t samples, int classes, std::optional<double> weight);

// means [batch * channels] of `area` pixels each, and back.
absl::Status DeviceAveragePool(DeviceWork& work, const void* source, TypedPointer means,
                               int64_t count, int area);
absl::Status DeviceAveragePoolBackward(DeviceWork& work, const void* diff_means,
                                       TypedPointer diff_source, int64_t count, int area);

// Batch norm and a rectifier, as layers/batch_norm_relu.h has them.
class DeviceNorm {
 public:
  struct Images {
    DType dtype = DType::kFloat32;
    int64_t batch = 0;
    int channels = 0;
    int area = 0;
    int64_t count() const { return batch * channels * area; }
  };
  // With the batch's statistics, by which the running ones move, or in evaluation with those.
  absl::Status Forward(DeviceWork& work, const Images& images, const BatchNormState& state,
                       bool is_training, const void* source, void* output);
  // After a Forward in training, of which source and output are as they were. `diff` becomes the
  // source's gradient.
  absl::Status Backward(DeviceWork& work, const Images& images, const BatchNormState& state,
                        const void* source, const void* output, void* diff,
                        GradTarget<float> weight, GradTarget<float> bias);

 private:
  DeviceBuffer statistics_;  // Mean and 1 / deviation: [2, channels].
  DeviceBuffer parts_;       // Sums of parts of channels.
};

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_DEVICE_LAYERS_H_
