// Trains a model of the trainer on this rank in one of several ways (SyncWay), step by step, and
// records the times of each step. The batch is noise.
//
//   EK_ASSIGN_OR_RETURN(auto training,
//                       StepTraining::Create(&comm, SyncWay::kReducer, {.model = "mlp"}));
//   StepSamples samples;
//   // on all ranks
//   EK_RETURN_IF_ERROR(training->RunBlock(/*joins=*/true, /*steps=*/16, samples));
//   MedianOf(samples.step);  // seconds
//
// "mlp":  784-1024-1024-10 with 64 samples; 1.9 M parameters.
// "gpt":  the preset mini, 4 layers of width 128, with 8 sequences of 128 bytes; 0.84 M parameters.
// "tiny": an mlp 784-32-10 with 4 samples, for tests.
//
// All models compute in float32; set the number of threads first
// (trainer/layers/compute_threads.h). Parameters are equal in all models of one name. Gradients
// have memory of their own until a reducer points them into its buckets.
//
// Threads: as the communicator.
// Errors:  InvalidArgument for another name; those of the libraries.

#ifndef EVENKEEL_TOOLS_STEP_STEP_TRAINING_H_
#define EVENKEEL_TOOLS_STEP_STEP_TRAINING_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "evenkeel/bucket/data_parallel.h"
#include "evenkeel/comm/backend.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/trainer/data/batch.h"
#include "evenkeel/trainer/models/model.h"
#include "evenkeel/zero_optim/optimizer.h"
#include "evenkeel/zero_optim/update_rule.h"

namespace evenkeel {

struct StepModel {
  std::unique_ptr<Model> model;
  BatchMemory memory;
  int64_t context = 0;  // The length of sequences; 0: the batch has images.

  Batch batch() const {
    if (context == 0) return ImageBatch{memory.images, memory.labels};
    return TokenBatch{memory.inputs, memory.targets, context};
  }
};

absl::StatusOr<StepModel> MakeStepModel(absl::string_view name);

enum class SyncWay {
  kLocal,        // Without other ranks: forward, backward and one pass over the parameters, and no
                 // other code of evenkeel.
  kReducer,      // DataParallel and an Optimizer that each rank repeats. Gradients are views.
  kCheckFinite,  // The same with ReducerOptions::check_finite.
  kSharded,      // DataParallel and an Optimizer that owns whole tensors.
  kSliced,       // DataParallel that reduces to the slices of an optimizer.
};

struct TrainingSettings {
  std::string model = "mlp";
  UpdateRule rule = Sgd{};
};

// In seconds, an entry per step of this rank.
struct StepSamples {
  std::vector<double> step;
  std::vector<double> update;  // The optimizer's step.
  std::vector<std::vector<double>>
      exposed;  // By bucket: the part of its reduction that backward did not hide.
};

class StepTraining {
 public:
  // All ranks call it together.
  static absl::StatusOr<std::unique_ptr<StepTraining>> Create(Communicator* comm, SyncWay way,
                                                              const TrainingSettings& settings);
  ~StepTraining();

  // All ranks call it together, and start at the same time. `joins`: inside RunJoined(), unless
  // kLocal.
  absl::Status RunBlock(bool joins, int steps, StepSamples& samples);

  std::vector<BucketInfo> buckets() const {
    return ddp_ == nullptr ? std::vector<BucketInfo>() : ddp_->buckets();
  }
  int64_t CountOfParameters() const;  // Elements.
  // Hashes all parameters: equal on ranks that are in step.
  uint64_t HashOfParameters();

 private:
  class PlainOptimizer;

  StepTraining(Communicator* comm, SyncWay way);
  absl::Status Init(const TrainingSettings& settings);
  absl::Status Steps(int steps, StepSamples& samples);
  absl::Status Step(StepSamples& samples);
  absl::Status ForwardAndBackward();
  void NoteExposed(StepSamples& samples) const;

  Communicator* const comm_;
  const SyncWay way_;
  Memory value_memory_;  // The model's values, except for kLocal.
  StepModel model_;
  std::unique_ptr<PlainOptimizer> plain_optimizer_;  // kLocal's; the other ways use this one:
  std::unique_ptr<Optimizer> optimizer_;
  std::unique_ptr<DataParallel> ddp_;
};

}  // namespace evenkeel

#endif  // EVENKEEL_TOOLS_STEP_STEP_TRAINING_H_
