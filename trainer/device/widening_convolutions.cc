#include "evenkeel/trainer/device/widening_convolutions.h"

#include <algorithm>
#include <cstddef>

#include "absl/time/time.h"
#include "evenkeel/comm/base/clock.h"
#include "evenkeel/comm/device/copy.h"
#include "evenkeel/comm/status.h"

namespace evenkeel::internal {
namespace {

constexpr absl::Duration kTimeout = absl::Minutes(2);

}  // namespace

absl::Status WideningConvolutions::Convolve(ConvolutionPass pass, const DeviceConvolution& shape,
                                            const ConvolutionTensors& tensors, StreamRef stream) {
  const Widened own{shape, pass};
  if (std::ranges::find(widened_, own) == widened_.end()) {
    const absl::Status status = library_->Convolve(pass, shape, tensors, stream);
    if (!absl::IsUnimplemented(status) || shape.dtype == DType::kFloat32) return status;
    widened_.push_back(own);
  }
  DeviceConvolution wide_shape = shape;
  wide_shape.dtype = DType::kFloat32;
  ConvolutionTensors wide = tensors;
  const auto counts = shape.counts();
  const auto written = static_cast<size_t>(pass);
  const bool is_rounded = pass != ConvolutionPass::kBackwardWeight;  // That gradient is float32.
  for (size_t i = 0; i < counts.size(); ++i) {
    if (i == written && !is_rounded) continue;
    EK_ASSIGN_OR_RETURN(float* const room, Room(places_[i], counts[i], stream));
    wide.data[i] = room;
    if (i == written) continue;
    EK_RETURN_IF_ERROR(Copy({shape.dtype, const_cast<void*>(tensors.data[i])},
                            {DType::kFloat32, room}, counts[i], stream));
  }
  EK_RETURN_IF_ERROR(library_->Convolve(pass, wide_shape, wide, stream));
  if (!is_rounded) return absl::OkStatus();
  return Copy({DType::kFloat32, wide.written(pass)}, {shape.dtype, tensors.written(pass)},
              counts[written], stream);
}

absl::StatusOr<float*> WideningConvolutions::Room(Memory& memory, int64_t count, StreamRef stream) {
  const int64_t bytes = count * static_cast<int64_t>(sizeof(float));
  if (memory.bytes < bytes) {
    // Work on the stream may still use the smaller one.
    if (memory.bytes > 0) EK_RETURN_IF_ERROR(runtime_.Synchronize(stream, SteadyNow() + kTimeout));
    memory = {};
    EK_ASSIGN_OR_RETURN(memory, runtime_.Allocate(device_, bytes));
  }
  return static_cast<float*>(memory.data.get());
}

absl::Status WideningConvolutions::Copy(TypedPointer from, TypedPointer to, int64_t count,
                                        StreamRef stream) {
  return CopySegmentsOnce(runtime_,
                          {{.to = TensorView(to.data, count, to.dtype, device_),
                            .from = TensorView(from.data, count, from.dtype, device_)}},
                          stream);
}

}  // namespace evenkeel::internal
