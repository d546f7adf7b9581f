#include "evenkeel/trainer/device/layers.h"

#include <algorithm>

#include "evenkeel/comm/device/kernel.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/trainer/device/internal/layer_kernels.cuh"
#include "evenkeel/trainer/device/layer_kernels_image.h"

namespace evenkeel {
namespace {

constexpr KernelKind kWaits = KernelKind::kSynchronises;

const auto kRelu = MakeKernel<&ek_relu>("ek_relu", layer_kernels_image);
const auto kReluBackward = MakeKernel<&ek_relu_backward>("ek_relu_backward", layer_kernels_image);
const auto kAddTo = MakeKernel<&ek_add_to>("ek_add_to", layer_kernels_image);
const auto kColumnSums = MakeKernel<&ek_column_sums>("ek_column_sums", layer_kernels_image, kWaits);
const auto kClassLoss = MakeKernel<&ek_class_loss>("ek_class_loss", layer_kernels_image, kWaits);
const auto kNormMoments = MakeKernel<&ek_norm_moments>("ek_norm_moments", layer_kernels_image, kWaits);
const auto kNormFinish = MakeKernel<&ek_norm_finish>("ek_norm_finish", layer_kernels_image);
const auto kNormApply = MakeKernel<&ek_norm_apply>("ek_norm_apply", layer_kernels_image);
const auto kNormBackwardSums = MakeKernel<&ek_norm_backward_sums>("ek_norm_backward_sums", layer_kernels_image, kWaits);
const auto kNormBackwardFinish = MakeKernel<&ek_norm_backward_finish>("ek_norm_backward_finish", layer_kernels_image);
const auto kNormBackwardApply = MakeKernel<&ek_norm_backward_apply>("ek_norm_backward_apply", layer_kernels_image);
const auto kAveragePool = MakeKernel<&ek_average_pool>("ek_average_pool", layer_kernels_image, kWaits);
const auto kAveragePoolBackward =
    MakeKernel<&ek_average_pool_backward>("ek_average_pool_backward", layer_kernels_image);

constexpr int kThreads = 256;

// One call of a kernel with that many elements to do.
template <typename KernelType, typename... Args>
absl::Status ForEach(DeviceWork& work, const KernelType& kernel, int64_t count, Args... args) {
  return Launch(work.runtime(), kernel, ShapeFor(count), work.stream(), args...);
}

// Parts of a channel: large enough for a block, few enough for who adds them up.
int NormBlocks(const DeviceNorm::Images& images) {
  constexpr int64_t kElements = 4096;
  return static_cast<int>(std::clamp<int64_t>(images.batch * images.area / kElements, 1, 64));
}

kernel::NormShape ShapeOf(const DeviceNorm::Images& images) { return {images.batch, images.channels, images.area}; }

kernel::NormState StateOf(const DeviceNorm::State& state, const DeviceBuffer& statistics, int channels) {
  return {.weight = state.weight,
          .bias = state.bias,
          .running_mean = state.running_mean,
          .running_variance = state.running_variance,
          .mean = statistics.as<float>(),
          .deviation = statistics.as<float>() + channels};
}

}  // namespace

absl::Status DeviceDense(DeviceWork& work, const DeviceDenseShape& shape, const float* input, const float* weight,
                         const float* bias, float* output) {
  return work.math().Product({.rows = shape.batch,
                              .columns = shape.outputs,
                              .inner = shape.inputs,
                              .left = {.row = shape.inputs},
                              .right = {.row = 1, .column = shape.inputs},
                              .output = {.row = shape.outputs}},
                             {DType::kFloat32, const_cast<float*>(input)}, weight, bias, {DType::kFloat32, output},
                             work.stream());
}

absl::Status DeviceDenseBackwardWeight(DeviceWork& work, const DeviceDenseShape& shape, const float* input,
                                       const float* diff_output, GradTarget<float> weight) {
  return work.math().Product({.rows = shape.outputs,
                              .columns = shape.inputs,
                              .inner = shape.batch,
                              .left = {.row = 1, .column = shape.outputs},
                              .right = {.row = shape.inputs},
                              .output = {.row = shape.inputs},
                              .add = weight.add},
                             {DType::kFloat32, const_cast<float*>(diff_output)}, input, nullptr,
                             {DType::kFloat32, weight.data}, work.stream());
}

absl::Status DeviceDenseBackwardInput(DeviceWork& work, const DeviceDenseShape& shape, const float* weight,
                                      const float* diff_output, float* diff_input) {
  return work.math().Product({.rows = shape.batch,
                              .columns = shape.inputs,
                              .inner = shape.outputs,
                              .left = {.row = shape.outputs},
                              .right = {.row = shape.inputs},
                              .output = {.row = shape.inputs}},
                             {DType::kFloat32, const_cast<float*>(diff_output)}, weight, nullptr,
                             {DType::kFloat32, diff_input}, work.stream());
}

absl::Status DeviceRelu(DeviceWork& work, float* data, int64_t count) {
  return ForEach(work, kRelu, count, data, count);
}

absl::Status DeviceReluBackward(DeviceWork& work, const float* output, float* diff, int64_t count) {
  return ForEach(work, kReluBackward, count, output, diff, count);
}

absl::Status DeviceAddTo(DeviceWork& work, const float* from, float* to, int64_t count) {
  return ForEach(work, kAddTo, count, from, to, count);
}

absl::Status DeviceColumnSums(DeviceWork& work, const float* data, int64_t rows, int64_t columns,
                              GradTarget<float> sums) {
  const int64_t blocks = (columns + kernel::kWarp - 1) / kernel::kWarp;
  return Launch(work.runtime(), kColumnSums, {.blocks = blocks, .threads = kThreads}, work.stream(), data, rows,
                columns, sums.data, sums.add ? 1 : 0);
}

absl::Status DeviceClassLoss(DeviceWork& work, float* scores, const uint8_t* labels, int64_t samples, int classes,
                             std::optional<double> weight) {
  return Launch(work.runtime(), kClassLoss, {.blocks = 1, .threads = kThreads}, work.stream(), scores, labels, samples,
                classes, weight.has_value() ? 1 : 0, weight.value_or(0), work.loss());
}

absl::Status DeviceAveragePool(DeviceWork& work, const float* source, float* means, int64_t count, int area) {
  return ForEach(work, kAveragePool, count * kernel::kWarp, source, means, count, area);
}

absl::Status DeviceAveragePoolBackward(DeviceWork& work, const float* diff_means, float* diff_source, int64_t count,
                                       int area) {
  return ForEach(work, kAveragePoolBackward, count * area, diff_means, diff_source, count, area);
}

absl::Status DeviceNorm::Forward(DeviceWork& work, const Images& images, const State& state, bool is_training,
                                 const float* source, float* output) {
  const kernel::NormShape shape = ShapeOf(images);
  const int blocks = NormBlocks(images);
  EK_RETURN_IF_ERROR(statistics_.Need(work, 2 * images.channels * static_cast<int64_t>(sizeof(float))));
  const kernel::NormState here = StateOf(state, statistics_, images.channels);
  if (is_training) {
    EK_RETURN_IF_ERROR(
        parts_.Need(work, int64_t{blocks} * images.channels * static_cast<int64_t>(sizeof(kernel::NormPart))));
    EK_RETURN_IF_ERROR(Launch(work.runtime(), kNormMoments,
                              {.blocks = blocks, .threads = kThreads, .rows = images.channels}, work.stream(), source,
                              shape, parts_.as<kernel::NormPart>()));
  }
  EK_RETURN_IF_ERROR(ForEach(work, kNormFinish, images.channels,
                             is_training ? parts_.as<const kernel::NormPart>() : nullptr, blocks, images.channels,
                             here));
  return ForEach(work, kNormApply, images.count(), source, output, shape, here);
}

absl::Status DeviceNorm::Backward(DeviceWork& work, const Images& images, const State& state, const float* source,
                                  const float* output, float* diff, GradTarget<float> weight, GradTarget<float> bias) {
  const kernel::NormShape shape = ShapeOf(images);
  const int blocks = NormBlocks(images);
  const kernel::NormState here = StateOf(state, statistics_, images.channels);
  auto* const parts = parts_.as<kernel::NormPart>();
  EK_RETURN_IF_ERROR(Launch(work.runtime(), kNormBackwardSums,
                            {.blocks = blocks, .threads = kThreads, .rows = images.channels}, work.stream(), source,
                            output, diff, shape, here, parts));
  EK_RETURN_IF_ERROR(ForEach(work, kNormBackwardFinish, images.channels, parts, blocks, images.channels, weight.data,
                             weight.add ? 1 : 0, bias.data, bias.add ? 1 : 0));
  return ForEach(work, kNormBackwardApply, images.count(), source, output, diff, shape, here, parts, blocks);
}

}  // namespace evenkeel
