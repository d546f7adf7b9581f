// The state that the parts of a reducer share: its constructor's arguments, its group, and the plan
// in force. The parts read it; only the reducer changes it, between steps, on the thread that runs
// them.

#ifndef EVENKEEL_BUCKET_REDUCER_REDUCER_CORE_H_
#define EVENKEEL_BUCKET_REDUCER_REDUCER_CORE_H_

#include <memory>
#include <string>
#include <vector>

#include "evenkeel/bucket/parameter_set.h"
#include "evenkeel/bucket/plan/planner.h"
#include "evenkeel/bucket/reducer/device_side.h"
#include "evenkeel/bucket/reducer/plan_in_force.h"
#include "evenkeel/bucket/reducer/reducer.h"
#include "evenkeel/bucket/reduction.h"
#include "evenkeel/comm/communicator.h"

namespace evenkeel {

struct ReducerCore {
  bool HasLivingGroup() const { return !group.expired(); }

  Communicator* comm;
  std::weak_ptr<const void> group;  // Expires with the group.
  ParameterSet* const params;
  std::shared_ptr<const std::string> attached;  // The reducer's mark on the parameters.
  const std::string name;
  const ReducerOptions options;
  bool checks_finite = false;  // By `options` or the variable.
  bool has_own_reduction;
  std::unique_ptr<BucketReduction> reduction;
  std::unique_ptr<DeviceSide> device;  // Null on the CPU.
  std::vector<ParamSpec> specs;
  std::shared_ptr<const PlanInForce> plan;
};

}  // namespace evenkeel

#endif  // EVENKEEL_BUCKET_REDUCER_REDUCER_CORE_H_
