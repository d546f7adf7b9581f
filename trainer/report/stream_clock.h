// Measures when a device finished the parts of a step: by marks on its stream, whose times are read
// later, so that the host waits for none. The host itself can measure only the time of enqueuing.
//
//   StreamClock clock(runtime, stream);
//   EK_RETURN_IF_ERROR(clock.Start());  // before the first of consecutive steps
//   clock.Begin(StreamClock::Detail::kParts);
//   ... enqueue forward ...
//   EK_RETURN_IF_ERROR(clock.Mark(SpanKind::kForward));
//   ... backward, and so on ...
//   const StreamMarks marks = clock.End();
//   ... the next step ...
//   if (*clock.HasPassed(marks)) EK_ASSIGN_OR_RETURN(const StreamStep step, clock.Read(marks));
//
// A Mark() names the activity of the stream since the mark before it, which may be that of the step
// before: so the parts of a step add up to the time from the end of one step to that of the next,
// and a part includes the stream's waits for other streams or for a late host. `kWait` is the time
// between the marks before and after the stream waits for the reduction: the part of it that
// backward did not hide, and copies out of buckets.
//
// Order:   steps are read in their order.
// Units:   Unix times are those of the device's clock, moved so that no mark is earlier than the
//          host enqueued it or later than the host saw it passed, since the two clocks drift apart.
// Threads: thread-compatible; the runtime outlives it.
// Errors:  the runtime's own.

#ifndef EVENKEEL_TRAINER_REPORT_STREAM_CLOCK_H_
#define EVENKEEL_TRAINER_REPORT_STREAM_CLOCK_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "evenkeel/comm/device/runtime.h"
#include "evenkeel/trainer/report/run_record.h"

namespace evenkeel {

// The marks of a step. The first is `before`, the end of the step before it.
struct StreamMarks {
  struct Part {
    SpanKind kind = SpanKind::kData;
    Event end;
  };
  Event before;
  std::vector<Part> parts;
  int64_t issued_ns = 0;  // When the host enqueued the last of them; Unix time.
};

// The times of a step, read from its marks.
struct StreamStep {
  absl::Duration took;           // From the end of the step before it.
  absl::Duration exposed;        // The sum of its kWait parts.
  std::vector<TraceSpan> spans;  // All marked parts, without gaps.
  int64_t last_gradient_ns = 0;  // 0: no backward.
};

class StreamClock {
 public:
  // Each mark has a cost on the device: kSummary omits those that only traces use.
  enum class Detail : uint8_t { kSummary, kParts };

  StreamClock(DeviceRuntime& runtime, StreamRef stream) : runtime_(runtime), stream_(stream) {}

  absl::Status Start();
  // Aligns the clocks, after Start(), for exact Unix times: waits for the device, which should be
  // idle.
  absl::Status Align(absl::Time deadline);

  void Begin(Detail detail);
  absl::Status Mark(SpanKind kind);
  StreamMarks End();

  // Returns true if the last mark, and so all of them, has passed.
  absl::StatusOr<bool> HasPassed(const StreamMarks& marks) { return runtime_.IsDone(EndOf(marks)); }
  // Waits on the host until the last mark has passed.
  absl::Status Wait(const StreamMarks& marks, absl::Time deadline);
  absl::StatusOr<StreamStep> Read(const StreamMarks& marks);

 private:
  static const Event& EndOf(const StreamMarks& marks) {
    return marks.parts.empty() ? marks.before : marks.parts.back().end;
  }

  DeviceRuntime& runtime_;
  const StreamRef stream_;
  Detail detail_ = Detail::kSummary;
  StreamMarks current_;
  Event last_;  // The newest mark of a step's end.
  // An event of known Unix time: the end of the step that was read last.
  Event settled_;
  int64_t settled_ns_ = 0;
};

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_REPORT_STREAM_CLOCK_H_
