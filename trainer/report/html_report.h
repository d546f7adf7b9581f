// What a run was, as one HTML file that needs nothing else: no network, no other file. It can be read on a screen of any
// width, printed, mailed, and kept for years.
//
//   const std::string html = RenderReport(record);
//   EK_RETURN_IF_ERROR(WriteFileAtomically("run.html", std::span(std::array<absl::string_view, 1>{html})));
//
// Parts for which the record has nothing are left out. Every string of the record is shown as text, whatever it holds.
//
// Threads: pure function.

#ifndef EVENKEEL_TRAINER_REPORT_HTML_REPORT_H_
#define EVENKEEL_TRAINER_REPORT_HTML_REPORT_H_

#include <string>

#include "evenkeel/trainer/report/run_record.h"

namespace evenkeel {

std::string RenderReport(const RunRecord& record);

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_REPORT_HTML_REPORT_H_
