// The checked options of a training run, made from its flags (train_flags.h).
//
//   EK_ASSIGN_OR_RETURN(const TrainOptions options,
//                       MakeTrainOptions({.optimizer = "sgd", .lr = 0.1}));
//
// Defaults that depend on other flags are filled in: sizes, the learning rate and its schedule, the
// weight decay.
//
// Threads: pure function.
// Errors:  InvalidArgument, which names the flag, its value and the valid values.

#ifndef EVENKEEL_TRAINER_APP_TRAIN_OPTIONS_H_
#define EVENKEEL_TRAINER_APP_TRAIN_OPTIONS_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/string_view.h"
#include "evenkeel/bucket/plan/planner.h"
#include "evenkeel/bucket/trainability.h"
#include "evenkeel/comm/types.h"
#include "evenkeel/comm/verify.h"
#include "evenkeel/join/step_divisor.h"
#include "evenkeel/trainer/app/freeze_schedule.h"
#include "evenkeel/trainer/app/learning_rate.h"
#include "evenkeel/trainer/app/train_flags.h"
#include "evenkeel/trainer/checkpoint/checkpoint_options.h"
#include "evenkeel/trainer/data/augment.h"
#include "evenkeel/trainer/data/training_data.h"
#include "evenkeel/trainer/gpt/gpt_options.h"
#include "evenkeel/trainer/models/cnn.h"
#include "evenkeel/zero_optim/update_rule.h"

namespace evenkeel {

enum class ModelKind { kMlp, kCnn, kGpt };
enum class DeviceKind { kAuto, kCpu, kCuda };
enum class BackendKind { kAuto, kLocal, kShm, kTcp, kHierarchical, kNccl };
enum class CommHook { kNone, kFloat16, kBFloat16, kInt8, kPowerSgd };
// The distribution of the optimizer's state over the ranks.
enum class Sharding { kNone, kTensors, kSlices };

struct TrainOptions {
  ModelKind model = ModelKind::kCnn;
  std::vector<int> hidden;          // Units of each hidden layer of the mlp.
  CnnOptions cnn;                   // The data sets the size of the images
  GptOptions gpt;                   // and the vocabulary.
  DType compute = DType::kFloat32;  // Type of factors of products; also in the gpt's options.
  double loss_scale = 65536;        // Initial scale of losses, for float16.
  uint64_t seed = 0;

  DataOptions data;
  AugmentOptions augment;  // Default: unchanged images.
  bool shuffle = true;
  int epochs = 0;
  int64_t max_steps = 0;            // 0: no limit.
  int64_t batch_size = 0;           // Samples per rank and pass.
  int64_t accumulate = 1;           // Passes per step.
  std::vector<int64_t> rank_steps;  // Empty: all the data.

  DeviceKind device = DeviceKind::kAuto;  // ChooseDevice() (choose_device.h) settles these three.
  int nproc = 0;
  bool nproc_is_given = false;
  BackendKind backend = BackendKind::kAuto;

  UpdateRule rule;
  Decay decay = Decay::kNone;
  int64_t warmup = 0;
  double clip = 0;  // Largest norm of all gradients; 0: no limit.
  Sharding sharding = Sharding::kSlices;

  bool joins = true;
  DivideBy divide_by = DivideBy::kSamples;
  bool stops_early = false;

  int64_t eval_every = 0;    // Steps; 0: only at the end of an epoch.
  int64_t eval_batches = 0;  // Per rank and evaluation of eval_every; 0: all the test data.
  int64_t patience = 0;  // Evaluations without a lower loss, after which training ends; 0: none.
  int64_t sample_every = 0;  // Steps between texts that rank 0's model writes; 0: none.
  std::string sample_prompt;
  int64_t sample_tokens = 0;
  bool saves_best = false;  // To save_file, in place of the last weights.

  bool goes_on = false;              // When a rank is lost, the others continue.
  bool lost_shard_is_fresh = false;  // The lost rank's part of a sharded optimizer's state is
                                     // reinitialized; goes_on needs it for a sharded optimizer.
  std::optional<VerifyLevel> verify;
  int64_t check_replicas_every = 0;  // Steps; 0: not given.

  std::vector<Bytes> bucket_caps;
  CommHook comm_hook = CommHook::kNone;
  int power_sgd_rank = 1;
  int64_t power_sgd_start = 1000;  // The first step that it compresses.
  bool gradients_are_views = false;
  TrainabilityPolicy trainability = TrainabilityPolicy::kAlways;
  int64_t check_trainable_every = 1;  // With kEveryN.
  FreezeSchedule freeze;

  CheckpointOptions checkpoints;

  std::string init_file;  // Paths; empty: none.
  std::string save_file;
  std::string metrics_file;
  std::string tensorboard_folder;
  std::string prometheus_file;
  std::string flight_folder;
  std::string report_file;
  std::string trace_file;

  bool dry_run = false;  // Describes the memory of the run, and runs no step.

  bool saves_folder() const { return absl::EndsWith(save_file, "/"); }
  bool wants_record() const { return !report_file.empty() || !trace_file.empty(); }
  int64_t samples_per_step() const { return batch_size * accumulate; }  // On one rank.
  // Returns the rank whose buffers the model has after a step in which all ranks had a batch.
  int ModelRank(int world_size) const { return joins ? world_size - 1 : 0; }
};

// Return the values of --model, --backend and --comm_hook.
absl::string_view NameOf(ModelKind model);
absl::string_view NameOf(BackendKind backend);
absl::string_view NameOf(CommHook hook);

absl::StatusOr<TrainOptions> MakeTrainOptions(const TrainFlags& flags);

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_APP_TRAIN_OPTIONS_H_
