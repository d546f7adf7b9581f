// The report of a run as one self-contained HTML file: it needs no network and no other file. It
// can be read on a screen of any width, printed, mailed and archived.
//
//   const std::string html = RenderReport(record);
//   EK_RETURN_IF_ERROR(WriteFileAtomically("run.html",
//                                          std::span(std::array<absl::string_view, 1>{html})));
//
// Parts without data in the record are left out. Every string of the record is escaped and shown as
// text.
//
// Threads: pure function.

#ifndef EVENKEEL_TRAINER_REPORT_HTML_REPORT_H_
#define EVENKEEL_TRAINER_REPORT_HTML_REPORT_H_

#include <string>

#include "evenkeel/trainer/report/run_record.h"

namespace evenkeel {

std::string RenderReport(const RunRecord& record);

// Returns a page in the style of the report, with its script. `title` is text, the others are HTML.
std::string RenderPage(const std::string& title, const std::string& body,
                       const std::string& footer);

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_REPORT_HTML_REPORT_H_
