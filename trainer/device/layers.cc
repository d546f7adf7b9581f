#include "evenkeel/trainer/device/layers.h"

#include <algorithm>

#include "evenkeel/comm/device/copy.h"
#include "evenkeel/comm/device/kernel.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/trainer/device/internal/layer_kernels.cuh"
#include "evenkeel/trainer/device/layer_kernels_image.h"
#include "evenkeel/trainer/layers/strided_shape.h"

namespace evenkeel {
namespace {

constexpr KernelKind kAlone = KernelKind::kIndependent, kWaits = KernelKind::kSynchronises;

// The kernel for each type of what goes from layer to layer.
template <typename KernelType>
struct ForTypes {
  KernelType float32, bfloat16, float16;
  const KernelType& operator[](DType dtype) const {
    if (dtype == DType::kBFloat16) return bfloat16;
    return dtype == DType::kFloat16 ? float16 : float32;
  }
};
template <typename KernelType>
ForTypes(KernelType, KernelType, KernelType) -> ForTypes<KernelType>;

#define EK_FOR_TYPES(name, kind)                                                        \
  ForTypes {                                                                            \
    MakeKernel<&kernel::name##_float>(#name "_float", layer_kernels_image, kind),       \
        MakeKernel<&kernel::name##_bfloat>(#name "_bfloat", layer_kernels_image, kind), \
        MakeKernel<&kernel::name##_half>(#name "_half", layer_kernels_image, kind)      \
  }

const auto kRelu = EK_FOR_TYPES(ek_relu, kAlone);
const auto kReluBackward = EK_FOR_TYPES(ek_relu_backward, kAlone);
const auto kAddTo = EK_FOR_TYPES(ek_add_to, kAlone);
const auto kColumnSums = EK_FOR_TYPES(ek_column_sums, kWaits);
const auto kClassLoss =
    MakeKernel<&kernel::ek_class_loss>("ek_class_loss", layer_kernels_image, kWaits);
const auto kNormMoments = EK_FOR_TYPES(ek_norm_moments, kWaits);
const auto kNormFinish = MakeKernel<&kernel::ek_norm_finish>("ek_norm_finish", layer_kernels_image);
const auto kNormApply = EK_FOR_TYPES(ek_norm_apply, kAlone);
const auto kNormBackwardSums = EK_FOR_TYPES(ek_norm_backward_sums, kWaits);
const auto kNormBackwardFinish =
    MakeKernel<&kernel::ek_norm_backward_finish>("ek_norm_backward_finish", layer_kernels_image);
const auto kNormBackwardApply = EK_FOR_TYPES(ek_norm_backward_apply, kAlone);
const auto kAveragePool = EK_FOR_TYPES(ek_average_pool, kWaits);
const auto kAveragePoolBackward = EK_FOR_TYPES(ek_average_pool_backward, kAlone);

constexpr int kThreads = 256;

// One call of a kernel with that many elements to do, of which a thread takes so many at a time.
template <int kPerThread = 1, typename KernelType, typename... Args>
absl::Status ForEach(DeviceWork& work, const KernelType& kernel, int64_t count, Args... args) {
  return Launch(work.runtime(), kernel, ShapeFor(count, kPerThread), work.stream(), args...);
}

LinearShape FromOutputs(const DeviceDenseShape& shape) {
  return LinearShape::FromOutputs(shape.batch, shape.inputs, shape.outputs);
}

// Returns the number of parts of a channel: each is large enough for a block, and they are few
// enough to be added up.
int NormBlocks(const DeviceNorm::Images& images) {
  constexpr int64_t kElements = 4096;
  return static_cast<int>(std::clamp<int64_t>(images.batch * images.area / kElements, 1, 64));
}

kernel::NormShape ShapeOf(const DeviceNorm::Images& images) {
  return {images.batch, images.channels, images.area};
}

kernel::NormState StateOf(const BatchNormState& state, const DeviceBuffer& statistics,
                          int channels) {
  return {.weight = state.weight,
          .bias = state.bias,
          .running_mean = state.running_mean,
          .running_variance = state.running_variance,
          .mean = statistics.as<float>(),
          .deviation = statistics.as<float>() + channels};
}

}  // namespace

absl::Status DeviceDense(DeviceWork& work, const DeviceDenseShape& shape, const void* input,
                         const void* weight, const float* bias, TypedPointer output) {
  return work.math().Product(FromOutputs(shape).BackwardInput(),
                             {shape.dtype, const_cast<void*>(input)}, weight, bias, output,
                             work.stream());
}

absl::Status DeviceDenseBackwardParameters(DeviceWork& work, const DeviceDenseShape& shape,
                                           int weight, int bias, const void* input,
                                           const void* diff_output, GradientSink& sink) {
  EK_RETURN_IF_ERROR(sink.Write<float>(bias, [&](GradTarget<float> sums) {
    const int64_t blocks = (shape.outputs + kernel::kWarp - 1) / kernel::kWarp;
    return Launch(work.runtime(), kColumnSums[shape.dtype], {.blocks = blocks, .threads = kThreads},
                  work.stream(), const_cast<void*>(diff_output), shape.batch, shape.outputs,
                  sums.data, sums.add ? 1 : 0);
  }));
  return sink.Write<float>(weight, [&](GradTarget<float> target) {
    return work.math().Product(FromOutputs(shape).BackwardWeight(target.add),
                               {shape.dtype, const_cast<void*>(diff_output)}, input, nullptr,
                               {DType::kFloat32, target.data}, work.stream());
  });
}

absl::Status DeviceDenseBackwardInput(DeviceWork& work, const DeviceDenseShape& shape,
                                      const void* weight, const void* diff_output,
                                      void* diff_input) {
  return work.math().Product(FromOutputs(shape).Forward(),
                             {shape.dtype, const_cast<void*>(diff_output)}, weight, nullptr,
                             {shape.dtype, diff_input}, work.stream());
}

absl::StatusOr<const void*> DeviceRounded(DeviceWork& work, const float* values, int64_t count,
                                          DType dtype, DeviceBuffer& copy) {
  if (dtype == DType::kFloat32) return values;
  EK_RETURN_IF_ERROR(copy.Need(work, count * SizeOf(dtype)));
  const Device device = work.stream().device;
  EK_RETURN_IF_ERROR(CopySegmentsOnce(
      work.runtime(),
      {{.to = TensorView(copy.as<void>(), count, dtype, device),
        .from = TensorView(const_cast<float*>(values), count, DType::kFloat32, device)}},
      work.stream()));
  return copy.as<void>();
}

absl::Status DeviceRelu(DeviceWork& work, TypedPointer data, int64_t count) {
  return ForEach<4>(work, kRelu[data.dtype], count, data.data, count);
}

absl::Status DeviceReluBackward(DeviceWork& work, const void* output, TypedPointer diff,
                                int64_t count) {
  return ForEach<4>(work, kReluBackward[diff.dtype], count, output, diff.data, count);
}

absl::Status DeviceAddTo(DeviceWork& work, const void* from, TypedPointer to, int64_t count) {
  return ForEach<4>(work, kAddTo[to.dtype], count, from, to.data, count);
}

absl::Status DeviceClassLoss(DeviceWork& work, float* scores, const uint8_t* labels,
                             int64_t samples, int classes, std::optional<double> weight) {
  return Launch(work.runtime(), kClassLoss, {.blocks = 1, .threads = kThreads}, work.stream(),
                scores, labels, samples, classes, weight.has_value() ? 1 : 0, weight.value_or(0),
                work.loss());
}

absl::Status DeviceAveragePool(DeviceWork& work, const void* source, TypedPointer means,
                               int64_t count, int area) {
  return ForEach(work, kAveragePool[means.dtype], count * kernel::kWarp, source, means.data, count,
                 area);
}

absl::Status DeviceAveragePoolBackward(DeviceWork& work, const void* diff_means,
                                       TypedPointer diff_source, int64_t count, int area) {
  return ForEach(work, kAveragePoolBackward[diff_source.dtype], count * area, diff_means,
                 diff_source.data, count, area);
}

absl::Status DeviceNorm::Forward(DeviceWork& work, const Images& images,
                                 const BatchNormState& state, bool is_training, const void* source,
                                 void* output) {
  const kernel::NormShape shape = ShapeOf(images);
  const int blocks = NormBlocks(images);
  EK_RETURN_IF_ERROR(
      statistics_.Need(work, 2 * images.channels * static_cast<int64_t>(sizeof(float))));
  const kernel::NormState here = StateOf(state, statistics_, images.channels);
  if (is_training) {
    EK_RETURN_IF_ERROR(parts_.Need(
        work, int64_t{blocks} * images.channels * static_cast<int64_t>(sizeof(kernel::NormPart))));
    EK_RETURN_IF_ERROR(Launch(work.runtime(), kNormMoments[images.dtype],
                              {.blocks = blocks, .threads = kThreads, .rows = images.channels},
                              work.stream(), source, shape, parts_.as<kernel::NormPart>()));
  }
  EK_RETURN_IF_ERROR(ForEach(work, kNormFinish, images.channels,
                             is_training ? parts_.as<const kernel::NormPart>() : nullptr, blocks,
                             images.channels, here));
  return ForEach(work, kNormApply[images.dtype], images.count(), source, output, shape, here);
}

absl::Status DeviceNorm::Backward(DeviceWork& work, const Images& images,
                                  const BatchNormState& state, const void* source,
                                  const void* output, void* diff, GradTarget<float> weight,
                                  GradTarget<float> bias) {
  const kernel::NormShape shape = ShapeOf(images);
  const int blocks = NormBlocks(images);
  const kernel::NormState here = StateOf(state, statistics_, images.channels);
  auto* const parts = parts_.as<kernel::NormPart>();
  EK_RETURN_IF_ERROR(Launch(work.runtime(), kNormBackwardSums[images.dtype],
                            {.blocks = blocks, .threads = kThreads, .rows = images.channels},
                            work.stream(), source, output, diff, shape, here, parts));
  EK_RETURN_IF_ERROR(ForEach(work, kNormBackwardFinish, images.channels, parts, blocks,
                             images.channels, weight.data, weight.add ? 1 : 0, bias.data,
                             bias.add ? 1 : 0));
  return ForEach(work, kNormBackwardApply[images.dtype], images.count(), source, output, diff,
                 shape, here, parts, blocks);
}

}  // namespace evenkeel
