#include "evenkeel/trainer/report/chrome_trace.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/string_view.h"
#include "evenkeel/comm/base/json.h"
#include "evenkeel/join/steps/straggler_report.h"

namespace evenkeel {
namespace {

using internal::JsonJoined;
using internal::JsonQuoted;

constexpr int kCompute = 0, kCommunication = 1;  // Threads.

std::string Micros(int64_t ns) {
  return absl::StrFormat("%s%d.%03d", ns < 0 ? "-" : "", std::abs(ns / 1000), std::abs(ns % 1000));
}

// The events of one run, as JSON.
class Events {
 public:
  Events(std::string* out, int64_t origin_ns) : joined_(out, '[', ']'), origin_ns_(origin_ns) {}

  // Adds the name or position of a process or thread.
  void Metadata(absl::string_view what, int process, int thread, absl::string_view args) {
    joined_.Add("\n{\"ph\":\"M\",\"name\":\"", what, "\",\"pid\":", process, ",\"tid\":", thread,
                ",\"args\":{", args, "}}");
  }
  void Complete(absl::string_view name, int process, int thread, int64_t begin_ns, int64_t end_ns,
                absl::string_view args) {
    joined_.Add("\n{\"ph\":\"X\",\"name\":", JsonQuoted(name),
                ",\"cat\":\"step\",\"pid\":", process, ",\"tid\":", thread,
                ",\"ts\":", Micros(begin_ns - origin_ns_), ",\"dur\":", Micros(end_ns - begin_ns),
                ",\"args\":{", args, "}}");
  }
  void Instant(absl::string_view name, int process, int thread, int64_t ns) {
    joined_.Add("\n{\"ph\":\"i\",\"s\":\"t\",\"name\":", JsonQuoted(name),
                ",\"cat\":\"step\",\"pid\":", process, ",\"tid\":", thread,
                ",\"ts\":", Micros(ns - origin_ns_), "}");
  }
  // Adds an arrow from the slice that contains `from_ns` to the one that begins at `to_ns`.
  void Arrow(int process, int64_t from_ns, int64_t to_ns) {
    ++arrows_;
    joined_.Add("\n{\"ph\":\"s\",\"name\":\"bucket\",\"cat\":\"bucket\",\"id\":", arrows_,
                ",\"pid\":", process, ",\"tid\":", kCompute,
                ",\"ts\":", Micros(from_ns - origin_ns_), "}");
    joined_.Add("\n{\"ph\":\"f\",\"bp\":\"e\",\"name\":\"bucket\",\"cat\":\"bucket\",\"id\":",
                arrows_, ",\"pid\":", process, ",\"tid\":", kCommunication,
                ",\"ts\":", Micros(to_ns - origin_ns_), "}");
  }
  void Counter(absl::string_view name, int process, int64_t ns, double value) {
    joined_.Add("\n{\"ph\":\"C\",\"name\":", JsonQuoted(name), ",\"pid\":", process,
                ",\"tid\":0,\"ts\":", Micros(ns - origin_ns_),
                ",\"args\":{\"value\":", absl::StrFormat("%.6g", value), "}}");
  }

 private:
  JsonJoined joined_;
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
  const bool is_device = trace.clock == StepClock::kDevice;
  const std::string host = is_device ? absl::StrCat(",\"host_us\":", Micros(trace.host_ns)) : "";
  events.Complete(
      absl::StrCat("step ", trace.step), rank, kCompute, trace.spans.front().begin_ns,
      trace.spans.back().end_ns,
      absl::StrCat("\"step\":", trace.step, ",\"clock\":\"", NameOf(trace.clock), "\"", host));
  for (const TraceSpan& span : trace.spans) {
    events.Complete(NameOf(span.kind), rank, kCompute, span.begin_ns, span.end_ns, "");
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
                    absl::StrCat("\"step\":", trace.step, ",\"bytes\":", bucket.bytes,
                                 ",\"exposed_us\":", Micros(exposed), ",\"waited_us\":",
                                 Micros(std::max<int64_t>(0, begin - bucket.ready_ns))));
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
  events.Metadata("process_name", rank.rank, 0, absl::StrCat("\"name\":", JsonQuoted(name)));
  events.Metadata("process_sort_index", rank.rank, 0, absl::StrCat("\"sort_index\":", rank.rank));
  events.Metadata("thread_name", rank.rank, kCompute, "\"name\":\"compute\"");
  events.Metadata("thread_name", rank.rank, kCommunication, "\"name\":\"communication\"");
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
  std::set<int> ranks;
  for (const CostPoint& point : record.costs)
    for (const auto& [rank, cost] : point.costs) ranks.insert(rank);
  for (const int rank : ranks) {
    const auto cost = [rank](const CostPoint& point) {
      const auto own = point.costs.find(rank);
      return own != point.costs.end() ? own->second : 0;
    };
    const auto most = std::ranges::max_element(record.costs, {}, cost);
    if (most == record.costs.end() || cost(*most) < StragglerReport::kLeastCost) continue;
    const std::string name = absl::StrCat("cost of rank ", rank, ", %");
    for (const CostPoint& point : record.costs) {
      if (!point.costs.contains(rank)) continue;  // It was lost before.
      const auto last_step = [](const StepPoint& steps) { return steps.step + steps.count - 1; };
      const auto at = std::ranges::lower_bound(record.steps, point.step, {}, last_step);
      if (at == record.steps.end()) continue;
      // The point may lie inside of several steps that were merged.
      const double before = at->took * static_cast<double>(last_step(*at) - point.step);
      const int64_t ns =
          NsOf(record, *at) - static_cast<int64_t>(std::isfinite(before) ? 1e9 * before : 0);
      events.Counter(name, process, ns, 100 * cost(point));
    }
  }
}

void AddCurves(const RunRecord& record, int process, Events& events) {
  events.Metadata("process_name", process, 0, "\"name\":\"the run\"");
  events.Metadata("process_sort_index", process, 0, "\"sort_index\":-1");
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
  std::string out = "{\"displayTimeUnit\":\"ms\",\"otherData\":";
  {
    JsonJoined about(&out, '{', '}');
    about.Add("\"title\":", JsonQuoted(record.title));
    about.Add("\"date\":", JsonQuoted(record.date));
    std::string settings;
    {
      JsonJoined members(&settings, '{', '}');
      for (const RunSetting& setting : record.settings)
        members.Add(JsonQuoted(setting.name), ":", JsonQuoted(setting.value));
    }
    about.Add("\"settings\":", settings);
  }
  out += ",\"traceEvents\":";
  {
    Events events(&out, record.begin_ns);
    int free_process = 0;
    const std::map<std::string, Alignment> alignments = AlignHosts(record.ranks);
    for (RankRecord rank : record.ranks) {
      std::string clock;
      if (const auto of_host = alignments.find(rank.host); of_host != alignments.end()) {
        const Alignment& alignment = of_host->second;
        MoveTimes(rank, alignment.shift_ns);
        clock = absl::StrCat(", clock aligned to ", Micros(alignment.error_ns), " us");
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
