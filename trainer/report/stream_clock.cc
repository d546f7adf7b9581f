#include "evenkeel/trainer/report/stream_clock.h"

#include <algorithm>
#include <utility>

#include "evenkeel/comm/base/clock.h"
#include "evenkeel/comm/status.h"

namespace evenkeel {

absl::Status StreamClock::Start() {
  EK_ASSIGN_OR_RETURN(last_, runtime_.RecordTimed(stream_));
  settled_ = last_;
  settled_ns_ = absl::ToUnixNanos(SteadyNow());
  return absl::OkStatus();
}

absl::Status StreamClock::Align(absl::Time deadline) {
  EK_ASSIGN_OR_RETURN(const bool is_done, runtime_.IsDone(settled_));
  if (!is_done) EK_RETURN_IF_ERROR(runtime_.Synchronize(settled_, deadline));
  settled_ns_ = is_done ? settled_ns_ : absl::ToUnixNanos(SteadyNow());
  return absl::OkStatus();
}

void StreamClock::Begin(Detail detail) {
  detail_ = detail;
  current_ = {.before = last_};
}

absl::Status StreamClock::Mark(SpanKind kind) {
  const bool is_always =
      kind == SpanKind::kBackward || kind == SpanKind::kWait || kind == SpanKind::kOptimizer;
  if (detail_ == Detail::kSummary && !is_always) return absl::OkStatus();
  EK_ASSIGN_OR_RETURN(Event end, runtime_.RecordTimed(stream_));
  current_.parts.push_back({.kind = kind, .end = std::move(end)});
  return absl::OkStatus();
}

StreamMarks StreamClock::End() {
  current_.issued_ns = absl::ToUnixNanos(SteadyNow());
  last_ = EndOf(current_);
  return std::exchange(current_, {});
}

absl::Status StreamClock::Wait(const StreamMarks& marks, absl::Time deadline) {
  EK_ASSIGN_OR_RETURN(const bool has_passed, HasPassed(marks));
  return has_passed ? absl::OkStatus() : runtime_.Synchronize(EndOf(marks), deadline);
}

absl::StatusOr<StreamStep> StreamClock::Read(const StreamMarks& marks) {
  const int64_t seen_ns = absl::ToUnixNanos(SteadyNow());
  StreamStep step;
  std::vector<int64_t> ends_ns;  // The ends of the parts, since `before`.
  absl::Duration last_gradient;
  for (const StreamMarks::Part& part : marks.parts) {
    EK_ASSIGN_OR_RETURN(const absl::Duration end, runtime_.Elapsed(marks.before, part.end));
    ends_ns.push_back(absl::ToInt64Nanoseconds(end));
    if (part.kind == SpanKind::kBackward) last_gradient = end;
    if (part.kind == SpanKind::kWait) step.exposed += end - step.took;
    step.took = end;
  }

  const bool is_next = settled_.handle == marks.before.handle;
  const int64_t took_ns = ends_ns.empty() ? 0 : ends_ns.back();
  int64_t end_ns = is_next ? settled_ns_ + took_ns : marks.issued_ns;
  end_ns = std::max(std::min(end_ns, seen_ns), marks.issued_ns);
  const int64_t before_ns = end_ns - took_ns;
  for (size_t i = 0; i < marks.parts.size(); ++i) {
    step.spans.push_back({.kind = marks.parts[i].kind,
                          .begin_ns = before_ns + (i == 0 ? 0 : ends_ns[i - 1]),
                          .end_ns = before_ns + ends_ns[i]});
  }
  if (last_gradient > absl::ZeroDuration())
    step.last_gradient_ns = before_ns + absl::ToInt64Nanoseconds(last_gradient);
  settled_ = EndOf(marks);
  settled_ns_ = end_ns;
  return step;
}

}  // namespace evenkeel
