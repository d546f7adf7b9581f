#include <algorithm>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "evenkeel/trainer/report/html_text.h"
#include "evenkeel/trainer/report/line_chart.h"
#include "evenkeel/trainer/report/report_sections.h"

namespace evenkeel {
namespace {

constexpr size_t kMaxSteps = 8;  // report.css has a rule for each.
constexpr size_t kMaxLanes = 16;
constexpr int kTicks = 5;

struct Lane {
  const RankRecord* rank;
  const StepTrace* trace;
};

// The clocks of two hosts differ: the lanes of each begin at its own first span.
using Origins = std::map<std::string, int64_t>;

Origins OriginsOf(const std::vector<Lane>& lanes) {
  Origins origins;
  for (const Lane& lane : lanes) {
    if (lane.trace->spans.empty()) continue;
    const int64_t begin = lane.trace->spans.front().begin_ns;
    const auto [at, is_new] = origins.try_emplace(lane.rank->host, begin);
    if (!is_new) at->second = std::min(at->second, begin);
  }
  return origins;
}

int64_t EndOf(const StepTrace& trace) {
  int64_t end = trace.spans.empty() ? 0 : trace.spans.back().end_ns;
  for (const BucketTrace& bucket : trace.buckets) end = std::max(end, bucket.reduced_ns);
  return end;
}

std::string Duration(int64_t ns) { return FormatSeconds(static_cast<double>(ns) / 1e9); }

// The scale of one step: from nanoseconds since its beginning to percents of the width.
class Scale {
 public:
  Scale(int64_t origin_ns, int64_t length_ns)
      : origin_ns_(origin_ns), length_ns_(std::max<int64_t>(1, length_ns)) {}

  std::string Box(int64_t begin_ns, int64_t end_ns, absl::string_view style, absl::string_view tip,
                  absl::string_view label = "") const {
    const double left = Share(begin_ns), right = std::max(left, Share(end_ns));
    return absl::StrCat("<i class=\"", style, "\" style=\"left:", Coordinate(left),
                        "%;width:", Coordinate(right - left), "%\" title=\"", EscapeHtml(tip),
                        "\">", right - left > 9 ? label : "", "</i>");
  }
  std::string Line(int64_t ns, absl::string_view style) const {
    return absl::StrCat("<i class=\"", style, "\" style=\"left:", Coordinate(Share(ns)),
                        "%\"></i>");
  }

 private:
  double Share(int64_t ns) const {
    const double share = static_cast<double>(ns - origin_ns_) / static_cast<double>(length_ns_);
    return 100 * std::clamp(share, 0.0, 1.0);
  }

  const int64_t origin_ns_;
  const int64_t length_ns_;
};

std::string ComputeRow(const StepTrace& trace, const Scale& scale) {
  std::string row;
  for (const TraceSpan& span : trace.spans) {
    const absl::string_view name = NameOf(span.kind);
    absl::StrAppend(
        &row,
        scale.Box(span.begin_ns, span.end_ns, absl::StrCat("box k", static_cast<int>(span.kind)),
                  absl::StrCat(name, ": ", Duration(span.end_ns - span.begin_ns)), name));
  }
  return row;
}

std::string BucketRow(const StepTrace& trace, const Scale& scale) {
  std::string row;
  for (size_t b = 0; b < trace.buckets.size(); ++b) {
    const BucketTrace& bucket = trace.buckets[b];
    const int64_t middle =
        std::clamp(trace.last_gradient_ns, std::min(bucket.start_ns, bucket.reduced_ns),
                   std::max(bucket.start_ns, bucket.reduced_ns));
    const std::string tip = absl::StrCat(
        "bucket ", b, ", ", FormatBytes(bucket.bytes), ": reduced for ",
        Duration(std::max<int64_t>(0, bucket.reduced_ns - bucket.start_ns)), ", of that ",
        Duration(std::max<int64_t>(0, bucket.reduced_ns - middle)), " exposed; it was ready ",
        Duration(std::max<int64_t>(0, bucket.start_ns - bucket.ready_ns)),
        " before it could start");
    if (middle > bucket.start_ns) {
      absl::StrAppend(
          &row, scale.Box(bucket.start_ns, middle, "box hidden", tip, absl::StrCat("bucket ", b)));
    }
    if (bucket.reduced_ns > middle) {
      absl::StrAppend(&row, scale.Box(middle, bucket.reduced_ns, "box exposed", tip,
                                      absl::StrCat("bucket ", b)));
    }
  }
  return row;
}

// "18.2 ms, 0.9 ms exposed".
std::string Described(const StepTrace& trace) {
  if (trace.spans.empty()) return "";
  const int64_t took = trace.spans.back().end_ns - trace.spans.front().begin_ns;
  if (trace.spans.front().kind == SpanKind::kFollow)
    return absl::StrCat("no more input; shadowed a step for ", Duration(took));
  int64_t exposed = 0;
  for (const TraceSpan& span : trace.spans) {
    if (span.kind == SpanKind::kWait) exposed += span.end_ns - span.begin_ns;
  }
  std::string text = absl::StrCat(Duration(took), ", ", Duration(exposed), " exposed");
  if (trace.clock == StepClock::kDevice)
    absl::StrAppend(&text, "; enqueued in ", Duration(trace.host_ns));
  return text;
}

std::string LaneOf(const Lane& lane, const Scale& scale) {
  const StepTrace& trace = *lane.trace;
  const std::string edge =
      trace.last_gradient_ns > 0 ? scale.Line(trace.last_gradient_ns, "edge") : "";
  return RenderLane(
      lane.rank->rank, Described(trace), ComputeRow(trace, scale),
      absl::StrCat("<div class=\"row thin\">", BucketRow(trace, scale), "</div>", edge));
}

std::string Axis(int64_t length_ns) {
  const double length = static_cast<double>(length_ns) / 1e6;
  const Ticks ticks = RoundTicks(0, length, kTicks);
  std::string axis = "<div class=\"axis\"><div class=\"who\"></div><div class=\"rows\">";
  for (int i = 0; i < ticks.count; ++i) {
    const double value = ticks.first + i * ticks.step;
    absl::StrAppend(&axis, "<span class=\"x\" style=\"left:", Coordinate(100 * value / length),
                    "%\">", absl::StrFormat("%.*f", ticks.decimals, value), i == 0 ? " ms" : "",
                    "</span>");
  }
  return axis + "</div></div>";
}

std::string RenderPane(const RunRecord& record, int64_t step) {
  std::vector<Lane> lanes;
  for (const RankRecord& rank : record.ranks) {
    for (const StepTrace& trace : rank.traces) {
      if (trace.step == step) lanes.push_back({&rank, &trace});
    }
  }
  const Origins origins = OriginsOf(lanes);
  int64_t length = 1;
  for (const Lane& lane : lanes)
    length = std::max(length, EndOf(*lane.trace) - origins.at(lane.rank->host));
  std::string pane = "<div class=\"pane\">";
  for (size_t i = 0; i < std::min(lanes.size(), kMaxLanes); ++i) {
    pane += LaneOf(lanes[i], Scale(origins.at(lanes[i].rank->host), length));
  }
  pane += Axis(length);
  if (lanes.size() > kMaxLanes) {
    absl::StrAppend(&pane, "<p class=\"note\">The other ", lanes.size() - kMaxLanes,
                    " ranks are in the trace.</p>");
  }
  return pane + "</div>";
}

std::string Legend() {
  std::string legend = "<p class=\"keys\">";
  for (SpanKind kind : {SpanKind::kData, SpanKind::kBegin, SpanKind::kForward, SpanKind::kBackward,
                        SpanKind::kWait, SpanKind::kOptimizer}) {
    absl::StrAppend(&legend, "<span class=\"key k", static_cast<int>(kind), "\">", NameOf(kind),
                    "</span>");
  }
  return legend +
         "<span class=\"key hidden\">reduction of a bucket, hidden by backward</span><span "
         "class=\"key "
         "exposed\">exposed"
         "</span></p>";
}

}  // namespace

std::string RenderTimeline(const RunRecord& record) {
  std::set<int64_t> sampled;
  for (const RankRecord& rank : record.ranks) {
    for (const StepTrace& trace : rank.traces) {
      if (!trace.spans.empty()) sampled.insert(trace.step);
    }
  }
  if (sampled.empty()) return "";
  std::vector<int64_t> steps(sampled.begin(), sampled.end());
  if (steps.size() > kMaxSteps) steps.resize(kMaxSteps);
  const size_t shown = steps.size() / 2;  // One from the middle of the run.
  std::string html = "<div class=\"picker\">";
  for (size_t i = 0; i < steps.size(); ++i) {
    absl::StrAppend(&html, "<input type=\"radio\" name=\"step\" id=\"step", i, "\"",
                    i == shown ? " checked" : "", "><label for=\"step", i, "\">step ",
                    FormatCount(steps[i]), "</label>");
  }
  html += Legend() + "<div class=\"panes\">";
  for (const int64_t step : steps) html += RenderPane(record, step);
  return html + "</div></div>\n";
}

}  // namespace evenkeel
