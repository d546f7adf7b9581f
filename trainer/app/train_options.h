// The flags of the trainer, and the checked options of a training run that are made from them.
//
//   TrainFlags flags;
//   FlagTable table;
//   AddTrainFlags(table, flags);  // and table.Parse()
//   EK_ASSIGN_OR_RETURN(const TrainOptions options,
//                       MakeTrainOptions({.optimizer = "sgd", .lr = 0.1}));
//
// Defaults that depend on other flags are filled in: sizes, the learning rate and its schedule, the
// weight decay.
//
// train_flags.inc is the table of flags, with their rules. A new flag is an entry there, its use, a
// test and, where the README describes it, a sentence. One whose value is parsed, or depends on
// other flags, is in MakeTrainOptions(), too.
//
// Threads: pure functions.
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
#include "evenkeel/trainer/app/flag_table.h"
#include "evenkeel/trainer/app/freeze_schedule.h"
#include "evenkeel/trainer/app/learning_rate.h"
#include "evenkeel/trainer/checkpoint/checkpoint_folder.h"
#include "evenkeel/trainer/data/augment.h"
#include "evenkeel/trainer/data/training_data.h"
#include "evenkeel/trainer/gpt/gpt_options.h"
#include "evenkeel/trainer/models/cnn.h"
#include "evenkeel/zero_optim/update_rule.h"

namespace evenkeel {

inline constexpr char kDefaultHidden[] = "64";
inline constexpr int kDefaultRanks = 2;  // On the CPU.
inline constexpr int64_t kDefaultCheckpointEvery = 500;

// Members have the names and defaults of the flags. None: not given.
struct TrainFlags {
#define GROUP(title)
#define FLAG(type, name, value, help, ...) type name = value;
#define OPTION(type, name, shown, help, ...) std::optional<type> name;
#include "evenkeel/trainer/app/train_flags.inc"
};

// Adds all flags to `table`. `flags` must outlive the parsing.
void AddTrainFlags(FlagTable& table, TrainFlags& flags);

enum class ModelKind { kMlp, kCnn, kGpt };
enum class DeviceKind { kAuto, kCpu, kCuda };
enum class BackendKind { kAuto, kLocal, kShm, kTcp, kHierarchical, kNccl };
enum class CommHook { kNone, kFloat16, kBFloat16, kInt8, kPowerSgd };
// The distribution of the optimizer's state over the ranks.
enum class Sharding { kNone, kTensors, kSlices };

struct TrainOptions {
  // The flags as they were given; main() fills in `flight` and `check_replicas` from the
  // environment. The members below have the values that are checked against a list, parsed, or
  // filled in.
  TrainFlags flags;

  ModelKind model = ModelKind::kCnn;
  std::vector<int> hidden;          // Units of each hidden layer of the mlp.
  CnnOptions cnn;                   // The data sets the size of the images
  GptOptions gpt;                   // and the vocabulary.
  DType compute = DType::kFloat32;  // Type of factors of products; also in the gpt's options.

  DataOptions data;
  AugmentOptions augment;  // Default: unchanged images.
  int epochs = 0;
  int64_t batch_size = 0;           // Samples per rank and pass; with --balance their mean.
  std::vector<int64_t> rank_steps;  // Empty: all the data.

  DeviceKind device = DeviceKind::kAuto;  // ChooseDevice() (choose_device.h) settles these three.
  int nproc = 0;
  int incarnation = 0;  // main() sets it; not 0: this process takes the place of a lost rank.
  BackendKind backend = BackendKind::kAuto;

  UpdateRule rule;
  Decay decay = Decay::kNone;
  int64_t warmup = 0;
  double clip = 0;  // Largest norm of all gradients; 0: no limit.
  Sharding sharding = Sharding::kSlices;

  DivideBy divide_by = DivideBy::kSamples;

  bool goes_on = false;              // When a rank is lost, the others continue,
  bool replaces = false;             // with a new process in its place.
  bool lost_shard_is_fresh = false;  // The lost rank's part of a sharded optimizer's state is
                                     // reinitialized; goes_on needs it for a sharded optimizer.
  std::optional<VerifyLevel> verify;

  std::vector<Bytes> bucket_caps;
  CommHook comm_hook = CommHook::kNone;
  TrainabilityPolicy trainability = TrainabilityPolicy::kAlways;
  int64_t check_trainable_every = 1;  // With kEveryN.
  FreezeSchedule freeze;

  CheckpointOptions checkpoints;

  bool saves_folder() const { return absl::EndsWith(flags.save, "/"); }
  bool wants_record() const { return !flags.report.empty() || !flags.trace.empty(); }
  // On one rank; with --balance the mean of all ranks.
  int64_t samples_per_step() const { return batch_size * flags.accumulate; }
  // With --balance the samples of a pass are batch_size and a multiple of this: at most 16 sizes,
  // from one of these to twice batch_size.
  int64_t pass_quantum() const { return (batch_size + 7) / 8; }
  // Returns the rank whose buffers the model has after a step in which all ranks had a batch.
  int ModelRank(int world_size) const { return flags.join ? world_size - 1 : 0; }
};

// Return the values of --model, --backend and --comm_hook.
absl::string_view NameOf(ModelKind model);
absl::string_view NameOf(BackendKind backend);
absl::string_view NameOf(CommHook hook);

absl::StatusOr<TrainOptions> MakeTrainOptions(const TrainFlags& flags);

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_APP_TRAIN_OPTIONS_H_
