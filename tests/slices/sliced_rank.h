// For tests: a rank that trains a made-up model with an optimizer by slices, and the plain training
//            it is compared with.

#ifndef EVENKEEL_TESTS_SLICES_SLICED_RANK_H_
#define EVENKEEL_TESTS_SLICES_SLICED_RANK_H_

#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "evenkeel/bucket/data_parallel.h"
#include "evenkeel/bucket/parameter_set.h"
#include "evenkeel/bucket/plan/planner.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/device/runtime.h"
#include "evenkeel/comm/device/simulated.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/testing/tested_group.h"
#include "evenkeel/join/joinable.h"
#include "evenkeel/zero_optim/optimizer.h"
#include "evenkeel/zero_optim/testing/test_model.h"
#include "gtest/gtest.h"

namespace evenkeel {

// When slices are updated.
inline constexpr bool kInStep = false, kInBackward = true;

inline const std::vector<int64_t> kSizes = {7, 300, 1, 0, 64, 33, 150};

inline void RunGroup(int world_size, absl::FunctionRef<absl::Status(Communicator&)> body) {
  const absl::Status status = RunTestRanks(world_size, body);
  EXPECT_TRUE(status.ok()) << status;
}

inline std::vector<int> Ranks(int world_size) {
  std::vector<int> ranks;
  for (int rank = 0; rank < world_size; ++rank) ranks.push_back(rank);
  return ranks;
}

struct SlicedRankOptions {
  Slices placement;  // For ranks with this placement.
  LostShard lost_shard = LostShard::kRefuse;
  ReducerOptions reducer = {.caps = {Bytes{256}, Bytes{700}}};
  std::vector<int64_t> sizes = kSizes;
  DType dtype = DType::kFloat32;
  std::set<int> frozen;
  SimulatedDevices* devices = nullptr;  // Where the group is.
};

// The other one with all state on every rank, for comparison.
template <typename Kind>
struct TestRank {
  TestRank(const SlicedRankOptions& options, Communicator& comm)
      : devices(options.devices),
        stream(devices == nullptr ? Stream() : *devices->CreateStream(comm.device())),
        model(options.sizes, options.dtype, devices, stream.ref()) {}
  ~TestRank() { EXPECT_TRUE(FinishDevice().ok()); }
  absl::Status FinishDevice() {
    if (devices == nullptr) return absl::OkStatus();
    return devices->Synchronize(stream.ref(), absl::Now() + absl::Minutes(1));
  }

  static absl::StatusOr<std::unique_ptr<TestRank>> Create(Communicator& comm,
                                                          const UpdateRule& rule,
                                                          const SlicedRankOptions& options = {}) {
    auto made = std::make_unique<TestRank>(options, comm);
    ParameterSet& params = made->model.params();
    for (int param : options.frozen) params.SetTrainable(param, false);
    EK_ASSIGN_OR_RETURN(
        made->ddp, DataParallel::Create(
                       &comm, &params, {},
                       {.reducer = options.reducer, .trainability = {.warn_on_change = false}}));
    OptimizerOptions how{.placement = Kind{}, .lost_shard = options.lost_shard};
    if constexpr (std::is_same_v<Kind, Slices>) how.placement = options.placement;
    EK_ASSIGN_OR_RETURN(made->optimizer, Optimizer::Create(*made->ddp, rule, how));
    return made;
  }

  int rank() const { return ddp->communicator().rank(); }
  std::vector<Joinable*> joinables() const { return {ddp.get(), optimizer.get()}; }

  // Forward and backward: the gradients of `step`, but for those in `without`, announced from the
  //                       last to the first.
  absl::Status Backward(int step, StepMode mode = StepMode::kSync,
                        const std::set<int>& without = {}) {
    EK_RETURN_IF_ERROR(ddp->BeginStep(mode));
    return Announce(step, without);
  }
  // The same of a step that has begun.
  absl::Status Announce(int step, const std::set<int>& without = {}) {
    ParameterSet& params = model.params();
    for (int param = model.size() - 1; param >= 0; --param) {
      if (!params.trainable(param)) continue;
      EK_RETURN_IF_ERROR(optimizer->WaitFor(param));  // Gradients depend on values.
      if (!without.contains(param)) AddGradient(step, param);
      EK_RETURN_IF_ERROR(params.grad_state(param) == GradState::kNone ? ddp->NoGradient(param)
                                                                      : ddp->GradientReady(param));
    }
    return ddp->FinishStep();
  }
  absl::Status Step(int step, const StepOptions& options = {}, const std::set<int>& without = {}) {
    model.params().ClearGradients();
    EK_RETURN_IF_ERROR(Backward(step, StepMode::kSync, without));
    return optimizer->Step(options);
  }

  SimulatedDevices* const devices;
  const Stream stream;
  internal::TestModel model;
  std::unique_ptr<Optimizer> optimizer;
  std::unique_ptr<DataParallel> ddp;

 private:
  void AddGradient(int step, int param) {
    ParameterSet& params = model.params();
    model.PutGradient(rank(), step, param, params.grad_state(param) != GradState::kNone);
    params.SetGradState(param, GradState::kLocal);
  }
};
using SlicedRank = TestRank<Slices>;
using WholeRank = TestRank<Replicated>;

// The parameters, and the state of all ranks together.
inline absl::Status ExpectEqual(SlicedRank& rank, const internal::TestModel& model,
                                const OptimizerState& state) {
  EK_RETURN_IF_ERROR(rank.optimizer->WaitForAll());
  EK_RETURN_IF_ERROR(rank.FinishDevice());
  EXPECT_TRUE(internal::IsSame(rank.model, model)) << "rank " << rank.rank();
  EK_ASSIGN_OR_RETURN(const OptimizerState all, rank.optimizer->Consolidate());
  EXPECT_TRUE(internal::IsSame(all, state)) << "rank " << rank.rank();
  return absl::OkStatus();
}

}  // namespace evenkeel

#endif  // EVENKEEL_TESTS_SLICES_SLICED_RANK_H_
