#include "evenkeel/trainer/report/chrome_trace.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/string_view.h"
#include "evenkeel/comm/base/json.h"
#include "evenkeel/join/steps/straggler_report.h"

namespace evenkeel {
namespace {

using Json = nlohmann::ordered_json;

constexpr int kCompute = 0, kCommunication = 1;  // Threads.

double Micros(int64_t ns) { return static_cast<double>(ns) / 1e3; }

// A name may have bytes that are not valid in JSON.
std::string Dumped(const Json& json) {
  return json.dump(-1, ' ', /*ensure_ascii=*/false, Json::error_handler_t::replace);
}

// The events of one run, as JSON.
class Events {
 public:
  Events(std::string* out, int64_t origin_ns) : joined_(out, '[', ']'), origin_ns_(origin_ns) {}

  // Adds the name or position of a process or thread.
  void Metadata(absl::string_view what, int process, int thread, Json args) {
    const Json event = {
        {"ph", "M"}, {"name", what}, {"pid", process}, {"tid", thread}, {"args", std::move(args)}};
    joined_.Add("\n", Dumped(event));
  }
  void Complete(absl::string_view name, int process, int thread, int64_t begin_ns, int64_t end_ns,
                Json args = Json::object()) {
    Add("X", name, process, thread, begin_ns,
        {{"cat", "step"}, {"dur", Micros(end_ns - begin_ns)}, {"args", std::move(args)}});
  }
  void Instant(absl::string_view name, int process, int thread, int64_t ns) {
    Add("i", name, process, thread, ns, {{"s", "t"}, {"cat", "step"}});
  }
  // Adds an arrow from the slice that contains `from_ns` to the one that begins at `to_ns`.
  void Arrow(int process, int64_t from_ns, int64_t to_ns) {
    ++arrows_;
    Add("s", "bucket", process, kCompute, from_ns, {{"cat", "bucket"}, {"id", arrows_}});
    Add("f", "bucket", process, kCommunication, to_ns,
        {{"bp", "e"}, {"cat", "bucket"}, {"id", arrows_}});
  }
  void Counter(absl::string_view name, int process, int64_t ns, double value) {
    Add("C", name, process, 0, ns, {{"args", {{"value", value}}}});
  }

 private:
  // `more`: the fields that not all kinds of events have.
  void Add(const char* phase, absl::string_view name, int process, int thread, int64_t ns,
           const Json& more) {
    Json event = {{"ph", phase},
                  {"name", name},
                  {"pid", process},
                  {"tid", thread},
                  {"ts", Micros(ns - origin_ns_)}};
    event.update(more);
    joined_.Add("\n", Dumped(event));
  }

  internal::JsonJoined joined_;
  const int64_t origin_ns_;
  int64_t arrows_ = 0;
};

// The correction of a host's clock, and the largest deviation of single steps from it.
struct Alignment {
  int64_t shift_ns = 0;
  int64_t error_ns = 0;
};

// The ends of reductions on one host, by step and the clock that measured them.
using Ends = std::map<std::pair<int64_t, StepClock>, std::vector<int64_t>>;

std::map<std::string, Ends> EndsByHost(const std::vector<RankRecord>& ranks) {
  std::map<std::string, Ends> ends;
  for (const RankRecord& rank : ranks) {
    for (const StepTrace& trace : rank.traces) {
      // A rank that shadowed the step has none.
      const auto wait = std::ranges::find(trace.spans, SpanKind::kWait, &TraceSpan::kind);
      if (wait != trace.spans.end())
        ends[rank.host][{trace.step, trace.clock}].push_back(wait->end_ns);
    }
  }
  return ends;
}

// Returns the corrections by host, without those of hosts that share no step with the first one.
std::map<std::string, Alignment> AlignHosts(const std::vector<RankRecord>& ranks) {
  std::map<std::string, Ends> ends = EndsByHost(ranks);
  std::map<std::string, Alignment> alignments;
  if (ranks.empty()) return alignments;
  const Ends reference = std::exchange(ends[ranks.front().host], {});
  for (const auto& [host, steps] : ends) {
    std::vector<int64_t> shifts;
    for (const auto& [step, moments] : steps) {
      const auto at = reference.find(step);
      if (at == reference.end()) continue;
      for (const int64_t moment : moments) shifts.push_back(at->second.front() - moment);
    }
    if (shifts.empty()) continue;
    std::ranges::sort(shifts);
    const int64_t middle = shifts[shifts.size() / 2];
    alignments[host] = {.shift_ns = middle,
                        .error_ns = std::max(shifts.back() - middle, middle - shifts.front())};
  }
  return alignments;
}

void AddStep(const StepTrace& trace, int rank, Events& events) {
  if (trace.spans.empty()) return;
  Json args = {{"step", trace.step}, {"clock", NameOf(trace.clock)}};
  if (trace.clock == StepClock::kDevice) args["host_us"] = Micros(trace.host_ns);
  events.Complete(absl::StrCat("step ", trace.step), rank, kCompute, trace.spans.front().begin_ns,
                  trace.spans.back().end_ns, std::move(args));
  for (const TraceSpan& span : trace.spans) {
    events.Complete(NameOf(span.kind), rank, kCompute, span.begin_ns, span.end_ns);
  }
  if (trace.last_gradient_ns > 0)
    events.Instant("last gradient", rank, kCompute, trace.last_gradient_ns);
}

// One bucket is reduced at a time: if the times overlap, each begins at the end of the one before
// it.
void AddBuckets(const StepTrace& trace, int rank, Events& events) {
  int64_t free_ns = std::numeric_limits<int64_t>::min();
  for (size_t b = 0; b < trace.buckets.size(); ++b) {
    const BucketTrace& bucket = trace.buckets[b];
    const int64_t begin = std::max(bucket.start_ns, free_ns);
    if (bucket.reduced_ns <= begin) continue;
    const int64_t exposed =
        bucket.reduced_ns - std::clamp(trace.last_gradient_ns, begin, bucket.reduced_ns);
    events.Complete(absl::StrCat("bucket ", b), rank, kCommunication, begin, bucket.reduced_ns,
                    {{"step", trace.step},
                     {"bytes", bucket.bytes},
                     {"exposed_us", Micros(exposed)},
                     {"waited_us", Micros(std::max<int64_t>(0, begin - bucket.ready_ns))}});
    const bool is_in_step = !trace.spans.empty() &&
                            bucket.ready_ns >= trace.spans.front().begin_ns &&
                            bucket.ready_ns <= std::min(begin, trace.spans.back().end_ns);
    if (is_in_step) events.Arrow(rank, bucket.ready_ns, begin);
    free_ns = bucket.reduced_ns;
  }
}

void AddRank(const RankRecord& rank, const std::string& clock, Events& events) {
  const std::string name =
      absl::StrCat("rank ", rank.rank, rank.host.empty() ? "" : " on ", rank.host, clock);
  events.Metadata("process_name", rank.rank, 0, {{"name", name}});
  events.Metadata("process_sort_index", rank.rank, 0, {{"sort_index", rank.rank}});
  events.Metadata("thread_name", rank.rank, kCompute, {{"name", "compute"}});
  events.Metadata("thread_name", rank.rank, kCommunication, {{"name", "communication"}});
  for (const StepTrace& trace : rank.traces) {
    AddStep(trace, rank.rank, events);
    AddBuckets(trace, rank.rank, events);
  }
}

int64_t NsOf(const RunRecord& record, const StepPoint& point) {
  return record.begin_ns + static_cast<int64_t>(1e9 * point.seconds);
}

// Adds the costs of ranks that cost the group enough, at any time, to be worth a curve.
void AddCosts(const RunRecord& record, int process, Events& events) {
  for (const auto& [rank, curve] : CurvesByRank(record.costs, &CostPoint::costs)) {
    if (curve.peak < StragglerReport::kLeastCost) continue;
    const std::string name = absl::StrCat("cost of rank ", rank, ", %");
    for (const auto& [step, cost] : curve.points) {
      const auto last_step = [](const StepPoint& steps) { return steps.step + steps.count - 1; };
      const auto at = std::ranges::lower_bound(record.steps, step, {}, last_step);
      if (at == record.steps.end()) continue;
      // The point may lie inside of several steps that were merged.
      const double before = at->took * static_cast<double>(last_step(*at) - step);
      const int64_t ns =
          NsOf(record, *at) - static_cast<int64_t>(std::isfinite(before) ? 1e9 * before : 0);
      events.Counter(name, process, ns, 100 * cost);
    }
  }
}

void AddCurves(const RunRecord& record, int process, Events& events) {
  events.Metadata("process_name", process, 0, {{"name", "the run"}});
  events.Metadata("process_sort_index", process, 0, {{"sort_index", -1}});
  const std::string loss = absl::StrCat("loss, rank ", record.reporter);
  for (const StepPoint& point : record.steps) {
    const int64_t ns = NsOf(record, point);
    if (std::isfinite(point.loss)) events.Counter(loss, process, ns, point.loss);
    const double rate = point.samples * record.units_per_sample / point.took;
    if (std::isfinite(rate))
      events.Counter(absl::StrCat(record.unit_name, " per second"), process, ns, rate);
  }
  AddCosts(record, process, events);
}

}  // namespace

std::string RenderTrace(const RunRecord& record) {
  Json about = {{"title", record.title}, {"date", record.date}, {"settings", Json::object()}};
  for (const RunSetting& setting : record.settings) about["settings"][setting.name] = setting.value;
  std::string out = absl::StrCat("{\"displayTimeUnit\":\"ms\",\"otherData\":", Dumped(about),
                                 ",\"traceEvents\":");
  {
    Events events(&out, record.begin_ns);
    int free_process = 0;
    const std::map<std::string, Alignment> alignments = AlignHosts(record.ranks);
    for (RankRecord rank : record.ranks) {
      std::string clock;
      if (const auto of_host = alignments.find(rank.host); of_host != alignments.end()) {
        const Alignment& alignment = of_host->second;
        MoveTimes(rank, alignment.shift_ns);
        clock = absl::StrFormat(", clock aligned to %.3f us", Micros(alignment.error_ns));
      } else if (rank.host != record.ranks.front().host) {
        clock = ", clock not aligned";
      }
      AddRank(rank, clock, events);
      free_process = std::max(free_process, rank.rank + 1);
    }
    if (!record.steps.empty()) AddCurves(record, free_process, events);
  }
  return out + "}\n";
}

}  // namespace evenkeel
