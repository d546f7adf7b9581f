// Tunes a reducer's caps: records some steps of the plan that has the gradient order, and chooses
// caps together with all ranks.
//
//   every plan:  OnPlan(); a plan whose order is final and whose caps are the options' is recorded
//   each step:   Record(), if this rank has inputs, then EndStep()
//   IsDue():     Choose(), on all ranks in the same step; ranks without inputs have no profile
//   next step:   the reducer takes `choice()` into its plan, and calls OnPlan()
//
// Ranks count the same steps, since those that have run out of inputs shadow all of them.
//
// Threads: thread-compatible.

#ifndef EVENKEEL_BUCKET_REDUCER_PLAN_TUNER_H_
#define EVENKEEL_BUCKET_REDUCER_PLAN_TUNER_H_

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "evenkeel/bucket/plan/plan_state.h"
#include "evenkeel/bucket/plan/tuner.h"
#include "evenkeel/bucket/stats.h"
#include "evenkeel/bucket/step_times.h"
#include "evenkeel/comm/communicator.h"

namespace evenkeel {

class PlanTuner {
 public:
  // `now`: the options' caps and their order. `steps`: the number of steps to record.
  PlanTuner(absl::string_view name, PlanOptions now, int steps)
      : name_(name), now_(std::move(now)), steps_(steps) {}

  void OnPlan(const PlanState& state, const BucketPlan& plan, std::span<const ParamSpec> specs);
  bool is_recording() const { return phase_ == Phase::kRecording; }

  // Records a synchronising step of this rank. `arrivals`: the times at which the gradients of
  // `order` arrived.
  void Record(const StepTimes& times, std::span<const int> order,
              std::span<const absl::Time> arrivals, absl::Duration longest_launch);
  void EndStep() { ++counted_steps_; }

  bool IsDue() const { return phase_ == Phase::kRecording && counted_steps_ >= steps_; }
  // All ranks call it together. It measures reductions on `channel` where the buckets' sizes are
  // too similar to fit the link.
  absl::Status Choose(Communicator& comm, Channel& channel, bool has_inputs);
  // Returns the caps for the next plan.
  const std::optional<CapChoice>& choice() const { return choice_; }

  TuningStats stats() const;

 private:
  enum class Phase {
    kWaiting,    // The plan has no final order yet.
    kRecording,  // -> kChosen, when all ranks have chosen.
    kChosen,     // The next plan takes the caps.
    kDone,       // The plan has its caps.
  };

  std::vector<int64_t> BucketBytes() const;
  // Measures reductions of some sizes without other work. A collective.
  absl::StatusOr<std::vector<LinkSample>> Probe(Communicator& comm, Channel& channel) const;

  const std::string name_;
  const PlanOptions now_;
  const int steps_;

  Phase phase_ = Phase::kWaiting;
  int64_t counted_steps_ = 0;  // With this plan.
  std::vector<ParamSpec> specs_;
  std::vector<int> order_;  // The recorded plan's order.
  BucketPlan plan_;
  // Allocated with the plan, so that steps allocate nothing; the first `recorded_steps_` are in
  // use.
  std::vector<StepProfile> recorded_;
  int recorded_steps_ = 0;
  std::optional<CapChoice> choice_;
  TuningStats stats_;
};

}  // namespace evenkeel

#endif  // EVENKEEL_BUCKET_REDUCER_PLAN_TUNER_H_
