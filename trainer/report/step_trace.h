// Records the activities of a rank in a few steps of a run; in other steps its cost is one
// comparison.
//
//   StepRecorder recorder(/*total_steps=*/1000);
//   recorder.Begin(step);
//   ... make the batch ...             recorder.Mark(SpanKind::kData);
//   ... forward ...                    recorder.Mark(SpanKind::kForward);
//   ... backward, and so on ...
//   recorder.End(ddp->reducer().last_step(), ddp->buckets());
//   recorder.traces();  // of steps 2 and 3, and of six more, spread over the run
//
//   recorder.NotePlan(step, ddp->reducer().generation(), ddp->buckets(), params);  // in each step
//
// A Mark() names the activity since the mark before it. A step without End() leaves no trace, and a
// repeated step replaces its earlier trace.
//
// On a device these times are those of the host enqueuing work. The device's times of the same step
// (stream_clock.h) are known later, and replace them:
//
//   recorder.NoteDevice(step, stream_step);
//
// The ends of buckets that backward hides are exact in the steps that the reducer measures: set its
// ReducerOptions::stats_every to sampled_every().
//
// Threads: thread-compatible.

#ifndef EVENKEEL_TRAINER_REPORT_STEP_TRACE_H_
#define EVENKEEL_TRAINER_REPORT_STEP_TRACE_H_

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/time/time.h"
#include "evenkeel/bucket/parameter_set.h"
#include "evenkeel/bucket/reduction.h"
#include "evenkeel/bucket/step_times.h"
#include "evenkeel/trainer/report/run_record.h"
#include "evenkeel/trainer/report/stream_clock.h"

namespace evenkeel {

class StepRecorder {
 public:
  static constexpr int64_t kLateSteps = 6;
  // With more of them, a plan of very many small buckets would make the report large.
  static constexpr size_t kMaxBuckets = 200;
  static constexpr size_t kMaxPlans = 50;

  StepRecorder() = default;  // Samples nothing.
  // `late_steps`: the number of sampled steps after step 3.
  explicit StepRecorder(int64_t total_steps, int64_t late_steps = kLateSteps);

  bool is_on() const { return every_ > 0; }
  int64_t sampled_every() const { return every_; }
  bool IsSampled(int64_t step) const;

  void Begin(int64_t step);
  void Mark(SpanKind kind) {
    if (current_.has_value()) AddSpan(kind);
  }
  void End(const StepTimes& times, const std::vector<BucketInfo>& buckets);
  void NoteDevice(int64_t step, const StreamStep& device);
  // Records a shadowed step of the active ranks, from `begin` until now.
  void Follow(int64_t step, absl::Time begin);

  // Records the buckets of the step if they differ from those before it.
  void NotePlan(int64_t step, uint64_t generation, const std::vector<BucketInfo>& buckets,
                const ParameterSet& parameters);

  const std::vector<StepTrace>& traces() const { return traces_; }
  const std::vector<PlanRecord>& plans() const { return plans_; }

 private:
  void AddSpan(SpanKind kind);
  void Keep(StepTrace trace);

  int64_t every_ = 0;  // 0: off.
  int64_t late_steps_ = kLateSteps;
  std::vector<StepTrace> traces_;
  std::optional<StepTrace> current_;  // The current step, if it is sampled.
  int64_t marked_ns_ = 0;             // Its last mark.
  uint64_t generation_ = 0;           // The last recorded plan's.
  std::vector<PlanRecord> plans_;
};

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_REPORT_STEP_TRACE_H_
