#include "evenkeel/trainer/device/internal/widening_convolutions.h"

#include <algorithm>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "evenkeel/comm/device/copy.h"
#include "evenkeel/comm/status.h"

namespace evenkeel::internal {
namespace {

constexpr absl::Duration kTimeout = absl::Minutes(2);

struct Counts {
  int64_t images, weight, output;
};
Counts CountsOf(const DeviceConvolution& s) {
  const int64_t side = (s.side - 1) / s.stride + 1;
  return {.images = s.batch * s.inputs * s.side * s.side,
          .weight = s.outputs * s.inputs * s.kernel * s.kernel,
          .output = s.batch * s.outputs * side * side};
}

DeviceConvolution InFloat32(DeviceConvolution shape) {
  shape.dtype = DType::kFloat32;
  return shape;
}

}  // namespace

absl::Status WideningConvolutions::LibraryOr(const DeviceConvolution& shape, Pass pass,
                                             absl::FunctionRef<absl::Status()> of_library,
                                             absl::FunctionRef<absl::Status()> otherwise) {
  if (std::ranges::find(widened_, Widened{shape, pass}) != widened_.end()) return otherwise();
  const absl::Status status = of_library();
  if (!absl::IsUnimplemented(status) || shape.dtype == DType::kFloat32) return status;
  widened_.push_back({shape, pass});
  return otherwise();
}

absl::Status WideningConvolutions::Forward(const DeviceConvolution& shape, const void* images, const void* weight,
                                           void* output, StreamRef stream) {
  return LibraryOr(
      shape, Pass::kForward, [&] { return library_->Forward(shape, images, weight, output, stream); },
      [&]() -> absl::Status {
        const Counts counts = CountsOf(shape);
        EK_ASSIGN_OR_RETURN(const float* const wide_images, Wide(0, images, shape.dtype, counts.images, stream));
        EK_ASSIGN_OR_RETURN(const float* const wide_weight, Wide(1, weight, shape.dtype, counts.weight, stream));
        EK_ASSIGN_OR_RETURN(float* const wide_output, Room(2, counts.output, stream));
        EK_RETURN_IF_ERROR(library_->Forward(InFloat32(shape), wide_images, wide_weight, wide_output, stream));
        return Round(wide_output, output, shape.dtype, counts.output, stream);
      });
}

absl::Status WideningConvolutions::BackwardImages(const DeviceConvolution& shape, const void* weight,
                                                  const void* diff_output, void* diff_images, StreamRef stream) {
  return LibraryOr(
      shape, Pass::kBackwardImages,
      [&] { return library_->BackwardImages(shape, weight, diff_output, diff_images, stream); },
      [&]() -> absl::Status {
        const Counts counts = CountsOf(shape);
        EK_ASSIGN_OR_RETURN(const float* const wide_weight, Wide(1, weight, shape.dtype, counts.weight, stream));
        EK_ASSIGN_OR_RETURN(const float* const wide_diff, Wide(2, diff_output, shape.dtype, counts.output, stream));
        EK_ASSIGN_OR_RETURN(float* const wide_images, Room(0, counts.images, stream));
        EK_RETURN_IF_ERROR(library_->BackwardImages(InFloat32(shape), wide_weight, wide_diff, wide_images, stream));
        return Round(wide_images, diff_images, shape.dtype, counts.images, stream);
      });
}

absl::Status WideningConvolutions::BackwardWeight(const DeviceConvolution& shape, const void* images,
                                                  const void* diff_output, float* diff_weight, bool add,
                                                  StreamRef stream) {
  return LibraryOr(
      shape, Pass::kBackwardWeight,
      [&] { return library_->BackwardWeight(shape, images, diff_output, diff_weight, add, stream); },
      [&]() -> absl::Status {
        const Counts counts = CountsOf(shape);
        EK_ASSIGN_OR_RETURN(const float* const wide_images, Wide(0, images, shape.dtype, counts.images, stream));
        EK_ASSIGN_OR_RETURN(const float* const wide_diff, Wide(2, diff_output, shape.dtype, counts.output, stream));
        return library_->BackwardWeight(InFloat32(shape), wide_images, wide_diff, diff_weight, add, stream);
      });
}

absl::StatusOr<float*> WideningConvolutions::Room(int place, int64_t count, StreamRef stream) {
  Memory& memory = places_[place];
  const int64_t bytes = count * static_cast<int64_t>(sizeof(float));
  if (memory.bytes < bytes) {
    // What is on the stream may still use the smaller one.
    if (memory.bytes > 0) EK_RETURN_IF_ERROR(runtime_.Synchronize(stream, absl::Now() + kTimeout));
    memory = {};
    EK_ASSIGN_OR_RETURN(memory, runtime_.Allocate(device_, bytes));
  }
  return static_cast<float*>(memory.data.get());
}

absl::StatusOr<const float*> WideningConvolutions::Wide(int place, const void* from, DType dtype, int64_t count,
                                                        StreamRef stream) {
  EK_ASSIGN_OR_RETURN(float* const to, Room(place, count, stream));
  EK_RETURN_IF_ERROR(CopySegmentsOnce(runtime_,
                                      {{.to = TensorView(to, count, DType::kFloat32, device_),
                                        .from = TensorView(const_cast<void*>(from), count, dtype, device_)}},
                                      stream));
  return to;
}

absl::Status WideningConvolutions::Round(const float* from, void* to, DType dtype, int64_t count, StreamRef stream) {
  return CopySegmentsOnce(runtime_,
                          {{.to = TensorView(to, count, dtype, device_),
                            .from = TensorView(const_cast<float*>(from), count, DType::kFloat32, device_)}},
                          stream);
}

}  // namespace evenkeel::internal
