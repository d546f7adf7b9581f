#include "evenkeel/trainer/report/line_chart.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
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
  double Share(double value) const { return (value - low) / (high - low); }
};

Range RangeOf(const Chart& chart) {
  std::vector<double> values;
  for (const Curve& curve : chart.curves) {
    std::vector<double> own;
    for (const ChartPoint& point : curve.points) {
      if (std::isfinite(point.y)) own.push_back(point.y);
    }
    std::sort(own.begin(), own.end());
    const size_t cut =
        curve.is_faint ? static_cast<size_t>(kPeaksCutOff * static_cast<double>(own.size())) : 0;
    const auto low =
        std::max(cut, static_cast<size_t>(chart.cut_low * static_cast<double>(own.size())));
    values.insert(values.end(), own.begin() + static_cast<ptrdiff_t>(low),
                  own.end() - static_cast<ptrdiff_t>(cut));
  }
  if (values.empty()) return {};
  const auto [low, high] = std::minmax_element(values.begin(), values.end());
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
    if (!std::isfinite(point.y)) {
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
    if (!std::isfinite(point.y)) continue;
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

// The data of the script: numbers only. It takes names and colours from the legend, which has the
// same order.
std::string Data(const Chart& chart, const Range& x, const Range& y) {
  std::string json =
      absl::StrFormat("{\"percent\":%d,\"x\":[%.10g,%.10g],\"y\":[%.6g,%.6g],\"curves\":[",
                      chart.unit == "%" ? 1 : 0, x.low, x.high, y.low, y.high);
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
  std::string html =
      absl::StrCat("<figure class=\"chart\"><figcaption><b>", EscapeHtml(chart.title), "</b>",
                   chart.unit.empty() || chart.unit == "%"
                       ? ""
                       : absl::StrCat(" <span class=\"unit\">", EscapeHtml(chart.unit), "</span>"),
                   "<span class=\"keys\">", Legend(chart), "</span></figcaption>");
  if (!HasPoints(chart)) {
    return absl::StrCat(html, "<p class=\"none\">", EscapeHtml(chart.empty), "</p></figure>\n");
  }
  const Range x{.low = 0, .high = std::max(1.0, chart.x_end)};
  const Range y = RangeOf(chart);
  const Ticks y_ticks = RoundTicks(y.low, y.high, kTicks);
  const Ticks x_ticks = RoundTicks(x.low, x.high, kTicks);
  std::string lines, labels;
  for (int i = 0; i < y_ticks.count; ++i) {
    const double value = y_ticks.first + i * y_ticks.step;
    const std::string top = Coordinate(kHeight * (1 - y.Share(value)));
    absl::StrAppend(&lines, "M0 ", top, "H1000");
    absl::StrAppend(&labels,
                    "<span class=\"y\" style=\"top:", Coordinate(100 * (1 - y.Share(value))),
                    "%\">", TickLabel(value, chart, y_ticks), "</span>");
  }
  for (int i = 0; i < x_ticks.count; ++i) {
    const double value = x_ticks.first + i * x_ticks.step;
    absl::StrAppend(&labels, "<span class=\"x\" style=\"left:", Coordinate(100 * x.Share(value)),
                    "%\">", i == 0 ? "step " : "", FormatCount(std::llround(value)), "</span>");
  }
  absl::StrAppend(&html, "<div class=\"plot\">", labels,
                  "<svg viewBox=\"0 0 1000 300\" preserveAspectRatio=\"none\"",
                  " role=\"img\" aria-label=\"", EscapeHtml(chart.title),
                  "\"><path class=\"grid\" d=\"", lines, "\"/>");
  for (const Curve& curve : chart.curves) {
    absl::StrAppend(&html, "<path class=\"curve ", curve.style, curve.is_faint ? " faint" : "",
                    "\" d=\"", PathOf(curve, x, y), "\"/>");
  }
  html += "</svg>";
  for (const Curve& curve : chart.curves) html += DotsOf(curve, x, y);
  return absl::StrCat(html, "</div><script type=\"application/json\">", Data(chart, x, y),
                      "</script></figure>\n");
}

}  // namespace evenkeel
