#include "evenkeel/trainer/report/step_trace.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "absl/time/clock.h"
#include "evenkeel/comm/internal/bytes.h"
#include "evenkeel/comm/status.h"

namespace evenkeel {
namespace {

using internal::ByteReader;
using internal::ByteWriter;

constexpr int64_t kFirstSampled = 2;  // Step 0 has the first plan, step 1 the rebuild.
constexpr int64_t kLastOfFirst = 3;

bool IsKnown(absl::Time time) { return time != absl::InfiniteFuture() && time != absl::InfinitePast(); }

BucketTrace TraceOf(const StepTimes& times, size_t bucket, int64_t bytes) {
  return {.bytes = bytes,
          .ready_ns = absl::ToUnixNanos(times.buckets[bucket].ready),
          .start_ns = absl::ToUnixNanos(StartOf(times, bucket)),
          .reduced_ns = absl::ToUnixNanos(times.buckets[bucket].reduced)};
}

void Write(const StepTrace& trace, ByteWriter& out) {
  out.I64(trace.step).I64(trace.last_gradient_ns).U32(static_cast<uint32_t>(trace.spans.size()));
  for (const TraceSpan& span : trace.spans) {
    out.U8(static_cast<uint8_t>(span.kind)).I64(span.begin_ns).I64(span.end_ns);
  }
  out.U32(static_cast<uint32_t>(trace.buckets.size()));
  for (const BucketTrace& bucket : trace.buckets) {
    out.I64(bucket.bytes).I64(bucket.ready_ns).I64(bucket.start_ns).I64(bucket.reduced_ns);
  }
  out.U8(static_cast<uint8_t>(trace.clock)).I64(trace.host_ns);
}

StepClock ReadClock(ByteReader& in) {
  const uint8_t clock = in.U8();
  if (clock > static_cast<uint8_t>(StepClock::kDevice)) in.Refuse();
  return static_cast<StepClock>(clock);
}

StepTrace ReadTrace(ByteReader& in) {
  StepTrace trace{.step = in.I64(), .last_gradient_ns = in.I64()};
  for (uint32_t left = in.U32(); left > 0 && in.ok(); --left) {
    const uint8_t kind = in.U8();
    if (kind >= kSpanKinds) in.Refuse();
    const int64_t begin = in.I64();
    trace.spans.push_back({.kind = static_cast<SpanKind>(kind), .begin_ns = begin, .end_ns = in.I64()});
  }
  for (uint32_t left = in.U32(); left > 0 && in.ok(); --left) {
    BucketTrace bucket{.bytes = in.I64()};
    bucket.ready_ns = in.I64();
    bucket.start_ns = in.I64();
    bucket.reduced_ns = in.I64();
    trace.buckets.push_back(bucket);
  }
  trace.clock = ReadClock(in);
  trace.host_ns = in.I64();
  return trace;
}

}  // namespace

StepRecorder::StepRecorder(int64_t total_steps) : every_(std::max<int64_t>(1, total_steps / (kLateSteps + 1))) {
  if (every_ > kMeasuredBetween) every_ -= every_ % kMeasuredBetween;
  device_means_ = std::make_unique<StepAverages>(MeasuredEvery());
}

bool StepRecorder::IsSampled(int64_t step) const {
  if (!is_on()) return false;
  if (step >= kFirstSampled && step <= kLastOfFirst) return true;
  return step > kLastOfFirst && step % every_ == 0 && step / every_ <= kLateSteps;
}

void StepRecorder::Begin(int64_t step) {
  current_.reset();
  if (!IsSampled(step)) return;
  current_.emplace(StepTrace{.step = step});
  marked_ns_ = absl::GetCurrentTimeNanos();
}

void StepRecorder::AddSpan(SpanKind kind) {
  const int64_t now = std::max(marked_ns_, absl::GetCurrentTimeNanos());  // The host's clock may be set back.
  current_->spans.push_back({.kind = kind, .begin_ns = marked_ns_, .end_ns = now});
  marked_ns_ = now;
}

void StepRecorder::End(const StepTimes& times, const std::vector<BucketInfo>& buckets) {
  if (!current_.has_value()) return;
  if (times.gradients > 0) current_->last_gradient_ns = absl::ToUnixNanos(times.last_gradient);
  const size_t count = std::min({times.buckets.size(), buckets.size(), kMaxBuckets});
  for (size_t b = 0; b < count; ++b) {
    const BucketTimes& bucket = times.buckets[b];
    const bool is_known = IsKnown(bucket.ready) && IsKnown(StartOf(times, b)) && IsKnown(bucket.reduced);
    if (is_known) current_->buckets.push_back(TraceOf(times, b, buckets[b].data.bytes()));
  }
  Keep(*std::exchange(current_, std::nullopt));
}

void StepRecorder::NoteDevice(int64_t step, const StreamStep& device) {
  if (!IsMeasured(step)) return;
  device_means_->Add(device.durations);
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
  const int64_t end_ns = std::max(begin_ns, absl::GetCurrentTimeNanos());
  Keep({.step = step, .spans = {{.kind = SpanKind::kFollow, .begin_ns = begin_ns, .end_ns = end_ns}}});
}

void StepRecorder::NotePlan(int64_t step, uint64_t generation, const std::vector<BucketInfo>& buckets,
                            const ParameterSet& parameters) {
  if (!is_on() || plans_.size() == kMaxPlans || (!plans_.empty() && generation == generation_)) return;
  generation_ = generation;
  PlanRecord plan{.step = step};
  for (const BucketInfo& bucket : buckets) {
    PlannedBucket& planned = plan.buckets.emplace_back();
    for (const int param : bucket.params) {
      planned.bytes += parameters[param].value.bytes();
      planned.parameters.push_back(parameters[param].name);
    }
  }
  // Another generation may come to the same buckets.
  if (plans_.empty() || plans_.back().buckets != plan.buckets) plans_.push_back(std::move(plan));
}

void StepRecorder::Keep(StepTrace trace) {
  std::erase_if(traces_, [&](const StepTrace& old) { return old.step >= trace.step; });
  traces_.push_back(std::move(trace));
}

std::string Serialize(const RankRecord& record) {
  ByteWriter out;
  out.I32(record.rank).Bytes(record.host).I64(record.process).I64(record.steps).I64(record.followed);
  const RankMemory& memory = record.memory;
  out.I64(memory.parameters)
      .I64(memory.gradients)
      .I64(memory.buckets)
      .I64(memory.optimizer)
      .I64(memory.activations)
      .I64(memory.peak_resident);
  const RankMeans& means = record.means;
  out.I64(means.steps).F64(means.to_first_gradient_us).F64(means.backward_us);
  out.F64(means.communication_us).F64(means.exposed_us).U8(static_cast<uint8_t>(means.clock));
  out.U32(static_cast<uint32_t>(record.traces.size()));
  for (const StepTrace& trace : record.traces) Write(trace, out);
  return out.Take();
}

absl::StatusOr<RankRecord> ParseRankRecord(absl::string_view bytes) {
  ByteReader in(bytes);
  RankRecord record{.rank = in.I32()};
  record.host = std::string(in.Bytes());
  record.process = in.I64();
  record.steps = in.I64();
  record.followed = in.I64();
  for (int64_t RankMemory::*part : {&RankMemory::parameters, &RankMemory::gradients, &RankMemory::buckets,
                                    &RankMemory::optimizer, &RankMemory::activations, &RankMemory::peak_resident}) {
    record.memory.*part = in.I64();
  }
  record.means.steps = in.I64();
  for (double RankMeans::*mean : {&RankMeans::to_first_gradient_us, &RankMeans::backward_us,
                                  &RankMeans::communication_us, &RankMeans::exposed_us}) {
    record.means.*mean = in.F64();
  }
  record.means.clock = ReadClock(in);
  for (uint32_t left = in.U32(); left > 0 && in.ok(); --left) record.traces.push_back(ReadTrace(in));
  EK_RETURN_IF_ERROR(in.Finish("a rank's record"));
  return record;
}

}  // namespace evenkeel
