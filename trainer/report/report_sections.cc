#include "evenkeel/trainer/report/report_sections.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <map>
#include <ranges>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "evenkeel/trainer/report/html_text.h"

namespace evenkeel {
namespace {

constexpr size_t kMaxRanksShown = 32;
constexpr size_t kMaxPlans = 4;
constexpr size_t kMaxBucketsShown = 40;
constexpr size_t kMaxNamesShown = 8;
constexpr size_t kMaxSegments = 400;  // Epochs times ranks.
constexpr size_t kMaxEvents = 100;

std::string Figure(absl::string_view name, absl::string_view value, absl::string_view more) {
  return absl::StrCat("<div class=\"figure\"><span class=\"name\">", name,
                      "</span><span class=\"value\">", value, "</span><span class=\"more\">", more,
                      "</span></div>");
}

std::string Bar(double begin, double share, absl::string_view style, absl::string_view tip) {
  return absl::StrCat("<i class=\"box ", style, "\" style=\"left:", Coordinate(100 * begin),
                      "%;width:", Coordinate(100 * share), "%\" title=\"", EscapeHtml(tip),
                      "\"></i>");
}

// Totals over the steps of known time; `own_seconds` and `exposed` over those for which the
// reporting rank had a batch.
struct Totals {
  double steps = 0, seconds = 0, samples = 0;
  double own_seconds = 0, exposed = 0;
};

Totals TotalsOf(const std::vector<StepPoint>& points) {
  Totals totals;
  for (const StepPoint& point : points) {
    if (!std::isfinite(point.took)) continue;
    const auto count = static_cast<double>(point.count);
    totals.steps += count;
    totals.seconds += point.took * count;
    totals.samples += point.samples * count;
    if (!std::isfinite(point.exposed)) continue;  // That rank had no batch.
    totals.own_seconds += point.took * count;
    totals.exposed += point.exposed * count;
  }
  return totals;
}

std::string ResultFigures(const RunRecord& record) {
  if (record.epochs.empty()) return "";
  const EpochPoint& last = record.epochs.back();
  const std::string after =
      absl::StrCat("after ", record.epochs.size(), " epoch", record.epochs.size() == 1 ? "" : "s");
  std::string figures;
  if (std::isfinite(record.bytes_per_prediction)) {
    figures += Figure(
        "Test bits per byte",
        absl::StrFormat("%.3f", BitsPerByte(last.test_loss, record.bytes_per_prediction)), after);
  } else {
    figures += Figure("Test accuracy", FormatPercent(last.test_accuracy, 2), after);
  }
  return figures + Figure("Test loss", absl::StrFormat("%.4f", last.test_loss),
                          absl::StrCat("training ", absl::StrFormat("%.4f", last.train_loss)));
}

// Returns true if a rank had no batch in a step for which others had one.
bool IsUneven(const EpochPoint& epoch) {
  return !epoch.batches.empty() && *std::min_element(epoch.batches.begin(), epoch.batches.end()) <
                                       epoch.step - epoch.first_step + 1;
}

// Renders one epoch of one rank: its batches, then the steps that it shadowed.
std::string Segment(const EpochPoint& epoch, int64_t batches, double total_steps) {
  const int64_t steps = epoch.step - epoch.first_step + 1;
  const auto begin = static_cast<double>(epoch.first_step) / total_steps;
  const auto own = static_cast<double>(batches) / total_steps;
  std::string segment =
      Bar(begin, own, "had",
          absl::StrCat("epoch ", epoch.epoch + 1, ": ", FormatCount(batches), " batches"));
  if (batches < steps) {
    segment += Bar(begin + own, static_cast<double>(steps - batches) / total_steps, "exhausted",
                   absl::StrCat("epoch ", epoch.epoch + 1, ": exhausted at step ",
                                FormatCount(epoch.first_step + batches), ", shadowed ",
                                FormatCount(steps - batches),
                                steps - batches == 1 ? " step" : " steps", " of active ranks"));
  }
  return segment;
}

// Returns, for example, "312 batches, first exhausted at step 312, shadowed 1 step".
// `last`: the last epoch of the run.
std::string DescribeRank(const std::vector<std::pair<const EpochPoint*, int64_t>>& epochs,
                         const EpochPoint& last) {
  int64_t batches = 0, followed = 0, first_exhausted = -1;
  for (const auto& [epoch, own] : epochs) {
    batches += own;
    const int64_t missing = epoch->step - epoch->first_step + 1 - own;
    if (missing > 0 && first_exhausted < 0) first_exhausted = epoch->first_step + own;
    followed += std::max<int64_t>(0, missing);
  }
  std::string text = absl::StrCat(FormatCount(batches), " batches");
  if (followed > 0) {
    absl::StrAppend(&text, ", first exhausted at step ", FormatCount(first_exhausted),
                    ", shadowed ", FormatCount(followed), followed == 1 ? " step" : " steps");
  }
  const EpochPoint& own_last = *epochs.back().first;
  if (&own_last != &last) absl::StrAppend(&text, ", until step ", FormatCount(own_last.step));
  return text;
}

// "m0", "m1", ...: the class of report.css for a part of the memory.
std::string StyleOf(const MemoryPart& part) { return absl::StrCat("m", &part - kMemoryParts); }

std::string MemoryRow(const RankRecord& rank, int64_t most) {
  std::string bars;
  double begin = 0;
  for (const MemoryPart& part : kMemoryParts) {
    const int64_t bytes = rank.memory.*part.bytes;
    if (bytes == 0) continue;
    const double share =
        static_cast<double>(bytes) / static_cast<double>(std::max<int64_t>(1, most));
    bars += Bar(begin, share, StyleOf(part), absl::StrCat(part.name, ": ", FormatBytes(bytes)));
    begin += share;
  }
  std::string text = absl::StrCat(FormatBytes(TotalOf(rank.memory)),
                                  rank.host.empty() ? "" : " on ", EscapeHtml(rank.host));
  if (rank.memory.peak_resident > 0) {
    absl::StrAppend(&text, ", process at most ", FormatBytes(rank.memory.peak_resident));
  }
  return RenderLane(rank.rank, text, bars);
}

// The classes of report.css for the phases, and for the wait.
constexpr const char* kPhaseStyles[kStepPhases + 1] = {"k1", "k0", "k2", "k3", "k5", "m4", "k4"};

std::string WaitsRow(const StragglerReport::Rank& rank, int64_t longest) {
  std::string bars;
  double begin = 0;
  for (int i = 0; i <= kStepPhases; ++i) {
    const bool is_wait = i == kStepPhases;
    const int64_t us = is_wait ? rank.mean.waited_us : rank.mean.busy_us[i];
    if (us == 0) continue;
    const double share = static_cast<double>(us) / static_cast<double>(longest);
    const absl::string_view name = is_wait ? "waiting" : NameOf(static_cast<StepPhase>(i));
    bars += Bar(begin, share, kPhaseStyles[i],
                absl::StrCat(name, ": ", FormatNumber(static_cast<double>(us) / 1e3), " ms"));
    begin += share;
  }
  std::string text = absl::StrCat("cost the group ", FormatPercent(rank.cost));
  if (rank.without_input > 0)
    absl::StrAppend(&text, ", no input for ", FormatPercent(rank.without_input));
  const BucketsReady& ready = rank.mean.ready;
  if (ready.last_us > 0) {
    const auto ms = [](int64_t us) { return FormatNumber(static_cast<double>(us) / 1e3); };
    absl::StrAppend(&text, ", buckets ready after ",
                    ready.first_us < ready.last_us ? absl::StrCat(ms(ready.first_us), " to ") : "",
                    ms(ready.last_us), " ms of backward");
  }
  return RenderLane(rank.rank, text, bars);
}

std::string Names(const std::vector<std::string>& names) {
  const auto shown = names.begin() + static_cast<ptrdiff_t>(std::min(names.size(), kMaxNamesShown));
  const auto escape = [](std::string* out, const std::string& name) { *out += EscapeHtml(name); };
  const std::string text = absl::StrJoin(names.begin(), shown, ", ", escape);
  if (shown == names.end()) return text;
  return absl::StrCat(text, " <details><summary>and ", names.end() - shown, " more</summary>",
                      absl::StrJoin(shown, names.end(), ", ", escape), "</details>");
}

std::string RenderPlan(const PlanRecord& plan, absl::string_view heading, int64_t largest) {
  int64_t bytes = 0;
  for (const PlannedBucket& bucket : plan.buckets) bytes += bucket.bytes;
  const size_t count = plan.buckets.size();
  std::string html =
      absl::StrCat("<div class=\"plan\"><h3>", heading, "</h3><p class=\"note\">", count,
                   count == 1 ? " bucket, " : " buckets, ", FormatBytes(bytes), "</p>");
  for (size_t b = 0; b < std::min(count, kMaxBucketsShown); ++b) {
    const PlannedBucket& bucket = plan.buckets[b];
    const double share =
        static_cast<double>(bucket.bytes) / static_cast<double>(std::max<int64_t>(1, largest));
    absl::StrAppend(
        &html, "<div class=\"bucket\"><span class=\"number\">", b,
        "</span><div><div class=\"row\">",
        Bar(0, share, "bytes", absl::StrCat("bucket ", b, ": ", FormatBytes(bucket.bytes))),
        "</div><p><b>", FormatBytes(bucket.bytes), "</b> ", Names(bucket.parameters),
        "</p></div></div>");
  }
  if (count > kMaxBucketsShown) {
    absl::StrAppend(&html, "<p class=\"note\">and ", count - kMaxBucketsShown, " more buckets</p>");
  }
  return html + "</div>";
}

}  // namespace

double BitsPerByte(double loss, double bytes_per_prediction) {
  return loss / std::log(2.0) / bytes_per_prediction;
}

std::string Section(const std::string& heading, const std::string& lead,
                    const std::string& content) {
  if (content.empty()) return "";
  return absl::StrCat("<section><h2>", heading, "</h2>",
                      lead.empty() ? "" : absl::StrCat("<p class=\"lead\">", lead, "</p>"), content,
                      "</section>\n");
}

std::string RenderLane(int rank, absl::string_view text, absl::string_view bars,
                       absl::string_view below) {
  return absl::StrCat("<div class=\"lane\"><div class=\"who\"><b>rank ", rank, "</b> <span>", text,
                      "</span></div><div class=\"rows\"><div class=\"row\">", bars, "</div>", below,
                      "</div></div>");
}

std::string RenderFigures(const RunRecord& record) {
  const Totals totals = TotalsOf(record.steps);
  const double rate = totals.samples * record.units_per_sample / totals.seconds;
  std::string figures = ResultFigures(record);
  if (totals.seconds > 0) {
    figures += Figure(absl::StrCat(EscapeHtml(record.unit_name), " per second"), FormatNumber(rate),
                      absl::StrCat(FormatSeconds(totals.seconds / totals.steps), " per step"));
    figures += Figure("Exposed communication", FormatPercent(totals.exposed / totals.own_seconds),
                      "of a step's time");
  }
  const auto left = static_cast<int>(record.ranks.size());
  figures += Figure("Ranks", absl::StrCat(record.world_size),
                    left > 0 && left < record.world_size
                        ? absl::StrCat(left, " at the end")
                        : absl::StrCat(FormatCount(record.parameters), " parameters"));
  figures += Figure("Time", FormatSeconds(record.seconds),
                    absl::StrCat(FormatCount(record.total_steps), " steps"));
  return absl::StrCat("<div class=\"figures\">", figures, "</div>\n");
}

std::string RenderRanks(const RunRecord& record) {
  if (record.epochs.empty() || record.world_size < 2) return "";
  std::map<int, std::vector<std::pair<const EpochPoint*, int64_t>>> by_rank;
  bool is_uneven = false;
  std::vector<EpochPoint> all = record.epochs;
  all.insert(all.end(), record.parts.begin(), record.parts.end());
  std::ranges::stable_sort(all, {}, &EpochPoint::first_step);
  for (const EpochPoint& epoch : all) {
    is_uneven = is_uneven || IsUneven(epoch);
    for (size_t i = 0; i < epoch.batches.size(); ++i)
      by_rank[epoch.ranks[i]].push_back({&epoch, epoch.batches[i]});
  }
  const auto total_steps = static_cast<double>(std::max<int64_t>(1, record.epochs.back().step + 1));
  std::string html = "<div class=\"lanes\">";
  size_t shown = 0, segments = 0;
  for (const auto& [rank, epochs] : by_rank) {
    if (++shown > kMaxRanksShown) break;
    std::string bars;
    for (const auto& [epoch, batches] : epochs) {
      if (++segments <= kMaxSegments) bars += Segment(*epoch, batches, total_steps);
    }
    html += RenderLane(rank, DescribeRank(epochs, all.back()), bars);
  }
  html += "</div><p class=\"keys\"><span class=\"key had\">steps with a batch of its own</span>";
  if (is_uneven)
    html += "<span class=\"key exhausted\">no more input, shadows the active ranks' steps</span>";
  html += "</p>";
  if (by_rank.size() > kMaxRanksShown) {
    absl::StrAppend(&html, "<p class=\"note\">The first ", kMaxRanksShown, " of ", by_rank.size(),
                    " ranks.</p>");
  }
  return html;
}

std::string RenderPlans(const RunRecord& record) {
  int64_t largest = 0;
  for (const PlanRecord& plan : record.plans) {
    for (const PlannedBucket& bucket : plan.buckets) largest = std::max(largest, bucket.bytes);
  }
  if (largest == 0) return "";
  std::string html = "<div class=\"plans\">";
  for (size_t i = 0; i < std::min(record.plans.size(), kMaxPlans); ++i) {
    const std::string heading =
        i == 0 ? "First plan, by type"
               : absl::StrCat("From step ", FormatCount(record.plans[i].step), " on");
    html += RenderPlan(record.plans[i], heading, largest);
  }
  html += "</div>";
  if (record.plans.size() > kMaxPlans) {
    absl::StrAppend(&html, "<p class=\"note\">and ", record.plans.size() - kMaxPlans,
                    " later plans</p>");
  }
  return html;
}

std::string RenderMemory(const RunRecord& record) {
  int64_t most = 0;
  for (const RankRecord& rank : record.ranks) most = std::max(most, TotalOf(rank.memory));
  if (most == 0) return "";
  std::string html = "<div class=\"lanes\">";
  for (const RankRecord& rank : record.ranks | std::views::take(kMaxRanksShown))
    html += MemoryRow(rank, most);
  html += "</div><p class=\"keys\">";
  for (const MemoryPart& part : kMemoryParts) {
    absl::StrAppend(&html, "<span class=\"key ", StyleOf(part), "\">", part.name, "</span>");
  }
  return html + "</p>";
}

std::string RenderWaits(const RunRecord& record) {
  int64_t longest = 0;
  for (const StragglerReport::Rank& rank : record.waits.ranks)
    longest = std::max(longest, rank.mean.total_us());
  if (longest == 0 || record.waits.ranks.size() < 2) return "";
  std::string html = "<div class=\"lanes\">";
  for (const StragglerReport::Rank& rank : record.waits.ranks | std::views::take(kMaxRanksShown))
    html += WaitsRow(rank, longest);
  html += "</div><p class=\"keys\">";
  for (int i = 0; i <= kStepPhases; ++i) {
    absl::StrAppend(&html, "<span class=\"key ", kPhaseStyles[i], "\">",
                    i == kStepPhases ? "waiting" : NameOf(static_cast<StepPhase>(i)), "</span>");
  }
  return html + "</p>";
}

std::string RenderEvents(const RunRecord& record) {
  if (record.events.empty()) return "";
  std::string rows;
  for (const RunEvent& event : record.events | std::views::take(kMaxEvents)) {
    absl::StrAppend(&rows, "<tr><td class=\"when\">step ", FormatCount(event.step), "<span>",
                    FormatSeconds(event.seconds), "</span></td><td><b class=\"tag\">",
                    EscapeHtml(event.kind), "</b> ", EscapeHtml(event.text), "</td></tr>");
  }
  if (record.events.size() > kMaxEvents) {
    absl::StrAppend(&rows, "<tr><td></td><td>and ", record.events.size() - kMaxEvents,
                    " more</td></tr>");
  }
  return absl::StrCat("<table class=\"events\"><tbody>", rows, "</tbody></table>");
}

std::string RenderSettings(const RunRecord& record) {
  if (record.settings.empty()) return "";
  std::string html = "<dl class=\"settings\">";
  for (const RunSetting& setting : record.settings) {
    absl::StrAppend(&html, "<div><dt>", EscapeHtml(setting.name), "</dt><dd>",
                    EscapeHtml(setting.value), "</dd></div>");
  }
  return html + "</dl>";
}

}  // namespace evenkeel
