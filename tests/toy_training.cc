#include "evenkeel/tests/toy_training.h"

#include <algorithm>
#include <cmath>
#include <memory>

#include "absl/memory/memory.h"
#include "evenkeel/bucket/data_parallel.h"
#include "evenkeel/bucket/testing/toy_model.h"
#include "evenkeel/comm/base/clock.h"
#include "evenkeel/comm/device/runtime.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/join/join.h"
#include "evenkeel/zero_optim/optimizer.h"

namespace evenkeel {
namespace {

const std::vector<int> kSizes = {3, 7, 1, 5, 2};
static_assert(kToyGradients == 5);
constexpr double kLearningRate = 0.1, kMomentum = 0.9;

// Weights stay below 8 in magnitude; 12 updates of at most 5 roundings of sums below 8, which
// momentum amplifies by 10.
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

std::vector<int> SizesOf(const ToySettings& settings) {
  std::vector<int> sizes = kSizes;
  sizes[0] += settings.is_misfit;
  return sizes;
}

}  // namespace

class ToyTrainer::Parts {
 public:
  Parts(const Communicator& comm, const ToySettings& settings)
      : model(SizesOf(settings), /*seed=*/0, comm.device()), runtime(comm.runtime()) {
    if (settings.is_exact) model.RoundGradients();
  }

  // The host's arithmetic begins when what the device does has ended. Nothing on the CPU.
  absl::Status Finish() {
    return runtime == nullptr ? absl::OkStatus()
                              : runtime->Synchronize(stream.ref(), SteadyNow() + absl::Minutes(1));
  }

  ToyModel model;
  DeviceRuntime* const runtime;
  Stream stream;
  std::unique_ptr<DataParallel> ddp;
  std::unique_ptr<Optimizer> optimizer;
};

absl::StatusOr<std::unique_ptr<ToyTrainer>> ToyTrainer::Create(Communicator* comm,
                                                               const ToySettings& settings) {
  auto trainer = absl::WrapUnique(new ToyTrainer(settings, *comm));
  EK_RETURN_IF_ERROR(trainer->Init(comm));
  return trainer;
}

ToyTrainer::ToyTrainer(const ToySettings& settings, const Communicator& comm)
    : settings_(settings),
      data_rank_(settings.data_rank >= 0 ? settings.data_rank : comm.rank()),
      parts_(std::make_unique<Parts>(comm, settings)) {
  result_.last.weights = Flat(parts_->model.values());
}

ToyTrainer::~ToyTrainer() = default;

absl::Status ToyTrainer::Init(Communicator* comm) {
  const UpdateRule rule = Sgd{.learning_rate = kLearningRate, .momentum = kMomentum};
  ParameterSet* const params = &parts_->model.params();
  if (parts_->runtime != nullptr) {
    EK_ASSIGN_OR_RETURN(parts_->stream, parts_->runtime->CreateStream(comm->device()));
    params->SetStream(parts_->stream.ref());
  }
  if (settings_.list != ToyList::kOptimizerAlone) {
    EK_ASSIGN_OR_RETURN(
        parts_->ddp, DataParallel::Create(comm, params, {}, {.reducer = {.caps = settings_.caps}}));
  }
  OptimizerOptions options;
  if (settings_.is_sharded) options.placement = WholeTensors{.bucket_cap = settings_.caps.front()};
  EK_ASSIGN_OR_RETURN(parts_->optimizer, Optimizer::Create(*comm, *params, rule, options));
  return absl::OkStatus();
}

std::vector<Joinable*> ToyTrainer::joinables() const {
  Joinable* const ddp = parts_->ddp.get();
  Joinable* const optimizer = parts_->optimizer.get();
  switch (settings_.list) {
    case ToyList::kGradientsFirst:
      return {ddp, optimizer};
    case ToyList::kOptimizerFirst:
      return {optimizer, ddp};
    case ToyList::kOptimizerAlone:
      break;
  }
  return {optimizer};
}

absl::Status ToyTrainer::Train(int first_step) {
  result_.steps = first_step;
  const auto in_scope = [&](JoinScope& scope) {
    if (settings_.on_scope) settings_.on_scope(scope);
    return Loop(first_step);
  };
  result_.status =
      settings_.joins ? RunJoined(joinables(), settings_.join_options, in_scope) : Loop(first_step);
  for (const int batch : settings_.even_batches) {
    if (!result_.status.ok()) return result_.status;
    result_.status = Step(result_.steps, batch);
  }
  if (result_.status.ok()) result_.status = TakeState();
  return result_.status;
}

absl::Status ToyTrainer::At(StepPoint point, int step, int gradients) const {
  return settings_.at ? settings_.at(point, step, gradients) : absl::OkStatus();
}

absl::Status ToyTrainer::Loop(int first_step) {
  const int steps = static_cast<int>(settings_.batches.size());
  for (int step = first_step; step < steps; ++step)
    EK_RETURN_IF_ERROR(Step(step, settings_.batches[step]));
  return At(StepPoint::kLoopEnd, steps);
}

absl::Status ToyTrainer::Step(int step, int batch) {
  ToyModel& model = parts_->model;
  DataParallel* const ddp = parts_->ddp.get();
  const bool accumulates = step == settings_.accumulating_step;
  EK_RETURN_IF_ERROR(At(StepPoint::kBeforeRecord, step));
  model.params().ClearGradients();
  if (ddp != nullptr)
    EK_RETURN_IF_ERROR(ddp->BeginStep(accumulates ? StepMode::kAccumulate : StepMode::kSync));
  EK_RETURN_IF_ERROR(At(StepPoint::kForward, step));
  int gradients = 0;
  auto announce = [&](int param) -> absl::Status {
    EK_RETURN_IF_ERROR(At(StepPoint::kBackward, step, gradients++));
    return ddp != nullptr ? ddp->GradientReady(param) : absl::OkStatus();
  };
  EK_RETURN_IF_ERROR(model.Backward(data_rank_, batch, announce));
  EK_RETURN_IF_ERROR(At(StepPoint::kBackward, step, gradients));
  if (ddp != nullptr) EK_RETURN_IF_ERROR(ddp->FinishStep());
  EK_RETURN_IF_ERROR(At(StepPoint::kReduced, step));
  if (!accumulates) {
    EK_RETURN_IF_ERROR(parts_->optimizer->Step());
    EK_RETURN_IF_ERROR(parts_->Finish());
    result_.last.weights = Flat(model.values());
    ++result_.steps;
  }
  return At(StepPoint::kStepped, step);
}

ToyState ToyTrainer::state() const {
  return {Flat(parts_->model.values()), Momentum(parts_->optimizer->state())};
}

absl::Status ToyTrainer::TakeState() {
  EK_RETURN_IF_ERROR(parts_->Finish());
  EK_ASSIGN_OR_RETURN(const OptimizerState state, parts_->optimizer->Consolidate());
  result_.ended = {Flat(parts_->model.values()), Momentum(state)};
  return absl::OkStatus();
}

ToyResult TrainToy(Communicator& comm, const ToySettings& settings) {
  absl::StatusOr<std::unique_ptr<ToyTrainer>> trainer = ToyTrainer::Create(&comm, settings);
  if (!trainer.ok()) {
    // Somebody was lost while others were still making their parts: no weight has changed.
    ToyResult result{.status = trainer.status()};
    result.last.weights = Flat(ToyModel(kSizes).values());
    return result;
  }
  if (const absl::Status status = (*trainer)->Train(); !status.ok()) comm.Abort(status);
  return (*trainer)->result();
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

std::vector<ToyState> TrainToyAlone(const std::vector<ToyStep>& steps, bool is_exact) {
  ToyModel model(kSizes);
  if (is_exact) model.RoundGradients();
  std::vector<std::vector<float>> momentum;
  for (int size : kSizes) momentum.emplace_back(size, 0.0f);
  std::vector<ToyState> states = {{Flat(model.values()), Flat(momentum)}};
  for (const ToyStep& step : steps) {
    for (int p = 0; p < kToyGradients; ++p) {
      float* const weights = static_cast<float*>(model.params()[p].value.data);
      for (int j = 0; j < kSizes[p]; ++j) {
        float sum = 0;
        for (const auto& [rank, batch] : step.inputs) sum += model.GradientAt(p, j, rank, batch);
        momentum[p][j] =
            static_cast<float>(kMomentum) * momentum[p][j] + sum / static_cast<float>(step.divisor);
      }
      for (int j = 0; j < kSizes[p]; ++j)
        weights[j] = std::fma(momentum[p][j], static_cast<float>(-kLearningRate), weights[j]);
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
