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

using Points = std::vector<ChartPoint>;

template <typename Value>
Points Over(const std::vector<Forecast>& forecasts, Value value) {
  Points points;
  for (const Forecast& at : forecasts) points.push_back({std::log2(at.where.ranks), value(at)});
  return points;
}

// Dots without a line between them: a gap follows each.
Points DotsOf(const Curves& curves, bool is_fitted) {
  Points points;
  for (const CheckedRun& run : curves.checked) {
    if (run.is_fitted != is_fitted) continue;
    points.push_back({std::log2(run.ranks), 1e3 * run.seconds});
    points.push_back({std::log2(run.ranks), kUnknown});
  }
  std::ranges::stable_sort(points, {}, &ChartPoint::x);
  return points;
}

Chart ChartOf(const Curves& curves, std::string title, std::string unit) {
  double end = 1;
  for (const Forecast& at : curves.forecasts) end = std::max(end, std::log2(at.where.ranks));
  return {.title = std::move(title),
          .unit = std::move(unit),
          .empty = "No number of ranks was given.",
          .begins_at_zero = true,
          .x_end = end,
          .x_name = "ranks",
          .x_is_log2 = true};
}

template <typename Value>
void AddBand(Chart& chart, const std::vector<Forecast>& forecasts, Value value) {
  chart.curves.push_back(
      {.name = "95 % from", .style = "plain", .points = Over(forecasts, [&](const auto& at) {
                                                return value(at.low);
                                              })});
  chart.curves.push_back(
      {.name = "to", .style = "plain", .points = Over(forecasts, [&](const auto& at) {
                                         return value(at.high);
                                       })});
}

std::string StepChart(const Curves& curves) {
  Chart chart = ChartOf(curves, "Duration of a step", "ms");
  chart.has_log = true;
  chart.curves.push_back(
      {.name = "predicted", .style = "rate", .points = Over(curves.forecasts, [](const auto& at) {
                                               return 1e3 * at.step;
                                             })});
  AddBand(chart, curves.forecasts, [](double step) { return 1e3 * step; });
  for (const bool is_fitted : {true, false}) {
    Points dots = DotsOf(curves, is_fitted);
    if (dots.empty()) continue;
    chart.curves.push_back({.name = is_fitted ? "measured, fitted to" : "measured",
                            .style = is_fitted ? "train" : "test",
                            .points = std::move(dots),
                            .has_dots = true});
  }
  return RenderChart(chart);
}

std::string EfficiencyChart(const Curves& curves) {
  Chart chart = ChartOf(curves, "Efficiency: the step of one rank, as a part of the step", "%");
  chart.highest = 1;
  chart.curves.push_back(
      {.name = "predicted", .style = "rate", .points = Over(curves.forecasts, [&](const auto& at) {
                                               return curves.alone / at.step;
                                             })});
  AddBand(chart, curves.forecasts, [&](double step) { return curves.alone / step; });
  return RenderChart(chart);
}

std::string ExposedChart(const Curves& curves) {
  Chart chart = ChartOf(curves, "Exposed communication, part of a step", "%");
  chart.highest = 1;
  chart.curves.push_back(
      {.name = "predicted",
       .style = "exposed",
       .points = Over(curves.forecasts, [](const auto& at) { return at.exposed / at.step; })});
  return RenderChart(chart);
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
                           absl::StrCat("<div class=\"charts\">", StepChart(curves),
                                        EfficiencyChart(curves), ExposedChart(curves), "</div>")),
                   Section("Numbers", "", absl::StrCat("<pre>", EscapeHtml(curves.text), "</pre>")),
                   "</main>\n"),
      "Predicted by evenkeel.");
}

}  // namespace evenkeel
