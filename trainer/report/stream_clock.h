// When a device came to the ends of a step's parts: by marks on its stream, whose times are read later, so that the host
// waits for none. What the host sees of a part is how long it took to put it there.
//
//   StreamClock clock(runtime, stream);
//   EK_RETURN_IF_ERROR(clock.Start());                            // before the first of steps in a row
//   clock.Begin(StreamClock::Detail::kParts);
//   ... put forward on the stream ...                             EK_RETURN_IF_ERROR(clock.Mark(SpanKind::kForward));
//   ... backward, and so on ...
//   const StreamMarks marks = clock.End();
//   ... the next step ...
//   if (*clock.HasPassed(marks)) EK_ASSIGN_OR_RETURN(const StreamStep step, clock.Read(marks));
//
// A Mark() names what the stream has done since the one before it, that of the step before included: so a step's parts
// add up to the time from the end of one step to that of the next, and a part has in it what the stream had to wait for,
// other streams or a host that was late. `kWait` is between the marks before and after the stream is ordered behind the
// reduction: what backward has not hidden of it, and what is copied out of buckets.
//
// Order:   steps are read in their order.
// Units:   unix times are the device's clock as far as it goes, moved so that no mark lies before the host put it there,
//          or after the host saw it passed: two clocks drift apart.
// Threads: thread-compatible; the runtime outlives it.
// Errors:  the runtime's own.

#ifndef EVENKEEL_TRAINER_REPORT_STREAM_CLOCK_H_
#define EVENKEEL_TRAINER_REPORT_STREAM_CLOCK_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "evenkeel/bucket/step_times.h"
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
  Event first_gradient;   // Null: not marked.
  int64_t issued_ns = 0;  // When the host put the last of them there; Unix time.
};

// What they say.
struct StreamStep {
  absl::Duration took;           // From the end of the step before it.
  StepDurations durations;       // What of them is known: not the communication, which is on other streams.
  std::vector<TraceSpan> spans;  // Of all parts that were marked, without a gap.
  int64_t last_gradient_ns = 0;  // 0: no backward.
};

class StreamClock {
 public:
  // Each mark costs the device something: kSummary leaves out what only a trace or a mean over parts shows.
  enum class Detail : uint8_t { kSummary, kParts };

  StreamClock(DeviceRuntime& runtime, StreamRef stream) : runtime_(runtime), stream_(stream) {}

  absl::Status Start();
  // After it, where Unix times are to be good: waits for the device, which should have nothing to do.
  absl::Status Align(absl::Time deadline);

  void Begin(Detail detail);
  absl::Status Mark(SpanKind kind);
  // Where backward has put its first gradient on the stream.
  absl::Status MarkFirstGradient();
  StreamMarks End();

  // The last of the marks, and with it all of them.
  absl::StatusOr<bool> HasPassed(const StreamMarks& marks) { return runtime_.IsDone(EndOf(marks)); }
  // The host waits for it, unless it has passed.
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
  // A moment whose Unix time has been settled: the end of the step that was read last.
  Event settled_;
  int64_t settled_ns_ = 0;
};

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_REPORT_STREAM_CLOCK_H_
