#include "evenkeel/trainer/report/record_bytes.h"

#include <concepts>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "evenkeel/comm/base/bytes.h"
#include "evenkeel/comm/status.h"

// Each struct's fields are listed once, for both directions: Fields() passes them to a Writer or to
// a Reader.

namespace evenkeel {
namespace {

using internal::ByteReader;
using internal::ByteWriter;

constexpr char kFormat[] = "evenkeel run record 3";

template <typename T, typename Struct>
concept Is = std::same_as<std::remove_const_t<T>, Struct>;

void Fields(auto& io, Is<StepPoint> auto& point) {
  io(point.step, point.count, point.seconds, point.loss, point.accuracy, point.learning_rate,
     point.took, point.exposed, point.gradient_norm, point.samples, point.active);
}
void Fields(auto& io, Is<EpochPoint> auto& epoch) {
  io(epoch.epoch, epoch.step, epoch.seconds, epoch.train_loss, epoch.train_accuracy,
     epoch.test_loss, epoch.test_accuracy, epoch.first_step, epoch.batches, epoch.ranks);
}
void Fields(auto& io, Is<TestPoint> auto& test) { io(test.step, test.loss, test.accuracy); }
void Fields(auto& io, Is<TraceSpan> auto& span) { io(span.kind, span.begin_ns, span.end_ns); }
void Fields(auto& io, Is<BucketTrace> auto& bucket) {
  io(bucket.bytes, bucket.ready_ns, bucket.start_ns, bucket.reduced_ns);
}
void Fields(auto& io, Is<StepTrace> auto& trace) {
  io(trace.step, trace.last_gradient_ns, trace.spans, trace.buckets, trace.clock, trace.host_ns);
}
void Fields(auto& io, Is<RankMemory> auto& memory) {
  io(memory.parameters, memory.gradients, memory.buckets, memory.optimizer, memory.activations,
     memory.data, memory.copies, memory.peak_resident);
}
void Fields(auto& io, Is<RankRecord> auto& rank) {
  io(rank.rank, rank.host, rank.memory, rank.traces);
}
void Fields(auto& io, Is<PlannedBucket> auto& bucket) { io(bucket.bytes, bucket.parameters); }
void Fields(auto& io, Is<PlanRecord> auto& plan) { io(plan.step, plan.buckets); }
void Fields(auto& io, Is<RunEvent> auto& event) {
  io(event.step, event.seconds, event.kind, event.text);
}
void Fields(auto& io, Is<RunSetting> auto& setting) { io(setting.name, setting.value); }
void Fields(auto& io, Is<RunRecord> auto& run) {
  io(run.title, run.summary, run.date, run.ending, run.unit_name, run.units_per_sample,
     run.bytes_per_prediction, run.has_accuracy, run.world_size, run.reporter, run.parameters,
     run.begin_ns, run.seconds);
  io(run.steps, run.epochs, run.parts, run.tests, run.plans, run.ranks, run.events, run.settings,
     run.total_steps, run.samples, run.samples_of_tail);
}

class Writer {
 public:
  void operator()(const auto&... fields) { (Put(fields), ...); }
  std::string Take() { return out_.Take(); }

 private:
  void Put(int value) { out_.I32(value); }
  void Put(int64_t value) { out_.I64(value); }
  void Put(double value) { out_.F64(value); }
  void Put(bool value) { out_.Bool(value); }
  void Put(SpanKind value) { out_.U8(static_cast<uint8_t>(value)); }
  void Put(StepClock value) { out_.U8(static_cast<uint8_t>(value)); }
  void Put(const std::string& value) { out_.Bytes(value); }
  template <typename T>
  void Put(const std::vector<T>& list) {
    out_.U32(static_cast<uint32_t>(list.size()));
    for (const T& item : list) Put(item);
  }
  void Put(const auto& value) { Fields(*this, value); }

  ByteWriter out_;
};

class Reader {
 public:
  explicit Reader(absl::string_view bytes) : in_(bytes) {}
  void operator()(auto&... fields) { (Get(fields), ...); }
  absl::Status Finish(absl::string_view what) const { return in_.Finish(what); }

 private:
  void Get(int& value) { value = in_.I32(); }
  void Get(int64_t& value) { value = in_.I64(); }
  void Get(double& value) { value = in_.F64(); }
  void Get(bool& value) { value = in_.Bool(); }
  void Get(SpanKind& value) { value = static_cast<SpanKind>(Below(kSpanKinds)); }
  void Get(StepClock& value) {
    value = static_cast<StepClock>(Below(static_cast<int>(StepClock::kDevice) + 1));
  }
  void Get(std::string& value) { value = std::string(in_.Bytes()); }
  template <typename T>
  void Get(std::vector<T>& list) {
    for (uint32_t left = in_.U32(); left > 0 && in_.ok(); --left) Get(list.emplace_back());
  }
  void Get(auto& value) { Fields(*this, value); }

  uint8_t Below(int end) {
    const uint8_t value = in_.U8();
    if (value >= end) in_.Refuse();
    return value;
  }

  ByteReader in_;
};

}  // namespace

std::string Serialize(const RankRecord& record) {
  Writer writer;
  writer(record);
  return writer.Take();
}

absl::StatusOr<RankRecord> ParseRankRecord(absl::string_view bytes) {
  Reader reader(bytes);
  RankRecord record;
  reader(record);
  EK_RETURN_IF_ERROR(reader.Finish("a rank's record"));
  return record;
}

std::string Serialize(const RunRecord& record) {
  Writer writer;
  writer(std::string(kFormat), record);
  return writer.Take();
}

absl::StatusOr<RunRecord> ParseRunRecord(absl::string_view bytes) {
  Reader reader(bytes);
  std::string format;
  reader(format);
  if (format != kFormat)
    return absl::InvalidArgumentError(absl::StrCat("this is not an ", kFormat));
  RunRecord record;
  reader(record);
  EK_RETURN_IF_ERROR(reader.Finish("a run's record"));
  return record;
}

}  // namespace evenkeel
