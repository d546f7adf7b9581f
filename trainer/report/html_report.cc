#include "evenkeel/trainer/report/html_report.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "evenkeel/trainer/report/html_text.h"
#include "evenkeel/trainer/report/line_chart.h"
#include "evenkeel/trainer/report/report_sections.h"

namespace evenkeel {
namespace {

constexpr double kSmoothedOver = 1.0 / 40;  // Fraction of the run.
constexpr size_t kTooFewToSmooth = 20;

using Points = std::vector<ChartPoint>;

// Returns a curve over the steps; a point of several steps is at their middle.
template <typename Value>
Points OverSteps(const RunRecord& record, Value value) {
  Points points;
  points.reserve(record.steps.size());
  for (const StepPoint& step : record.steps) {
    points.push_back(
        {static_cast<double>(step.step) + 0.5 * static_cast<double>(step.count - 1), value(step)});
  }
  return points;
}

template <typename Value>
Points OverTests(const RunRecord& record, Value value) {
  Points points;
  for (const TestPoint& test : record.tests)
    points.push_back({static_cast<double>(test.step), value(test)});
  return points;
}

// Returns a running mean, whose first values are means over fewer points.
Points Smoothed(const Points& points) {
  if (points.size() < kTooFewToSmooth) return points;
  const double memory = 1 - 1 / std::max(2.0, kSmoothedOver * static_cast<double>(points.size()));
  double sum = 0, weight = 0;
  Points smoothed = points;
  for (ChartPoint& point : smoothed) {
    if (!std::isfinite(point.y)) continue;
    sum = memory * sum + point.y;
    weight = memory * weight + 1;
    point.y = sum / weight;
  }
  return smoothed;
}

void AddCurve(Chart& chart, std::string name, std::string style, const Points& points) {
  if (points.size() >= kTooFewToSmooth) {
    chart.curves.push_back({.name = name, .style = style, .points = points, .is_faint = true});
  }
  chart.curves.push_back({.name = std::move(name),
                          .style = std::move(style),
                          .points = Smoothed(points),
                          .has_dots = points.size() < 2});
}

Chart ChartOf(const RunRecord& record, std::string title, std::string unit = "") {
  const double last =
      record.steps.empty()
          ? 0
          : static_cast<double>(record.steps.back().step + record.steps.back().count - 1);
  return {.title = std::move(title),
          .unit = std::move(unit),
          .empty = "No step was run.",
          .x_end = last};
}

std::string TrainingOf(const RunRecord& record) {
  return absl::StrCat("training, rank ", record.reporter);
}

void AddTestCurve(Chart& chart, Points points) {
  chart.curves.push_back(
      {.name = "test", .style = "test", .points = std::move(points), .has_dots = true});
}

std::string LearningCharts(const RunRecord& record) {
  const bool is_text = std::isfinite(record.bytes_per_prediction);
  const auto loss_of = [&](double loss) {
    return is_text ? BitsPerByte(loss, record.bytes_per_prediction) : loss;
  };
  Chart loss = ChartOf(record, is_text ? "Bits per byte" : "Loss");
  loss.has_log = loss.begins_at_zero = true;
  AddCurve(loss, TrainingOf(record), "train",
           OverSteps(record, [&](const StepPoint& p) { return loss_of(p.loss); }));
  AddTestCurve(loss, OverTests(record, [&](const TestPoint& p) { return loss_of(p.loss); }));
  Chart accuracy = ChartOf(record, "Accuracy", "%");
  accuracy.highest = 1;
  accuracy.cut_low = 0.04;  // The first steps, which would compress the others.
  AddCurve(accuracy, TrainingOf(record), "train",
           OverSteps(record, [](const StepPoint& p) { return p.accuracy; }));
  AddTestCurve(accuracy, OverTests(record, [](const TestPoint& p) { return p.accuracy; }));
  return RenderChart(loss) + RenderChart(accuracy);
}

std::string SpeedCharts(const RunRecord& record) {
  Chart rate = ChartOf(record, "Throughput", absl::StrCat(record.unit_name, " per second"));
  rate.begins_at_zero = true;
  AddCurve(rate, "all ranks", "rate", OverSteps(record, [&](const StepPoint& p) {
             return p.samples * record.units_per_sample / p.took;
           }));
  Chart exposed = ChartOf(record, "Exposed communication, part of a step", "%");
  exposed.begins_at_zero = true;
  exposed.highest = 1;
  AddCurve(exposed, absl::StrCat("rank ", record.reporter), "exposed",
           OverSteps(record, [](const StepPoint& p) { return p.exposed / p.took; }));
  Chart took = ChartOf(record, "Duration of a step", "ms");
  took.begins_at_zero = true;
  AddCurve(took, absl::StrCat("rank ", record.reporter), "plain",
           OverSteps(record, [](const StepPoint& p) { return 1000 * p.took; }));
  return RenderChart(rate) + RenderChart(took) + RenderChart(exposed);
}

std::string Charts(const std::string& charts) {
  return absl::StrCat("<div class=\"charts\">", charts, "</div>");
}

constexpr size_t kMostCostCurves = 6;

// The costs over time of the ranks with the highest ones.
std::string CostChart(const RunRecord& record) {
  if (record.costs.size() < 2) return "";
  std::map<int, CostCurve> curves = CostsByRank(record.costs);
  std::vector<std::pair<double, int>> by_peak;
  for (const auto& [rank, curve] : curves) by_peak.emplace_back(-curve.peak, rank);
  std::sort(by_peak.begin(), by_peak.end());
  Chart chart = ChartOf(record, "Cost of a rank, part of the time", "%");
  chart.begins_at_zero = true;
  static constexpr const char* kStyles[kMostCostCurves] = {"k4", "k2", "k3", "k5", "k0", "m4"};
  for (const auto& [peak, rank] : by_peak) {
    if (chart.curves.size() == kMostCostCurves) break;
    Points points;
    for (const auto& [step, cost] : curves[rank].points)
      points.push_back({static_cast<double>(step), cost});
    const int64_t last = curves[rank].points.back().first;
    const bool is_lost = !record.costs.back().costs.contains(rank);
    chart.curves.push_back(
        {.name = absl::StrCat("rank ", rank,
                              is_lost ? absl::StrCat(", until step ", FormatCount(last)) : ""),
         .style = kStyles[chart.curves.size()],
         .points = std::move(points)});
  }
  return Charts(RenderChart(chart));
}

std::string WaitsSection(const RunRecord& record) {
  return Section(
      "Waits by rank",
      "The mean step of each rank. All ranks leave a reduction together, so the one with "
      "the shortest wait is the last to arrive. The cost of a rank is its share of the time that "
      "delays cost the group.",
      RenderWaits(record) + CostChart(record));
}

std::string GradientNormChart(const RunRecord& record) {
  const Points points = OverSteps(record, [](const StepPoint& p) { return p.gradient_norm; });
  const bool is_known = std::ranges::any_of(points, [](auto p) { return std::isfinite(p.y); });
  if (!is_known) return "";
  Chart chart = ChartOf(record, "Gradient norm before clipping");
  chart.has_log = chart.begins_at_zero = true;
  AddCurve(chart, "gradients", "plain", points);
  return RenderChart(chart);
}

std::string LearningRateChart(const RunRecord& record) {
  const Points points = OverSteps(record, [](const StepPoint& p) { return p.learning_rate; });
  const auto [low, high] =
      std::minmax_element(points.begin(), points.end(),
                          [](const ChartPoint& a, const ChartPoint& b) { return a.y < b.y; });
  if (points.empty() || low->y == high->y) return "";  // The settings show a constant rate.
  Chart chart = ChartOf(record, "Learning rate");
  chart.begins_at_zero = true;
  chart.curves.push_back({.name = "learning rate", .style = "plain", .points = points});
  return RenderChart(chart);
}

std::string Header(const RunRecord& record) {
  std::string html =
      absl::StrCat("<header><p class=\"mark\"><span>evenkeel</span><time>", EscapeHtml(record.date),
                   "</time></p><h1>", EscapeHtml(record.title), "</h1><p class=\"summary\">",
                   EscapeHtml(record.summary), "</p>");
  if (record.goes_on) {
    html +=
        "<p class=\"ending\">The run is still in progress; this page is updated every minute.</p>";
  } else if (!record.ending.empty()) {
    absl::StrAppend(&html, "<p class=\"ending\"><b>The run did not come to its end.</b> ",
                    EscapeHtml(record.ending), "</p>");
  }
  return html + RenderFigures(record) + "</header>\n";
}

std::string RanksLead(const RunRecord& record) {
  if (record.samples_of_tail == 0) return "All ranks had a batch in every step.";
  return absl::StrCat(
      "Exhausted ranks shadow the active ranks' steps. This way ",
      FormatCount(record.samples_of_tail),
      " more samples were used for training than if the group had stopped with the ",
      "first exhausted rank.");
}

bool IsOnDevices(const RunRecord& record) {
  return std::ranges::any_of(record.ranks, [](const RankRecord& rank) {
    return std::ranges::count(rank.traces, StepClock::kDevice, &StepTrace::clock) > 0;
  });
}

std::string StepsLead(const RunRecord& record) {
  if (IsOnDevices(record)) {
    return "The work of each rank's device in a few sampled steps, timed by marks on its stream: "
           "batch "
           "and begin are times in which it waited for them, wait is the time for gradients that "
           "backward did not hide. Shadowed steps are timed by the host's clock. Buckets are "
           "reduced on other streams and are not "
           "shown.";
  }
  return "The work of each rank in a few sampled steps, and below it the reduction of its gradient "
         "buckets. The line marks its last gradient: the part of the reduction after it was not "
         "hidden.";
}

std::string Body(const RunRecord& record) {
  return absl::StrCat(
      Header(record), "<main>",
      Section(
          "Learning", "",
          Charts(LearningCharts(record) + LearningRateChart(record) + GradientNormChart(record))),
      Section("Speed", "", Charts(SpeedCharts(record))),
      Section("Steps, rank by rank", StepsLead(record), RenderTimeline(record)),
      Section(record.samples_of_tail > 0 ? "Uneven ranks" : "Batches of each rank",
              RanksLead(record), RenderRanks(record)),
      WaitsSection(record),
      Section("Gradient buckets",
              "The first step shows in which order gradients arrive; the plan made from it "
              "sends the gradients that are ready first.",
              RenderPlans(record)),
      Section("Memory per rank",
              "Memory of the model, the library, the optimizer and the data. A process also holds "
              "code.",
              RenderMemory(record)),
      Section("Events", "", RenderEvents(record)), Section("Settings", "", RenderSettings(record)),
      "</main>\n");
}

}  // namespace

std::string RenderPage(const std::string& title, const std::string& body,
                       const std::string& footer) {
  return absl::StrCat(
      "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n"
      "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n"
      "<meta name=\"color-scheme\" content=\"light dark\">\n<title>",
      EscapeHtml(title), "</title>\n<style>\n", kReportStyle, "</style>\n</head>\n<body>\n", body,
      "<footer>", footer, "</footer>\n<script>\n", kReportScript, "</script>\n</body>\n</html>\n");
}

std::string RenderReport(const RunRecord& record) {
  return RenderPage(record.title, Body(record), "Written by evenkeel. Steps are counted from 0.");
}

}  // namespace evenkeel
