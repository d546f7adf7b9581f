#include "evenkeel/tools/predict/curve_page.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>

#include "absl/strings/str_cat.h"
#include "evenkeel/trainer/report/html_report.h"

namespace evenkeel {
namespace {

using Json = nlohmann::json;

template <typename Value>
Json CurveOf(const char* name, const char* style, const Curves& curves, Value value) {
  Json curve = {{"name", name}, {"style", style}, {"x", Json::array()}, {"y", Json::array()}};
  for (const Forecast& at : curves.forecasts) {
    curve["x"].push_back(at.where.ranks);
    curve["y"].push_back(value(at));
  }
  return curve;
}

// Returns a value of each forecast, and the same of the ends of its interval.
template <typename Value>
Json Interval(const Curves& curves, Value value) {
  return {CurveOf("predicted", "rate", curves, [&](const auto& at) { return value(at.step); }),
          CurveOf("95 % from", "plain", curves, [&](const auto& at) { return value(at.low); }),
          CurveOf("to", "plain", curves, [&](const auto& at) { return value(at.high); })};
}

Json Measured(const Curves& curves, bool is_fitted) {
  Json dots = {{"name", is_fitted ? "measured, fitted to" : "measured"},
               {"style", is_fitted ? "train" : "test"},
               {"dots", true},
               {"noLine", true},
               {"x", Json::array()},
               {"y", Json::array()}};
  for (const CheckedRun& run : curves.checked) {
    if (run.is_fitted != is_fitted) continue;
    dots["x"].push_back(run.ranks);
    dots["y"].push_back(1e3 * run.seconds);
  }
  return dots;
}

Json ChartOf(const char* title, const char* unit, Json curves) {
  return {{"title", title},
          {"unit", unit},
          {"empty", "No number of ranks was given."},
          {"fromZero", true},
          {"xName", "ranks"},
          {"xLog2", true},
          {"curves", std::move(curves)}};
}

}  // namespace

std::string RenderCurves(Curves curves) {
  std::ranges::sort(curves.forecasts, {}, [](const Forecast& at) { return at.where.ranks; });
  Json step = ChartOf("Duration of a step", "ms",
                      Interval(curves, [](double seconds) { return 1e3 * seconds; }));
  step["log"] = true;
  for (const bool is_fitted : {true, false}) {
    Json measured = Measured(curves, is_fitted);
    if (!measured["x"].empty()) step["curves"].push_back(std::move(measured));
  }
  Json efficiency =
      ChartOf("Efficiency: the step of one rank, as a part of the step", "%",
              Interval(curves, [&](double seconds) { return curves.alone / seconds; }));
  Json exposed = ChartOf("Exposed communication, part of a step", "%",
                         Json::array({CurveOf("predicted", "exposed", curves, [](const auto& at) {
                           return at.exposed / at.step;
                         })}));
  efficiency["highest"] = exposed["highest"] = 1;
  return RenderPage({{"title", absl::StrCat("Predicted steps: ", curves.title)},
                     {"charts", {step, efficiency, exposed}},
                     {"text", curves.text}});
}

}  // namespace evenkeel
