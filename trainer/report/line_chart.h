// A chart of curves over the steps of a run, as HTML that needs nothing else: a drawing that stretches to any width, with
// axes whose text does not.
//
//   RenderChart({.title = "Loss", .curves = {{.name = "training", .style = "train", .points = points}}})
//
// The page's script finds the curves' points in the chart and shows their values under the pointer; without script all
// but that is there.
//
// Threads: pure function.

#ifndef EVENKEEL_TRAINER_REPORT_LINE_CHART_H_
#define EVENKEEL_TRAINER_REPORT_LINE_CHART_H_

#include <string>
#include <vector>

namespace evenkeel {

struct ChartPoint {
  double x = 0;
  double y = 0;
};

struct Curve {
  std::string name;
  std::string style;               // A class of report.css.
  std::vector<ChartPoint> points;  // x ascends; a y that is not finite is a gap.
  bool has_dots = false;
  bool is_faint = false;  // Behind the others; peaks of it are cut off.
};

struct Chart {
  std::string title;
  std::string unit;   // "", "%", "samples/s"
  std::string empty;  // What is said if there is nothing to show.
  std::vector<Curve> curves;
  bool begins_at_zero = false;
  double highest = 0;  // The axis ends there at the latest; 0: anywhere.
  double cut_low = 0;  // Of each curve's points, so many of the lowest need not be seen.
  double x_end = 0;    // The last step.
};

std::string RenderChart(const Chart& chart);

// Round numbers, so many or a few more or less, that lie within [low, high]; both ends included in what they span.
struct Ticks {
  double first = 0;
  double step = 1;
  int count = 0;
  int decimals = 0;
};
Ticks RoundTicks(double low, double high, int wanted);

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_REPORT_LINE_CHART_H_
