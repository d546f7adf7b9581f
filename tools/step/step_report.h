// The report of bench_step, as people read it; and whether the bars are met.
//
//   // [{"what", "median", "low", "high", "bar", "is_met"}, ...]
//   report["bars"] = JudgeReport(report);
//   std::cout << FormatReport(report);
//
// Shape:   {"world", "cores", "views", "pairs", "results": [...], "startup"?, "bars"}; a result is
//          ToJson(PlanResult) with "backend", "world" and "plan", the startup what
//          MeasureStartups() answers.
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
