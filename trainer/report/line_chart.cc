#include "evenkeel/trainer/report/line_chart.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "evenkeel/comm/base/json.h"
#include "evenkeel/trainer/report/html_text.h"

namespace evenkeel {
namespace {

// The drawing's size, before it is stretched; two decimals are finer than a screen.
constexpr double kWidth = 1000;
constexpr double kHeight = 300;
constexpr int kTicks = 5;
constexpr double kPeaksCutOff = 0.01;  // Fraction of a faint curve's points.

struct Range {
  double low = 0, high = 1;
  bool is_log = false;
  bool Has(double value) const { return std::isfinite(value) && (!is_log || value > 0); }
  double Share(double value) const {
    return is_log ? std::log(value / low) / std::log(high / low) : (value - low) / (high - low);
  }
};

Range RangeOf(const Chart& chart, bool is_log) {
  std::vector<double> values;
  for (const Curve& curve : chart.curves) {
    std::vector<double> own;
    for (const ChartPoint& point : curve.points) {
      if (Range{.is_log = is_log}.Has(point.y)) own.push_back(point.y);
    }
    std::sort(own.begin(), own.end());
    const size_t cut =
        curve.is_faint ? static_cast<size_t>(kPeaksCutOff * static_cast<double>(own.size())) : 0;
    const auto low =
        std::max(cut, static_cast<size_t>(chart.cut_low * static_cast<double>(own.size())));
    values.insert(values.end(), own.begin() + static_cast<ptrdiff_t>(low),
                  own.end() - static_cast<ptrdiff_t>(cut));
  }
  if (values.empty()) return is_log ? Range{.low = 1, .high = 10, .is_log = true} : Range{};
  const auto [low, high] = std::minmax_element(values.begin(), values.end());
  if (is_log) {
    const double margin = std::max(1.01, std::pow(*high / *low, 0.05));
    return {.low = *low / margin, .high = *high * margin, .is_log = true};
  }
  Range range{.low = chart.begins_at_zero ? std::min(0.0, *low) : *low, .high = *high};
  const double margin =
      range.high > range.low ? 0.05 * (range.high - range.low) : std::max(1e-9, 0.1 * range.high);
  range.high += margin;
  if (!chart.begins_at_zero) range.low -= margin;
  if (chart.highest > 0) range.high = std::max(*high, std::min(range.high, chart.highest));
  return range;
}

std::string TickLabel(double value, const Chart& chart, const Ticks& ticks) {
  if (chart.unit == "%") {
    return absl::StrFormat("%.*f %%", std::max(0, ticks.decimals - 2), 100 * value);
  }
  if (std::fabs(value) >= 1e6) return absl::StrCat(FormatNumber(value / 1e6), "M");
  if (std::fabs(value) >= 10000) return absl::StrCat(absl::StrFormat("%g", value / 1000), "k");
  return absl::StrFormat("%.*f", ticks.decimals, value);
}

std::string PathOf(const Curve& curve, const Range& x, const Range& y) {
  std::string path;
  bool is_open = false;
  for (const ChartPoint& point : curve.points) {
    if (!y.Has(point.y)) {
      is_open = false;
      continue;
    }
    absl::StrAppend(&path, is_open ? "L" : "M", Coordinate(kWidth * x.Share(point.x)), " ",
                    Coordinate(kHeight * (1 - y.Share(point.y))));
    is_open = true;
  }
  return path;
}

// Dots keep their shape when the drawing is stretched, so they are not part of it.
std::string DotsOf(const Curve& curve, const Range& x, const Range& y) {
  std::string dots;
  if (!curve.has_dots || curve.points.size() > 60) return dots;
  for (const ChartPoint& point : curve.points) {
    if (!y.Has(point.y)) continue;
    absl::StrAppend(&dots, "<i class=\"dot ", curve.style,
                    "\" style=\"left:", Coordinate(100 * x.Share(point.x)),
                    "%;top:", Coordinate(100 * (1 - y.Share(point.y))), "%\"></i>");
  }
  return dots;
}

std::string Legend(const Chart& chart) {
  std::string legend;
  for (const Curve& curve : chart.curves) {
    if (!curve.is_faint) {
      absl::StrAppend(&legend, "<span class=\"key ", curve.style, "\">", EscapeHtml(curve.name),
                      "</span>");
    }
  }
  return legend;
}

// The data of the script: numbers, and the name of x. It takes names and colours from the legend,
// which has the same order.
std::string Data(const Chart& chart, const Range& x) {
  std::string json =
      absl::StrFormat("{\"percent\":%d,\"base2\":%d,\"name\":%s,\"x\":[%.10g,%.10g],\"curves\":[",
                      chart.unit == "%" ? 1 : 0, chart.x_is_log2 ? 1 : 0,
                      internal::JsonQuoted(chart.x_name), x.low, x.high);
  const char* curve_comma = "";
  for (const Curve& curve : chart.curves) {
    if (curve.is_faint) continue;
    absl::StrAppend(&json, std::exchange(curve_comma, ","), "[");
    const char* comma = "";
    for (const ChartPoint& point : curve.points) {
      if (!std::isfinite(point.y)) continue;
      absl::StrAppendFormat(&json, "%s%.10g,%.4g", std::exchange(comma, ","), point.x, point.y);
    }
    json += "]";
  }
  return json + "]}";
}

bool HasPoints(const Chart& chart) {
  return std::any_of(chart.curves.begin(), chart.curves.end(), [](const Curve& curve) {
    return std::any_of(curve.points.begin(), curve.points.end(),
                       [](const ChartPoint& point) { return std::isfinite(point.y); });
  });
}

// Returns the values of the horizontal lines.
std::vector<double> LinesOf(const Range& y, const Ticks& ticks) {
  std::vector<double> values;
  const double ratio = y.high / y.low;
  if (!y.is_log || ratio < 2) {
    for (int i = 0; i < ticks.count; ++i) values.push_back(ticks.first + i * ticks.step);
    return values;
  }
  std::vector<double> factors = {1};
  if (ratio < 1000) factors = {1, 2, 5};
  if (ratio < 10) factors = {1, 1.5, 2, 3, 4, 6, 8};
  for (double power = std::pow(10, std::floor(std::log10(y.low))); power < y.high; power *= 10) {
    for (const double factor : factors) {
      const double value = factor * power;
      if (value >= y.low && value <= y.high) values.push_back(value);
    }
  }
  return values;
}

std::string LineLabel(double value, const Chart& chart, const Range& y, const Ticks& ticks) {
  return y.is_log ? absl::StrFormat("%.4g", value) : TickLabel(value, chart, ticks);
}

std::string Plot(const Chart& chart, const Range& x, bool is_log) {
  const Range y = RangeOf(chart, is_log);
  const Ticks y_ticks = RoundTicks(y.low, y.high, kTicks);
  // Logarithms are labelled where they are whole.
  const int x_wanted = chart.x_is_log2 ? std::min(kTicks, static_cast<int>(x.high)) : kTicks;
  const Ticks x_ticks = RoundTicks(x.low, x.high, x_wanted);
  std::string lines, labels;
  for (const double value : LinesOf(y, y_ticks)) {
    absl::StrAppend(&lines, "M0 ", Coordinate(kHeight * (1 - y.Share(value))), "H1000");
    absl::StrAppend(&labels,
                    "<span class=\"y\" style=\"top:", Coordinate(100 * (1 - y.Share(value))),
                    "%\">", LineLabel(value, chart, y, y_ticks), "</span>");
  }
  for (int i = 0; i < x_ticks.count; ++i) {
    const double value = x_ticks.first + i * x_ticks.step;
    absl::StrAppend(&labels, "<span class=\"x\" style=\"left:", Coordinate(100 * x.Share(value)),
                    "%\">", i == 0 ? EscapeHtml(chart.x_name) + " " : "",
                    FormatCount(std::llround(chart.x_is_log2 ? std::exp2(value) : value)),
                    "</span>");
  }
  std::string html =
      absl::StrCat("<div class=\"plot", is_log ? " log" : "", "\">", labels,
                   "<svg viewBox=\"0 0 1000 300\" preserveAspectRatio=\"none\"",
                   " role=\"img\" aria-label=\"", EscapeHtml(chart.title),
                   is_log ? ", logarithmic" : "", "\"><path class=\"grid\" d=\"", lines, "\"/>");
  for (const Curve& curve : chart.curves) {
    absl::StrAppend(&html, "<path class=\"curve ", curve.style, curve.is_faint ? " faint" : "",
                    "\" d=\"", PathOf(curve, x, y), "\"/>");
  }
  html += "</svg>";
  for (const Curve& curve : chart.curves) html += DotsOf(curve, x, y);
  return html + "</div>";
}

}  // namespace

Ticks RoundTicks(double low, double high, int wanted) {
  const double span = high - low;
  if (!(span > 0) || !std::isfinite(span) || wanted < 1) return {.first = low, .count = 1};
  const double power = std::pow(10, std::floor(std::log10(span / wanted)));
  double step = 10 * power;
  for (double factor : {5.0, 2.0, 1.0}) {
    if (factor * power * wanted >= span) step = factor * power;
  }
  Ticks ticks{.first = std::ceil(low / step - 1e-9) * step, .step = step};
  ticks.count = static_cast<int>(std::floor((high - ticks.first) / step + 1e-9)) + 1;
  ticks.decimals = std::clamp(static_cast<int>(std::ceil(-std::log10(step) - 1e-9)), 0, 9);
  return ticks;
}

std::string RenderChart(const Chart& chart) {
  const bool has_points = HasPoints(chart);
  const std::string unit =
      chart.unit.empty() || chart.unit == "%"
          ? ""
          : absl::StrCat(" <span class=\"unit\">", EscapeHtml(chart.unit), "</span>");
  const std::string box = chart.has_log && has_points
                              ? "<label class=\"scale\"><input type=\"checkbox\"> log</label>"
                              : "";
  std::string html =
      absl::StrCat("<figure class=\"chart\"><figcaption><b>", EscapeHtml(chart.title), "</b>", unit,
                   "<span class=\"keys\">", Legend(chart), box, "</span></figcaption>");
  if (!has_points) {
    return absl::StrCat(html, "<p class=\"none\">", EscapeHtml(chart.empty), "</p></figure>\n");
  }
  const Range x{.low = 0, .high = std::max(1.0, chart.x_end)};
  html += Plot(chart, x, /*is_log=*/false);
  if (chart.has_log) html += Plot(chart, x, /*is_log=*/true);
  return absl::StrCat(html, "<script type=\"application/json\">", Data(chart, x),
                      "</script></figure>\n");
}

}  // namespace evenkeel
