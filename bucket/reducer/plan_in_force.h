// A reducer's plan in force, as one immutable value: the parameters that it reduces, their buckets,
// and the collectives of a step.
//
//   EK_ASSIGN_OR_RETURN(core.plan, MakePlanInForce(core, state, sparse, *storage, unused));
//   const int bucket = core.plan->bucket_of[param];
//
// The reducer makes a new one, between two steps, when
//
//   it adopts the recorded order of gradients, or the measured caps    RebuildNow()
//   other parameters are trained                                       RefreshTrainable()
//   another rank's plan is adopted                                     ImportPlan()
//   the group changes, for example after the loss of a rank            ReplaceGroup()
//   the reduction changes                                              InstallReduction()
//   the collectives of the reduction change                            Refresh()
//
// The first three change the generation. Buckets that remain the same stay where they are.
//
// Ownership: the reducer owns the plan in force. A step's pipeline, and callbacks that may run
//            after the step or after the reducer's end, share it. After the step they must not
//            follow its pointers: the objects (the reducer's buckets and reduction, the group's
//            channels, streams) are valid only while the plan is in force.
// Threads:   immutable. The thread that runs steps replaces it; this thread, backward's threads,
//            the reduction's thread and the control thread read it.

#ifndef EVENKEEL_BUCKET_REDUCER_PLAN_IN_FORCE_H_
#define EVENKEEL_BUCKET_REDUCER_PLAN_IN_FORCE_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/statusor.h"
#include "evenkeel/bucket/plan/plan_state.h"
#include "evenkeel/bucket/reducer/bucket_storage.h"
#include "evenkeel/bucket/reduction.h"
#include "evenkeel/comm/collective.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/device/runtime.h"

namespace evenkeel {

struct ReducerCore;

struct PlanInForce {
  static constexpr int kNotPlanned = -1;
  static constexpr int kGathered = -2;  // Sparse, so in no bucket.
  static constexpr int kNone = -1;

  struct Bucket {
    BucketInfo info;
    std::vector<Collective> rounds;
  };

  bool is_planned(int param) const { return bucket_of[param] != kNotPlanned; }

  // Parameters.
  PlanState state;
  std::vector<int> sparse;         // Trained parameters whose rows are gathered.
  std::vector<int> bucket_of;      // By parameter.
  int planned = 0;                 // The number of parameters that are in buckets or gathered.
  std::vector<int> announcements;  // By bucket: the number for which it waits.
  // The first bucket that also waits for the announcement of `delay_until`, which is in another
  // bucket; or kNone. Buckets are launched in their order, so it is enough to hold back the first
  // of those that are delayed.
  int delayed_bucket = kNone;
  int delay_until = kNone;

  // Buckets and collectives.
  BucketStorage* storage = nullptr;
  BucketReduction* reduction = nullptr;
  std::vector<Bucket> buckets;
  std::vector<Channel*> channels;  // By round: ranks may be in different rounds of different
                                   // buckets.
  // The all-reduce of the used flags (which gradients exist on any rank), after the last bucket's
  // first round; count 0: there is none.
  Collective used;
  TensorView used_data;
  // On a device. `streams`: one per round, and one for OnReduced(); none if the reduction has no
  // work on streams.
  DeviceRuntime* runtime = nullptr;
  std::vector<StreamRef> streams;
  Schedule schedule;  // The collectives of a synchronising step, in order.
  int64_t collectives_version = 0;
};

// Makes a plan; does not communicate. `sparse` has the trained sparse parameters, in the order of
// their buckets; `storage` the buckets of the others, which the reduction has seen; `unused` the
// agreement on unused parameters, if there is one. InvalidArgument for a reduction whose number of
// collectives differs between buckets, is 0, or is more than 1 without a thread.
absl::StatusOr<std::shared_ptr<const PlanInForce>> MakePlanInForce(
    const ReducerCore& core, PlanState state, std::vector<int> sparse, BucketStorage& storage,
    std::optional<Collective> unused);

}  // namespace evenkeel

#endif  // EVENKEEL_BUCKET_REDUCER_PLAN_IN_FORCE_H_
