// Finds out which way of fusing gradients is the faster one here: some steps each way, and all ranks agree.
//
//   every plan:  OnPlan()        once its order, and where they are tuned its caps, are final, steps count
//   each step:   EndStep()
//   next():      what the next plan is to do: coalesced after enough flat steps, then what was chosen
//   IsDue():     Choose(), on all ranks in the same step
//
// What is compared is the time from the first gradient to the step's end: copies lie in backward as well as behind it.
// The first step of a plan does not count, for its memory is new. A rank is heard if it had inputs in steps of both
// ways; if none had, gradients stay flat.
//
// Threads: thread-compatible.

#ifndef EVENKEEL_BUCKET_INTERNAL_FUSION_TRIAL_H_
#define EVENKEEL_BUCKET_INTERNAL_FUSION_TRIAL_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "evenkeel/bucket/plan_state.h"
#include "evenkeel/bucket/stats.h"
#include "evenkeel/bucket/step_times.h"
#include "evenkeel/comm/communicator.h"

namespace evenkeel {

class FusionTrial {
 public:
  // `waits_for_caps`: the caps are tuned first.
  FusionTrial(absl::string_view name, int steps, bool waits_for_caps)
      : name_(name), steps_(steps), waits_for_caps_(waits_for_caps) {}

  void OnPlan(const PlanState& state);
  // A synchronising step has ended; null: this rank had no inputs.
  void EndStep(const StepTimes* times);

  bool IsDue() const { return runs_ && now_ == MeasuredFusion::kTrying && counted_steps_ > steps_ && !next_; }
  // All ranks together.
  absl::Status Choose(Communicator& comm);
  const std::optional<MeasuredFusion>& next() const { return next_; }

  FusionStats stats() const;

 private:
  const std::string name_;
  const int steps_;
  const bool waits_for_caps_;

  bool runs_ = false;
  MeasuredFusion now_ = MeasuredFusion::kUnknown;
  int64_t counted_steps_ = 0;  // With this plan.
  std::vector<int64_t> flat_ns_, coalesced_ns_;
  std::optional<MeasuredFusion> next_;
  FusionStats stats_;
};

}  // namespace evenkeel

#endif  // EVENKEEL_BUCKET_INTERNAL_FUSION_TRIAL_H_
