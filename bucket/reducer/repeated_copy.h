// A list of copies on a device that is mostly the same again and again: kept there as long as it
// is.
//
//   RepeatedCopy pack(&runtime, device);
//   // waits for the device, unless it is prepared
//   EK_RETURN_IF_ERROR(pack.Prepare(segments, stream));
//   EK_RETURN_IF_ERROR(pack.Run(segments, stream));      // in each step: one launch, no wait
//
// A list that is not the prepared one goes to the device with its launch, or launches, of
// kMostInlineSegments each. Once it has come kRepeats times in a row it is prepared in the other's
// place, which waits for the device.
//
// Threads:   thread-compatible.
// Ownership: the runtime outlives it; it outlives its runs on the device.

#ifndef EVENKEEL_BUCKET_REDUCER_REPEATED_COPY_H_
#define EVENKEEL_BUCKET_REDUCER_REPEATED_COPY_H_

#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "evenkeel/comm/device/copy.h"
#include "evenkeel/comm/device/runtime.h"
#include "evenkeel/comm/types.h"

namespace evenkeel {

class RepeatedCopy {
 public:
  static constexpr int kRepeats = 3;

  RepeatedCopy(DeviceRuntime* runtime, Device device) : runtime_(runtime), device_(device) {}

  // `stream`: on which it runs.
  absl::Status Prepare(absl::Span<const CopySegment> segments, StreamRef stream);
  absl::Status Run(absl::Span<const CopySegment> segments, StreamRef stream);

 private:
  DeviceRuntime* runtime_;
  Device device_;
  std::vector<CopySegment> prepared_, last_;
  std::optional<SegmentCopy> copy_;
  int repeats_ = 0;  // Repeats of `last_`.
};

}  // namespace evenkeel

#endif  // EVENKEEL_BUCKET_REDUCER_REPEATED_COPY_H_
