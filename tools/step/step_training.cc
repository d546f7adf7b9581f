#include "evenkeel/tools/step/step_training.h"

#include <algorithm>
#include <random>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "evenkeel/bucket/step_times.h"
#include "evenkeel/bucket/value_memory.h"
#include "evenkeel/comm/base/clock.h"
#include "evenkeel/comm/collective.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/join/join.h"
#include "evenkeel/trainer/gpt/gpt.h"
#include "evenkeel/trainer/models/mlp.h"

namespace evenkeel {
namespace {

double Since(absl::Time start) { return absl::ToDoubleSeconds(SteadyNow() - start); }

absl::StatusOr<StepModel> WithImages(const std::vector<int>& hidden, int count) {
  StepModel step;
  EK_ASSIGN_OR_RETURN(step.model, MakeMlp({.hidden = hidden}));
  std::minstd_rand random(17);
  for (int i = 0; i < count * 784; ++i)
    step.memory.images.push_back(static_cast<float>(random() % 1001) * 1e-3f);
  for (int i = 0; i < count; ++i) step.memory.labels.push_back(static_cast<uint8_t>(i % 10));
  return step;
}

absl::StatusOr<StepModel> WithTokens(absl::string_view preset, int sequences) {
  EK_ASSIGN_OR_RETURN(const GptOptions options, GptPreset(preset));
  StepModel step{.context = options.context};
  EK_ASSIGN_OR_RETURN(step.model, MakeGpt(options));
  std::minstd_rand random(17);
  for (std::vector<int32_t>* tokens : {&step.memory.inputs, &step.memory.targets}) {
    for (int64_t i = 0; i < sequences * options.context; ++i)
      tokens->push_back(static_cast<int32_t>(random() % options.vocabulary));
  }
  return step;
}

}  // namespace

absl::StatusOr<StepModel> MakeStepModel(absl::string_view name) {
  if (name == "mlp") return WithImages({1024, 1024}, 64);
  if (name == "tiny") return WithImages({32}, 4);
  if (name == "gpt") return WithTokens("mini", 8);
  return absl::InvalidArgumentError(
      absl::StrCat("\"", name, "\" is not a model; choose mlp, gpt or tiny"));
}

// The optimizer of a program with one rank, without a group.
class StepTraining::PlainOptimizer {
 public:
  PlainOptimizer(const ParameterSet* params, const UpdateRule& rule)
      : params_(params), rule_(rule) {
    for (int i = 0; i < params->size(); ++i) {
      std::vector<std::vector<float>>& tensors = state_.emplace_back();
      for (size_t t = 0; t < StateTensorNames(rule).size(); ++t)
        tensors.emplace_back((*params)[i].value.count);
    }
  }
  void Step() {
    ++steps_;
    for (int i = 0; i < params_->size(); ++i) {
      std::vector<TensorView> state;
      for (std::vector<float>& tensor : state_[i]) state.emplace_back(absl::MakeSpan(tensor));
      ApplyUpdate(rule_, steps_, /*grad_scale=*/1.0, (*params_)[i].value, (*params_)[i].grad,
                  state);
    }
  }

 private:
  const ParameterSet* const params_;
  const UpdateRule rule_;
  std::vector<std::vector<std::vector<float>>> state_;  // By parameter and tensor.
  int64_t steps_ = 0;
};

absl::StatusOr<std::unique_ptr<StepTraining>> StepTraining::Create(
    Communicator* comm, SyncWay way, const TrainingSettings& settings) {
  std::unique_ptr<StepTraining> training(new StepTraining(comm, way));
  EK_RETURN_IF_ERROR(training->Init(settings));
  return training;
}

StepTraining::StepTraining(Communicator* comm, SyncWay way) : comm_(comm), way_(way) {}

StepTraining::~StepTraining() = default;

absl::Status StepTraining::Init(const TrainingSettings& settings) {
  EK_ASSIGN_OR_RETURN(model_, MakeStepModel(settings.model));
  ParameterSet* const params = &model_.model->parameters();
  if (way_ == SyncWay::kLocal) {
    plain_optimizer_ = std::make_unique<PlainOptimizer>(params, settings.rule);
    return absl::OkStatus();
  }
  EK_ASSIGN_OR_RETURN(value_memory_, MoveValues(*comm_, *params));
  const DataParallelOptions options{
      .reducer = {.gradient_as_bucket_view = true, .check_finite = way_ == SyncWay::kCheckFinite}};
  EK_ASSIGN_OR_RETURN(ddp_, DataParallel::Create(comm_, params, {}, options));
  OptimizerOptions placed;
  if (way_ == SyncWay::kSliced) placed.placement = Slices{};
  if (way_ == SyncWay::kSharded) placed.placement = WholeTensors{};
  EK_ASSIGN_OR_RETURN(optimizer_, Optimizer::Create(*ddp_, settings.rule, placed));
  return absl::OkStatus();
}

absl::Status StepTraining::RunBlock(bool joins, int steps, StepSamples& samples) {
  EK_RETURN_IF_ERROR(comm_->control().Exchange("block", "", comm_->timeout()).status());
  if (!joins || way_ == SyncWay::kLocal) return Steps(steps, samples);
  return RunJoined({ddp_.get(), optimizer_.get()}, {},
                   [&](JoinScope&) { return Steps(steps, samples); });
}

absl::Status StepTraining::Steps(int steps, StepSamples& samples) {
  for (int step = 0; step < steps; ++step) EK_RETURN_IF_ERROR(Step(samples));
  return absl::OkStatus();
}

absl::Status StepTraining::Step(StepSamples& samples) {
  const absl::Time start = SteadyNow();
  model_.model->parameters().ClearGradients();
  EK_RETURN_IF_ERROR(ForwardAndBackward());
  const absl::Time reduced = SteadyNow();
  if (plain_optimizer_ != nullptr) plain_optimizer_->Step();
  if (optimizer_ != nullptr) EK_RETURN_IF_ERROR(optimizer_->Step());
  samples.update.push_back(Since(reduced));
  samples.step.push_back(Since(start));
  NoteExposed(samples);
  return absl::OkStatus();
}

absl::Status StepTraining::ForwardAndBackward() {
  if (ddp_ != nullptr) EK_RETURN_IF_ERROR(ddp_->BeginStep());
  EK_RETURN_IF_ERROR(model_.model->Forward(model_.batch(), Mode::kTraining).status());
  EK_RETURN_IF_ERROR(model_.model->Backward(
      [&](int param) { return ddp_ == nullptr ? absl::OkStatus() : ddp_->GradientReady(param); }));
  return ddp_ == nullptr ? absl::OkStatus() : ddp_->FinishStep();
}

void StepTraining::NoteExposed(StepSamples& samples) const {
  if (ddp_ == nullptr) return;
  const StepTimes& times = ddp_->reducer().last_step();
  samples.exposed.resize(times.buckets.size());
  absl::Time free = times.last_gradient;  // The time from which the rank waits.
  for (size_t b = 0; b < times.buckets.size(); ++b) {
    const absl::Time reduced = std::min(times.buckets[b].reduced, times.end);
    samples.exposed[b].push_back(
        absl::ToDoubleSeconds(std::max(absl::ZeroDuration(), reduced - free)));
    free = std::max(free, reduced);
  }
}

int64_t StepTraining::CountOfParameters() const {
  int64_t count = 0;
  for (int i = 0; i < model_.model->parameters().size(); ++i)
    count += model_.model->parameters()[i].value.count;
  return count;
}

uint64_t StepTraining::HashOfParameters() {
  uint64_t hash = 0;
  for (int i = 0; i < model_.model->parameters().size(); ++i) {
    const TensorView& value = model_.model->parameters()[i].value;
    hash = StableHash(hash, absl::string_view(static_cast<const char*>(value.data), value.bytes()));
  }
  return hash;
}

}  // namespace evenkeel
