// One rank's part of a training run: the replicas of a model, their optimizer, and the loop that goes on for ranks that
// have run out of batches.
//
//   EK_ASSIGN_OR_RETURN(std::unique_ptr<TrainingRun> run, TrainingRun::Create(&comm, options, std::move(setup)));
//   for (int epoch = 0; epoch < run->plan().epochs(); ++epoch) {
//     EK_ASSIGN_OR_RETURN(EpochResult result, run->TrainEpoch(epoch, [](const StepFacts&) { return absl::OkStatus();
//     })); if (result.stopped_early) break;
//   }
//   EK_ASSIGN_OR_RETURN(Evaluation test, run->Test());        // exact, over all ranks
//
// Every call is one that all ranks make together.
//
// Ownership: the communicator outlives it.
// Threads:   thread-compatible.
// Errors:    whatever ends the group; it does not go on after one.

#ifndef EVENKEEL_TRAINER_TRAINING_RUN_H_
#define EVENKEEL_TRAINER_TRAINING_RUN_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <variant>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "evenkeel/bucket/data_parallel.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/join/join.h"
#include "evenkeel/trainer/evaluate.h"
#include "evenkeel/trainer/model.h"
#include "evenkeel/trainer/rank_setup.h"
#include "evenkeel/trainer/sampler.h"
#include "evenkeel/trainer/step_plan.h"
#include "evenkeel/trainer/train_options.h"
#include "evenkeel/zero_optim/optimizer.h"
#include "evenkeel/zero_optim/sharded_optimizer.h"

namespace evenkeel {

// One step of the group as one of its ranks saw it.
struct StepFacts {
  int epoch = 0;
  int64_t step = 0;     // Of the group.
  int active = 0;       // How many ranks had a batch.
  int64_t samples = 0;  // In all their batches.
  double learning_rate = 0;
  std::optional<BatchResult> own;  // None: this rank has run dry.
  int64_t own_samples = 0;
  absl::Duration sync = absl::ZeroDuration();  // How long this rank waited for gradients after its backward pass.
};

struct EpochResult {
  Evaluation training;                // Over all ranks, each batch as it was when it was trained on.
  std::vector<int64_t> batches_done;  // By rank.
  bool stopped_early = false;         // By --stop_early, on all ranks in the same step.
};

class TrainingRun {
 public:
  static absl::StatusOr<std::unique_ptr<TrainingRun>> Create(Communicator* comm, const TrainOptions& options,
                                                             RankSetup setup);
  ~TrainingRun();

  // `on_step` is called after each of the group's steps, also those that this rank had no batch for. An error of it
  // ends training on all ranks.
  absl::StatusOr<EpochResult> TrainEpoch(int epoch, absl::FunctionRef<absl::Status(const StepFacts&)> on_step);
  // Over the test data, of which each rank evaluates its part. Makes the ranks' buffers equal first.
  absl::StatusOr<Evaluation> Test();

  const StepPlan& plan() const { return setup_.plan; }
  const Model& model() const { return *setup_.model; }

 private:
  using AnyOptimizer = std::variant<std::unique_ptr<Optimizer>, std::unique_ptr<ShardedOptimizer>>;
  class Watch;

  TrainingRun(Communicator* comm, const TrainOptions& options, RankSetup setup);
  absl::Status Init();

  Joinable* optimizer_joinable() const;
  LearningRateSchedule learning_rates() const;
  // Runs `loop` as the options say: joined, or bare.
  absl::Status Loop(absl::FunctionRef<absl::Status()> loop);
  absl::Status Freeze(int64_t step);
  absl::StatusOr<BatchResult> Step(int64_t step, std::span<const int32_t> samples);
  absl::StatusOr<Evaluation> SumOverRanks(const Evaluation& mine);

  Communicator* const comm_;
  const TrainOptions options_;
  const RankSetup setup_;
  std::unique_ptr<DataParallel> ddp_;
  AnyOptimizer optimizer_;
  std::unique_ptr<Watch> watch_;

  std::vector<float> images_;  // Of the current batch.
  std::vector<uint8_t> labels_;
};

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_TRAINING_RUN_H_
