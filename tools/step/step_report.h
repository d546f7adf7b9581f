// The report of bench_step, as people read it; and whether the bars are met.
//
//   // [{"what", "median", "low", "high", "bar", "is_met"}, ...]
//   report["bars"] = JudgeReport(report);
//   std::cout << FormatReport(report);
//
// Shape:   {"world", "cores", "pairs", "results": [...], "startup"?, "bars"}; a result is that of
//          MeasurePlan() with "backend" and "plan", the startup that of MeasureStartups().
// Bars:    for two ranks only: with more there are not enough cores on most machines.
// Threads: pure.

#ifndef EVENKEEL_TOOLS_STEP_STEP_REPORT_H_
#define EVENKEEL_TOOLS_STEP_STEP_REPORT_H_

#include <string>

#include "nlohmann/json.hpp"

namespace evenkeel {

nlohmann::json JudgeReport(const nlohmann::json& report);
std::string FormatReport(const nlohmann::json& report);

}  // namespace evenkeel

#endif  // EVENKEEL_TOOLS_STEP_STEP_REPORT_H_
