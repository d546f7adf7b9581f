#include "evenkeel/trainer/report/chrome_trace.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <limits>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/string_view.h"
#include "evenkeel/comm/base/json.h"
#include "evenkeel/trainer/report/step_timeline.h"

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

void AddRank(const RankRecord& rank, Events& events) {
  const std::string name =
      absl::StrCat("rank ", rank.rank, rank.host.empty() ? "" : " on ", rank.host);
  events.Metadata("process_name", rank.rank, 0, absl::StrCat("\"name\":", JsonQuoted(name)));
  events.Metadata("process_sort_index", rank.rank, 0, absl::StrCat("\"sort_index\":", rank.rank));
  events.Metadata("thread_name", rank.rank, kCompute, "\"name\":\"compute\"");
  events.Metadata("thread_name", rank.rank, kCommunication, "\"name\":\"communication\"");
  for (const StepTrace& trace : rank.traces) {
    AddStep(trace, rank.rank, events);
    AddBuckets(trace, rank.rank, events);
  }
}

void AddCurves(const RunRecord& record, int process, Events& events) {
  events.Metadata("process_name", process, 0, "\"name\":\"the run\"");
  events.Metadata("process_sort_index", process, 0, "\"sort_index\":-1");
  const std::string loss = absl::StrCat("loss, rank ", record.reporter);
  for (const StepPoint& point : record.steps) {
    const int64_t ns = record.begin_ns + static_cast<int64_t>(1e9 * point.seconds);
    if (std::isfinite(point.loss)) events.Counter(loss, process, ns, point.loss);
    const double rate = point.samples * record.units_per_sample / point.took;
    if (std::isfinite(rate))
      events.Counter(absl::StrCat(record.unit_name, " per second"), process, ns, rate);
  }
}

}  // namespace

std::string RenderTrace(const RunRecord& record) {
  std::string out = "{\"displayTimeUnit\":\"ms\",\"otherData\":";
  {
    JsonJoined about(&out, '{', '}');
    about.Add("\"title\":", JsonQuoted(record.title));
    about.Add("\"date\":", JsonQuoted(record.date));
  }
  out += ",\"traceEvents\":";
  {
    Events events(&out, record.begin_ns);
    int free_process = 0;
    for (const RankRecord& rank : record.ranks) {
      AddRank(rank, events);
      free_process = std::max(free_process, rank.rank + 1);
    }
    if (!record.steps.empty()) AddCurves(record, free_process, events);
  }
  return out + "}\n";
}

}  // namespace evenkeel
