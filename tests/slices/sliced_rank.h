// For tests: a rank that trains a made-up model with a SlicedOptimizer, and the plain training it is compared with.

#ifndef EVENKEEL_TESTS_SLICES_SLICED_RANK_H_
#define EVENKEEL_TESTS_SLICES_SLICED_RANK_H_

#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "evenkeel/bucket/data_parallel.h"
#include "evenkeel/bucket/parameter_set.h"
#include "evenkeel/bucket/planner.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/local.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/join/joinable.h"
#include "evenkeel/zero_optim/internal/test_model.h"
#include "evenkeel/zero_optim/sliced_optimizer.h"
#include "gtest/gtest.h"

namespace evenkeel {

inline const std::vector<int64_t> kSizes = {7, 300, 1, 0, 64, 33, 150};

inline void RunGroup(int world_size, absl::FunctionRef<absl::Status(Communicator&)> body) {
  const absl::Status status = RunRanks(world_size, body);
  EXPECT_TRUE(status.ok()) << status;
}

inline std::vector<int> Ranks(int world_size) {
  std::vector<int> ranks;
  for (int rank = 0; rank < world_size; ++rank) ranks.push_back(rank);
  return ranks;
}

struct SlicedRankOptions {
  SlicedOptimizerOptions optimizer;
  ReducerOptions reducer = {.caps = {Bytes{256}, Bytes{700}}};
  std::vector<int64_t> sizes = kSizes;
  DType dtype = DType::kFloat32;
  std::set<int> frozen;
};

struct SlicedRank {
  explicit SlicedRank(const SlicedRankOptions& options) : model(options.sizes, options.dtype) {}

  static absl::StatusOr<std::unique_ptr<SlicedRank>> Create(Communicator& comm, const UpdateRule& rule,
                                                            const SlicedRankOptions& options = {}) {
    auto made = std::make_unique<SlicedRank>(options);
    for (int param : options.frozen) made->model.params().SetTrainable(param, false);
    EK_ASSIGN_OR_RETURN(made->optimizer,
                        SlicedOptimizer::Create(&comm, &made->model.params(), rule, options.optimizer));
    EK_ASSIGN_OR_RETURN(made->ddp,
                        DataParallel::Create(&comm, &made->model.params(), {}, {.reducer = options.reducer},
                                             made->optimizer->TakeReduction()));
    return made;
  }

  int rank() const { return ddp->communicator().rank(); }

  // Forward and backward: the gradients of `step`, but for those in `without`, announced from the last to the first.
  absl::Status Backward(int step, StepMode mode = StepMode::kSync, const std::set<int>& without = {}) {
    EK_RETURN_IF_ERROR(ddp->BeginStep(mode));
    for (int param = model.size() - 1; param >= 0; --param) {
      ParameterSet& params = model.params();
      if (!params.trainable(param)) continue;
      if (without.contains(param)) {
        EK_RETURN_IF_ERROR(params.grad_state(param) == GradState::kNone ? ddp->NoGradient(param)
                                                                        : ddp->GradientReady(param));
        continue;
      }
      const TensorView gradient = params[param].grad;
      StateTensor fresh(gradient.dtype, gradient.count);
      model.ComputeGradient(rank(), step, param, fresh.view());
      Put(fresh, gradient, params.grad_state(param) != GradState::kNone);
      params.SetGradState(param, GradState::kLocal);
      EK_RETURN_IF_ERROR(ddp->GradientReady(param));
    }
    return ddp->FinishStep();
  }
  absl::Status Step(int step, const StepOptions& options = {}) {
    model.params().ClearGradients();
    EK_RETURN_IF_ERROR(Backward(step));
    return optimizer->Step(options);
  }

  // The parameters, and the state of all ranks together.
  absl::Status ExpectEqual(internal::TestModel& plain_model, const internal::PlainTraining& plain) {
    EK_RETURN_IF_ERROR(optimizer->WaitForAll());
    EXPECT_TRUE(model.Bytes() == plain_model.Bytes()) << "rank " << rank();
    EK_ASSIGN_OR_RETURN(const OptimizerState all, optimizer->Consolidate());
    EXPECT_TRUE(all == plain.state()) << "rank " << rank();
    return absl::OkStatus();
  }

  internal::TestModel model;
  std::unique_ptr<SlicedOptimizer> optimizer;  // Outlives the other's steps.
  std::unique_ptr<DataParallel> ddp;

 private:
  static void Put(const StateTensor& from, const TensorView& to, bool adds) {
    const auto put = [&](auto type) {
      using T = decltype(type);
      for (int64_t k = 0; k < to.count; ++k) to.as<T>()[k] = adds ? to.as<T>()[k] + from.as<T>()[k] : from.as<T>()[k];
    };
    to.dtype == DType::kFloat64 ? put(double{}) : put(float{});
  }
};

}  // namespace evenkeel

#endif  // EVENKEEL_TESTS_SLICES_SLICED_RANK_H_
