// A chart of curves over the steps of a run, as self-contained HTML: a drawing that stretches to
// any width, with axes whose text does not stretch.
//
//   RenderChart({.title = "Loss",
//                .curves = {{.name = "training", .style = "train", .points = points}}})
//
// The page's script finds the curves' points in the chart and shows their values under the pointer;
// without a script only that is missing. A chart with `has_log` is drawn twice; a box in its legend
// chooses the scale, also without a script.
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
  bool is_faint = false;  // Behind the others, with its peaks cut off.
};

struct Chart {
  std::string title;
  std::string unit;   // "", "%", "samples/s"
  std::string empty;  // The text shown without data.
  std::vector<Curve> curves;
  bool has_log = false;  // The reader may choose a logarithmic scale.
  bool begins_at_zero = false;
  double highest = 0;  // Upper limit of the axis; 0: none.
  double cut_low = 0;  // Fraction of each curve's lowest points that may be cut off.
  double x_end = 0;    // The last step.
  std::string x_name = "step";
  bool x_is_log2 = false;  // Each x is a binary logarithm; texts show the number itself.
};

std::string RenderChart(const Chart& chart);

// Round numbers within [low, high], about as many as wanted.
struct Ticks {
  double first = 0;
  double step = 1;
  int count = 0;
  int decimals = 0;
};
Ticks RoundTicks(double low, double high, int wanted);

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_REPORT_LINE_CHART_H_
