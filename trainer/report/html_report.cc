#include "evenkeel/trainer/report/html_report.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <map>
#include <ranges>
#include <set>
#include <utility>
#include <vector>

#include "absl/strings/str_format.h"
#include "absl/strings/str_replace.h"

namespace evenkeel {

// report.html with all that it needs except the data, embedded into the program.
extern const char kReportTemplate[];

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(PlannedBucket, bytes, parameters)
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(RunSetting, name, value)

namespace {

using Json = nlohmann::json;

constexpr size_t kMaxRanksShown = 32;
constexpr size_t kMaxLanes = 16;
constexpr size_t kMaxSampledSteps = 8;
constexpr size_t kMaxCostCurves = 6;
constexpr size_t kMaxPlans = 4;
constexpr size_t kMaxBucketsShown = 40;
constexpr size_t kMaxSegments = 400;  // Epochs times ranks.
constexpr size_t kMaxEvents = 100;

// Returns a value of a curve with the digits that can be seen.
double Rounded(double value) {
  return std::isfinite(value) ? std::strtod(absl::StrFormat("%.4g", value).c_str(), nullptr)
                              : value;
}

// Returns the first `most` elements and the number of the others.
template <typename List, typename ToJson = std::identity>
Json Limited(const List& list, size_t most, ToJson to_json = {}) {
  Json shown = Json::array();
  for (const auto& element : list | std::views::take(most)) shown.push_back(to_json(element));
  return {{"more", std::ranges::size(list) - shown.size()}, {"shown", std::move(shown)}};
}

template <typename List, typename Value>
Json Column(const List& list, Value value) {
  Json column = Json::array();
  for (const auto& element : list) column.push_back(value(element));
  return column;
}

// Converts a language model's loss from nats per prediction to bits per byte; returns that of other
// models as it is.
double ShownLoss(const RunRecord& record, double loss) {
  const double bytes = record.bytes_per_prediction;
  return std::isfinite(bytes) ? loss / std::log(2.0) / bytes : loss;
}

// A result of a run that diverged is a string, "inf" or "nan".
Json ResultJson(double value) {
  if (std::isfinite(value)) return value;
  return std::isnan(value) ? "nan" : absl::StrFormat("%g", value);
}

// Curves over the steps; a point of several steps is at their middle.
Json Curves(const RunRecord& record) {
  const auto of = [&](auto value) {
    return Column(record.steps, [&](const StepPoint& step) { return Rounded(value(step)); });
  };
  using Point = const StepPoint&;
  return {{"step", Column(record.steps,
                          [](Point p) {
                            return static_cast<double>(p.step) +
                                   0.5 * static_cast<double>(p.count + 1);
                          })},
          {"loss", of([&](Point p) { return ShownLoss(record, p.loss); })},
          {"accuracy", of([](Point p) { return p.accuracy; })},
          {"learning_rate", of([](Point p) { return p.learning_rate; })},
          {"gradient_norm", of([](Point p) { return p.gradient_norm; })},
          {"rate", of([&](Point p) { return p.samples * record.units_per_sample / p.took; })},
          {"ms", of([](Point p) { return 1000 * p.took; })},
          {"exposed", of([](Point p) { return p.exposed / p.took; })}};
}

Json Tests(const RunRecord& record) {
  return {{"step", Column(record.tests, [](const TestPoint& test) { return test.step + 1; })},
          {"loss", Column(record.tests,
                          [&](const TestPoint& test) { return ShownLoss(record, test.loss); })},
          {"accuracy", Column(record.tests, [](const TestPoint& test) { return test.accuracy; })}};
}

// Means over the steps of known time; exposed communication over those for which the reporting rank
// had a batch.
Json Means(const RunRecord& record) {
  double steps = 0, seconds = 0, samples = 0, own_seconds = 0, exposed = 0;
  for (const StepPoint& point : record.steps) {
    if (!std::isfinite(point.took)) continue;
    const auto count = static_cast<double>(point.count);
    steps += count;
    seconds += point.took * count;
    samples += point.samples * count;
    if (!std::isfinite(point.exposed)) continue;
    own_seconds += point.took * count;
    exposed += point.exposed * count;
  }
  return {{"step_seconds", seconds / steps},
          {"rate", samples * record.units_per_sample / seconds},
          {"exposed", exposed / own_seconds}};
}

Json Result(const RunRecord& record) {
  if (record.epochs.empty()) return nullptr;
  const EpochPoint& last = record.epochs.back();
  return {{"epochs", record.epochs.size()},
          {"test_loss", ResultJson(last.test_loss)},
          {"train_loss", ResultJson(last.train_loss)},
          {"test_accuracy", last.test_accuracy},
          {"bits_per_byte", ResultJson(ShownLoss(record, last.test_loss))}};
}

// An epoch, or the part of one until a rank was lost, of one rank: its batches, and the steps that
// it shadowed after them.
struct Segment {
  const EpochPoint* epoch;
  int64_t batches;
  int64_t Shadowed() const { return epoch->step - epoch->first_step + 1 - batches; }
};

Json BatchesOfRank(int rank, const std::vector<Segment>& segments, size_t most,
                   const EpochPoint& last) {
  int64_t batches = 0, shadowed = 0;
  Json exhausted;
  for (const Segment& one : segments) {
    batches += one.batches;
    shadowed += std::max<int64_t>(0, one.Shadowed());
    if (one.Shadowed() > 0 && exhausted.is_null()) exhausted = one.epoch->first_step + one.batches;
  }
  const EpochPoint& own_last = *segments.back().epoch;
  return {{"rank", rank},
          {"batches", batches},
          {"shadowed", shadowed},
          {"exhausted", exhausted},
          {"until", &own_last == &last ? Json() : Json(own_last.step + 1)},
          {"epochs", Column(segments | std::views::take(most), [](const Segment& one) {
             return Json{{"epoch", one.epoch->epoch},
                         {"first_step", one.epoch->first_step},
                         {"batches", one.batches},
                         {"shadowed", one.Shadowed()}};
           })}};
}

Json Batches(const RunRecord& record) {
  if (record.epochs.empty() || record.world_size < 2) return nullptr;
  std::vector<EpochPoint> all = record.epochs;
  all.insert(all.end(), record.parts.begin(), record.parts.end());
  std::ranges::stable_sort(all, {}, &EpochPoint::first_step);
  std::map<int, std::vector<Segment>> by_rank;
  for (const EpochPoint& epoch : all) {
    for (size_t i = 0; i < epoch.batches.size(); ++i)
      by_rank[epoch.ranks[i]].push_back({&epoch, epoch.batches[i]});
  }
  size_t left = kMaxSegments;
  Json batches = Limited(by_rank, kMaxRanksShown, [&](const auto& rank) {
    const size_t most = std::min(left, rank.second.size());
    left -= most;
    return BatchesOfRank(rank.first, rank.second, most, all.back());
  });
  batches["steps"] = std::max<int64_t>(1, record.epochs.back().step + 1);
  return batches;
}

int64_t EndOf(const StepTrace& trace) {
  int64_t end = trace.spans.empty() ? 0 : trace.spans.back().end_ns;
  for (const BucketTrace& bucket : trace.buckets) end = std::max(end, bucket.reduced_ns);
  return end;
}

struct Lane {
  const RankRecord* rank;
  const StepTrace* trace;
};

Json LaneJson(const Lane& lane, int64_t origin) {
  const StepTrace& trace = *lane.trace;
  return {{"rank", lane.rank->rank},
          {"last_gradient",
           trace.last_gradient_ns > 0 ? Json(trace.last_gradient_ns - origin) : Json()},
          {"enqueued", trace.clock == StepClock::kDevice ? Json(trace.host_ns) : Json()},
          {"spans", Column(trace.spans,
                           [&](const TraceSpan& span) {
                             return Json{{"kind", span.kind},
                                         {"begin", span.begin_ns - origin},
                                         {"end", span.end_ns - origin}};
                           })},
          {"buckets", Column(trace.buckets, [&](const BucketTrace& bucket) {
             return Json{{"bytes", bucket.bytes},
                         {"ready", bucket.ready_ns - origin},
                         {"start", bucket.start_ns - origin},
                         {"reduced", bucket.reduced_ns - origin}};
           })}};
}

// One sampled step, in nanoseconds. The clocks of two hosts differ: the lanes of each begin at its
// own first span.
Json SampledStep(const RunRecord& record, int64_t step) {
  std::vector<Lane> lanes;
  std::map<std::string, int64_t> origins;  // By host.
  for (const RankRecord& rank : record.ranks) {
    for (const StepTrace& trace : rank.traces) {
      if (trace.step != step || trace.spans.empty()) continue;
      lanes.push_back({&rank, &trace});
      const int64_t begin = trace.spans.front().begin_ns;
      int64_t& origin = origins.try_emplace(rank.host, begin).first->second;
      origin = std::min(origin, begin);
    }
  }
  int64_t length = 1;
  for (const Lane& lane : lanes)
    length = std::max(length, EndOf(*lane.trace) - origins.at(lane.rank->host));
  Json sampled = Limited(lanes, kMaxLanes, [&](const Lane& lane) {
    return LaneJson(lane, origins.at(lane.rank->host));
  });
  sampled["step"] = step + 1;
  sampled["length"] = length;
  return sampled;
}

Json SampledSteps(const RunRecord& record) {
  std::set<int64_t> steps;
  for (const RankRecord& rank : record.ranks) {
    for (const StepTrace& trace : rank.traces) {
      if (!trace.spans.empty()) steps.insert(trace.step);
    }
  }
  return Column(steps | std::views::take(kMaxSampledSteps),
                [&](int64_t step) { return SampledStep(record, step); });
}

Json Waits(const RunRecord& record) {
  Json waits = Limited(record.waits.ranks, kMaxRanksShown, [](const StragglerReport::Rank& rank) {
    const PhaseTimes& mean = rank.mean;
    Json us = mean.busy_us;
    us.push_back(mean.waited_us);
    return Json{
        {"rank", rank.rank},
        {"cost", rank.cost},
        {"without_input", rank.without_input},
        {"us", std::move(us)},
        {"total", mean.total_us()},
        {"ready", mean.ready.last_us > 0 ? Json{mean.ready.first_us, mean.ready.last_us} : Json()}};
  });
  for (int i = 0; i < kStepPhases; ++i)
    waits["phases"].push_back(NameOf(static_cast<StepPhase>(i)));
  return waits;
}

// Returns the samples of each rank over time; a peak is the largest distance from the mean of the
// ranks, since the slow ranks have the fewest samples.
std::map<int, CostCurve> ShareCurves(const RunRecord& record) {
  std::map<int, CostCurve> curves = CurvesByRank(record.costs, &CostPoint::samples);
  for (auto& [rank, curve] : curves) curve.peak = 0;
  for (const CostPoint& point : record.costs) {
    double sum = 0;
    for (const auto& [rank, samples] : point.samples) sum += samples;
    const double mean = sum / static_cast<double>(point.samples.size());
    for (const auto& [rank, samples] : point.samples)
      curves[rank].peak = std::max(curves[rank].peak, std::abs(samples - mean));
  }
  return curves;
}

// The costs or the samples over time of the ranks with the highest peaks.
Json CostCurves(const RunRecord& record, const char* name,
                const std::map<int, CostCurve>& by_rank) {
  if (record.costs.size() < 2) return Json::array();
  std::vector<std::pair<int, CostCurve>> curves(by_rank.begin(), by_rank.end());
  std::ranges::stable_sort(curves, std::greater<>(),
                           [](const auto& curve) { return curve.second.peak; });
  return Column(curves | std::views::take(kMaxCostCurves), [&](const auto& curve) {
    const auto& points = curve.second.points;
    const bool is_lost = !record.costs.back().costs.contains(curve.first);
    return Json{{"rank", curve.first},
                {"until", is_lost ? Json(points.back().first + 1) : Json()},
                {"step", Column(points, [](const auto& point) { return point.first + 1; })},
                {name, Column(points, [](const auto& point) { return Rounded(point.second); })}};
  });
}

Json Plans(const RunRecord& record) {
  return Limited(record.plans, kMaxPlans, [](const PlanRecord& plan) {
    int64_t bytes = 0;
    for (const PlannedBucket& bucket : plan.buckets) bytes += bucket.bytes;
    Json json = Limited(plan.buckets, kMaxBucketsShown);
    json["step"] = plan.step;
    json["bytes"] = bytes;
    return json;
  });
}

Json Memory(const RunRecord& record) {
  Json memory = Limited(record.ranks, kMaxRanksShown, [](const RankRecord& rank) {
    return Json{{"rank", rank.rank},
                {"host", rank.host},
                {"total", TotalOf(rank.memory)},
                {"peak", rank.memory.peak_resident},
                {"bytes", Column(kMemoryParts,
                                 [&](const MemoryPart& part) { return rank.memory.*part.bytes; })}};
  });
  memory["parts"] = Column(kMemoryParts, [](const MemoryPart& part) { return part.name; });
  return memory;
}

}  // namespace

Json ReportData(const RunRecord& record) {
  Json kinds = Json::array();
  for (int kind = 0; kind < kSpanKinds; ++kind)
    kinds.push_back(NameOf(static_cast<SpanKind>(kind)));
  return {{"title", record.title},
          {"summary", record.summary},
          {"date", record.date},
          {"ending", record.ending},
          {"goes_on", record.goes_on},
          {"unit", record.unit_name},
          {"is_in_bits_per_byte", std::isfinite(record.bytes_per_prediction)},  // Losses.
          {"world_size", record.world_size},
          {"ranks_left", record.ranks.size()},
          {"reporter", record.reporter},
          {"parameters", record.parameters},
          {"seconds", record.seconds},
          {"total_steps", record.total_steps},
          {"samples_of_tail", record.samples_of_tail},
          {"steps", Curves(record)},
          {"tests", Tests(record)},
          {"means", Means(record)},
          {"result", Result(record)},
          {"batches", Batches(record)},
          {"span_kinds", std::move(kinds)},
          {"sampled", SampledSteps(record)},
          {"waits", Waits(record)},
          {"costs", CostCurves(record, "cost", CurvesByRank(record.costs, &CostPoint::costs))},
          {"shares", CostCurves(record, "samples", ShareCurves(record))},
          {"plans", Plans(record)},
          {"memory", Memory(record)},
          {"events", Limited(record.events, kMaxEvents,
                             [](const RunEvent& event) {
                               return Json{{"step", event.step + 1},
                                           {"seconds", event.seconds},
                                           {"kind", event.kind},
                                           {"text", event.text}};
                             })},
          {"settings", record.settings}};
}

std::string RenderPage(const Json& data) {
  const std::string text =
      data.dump(-1, ' ', /*ensure_ascii=*/false, Json::error_handler_t::replace);
  // Within JSON, "<" is only in strings. Without it, no text can end the script element.
  const std::string safe = absl::StrReplaceAll(text, {{"<", "\\u003c"}});
  return absl::StrReplaceAll(kReportTemplate, {{"{{data}}", safe}});
}

std::string RenderReport(const RunRecord& record) { return RenderPage(ReportData(record)); }

}  // namespace evenkeel
