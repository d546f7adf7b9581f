#include "evenkeel/tests/toy_training.h"

#include <algorithm>
#include <cmath>
#include <memory>

#include "absl/strings/string_view.h"
#include "evenkeel/bucket/data_parallel.h"
#include "evenkeel/bucket/testing/toy_model.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/join/join.h"
#include "evenkeel/zero_optim/optimizer.h"
#include "evenkeel/zero_optim/sharded_optimizer.h"

namespace evenkeel {
namespace {

const std::vector<int> kSizes = {3, 7, 1, 5, 2};
static_assert(kToyGradients == 5);
constexpr double kLearningRate = 0.1, kMomentum = 0.9;

// Weights stay below 8 in magnitude; 12 updates of at most 5 roundings of sums below 8, which momentum amplifies by 10.
constexpr float kTolerance = 1e-4f;

std::vector<float> Flat(const std::vector<std::vector<float>>& parts) {
  std::vector<float> flat;
  for (const std::vector<float>& part : parts) flat.insert(flat.end(), part.begin(), part.end());
  return flat;
}

std::vector<float> Momentum(const OptimizerState& state) {
  std::vector<float> flat;
  for (int p = 0; p < kToyGradients; ++p) {
    const auto found = state.params.find(p);
    std::vector<float> part(kSizes[p], 0.0f);
    if (found != state.params.end()) {
      const auto moment = found->second.tensors.at("momentum").as<float>();
      part.assign(moment.begin(), moment.end());
    }
    flat.insert(flat.end(), part.begin(), part.end());
  }
  return flat;
}

class ToyRun {
 public:
  ToyRun(Communicator& comm, const ToySettings& settings, ToyResult& result)
      : comm_(comm),
        settings_(settings),
        result_(result),
        data_rank_(settings.data_rank >= 0 ? settings.data_rank : comm.rank()),
        model_(kSizes) {
    result_.last.weights = Flat(model_.values());
  }

  absl::Status Run() {
    const UpdateRule rule = Sgd{.learning_rate = kLearningRate, .momentum = kMomentum};
    EK_ASSIGN_OR_RETURN(ddp_,
                        DataParallel::Create(&comm_, &model_.params(), {}, {.reducer = {.caps = settings_.caps}}));
    std::vector<Joinable*> list = {ddp_.get()};
    if (settings_.is_sharded) {
      EK_ASSIGN_OR_RETURN(
          sharded_, ShardedOptimizer::Create(&comm_, &model_.params(), rule, {.bucket_cap = settings_.caps.front()}));
      list.push_back(sharded_.get());
    } else {
      EK_ASSIGN_OR_RETURN(unsharded_, Optimizer::Create(&comm_, &model_.params(), rule));
      list.push_back(unsharded_.get());
    }
    EK_RETURN_IF_ERROR(settings_.joins ? RunJoined(list, settings_.join_options, [&](JoinScope&) { return Loop(); })
                                       : Loop());
    return TakeState();
  }

 private:
  absl::Status At(StepPoint point, int step, int gradients = 0) {
    return settings_.at ? settings_.at(point, step, gradients) : absl::OkStatus();
  }

  absl::Status Loop() {
    const int steps = static_cast<int>(settings_.batches.size());
    for (int step = 0; step < steps; ++step) EK_RETURN_IF_ERROR(Step(step));
    return At(StepPoint::kLoopEnd, steps);
  }

  absl::Status Step(int step) {
    const bool accumulates = step == settings_.accumulating_step;
    EK_RETURN_IF_ERROR(At(StepPoint::kBeforeRecord, step));
    model_.params().ClearGradients();
    EK_RETURN_IF_ERROR(ddp_->BeginStep(accumulates ? StepMode::kAccumulate : StepMode::kSync));
    EK_RETURN_IF_ERROR(At(StepPoint::kForward, step));
    int gradients = 0;
    EK_RETURN_IF_ERROR(model_.Backward(data_rank_, settings_.batches[step], [&](int param) -> absl::Status {
      EK_RETURN_IF_ERROR(At(StepPoint::kBackward, step, gradients++));
      return ddp_->GradientReady(param);
    }));
    EK_RETURN_IF_ERROR(At(StepPoint::kBackward, step, gradients));
    EK_RETURN_IF_ERROR(ddp_->FinishStep());
    EK_RETURN_IF_ERROR(At(StepPoint::kReduced, step));
    if (!accumulates) {
      EK_RETURN_IF_ERROR(settings_.is_sharded ? sharded_->Step() : unsharded_->Step());
      result_.last.weights = Flat(model_.values());
      ++result_.steps;
    }
    return At(StepPoint::kStepped, step);
  }

  absl::Status TakeState() {
    OptimizerState state;
    if (settings_.is_sharded) {
      EK_ASSIGN_OR_RETURN(state, sharded_->Consolidate());
    } else {
      state = unsharded_->state();
    }
    result_.ended = {Flat(model_.values()), Momentum(state)};
    return absl::OkStatus();
  }

  Communicator& comm_;
  const ToySettings& settings_;
  ToyResult& result_;
  const int data_rank_;
  ToyModel model_;
  std::unique_ptr<DataParallel> ddp_;
  std::unique_ptr<Optimizer> unsharded_;
  std::unique_ptr<ShardedOptimizer> sharded_;
};

}  // namespace

ToyResult TrainToy(Communicator& comm, const ToySettings& settings) {
  ToyResult result;
  result.status = ToyRun(comm, settings, result).Run();
  return result;
}

std::vector<ToyStep> GroupSteps(const std::vector<std::vector<int>>& batches) {
  std::vector<ToyStep> steps;
  for (size_t rank = 0; rank < batches.size(); ++rank) {
    steps.resize(std::max(steps.size(), batches[rank].size()));
    for (size_t step = 0; step < batches[rank].size(); ++step) {
      steps[step].inputs.emplace_back(static_cast<int>(rank), batches[rank][step]);
    }
  }
  for (ToyStep& step : steps) step.divisor = static_cast<int>(batches.size());
  return steps;
}

std::vector<ToyState> TrainToyAlone(const std::vector<ToyStep>& steps) {
  ToyModel model(kSizes);
  std::vector<std::vector<float>> momentum;
  for (int size : kSizes) momentum.emplace_back(size, 0.0f);
  std::vector<ToyState> states = {{Flat(model.values()), Flat(momentum)}};
  for (const ToyStep& step : steps) {
    for (int p = 0; p < kToyGradients; ++p) {
      float* const weights = static_cast<float*>(model.params()[p].value.data);
      for (int j = 0; j < kSizes[p]; ++j) {
        float sum = 0;
        for (const auto& [rank, batch] : step.inputs) sum += model.GradientAt(p, j, rank, batch);
        momentum[p][j] = static_cast<float>(kMomentum) * momentum[p][j] + sum / static_cast<float>(step.divisor);
      }
      for (int j = 0; j < kSizes[p]; ++j) weights[j] -= static_cast<float>(kLearningRate) * momentum[p][j];
    }
    states.push_back({Flat(model.values()), Flat(momentum)});
  }
  return states;
}

bool IsClose(const std::vector<float>& a, const std::vector<float>& b) {
  if (a.size() != b.size()) return false;
  for (size_t i = 0; i < a.size(); ++i) {
    if (!(std::abs(a[i] - b[i]) <= kTolerance)) return false;  // Not a number is never close.
  }
  return true;
}

}  // namespace evenkeel
