#include "evenkeel/tests/parity/rank_training.h"

#include <algorithm>
#include <memory>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "evenkeel/bucket/data_parallel.h"
#include "evenkeel/bucket/hooks/compressed_reduction.h"
#include "evenkeel/bucket/parameter_set.h"
#include "evenkeel/bucket/reduction.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/join/join.h"
#include "evenkeel/zero_optim/gradient_check.h"
#include "evenkeel/zero_optim/optimizer.h"
#include "evenkeel/zero_optim/sharded_optimizer.h"
#include "evenkeel/zero_optim/sliced_optimizer.h"
#include "evenkeel/zero_optim/step_options.h"

namespace evenkeel {
namespace {

template <typename T>
class RankTraining {
 public:
  RankTraining(const Combination& combination, Communicator* comm) : combination_(combination), comm_(comm) {
    for (int p = 0; p < kTinyParams; ++p) {
      gradients_[p].assign(kTinySizes[p], T(-77));  // Garbage that must not leak from a gradient which is none.
      params_.Add(absl::StrCat("p", p), absl::MakeSpan(weights_[p]), absl::MakeSpan(gradients_[p]));
    }
  }

  absl::StatusOr<Trained<T>> Train() {
    EK_RETURN_IF_ERROR(MakeParts());
    trained_.weights.push_back(weights_);
    auto loop = [this]() -> absl::Status {
      for (int step = 0; step < combination_.StepsOf(comm_->rank()); ++step) EK_RETURN_IF_ERROR(Step(step));
      return absl::OkStatus();
    };
    if (combination_.joins()) {
      const JoinOptions options{.divide_by = combination_.inputs == InputsKind::kUnevenEffective
                                                 ? DivideBy::kActiveRanks
                                                 : DivideBy::kInitialWorldSize};
      EK_RETURN_IF_ERROR(RunJoined({ddp_.get(), optimizer()}, options, [&](JoinScope&) { return loop(); }));
    } else {
      EK_RETURN_IF_ERROR(loop());
    }
    trained_.weights.push_back(weights_);
    EK_RETURN_IF_ERROR(TakeState());
    return std::move(trained_);
  }

 private:
  // What all kinds of optimizers have in common.
  template <typename Call>
  auto WithOptimizer(Call call) {
    if (unsharded_ != nullptr) return call(*unsharded_);
    if (sharded_ != nullptr) return call(*sharded_);
    return call(*sliced_);
  }

  Joinable* optimizer() {
    return WithOptimizer([](auto& optimizer) -> Joinable* { return &optimizer; });
  }

  absl::Status MakeParts() {
    SetTrainable(0);  // What is not trained yet must own nothing.
    std::vector<TensorView> buffers;
    if (combination_.buffers) buffers.push_back(TensorView(absl::MakeSpan(shift_)));
    DataParallelOptions options;
    options.reducer.caps = {Bytes{16}, Bytes{48}};
    options.reducer.gradient_as_bucket_view = combination_.views;
    const UpdateRule rule = combination_.RuleAt(0);
    std::unique_ptr<BucketReduction> reduction;
    switch (combination_.optimizer) {
      case OptimizerKind::kUnsharded: {
        EK_ASSIGN_OR_RETURN(unsharded_, Optimizer::Create(comm_, &params_, rule));
        break;
      }
      case OptimizerKind::kSharded: {
        EK_ASSIGN_OR_RETURN(sharded_, ShardedOptimizer::Create(comm_, &params_, rule, {.bucket_cap = Bytes{24}}));
        break;
      }
      case OptimizerKind::kSliced:
      case OptimizerKind::kSlicedInBackward: {
        const bool in_backward = combination_.optimizer == OptimizerKind::kSlicedInBackward;
        const SlicedOptimizerOptions sliced{.updates = in_backward ? SliceUpdates::kInBackward : SliceUpdates::kInStep};
        EK_ASSIGN_OR_RETURN(sliced_, SlicedOptimizer::Create(comm_, &params_, rule, sliced));
        reduction = sliced_->TakeReduction();
        break;
      }
    }
    if (combination_.is_compressed()) {
      reduction = std::make_unique<CompressedReduction>(combination_.wire, std::move(reduction));
    }
    EK_ASSIGN_OR_RETURN(ddp_, DataParallel::Create(comm_, &params_, buffers, options, std::move(reduction)));
    return absl::OkStatus();
  }

  void SetTrainable(int step) {
    for (int p = 0; p < kTinyParams; ++p) params_.SetTrainable(p, combination_.Trains(p, step));
  }

  absl::Status Step(int step) {
    SetTrainable(step);
    params_.ClearGradients();
    const double rate = LearningRate(combination_.RuleAt(step));
    EK_RETURN_IF_ERROR(WithOptimizer([rate](auto& optimizer) { return optimizer.SetLearningRate(rate); }));
    for (int pass = 0; pass < combination_.passes(); ++pass) {
      const bool is_last = pass + 1 == combination_.passes();
      EK_RETURN_IF_ERROR(ddp_->BeginStep(is_last ? StepMode::kSync : StepMode::kAccumulate));
      EK_RETURN_IF_ERROR(ForwardAndBackward(step * combination_.passes() + pass));
      EK_RETURN_IF_ERROR(ddp_->FinishStep());
    }
    StepOptions options;
    if (combination_.clip_norm != 0) {
      options.clip = ClipOptions{.max_norm = Combination::kMaxNorm, .norm = combination_.clip_norm};
    }
    EK_RETURN_IF_ERROR(WithOptimizer([&options](auto& optimizer) { return optimizer.Step(options); }));
    trained_.weights.push_back(weights_);
    return absl::OkStatus();
  }

  absl::Status ForwardAndBackward(int batch) {
    if (combination_.buffers) MoveShift(comm_->rank(), batch, shift_);
    TinyWeights<T> gradient = ZeroWeights<T>();
    for (int i = 0; i < kTinyBatch; ++i) {
      AddGradient(weights_, shift_, SampleOf(comm_->rank(), batch, i), T(1) / T(kTinyBatch), gradient);
    }
    for (int p = kTinyParams - 1; p >= 0; --p) {
      if (!params_.trainable(p)) continue;
      T* const grad = static_cast<T*>(params_[p].grad.data);
      const bool adds = params_.grad_state(p) != GradState::kNone;
      for (int j = 0; j < kTinySizes[p]; ++j) grad[j] = adds ? grad[j] + gradient[p][j] : gradient[p][j];
      params_.SetGradState(p, GradState::kLocal);
      EK_RETURN_IF_ERROR(ddp_->GradientReady(p));
    }
    return absl::OkStatus();
  }

  absl::Status TakeState() {
    OptimizerState state;
    if (unsharded_ != nullptr) {
      state = unsharded_->state();
    } else if (sharded_ != nullptr) {
      EK_ASSIGN_OR_RETURN(state, sharded_->Consolidate());
    } else {
      EK_ASSIGN_OR_RETURN(state, sliced_->Consolidate());
    }
    trained_.first = trained_.second = ZeroWeights<T>();
    for (const auto& [p, of_param] : state.params) {
      trained_.updates[p] = of_param.step;
      const auto take = [&](const std::string& name, std::vector<T>& into) {
        const auto found = of_param.tensors.find(name);
        if (found != of_param.tensors.end()) std::ranges::copy(found->second.template as<T>(), into.begin());
      };
      take(combination_.adamw ? "exp_avg" : "momentum", trained_.first[p]);
      take("exp_avg_sq", trained_.second[p]);
    }
    return absl::OkStatus();
  }

  const Combination& combination_;
  Communicator* const comm_;
  TinyWeights<T> weights_ = InitialWeights<T>();
  TinyWeights<T> gradients_;
  TinyShift<T> shift_ = {};
  ParameterSet params_;
  // One of the three; before ddp_, whose buckets a sliced one reduces.
  std::unique_ptr<Optimizer> unsharded_;
  std::unique_ptr<ShardedOptimizer> sharded_;
  std::unique_ptr<SlicedOptimizer> sliced_;
  std::unique_ptr<DataParallel> ddp_;
  Trained<T> trained_;
};

}  // namespace

template <typename T>
absl::StatusOr<Trained<T>> TrainRank(const Combination& combination, Communicator& comm) {
  return RankTraining<T>(combination, &comm).Train();
}

template absl::StatusOr<Trained<float>> TrainRank(const Combination&, Communicator&);
template absl::StatusOr<Trained<double>> TrainRank(const Combination&, Communicator&);

}  // namespace evenkeel
