// The sampled steps of a run as a trace that https://ui.perfetto.dev and chrome://tracing open.
//
//   const std::string text = RenderTrace(record);  // WriteFileAtomically("trace.json", ...)
//
// The trace has a process per rank, with a thread for its computation and one for its buckets;
// arrows lead from the completion of a bucket to the start of its reduction. One more process has
// loss, throughput, and the cost of each slow rank as counters over the whole run. "otherData" has
// the run's settings, of which tools/predict reads some (trace_settings.h).
//
// Units:   microseconds since the run began, by the clock of the first rank's host. All ranks leave
//          a reduction together, so the clocks of other hosts are aligned by the moments at which
//          their ranks did; a rank's name has the largest deviation that remains, which is large if
//          a resumed run's ranks have moved to other hosts.
// Threads: pure function.
// Source:  "Trace Event Format", the JSON object format, as published by the Chromium project.

#ifndef EVENKEEL_TRAINER_REPORT_CHROME_TRACE_H_
#define EVENKEEL_TRAINER_REPORT_CHROME_TRACE_H_

#include <string>

#include "evenkeel/trainer/report/run_record.h"

namespace evenkeel {

std::string RenderTrace(const RunRecord& record);

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_REPORT_CHROME_TRACE_H_
