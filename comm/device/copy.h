// Copies many tensors in one launch, with conversion and scaling: gradients into buckets and back.
//
//   EK_ASSIGN_OR_RETURN(SegmentCopy pack,
//                       SegmentCopy::Create(runtime, device,
//                                           {{.to = slot, .from = gradient}, ...}));
//   EK_RETURN_IF_ERROR(pack.Run(stream, {.scale = 1.0 / divisor}));        // repeatedly
//
// to = from * scale, element by element; computed in float (in double between float64s), rounded
// once. A segment without `from` becomes `fill`. The list is kept on the device, so a run is one
// launch and no copy.
//
// Shapes:    `to` and `from` of a segment have one count, and any float types, or one integer type
//            with scale 1. Segments must not overlap, except that `to` may be `from`.
// Threads:   thread-compatible.
// Ownership: `runtime`, the tensors and this object must outlive its runs.
// Errors:    InvalidArgument names the segment.

#ifndef EVENKEEL_COMM_DEVICE_COPY_H_
#define EVENKEEL_COMM_DEVICE_COPY_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "evenkeel/comm/device/runtime.h"
#include "evenkeel/comm/memory.h"
#include "evenkeel/comm/types.h"

namespace evenkeel {

struct CopySegment {
  TensorView to;
  TensorView from;    // Null data: none.
  double fill = 0.0;  // Without a `from`.
};

class SegmentCopy {
 public:
  struct Options {
    double scale = 1.0;
    const float* scale_at = nullptr;  // Another factor, in the device's memory.
  };

  static absl::StatusOr<SegmentCopy> Create(DeviceRuntime& runtime, Device device,
                                            absl::Span<const CopySegment> segments);
  absl::Status Run(StreamRef stream, const Options& options) const;
  absl::Status Run(StreamRef stream) const { return Run(stream, Options()); }

  int64_t bytes_moved() const { return bytes_moved_; }  // Read and written by a run.

 private:
  SegmentCopy() = default;

  DeviceRuntime* runtime_ = nullptr;
  Memory table_;  // The chunks, on the device.
  int64_t chunks_ = 0;
  bool scales_ = true;  // All are floats.
  int64_t bytes_moved_ = 0;
};

// Copies a list that is used once: it is sent with the launch if it has at most
// kMostInlineSegments, else by Create() and Run().
absl::Status CopySegmentsOnce(DeviceRuntime& runtime, absl::Span<const CopySegment> segments,
                              StreamRef stream, const SegmentCopy::Options& options = {});
inline constexpr int kMostInlineSegments = 64;

}  // namespace evenkeel

#endif  // EVENKEEL_COMM_DEVICE_COPY_H_
