#include "evenkeel/tests/parity/rank_training.h"

#include <algorithm>
#include <limits>
#include <memory>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "evenkeel/bucket/data_parallel.h"
#include "evenkeel/bucket/hooks/compressed_reduction.h"
#include "evenkeel/bucket/mixed_precision.h"
#include "evenkeel/bucket/parameter_set.h"
#include "evenkeel/bucket/reduction.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/types.h"
#include "evenkeel/join/join.h"
#include "evenkeel/zero_optim/gradient_check.h"
#include "evenkeel/zero_optim/loss_scaler.h"
#include "evenkeel/zero_optim/optimizer.h"
#include "evenkeel/zero_optim/step_options.h"

namespace evenkeel {
namespace {

template <typename T>
class RankTraining {
 public:
  RankTraining(const Combination& combination, Communicator* comm)
      : combination_(combination), comm_(comm) {
    for (int p = 0; p < kTinyParams; ++p) {
      gradients_[p].assign(kTinySizes[p],
                           T(-77));  // Garbage that must not leak from a gradient which is none.
      params_.Add(absl::StrCat("p", p), absl::MakeSpan(weights_[p]), absl::MakeSpan(gradients_[p]));
    }
  }

  absl::StatusOr<Trained<T>> Train() {
    EK_RETURN_IF_ERROR(MakeParts());
    trained_.weights.push_back(weights_);
    auto loop = [this]() -> absl::Status {
      for (int step = 0; step < combination_.StepsOf(comm_->rank()); ++step)
        EK_RETURN_IF_ERROR(Step(step));
      return absl::OkStatus();
    };
    if (combination_.joins()) {
      const JoinOptions options{.divide_by = combination_.inputs == InputsKind::kUnevenEffective
                                                 ? DivideBy::kActiveRanks
                                                 : DivideBy::kInitialWorldSize};
      std::vector<Joinable*> list = {ddp_.get(), optimizer_.get()};
      if (scaler_ != nullptr) list.push_back(scaler_.get());
      EK_RETURN_IF_ERROR(RunJoined(list, options, [&](JoinScope&) { return loop(); }));
    } else {
      EK_RETURN_IF_ERROR(loop());
    }
    trained_.weights.push_back(weights_);
    EK_RETURN_IF_ERROR(TakeState());
    return std::move(trained_);
  }

 private:
  Placement placement() const {
    switch (combination_.optimizer) {
      case OptimizerKind::kUnsharded:
        break;
      case OptimizerKind::kSharded:
        return WholeTensors{.bucket_cap = Bytes{24}};
      case OptimizerKind::kSliced:
        return Slices{};
      case OptimizerKind::kSlicedInBackward:
        return Slices{.update_in_backward = true};
    }
    return Replicated{};
  }

  absl::Status MakeParts() {
    SetTrainable(0);  // A parameter that is not trained yet must hold no state.
    std::vector<TensorView> buffers;
    if (combination_.buffers) buffers.push_back(TensorView(absl::MakeSpan(shift_)));
    DataParallelOptions options;
    options.reducer.caps = {Bytes{16}, Bytes{48}};
    options.reducer.gradient_as_bucket_view = combination_.views;
    const UpdateRule rule = combination_.RuleAt(0);
    EK_ASSIGN_OR_RETURN(optimizer_,
                        Optimizer::Create(*comm_, params_, rule, {.placement = placement()}));
    std::unique_ptr<BucketReduction> reduction;
    if (std::holds_alternative<Slices>(optimizer_->placement())) {
      EK_ASSIGN_OR_RETURN(reduction, optimizer_->TakeReduction());
    }
    if (combination_.is_compressed()) {
      reduction = std::make_unique<CompressedReduction>(combination_.wire, std::move(reduction));
    }
    EK_ASSIGN_OR_RETURN(
        ddp_, DataParallel::Create(comm_, &params_, buffers, options, std::move(reduction)));
    if (combination_.mixed) {
      EK_ASSIGN_OR_RETURN(
          mixed_, MixedPrecision::Create(&params_, ddp_.get(), {.compute = DType::kFloat16}));
    }
    if (combination_.scaled) {  // Far below where float16 overflows.
      EK_ASSIGN_OR_RETURN(scaler_,
                          LossScaler::Create(comm_, {.initial_scale = 64, .growth_interval = 2}));
    }
    return absl::OkStatus();
  }

  void SetTrainable(int step) {
    for (int p = 0; p < kTinyParams; ++p) params_.SetTrainable(p, combination_.Trains(p, step));
  }

  absl::Status Step(int step) {
    SetTrainable(step);
    ClearGradients();
    const double rate = LearningRate(combination_.RuleAt(step));
    EK_RETURN_IF_ERROR(optimizer_->SetLearningRate(rate));
    for (int pass = 0; pass < combination_.passes(); ++pass) {
      const bool is_last = pass + 1 == combination_.passes();
      EK_RETURN_IF_ERROR(ddp_->BeginStep(is_last ? StepMode::kSync : StepMode::kAccumulate));
      EK_RETURN_IF_ERROR(
          ForwardAndBackward(step * combination_.passes() + pass, is_last && Overflows(step)));
      EK_RETURN_IF_ERROR(ddp_->FinishStep());
    }
    StepOptions options;
    if (combination_.clip_norm != 0) {
      options.clip = ClipOptions{.max_norm = Combination::kMaxNorm, .norm = combination_.clip_norm};
    }
    if (scaler_ != nullptr) {
      options.grad_scale = 1 / scaler_->scale();
      options.skip_nonfinite = true;
    }
    EK_RETURN_IF_ERROR(optimizer_->Step(options));
    if (scaler_ != nullptr) {
      const bool is_finite = optimizer_->last_check()->is_finite;
      if (is_finite == combination_.Overflows(step))
        return absl::InternalError("the check missed the infinity");
      EK_RETURN_IF_ERROR(scaler_->Update(!is_finite));
    }
    trained_.weights.push_back(weights_);
    return absl::OkStatus();
  }

  // One rank is enough; the last one has inputs to the end.
  bool Overflows(int step) const {
    return combination_.Overflows(step) && comm_->rank() == combination_.world - 1;
  }

  void ClearGradients() {
    if (!combination_.zeroes) return params_.ClearGradients();
    for (int p = 0; p < kTinyParams; ++p) {
      if (params_[p].grad.data != nullptr)
        std::fill_n(static_cast<T*>(params_[p].grad.data), kTinySizes[p], T(0));
    }
  }

  absl::Status ForwardAndBackward(int batch, bool overflows) {
    if (combination_.buffers) MoveShift(comm_->rank(), batch, shift_);
    const TinyWeights<T> weights = ComputedWith();
    TinyWeights<T> gradient = ZeroWeights<T>();
    const T loss_scale = scaler_ == nullptr ? T(1) : static_cast<T>(scaler_->scale());
    for (int i = 0; i < kTinyBatch; ++i) {
      AddGradient(weights, shift_, SampleOf(comm_->rank(), batch, i), loss_scale / T(kTinyBatch),
                  gradient);
    }
    if (overflows) gradient.back()[0] = std::numeric_limits<T>::infinity();
    for (int p = kTinyParams - 1; p >= 0; --p) {
      if (params_.trainable(p)) EK_RETURN_IF_ERROR(TakeGradient(p, gradient[p]));
    }
    return absl::OkStatus();
  }

  TinyWeights<T> ComputedWith() {
    if (mixed_ == nullptr) return weights_;
    TinyWeights<T> weights;
    for (int p = 0; p < kTinyParams; ++p) {
      for (const Float16 half : mixed_->Compute(p).as<Float16>()) {
        weights[p].push_back(static_cast<T>(static_cast<float>(half)));
      }
    }
    return weights;
  }

  absl::Status TakeGradient(int p, const std::vector<T>& gradient) {
    if (mixed_ != nullptr) {
      const auto half = mixed_->Gradient(p).as<Float16>();
      for (int j = 0; j < kTinySizes[p]; ++j) half[j] = Float16(static_cast<float>(gradient[j]));
      return mixed_->GradientReady(p);
    }
    T* const grad = static_cast<T*>(params_[p].grad.data);
    const bool adds = params_.grad_state(p) != GradState::kNone;
    for (int j = 0; j < kTinySizes[p]; ++j) grad[j] = adds ? grad[j] + gradient[j] : gradient[j];
    params_.SetGradState(p, GradState::kLocal);
    return ddp_->GradientReady(p);
  }

  absl::Status TakeState() {
    EK_ASSIGN_OR_RETURN(const OptimizerState state, optimizer_->Consolidate());
    trained_.first = trained_.second = ZeroWeights<T>();
    for (const auto& [p, of_param] : state.params) {
      trained_.updates[p] = of_param.step;
      const auto take = [&of_param = of_param](const std::string& name, std::vector<T>& into) {
        const auto found = of_param.tensors.find(name);
        if (found != of_param.tensors.end())
          std::ranges::copy(found->second.template as<T>(), into.begin());
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
  std::unique_ptr<Optimizer> optimizer_;
  std::unique_ptr<DataParallel> ddp_;
  std::unique_ptr<MixedPrecision> mixed_;  // May be null, as the next one.
  std::unique_ptr<LossScaler> scaler_;
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
