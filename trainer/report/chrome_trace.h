// The sampled steps of a run as a trace that https://ui.perfetto.dev and chrome://tracing open.
//
//   const std::string text = RenderTrace(record);  // WriteFileAtomically("trace.json", ...)
//
// The trace has a process per rank, with a thread for its computation and one for its buckets;
// arrows lead from the completion of a bucket to the start of its reduction. One more process has
// loss and throughput over the whole run as counters.
//
// Units:   microseconds since the run began, by each host's clock.
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
