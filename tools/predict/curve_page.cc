#include "evenkeel/tools/predict/curve_page.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "evenkeel/trainer/report/html_report.h"
#include "evenkeel/trainer/report/html_text.h"
#include "evenkeel/trainer/report/line_chart.h"
#include "evenkeel/trainer/report/report_sections.h"
#include "evenkeel/trainer/report/run_record.h"

namespace evenkeel {
namespace {

template <typename Value>
Curve CurveOf(const char* name, const char* style, const Curves& curves, Value value) {
  Curve curve{.name = name, .style = style};
  for (const Forecast& at : curves.forecasts)
    curve.points.push_back({std::log2(at.where.ranks), value(at)});
  return curve;
}

// Draws a value of each forecast, and the same of the ends of its interval.
template <typename Value>
Chart ChartOf(const Curves& curves, const char* title, const char* unit, Value value) {
  Chart chart{.title = title,
              .unit = unit,
              .empty = "No number of ranks was given.",
              .begins_at_zero = true,
              .x_end = 1,
              .x_name = "ranks",
              .x_is_log2 = true};
  for (const Forecast& at : curves.forecasts)
    chart.x_end = std::max(chart.x_end, std::log2(at.where.ranks));
  chart.curves = {
      CurveOf("predicted", "rate", curves, [&](const auto& at) { return value(at.step); }),
      CurveOf("95 % from", "plain", curves, [&](const auto& at) { return value(at.low); }),
      CurveOf("to", "plain", curves, [&](const auto& at) { return value(at.high); })};
  return chart;
}

// Adds dots without a line between them: a gap follows each.
void AddMeasured(const Curves& curves, bool is_fitted, Chart& chart) {
  Curve dots{.name = is_fitted ? "measured, fitted to" : "measured",
             .style = is_fitted ? "train" : "test",
             .has_dots = true};
  for (const CheckedRun& run : curves.checked) {
    if (run.is_fitted != is_fitted) continue;
    dots.points.push_back({std::log2(run.ranks), 1e3 * run.seconds});
    dots.points.push_back({std::log2(run.ranks), kUnknown});
  }
  std::ranges::stable_sort(dots.points, {}, &ChartPoint::x);
  if (!dots.points.empty()) chart.curves.push_back(std::move(dots));
}

std::string ChartsOf(const Curves& curves) {
  Chart step =
      ChartOf(curves, "Duration of a step", "ms", [](double seconds) { return 1e3 * seconds; });
  step.has_log = true;
  for (const bool is_fitted : {true, false}) AddMeasured(curves, is_fitted, step);
  Chart efficiency = ChartOf(curves, "Efficiency: the step of one rank, as a part of the step", "%",
                             [&](double seconds) { return curves.alone / seconds; });
  Chart exposed = ChartOf(curves, "Exposed communication, part of a step", "%",
                          [](double) { return kUnknown; });
  exposed.curves = {
      CurveOf("predicted", "exposed", curves, [](const auto& at) { return at.exposed / at.step; })};
  efficiency.highest = exposed.highest = 1;
  return RenderChart(step) + RenderChart(efficiency) + RenderChart(exposed);
}

}  // namespace

std::string RenderCurves(Curves curves) {
  std::ranges::sort(curves.forecasts, {}, [](const Forecast& at) { return at.where.ranks; });
  const std::string title = absl::StrCat("Predicted steps: ", curves.title);
  return RenderPage(
      title,
      absl::StrCat("<header><p class=\"mark\"><span>evenkeel</span></p><h1>", EscapeHtml(title),
                   "</h1></header><main>",
                   Section("By the number of ranks", "",
                           absl::StrCat("<div class=\"charts\">", ChartsOf(curves), "</div>")),
                   Section("Numbers", "", absl::StrCat("<pre>", EscapeHtml(curves.text), "</pre>")),
                   "</main>\n"),
      "Predicted by evenkeel.");
}

}  // namespace evenkeel
