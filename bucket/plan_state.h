// What a bucket plan is made from, as a value that ranks can send to each other.
//
//   PlanState state{.mask = params.mask()};
//   EK_ASSIGN_OR_RETURN(BucketPlan plan, PlanFor(state, specs, caps));     // one bucket: no order is known yet
//   AdoptOrder(state, ready_order);                                        // generation 1, real buckets
//   AdoptMask(state, params.mask());                                       // generation 2, the order is kept
//
// Two ranks with equal states have equal plans. Each change is a new generation.
//
// Threads: immutable values and pure functions.

#ifndef EVENKEEL_BUCKET_PLAN_STATE_H_
#define EVENKEEL_BUCKET_PLAN_STATE_H_

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "evenkeel/bucket/planner.h"
#include "evenkeel/bucket/trainable_mask.h"

namespace evenkeel {

// What is known of the faster way of fusing gradients, where that is to be measured.
enum class MeasuredFusion : uint8_t {
  kUnknown,  // Flat, until enough steps have been measured.
  kTrying,   // Coalesced, likewise.
  kFlat,
  kCoalesced,
};

struct PlanState {
  uint64_t generation = 0;
  TrainableMask mask;
  std::vector<int> order;    // All parameters in gradient-ready order; empty: not known yet.
  bool order_final = false;  // Recorded with this mask; false: the next synchronising step records.
  // Chosen by measurement (tuner.h), and kept when what is trained changes; empty: not, so the options' are in force.
  std::vector<Bytes> caps;
  CapOrder cap_order = CapOrder::kFromFirstReady;  // Of those.
  MeasuredFusion fusion = MeasuredFusion::kUnknown;

  std::string Serialize() const;
  // InvalidArgument for anything that Serialize() of a set of `param_count` parameters can't have made.
  static absl::StatusOr<PlanState> Parse(absl::string_view bytes, int param_count);

  friend bool operator==(const PlanState&, const PlanState&) = default;
};

// Buckets of the trained parameters: by order if there is one, else one per (dtype, device). `caps` and `cap_order` are
// the options'.
absl::StatusOr<BucketPlan> PlanFor(const PlanState& state, std::span<const ParamSpec> specs,
                                   const std::vector<Bytes>& caps, CapOrder cap_order = CapOrder::kFromFirstReady);
// The trained parameters, in the state's order; empty if it has none.
std::vector<int> PlannedOrder(const PlanState& state);

// `recorded` lists the parameters whose gradients came, in their order; the others keep their place behind them.
void AdoptOrder(PlanState& state, std::span<const int> recorded);
void AdoptMask(PlanState& state, const TrainableMask& mask);
void AdoptCaps(PlanState& state, std::vector<Bytes> caps, CapOrder cap_order);
void AdoptFusion(PlanState& state, MeasuredFusion fusion);

}  // namespace evenkeel

#endif  // EVENKEEL_BUCKET_PLAN_STATE_H_
