// The state from which a bucket plan is made, as a value that ranks can send to each other.
//
//   PlanState state{.mask = params.mask()};
//   // one bucket, since no order is known yet
//   EK_ASSIGN_OR_RETURN(BucketPlan plan, PlanFor(state, specs, caps));
//   AdoptOrder(state, ready_order);  // generation 1, real buckets
//   AdoptMask(state, params.mask());  // generation 2, the order is kept
//
// Two ranks with equal states have equal plans. Each change is a new generation.
//
// Threads: immutable values and pure functions.

#ifndef EVENKEEL_BUCKET_PLAN_PLAN_STATE_H_
#define EVENKEEL_BUCKET_PLAN_PLAN_STATE_H_

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "evenkeel/bucket/plan/planner.h"
#include "evenkeel/bucket/plan/trainable_mask.h"

namespace evenkeel {

struct PlanState {
  uint64_t generation = 0;
  TrainableMask mask;
  std::vector<int> order;    // All parameters in gradient-ready order; empty: not known yet.
  bool order_final = false;  // Recorded with this mask; false: the next synchronising step records.
  // Chosen by the tuner (tuner.h), and kept when the set of trained parameters changes. Empty: the
  // options' caps are in force.
  std::vector<Bytes> caps;
  CapOrder cap_order = CapOrder::kFromFirstReady;  // The order of `caps`.

  std::string Serialize() const;
  // InvalidArgument for bytes that Serialize() for `param_count` parameters cannot have made.
  static absl::StatusOr<PlanState> Parse(absl::string_view bytes, int param_count);

  friend bool operator==(const PlanState&, const PlanState&) = default;
};

// Returns the buckets of the trained parameters: by the order if there is one, else one per (dtype,
// device). `caps` and `cap_order` are those of the options.
absl::StatusOr<BucketPlan> PlanFor(const PlanState& state, std::span<const ParamSpec> specs,
                                   const std::vector<Bytes>& caps,
                                   CapOrder cap_order = CapOrder::kFromFirstReady);
// Returns the trained parameters in the state's order; empty if it has none.
std::vector<int> PlannedOrder(const PlanState& state);

// Adopts the recorded order of gradients; parameters without a gradient follow in their old order.
void AdoptOrder(PlanState& state, std::span<const int> recorded);
void AdoptMask(PlanState& state, const TrainableMask& mask);
void AdoptCaps(PlanState& state, std::vector<Bytes> caps, CapOrder cap_order);

}  // namespace evenkeel

#endif  // EVENKEEL_BUCKET_PLAN_PLAN_STATE_H_
