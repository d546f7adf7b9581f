// The report of a run as one self-contained HTML file: it needs no network and no other file. It
// can be read on a screen of any width, printed, mailed and archived.
//
//   const std::string html = RenderReport(record);
//   EK_RETURN_IF_ERROR(WriteFileAtomically("run.html",
//                                          std::span(std::array<absl::string_view, 1>{html})));
//
// The page is a template (report.html with report.css, report.js and the chart library dygraphs)
// around one JSON object, which its script displays. Parts without data are left out. The script
// shows every string as text.
//
// Threads: pure functions.

#ifndef EVENKEEL_TRAINER_REPORT_HTML_REPORT_H_
#define EVENKEEL_TRAINER_REPORT_HTML_REPORT_H_

#include <nlohmann/json.hpp>
#include <string>

#include "evenkeel/trainer/report/run_record.h"

namespace evenkeel {

std::string RenderReport(const RunRecord& record);

// Returns the data of a run's page: numbers in the units of the record, null if unknown; "inf" or
// "nan" for results of a run that diverged. Its steps are counted from 1, as in messages. Its size
// is bounded, however long the run was; `more` beside a list counts the elements left out.
nlohmann::json ReportData(const RunRecord& record);

// Returns a page that displays `data`: a run's, or {title, charts, text} (report.js, Forecast()).
std::string RenderPage(const nlohmann::json& data);

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_REPORT_HTML_REPORT_H_
