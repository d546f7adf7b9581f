// One way to train a model on this rank, step by step, with the times of each.
//
//   EK_ASSIGN_OR_RETURN(auto training,
//                       StepTraining::Create(&comm, SyncWay::kReducer, {.model = "mlp"}));
//   StepSamples samples;
//   // on all ranks
//   EK_RETURN_IF_ERROR(training->RunBlock(/*joins=*/true, /*steps=*/16, samples));
//   MedianOf(samples.step);  // seconds
//
// Threads: as the communicator.
// Errors:  those of the libraries.

#ifndef EVENKEEL_TOOLS_STEP_STEP_TRAINING_H_
#define EVENKEEL_TOOLS_STEP_STEP_TRAINING_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "evenkeel/bucket/data_parallel.h"
#include "evenkeel/comm/backend.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/tools/step/step_model.h"
#include "evenkeel/zero_optim/optimizer.h"
#include "evenkeel/zero_optim/update_rule.h"

namespace evenkeel {

enum class SyncWay {
  kLocal,  // This rank for itself: forward, backward and one pass over the parameters, and nothing
           // of ours around it.
  kReducer,      // DataParallel and an Optimizer that each rank repeats. Gradients are views.
  kCheckFinite,  // The same with ReducerOptions::check_finite.
  kSharded,      // DataParallel and one that owns whole tensors.
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
      exposed;  // By bucket, of its reduction: what backward did not hide.
};

class StepTraining {
 public:
  // All ranks together.
  static absl::StatusOr<std::unique_ptr<StepTraining>> Create(Communicator* comm, SyncWay way,
                                                              const TrainingSettings& settings);
  ~StepTraining();

  // All ranks together, which start at the same time. `joins`: inside RunJoined(), unless kLocal.
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
  std::unique_ptr<PlainOptimizer> plain_optimizer_;  // kLocal's; the others have this one:
  std::unique_ptr<Optimizer> optimizer_;
  std::unique_ptr<DataParallel> ddp_;
};

}  // namespace evenkeel

#endif  // EVENKEEL_TOOLS_STEP_STEP_TRAINING_H_
