// The sampled steps of a run, rank by rank, as HTML: the computation of each rank, and below it the
// reduction of its buckets, in one shade where backward hid it and in another where the rank
// waited.
//
//   html += RenderTimeline(record);              // empty if no step was sampled
//
// One step is shown at a time; switching steps needs no script.
//
// Threads: pure function.

#ifndef EVENKEEL_TRAINER_REPORT_STEP_TIMELINE_H_
#define EVENKEEL_TRAINER_REPORT_STEP_TIMELINE_H_

#include <string>

#include "absl/strings/string_view.h"
#include "evenkeel/trainer/report/run_record.h"

namespace evenkeel {

std::string RenderTimeline(const RunRecord& record);

absl::string_view NameOf(SpanKind kind);  // "forward"

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_REPORT_STEP_TIMELINE_H_
