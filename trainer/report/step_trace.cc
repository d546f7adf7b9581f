#include "evenkeel/trainer/report/step_trace.h"

#include <algorithm>
#include <utility>

#include "evenkeel/comm/base/clock.h"

namespace evenkeel {
namespace {

constexpr int64_t kFirstSampled = 2;  // Step 0 has the first plan, step 1 the rebuild.
constexpr int64_t kLastOfFirst = 3;

bool IsKnown(absl::Time time) {
  return time != absl::InfiniteFuture() && time != absl::InfinitePast();
}

BucketTrace TraceOf(const StepTimes& times, size_t bucket, int64_t bytes) {
  return {.bytes = bytes,
          .ready_ns = absl::ToUnixNanos(times.buckets[bucket].ready),
          .start_ns = absl::ToUnixNanos(StartOf(times, bucket)),
          .reduced_ns = absl::ToUnixNanos(times.buckets[bucket].reduced)};
}

}  // namespace

StepRecorder::StepRecorder(int64_t total_steps, int64_t late_steps)
    : every_(std::max<int64_t>(1, total_steps / (late_steps + 1))), late_steps_(late_steps) {}

bool StepRecorder::IsSampled(int64_t step) const {
  if (!is_on()) return false;
  if (step >= kFirstSampled && step <= kLastOfFirst) return true;
  return step > kLastOfFirst && step % every_ == 0 && step / every_ <= late_steps_;
}

void StepRecorder::Begin(int64_t step) {
  current_.reset();
  if (!IsSampled(step)) return;
  current_.emplace(StepTrace{.step = step});
  marked_ns_ = absl::ToUnixNanos(SteadyNow());
}

void StepRecorder::AddSpan(SpanKind kind) {
  const int64_t now = absl::ToUnixNanos(SteadyNow());
  current_->spans.push_back({.kind = kind, .begin_ns = marked_ns_, .end_ns = now});
  marked_ns_ = now;
}

void StepRecorder::End(const StepTimes& times, const std::vector<BucketInfo>& buckets) {
  if (!current_.has_value()) return;
  if (times.gradients > 0) current_->last_gradient_ns = absl::ToUnixNanos(times.last_gradient);
  const size_t count = std::min({times.buckets.size(), buckets.size(), kMaxBuckets});
  for (size_t b = 0; b < count; ++b) {
    const BucketTimes& bucket = times.buckets[b];
    const bool is_known =
        IsKnown(bucket.ready) && IsKnown(StartOf(times, b)) && IsKnown(bucket.reduced);
    if (is_known) current_->buckets.push_back(TraceOf(times, b, buckets[b].data.bytes()));
  }
  Keep(*std::exchange(current_, std::nullopt));
}

void StepRecorder::NoteDevice(int64_t step, const StreamStep& device) {
  const auto trace = std::ranges::find(traces_, step, &StepTrace::step);
  if (trace == traces_.end() || trace->spans.empty()) return;
  trace->clock = StepClock::kDevice;
  trace->host_ns = trace->spans.back().end_ns - trace->spans.front().begin_ns;
  trace->spans = device.spans;
  trace->last_gradient_ns = device.last_gradient_ns;
  trace->buckets.clear();
}

void StepRecorder::Follow(int64_t step, absl::Time begin) {
  if (!IsSampled(step)) return;
  const int64_t begin_ns = absl::ToUnixNanos(begin);
  const int64_t end_ns = absl::ToUnixNanos(SteadyNow());
  Keep({.step = step,
        .spans = {{.kind = SpanKind::kFollow, .begin_ns = begin_ns, .end_ns = end_ns}}});
}

void StepRecorder::NotePlan(int64_t step, uint64_t generation,
                            const std::vector<BucketInfo>& buckets,
                            const ParameterSet& parameters) {
  if (!is_on() || plans_.size() == kMaxPlans || (!plans_.empty() && generation == generation_))
    return;
  generation_ = generation;
  PlanRecord plan{.step = step};
  for (const BucketInfo& bucket : buckets) {
    PlannedBucket& planned = plan.buckets.emplace_back();
    for (const int param : bucket.params) {
      planned.bytes += parameters[param].value.bytes();
      planned.parameters.push_back(parameters[param].name);
    }
  }
  // Another generation may have the same buckets.
  if (plans_.empty() || plans_.back().buckets != plan.buckets) plans_.push_back(std::move(plan));
}

void StepRecorder::Keep(StepTrace trace) {
  std::erase_if(traces_, [&](const StepTrace& old) { return old.step >= trace.step; });
  traces_.push_back(std::move(trace));
}

}  // namespace evenkeel
