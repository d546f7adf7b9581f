#include "evenkeel/bucket/reducer/repeated_copy.h"

#include <algorithm>

#include "absl/time/time.h"
#include "evenkeel/comm/base/clock.h"
#include "evenkeel/comm/status.h"

namespace evenkeel {
namespace {

constexpr absl::Duration kDrainTimeout = absl::Minutes(1);

bool AreEqual(absl::Span<const CopySegment> a, absl::Span<const CopySegment> b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](const CopySegment& x, const CopySegment& y) {
                      return x.to == y.to && x.from == y.from && x.fill == y.fill;
                    });
}

}  // namespace

absl::Status RepeatedCopy::Prepare(absl::Span<const CopySegment> segments, StreamRef stream) {
  if (copy_.has_value() && AreEqual(segments, prepared_)) return absl::OkStatus();
  // The list before may be in use.
  if (copy_.has_value())
    EK_RETURN_IF_ERROR(runtime_->Synchronize(stream, SteadyNow() + kDrainTimeout));
  EK_ASSIGN_OR_RETURN(SegmentCopy copy, SegmentCopy::Create(*runtime_, device_, segments));
  copy_ = std::move(copy);
  prepared_.assign(segments.begin(), segments.end());
  return absl::OkStatus();
}

absl::Status RepeatedCopy::Run(absl::Span<const CopySegment> segments, StreamRef stream) {
  if (segments.empty()) return absl::OkStatus();
  if (copy_.has_value() && AreEqual(segments, prepared_)) return copy_->Run(stream);
  if (!AreEqual(segments, last_)) {
    last_.assign(segments.begin(), segments.end());
    repeats_ = 0;
  }
  if (++repeats_ >= kRepeats) {
    EK_RETURN_IF_ERROR(Prepare(segments, stream));
    return copy_->Run(stream);
  }
  for (size_t begin = 0; begin < segments.size(); begin += kMostInlineSegments) {
    EK_RETURN_IF_ERROR(
        CopySegmentsOnce(*runtime_, segments.subspan(begin, kMostInlineSegments), stream));
  }
  return absl::OkStatus();
}

}  // namespace evenkeel
