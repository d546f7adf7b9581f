// What a training run is asked to do: the flags as they are typed, and the checked options that they become.
//
//   EK_ASSIGN_OR_RETURN(const TrainOptions options, MakeTrainOptions({.optimizer = "sgd", .learning_rate = 0.1}));
//
// Defaults that depend on other flags are filled in: sizes, the learning rate and its schedule, the weight decay.
//
// Threads: pure function.
// Errors:  InvalidArgument: one sentence that names the flag, its value and what it may be.

#ifndef EVENKEEL_TRAINER_TRAIN_OPTIONS_H_
#define EVENKEEL_TRAINER_TRAIN_OPTIONS_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "evenkeel/bucket/planner.h"
#include "evenkeel/bucket/trainability.h"
#include "evenkeel/comm/types.h"
#include "evenkeel/comm/verify.h"
#include "evenkeel/join/step_divisor.h"
#include "evenkeel/trainer/augment.h"
#include "evenkeel/trainer/checkpoint/checkpoint_options.h"
#include "evenkeel/trainer/cnn.h"
#include "evenkeel/trainer/freeze_schedule.h"
#include "evenkeel/trainer/gpt/gpt_options.h"
#include "evenkeel/trainer/learning_rate.h"
#include "evenkeel/trainer/training_data.h"
#include "evenkeel/zero_optim/update_rule.h"

namespace evenkeel {

inline constexpr char kDefaultHidden[] = "64";
inline constexpr int kDefaultRanks = 2;  // On the CPU.
inline constexpr int64_t kDefaultCheckpointEvery = 500;

// Named like the flags, with their defaults.
struct TrainFlags {
  std::string model = "cnn";
  std::optional<std::string> hidden;  // None: not given. So with the others whose default depends on the model.
  std::optional<std::string> preset;
  std::optional<int64_t> layers;
  std::optional<int64_t> width;
  std::optional<int64_t> heads;
  std::optional<int64_t> context;
  std::optional<double> dropout;
  std::string compute = "float32";
  double loss_scale = 65536;
  std::optional<std::string> widths;
  std::optional<int> blocks;
  std::optional<std::string> data;
  std::string test_data;
  std::optional<bool> mirror;
  std::optional<int> shift;
  bool shuffle = true;
  uint64_t seed = 0;
  std::string device = "auto";
  std::optional<int> nproc;
  std::string backend = "auto";
  std::optional<int> epochs;
  int64_t max_steps = 0;
  std::optional<int64_t> batch_size;
  int64_t accumulate = 1;
  std::string rank_steps;
  std::string optimizer = "adamw";
  std::optional<double> lr;
  std::string lr_decay = "auto";
  std::optional<int64_t> warmup;
  double momentum = 0;
  std::optional<double> weight_decay;
  std::optional<double> clip;
  bool zero = true;
  std::string shards = "slices";
  bool join = true;
  std::optional<std::string> divide_by;
  bool stop_early = false;
  std::string on_failure = "stop";
  std::string lost_shard = "refuse";
  std::string verify;  // Empty: as the environment says.
  double bucket_cap_mb = 25;
  double first_bucket_mb = 1;
  bool grad_view = false;
  std::string auto_refresh_trainable = "always";
  std::string freeze;
  std::string init;
  std::string save;
  std::string checkpoint_dir;
  std::optional<int64_t> checkpoint_every;
  std::optional<int> keep;
  std::optional<std::string> resume;
  std::string metrics;
  std::string tensorboard;
  std::string prometheus;
  bool dry_run = false;
  std::string flight;
  std::string report;
  std::string trace;
};

enum class ModelKind { kMlp, kCnn, kGpt };
enum class DeviceKind { kAuto, kCpu, kCuda };
enum class BackendKind { kAuto, kLocal, kShm, kGloo, kHierarchical, kNccl };
// How the optimizer's state is spread over the ranks.
enum class Sharding { kNone, kTensors, kSlices };

struct TrainOptions {
  ModelKind model = ModelKind::kCnn;
  std::vector<int> hidden;          // Units of each hidden layer of the mlp.
  CnnOptions cnn;                   // The data says of which images,
  GptOptions gpt;                   // and of which vocabulary.
  DType compute = DType::kFloat32;  // Of factors of products; the gpt's options have it, too.
  double loss_scale = 65536;        // That losses begin with, of float16.
  uint64_t seed = 0;

  DataOptions data;
  AugmentOptions augment;  // Nothing, by default.
  bool shuffle = true;
  int epochs = 0;
  int64_t max_steps = 0;            // 0: no limit.
  int64_t batch_size = 0;           // Samples per rank and pass.
  int64_t accumulate = 1;           // Passes per step.
  std::vector<int64_t> rank_steps;  // Empty: all that the data has.

  DeviceKind device = DeviceKind::kAuto;  // ChooseDevice() (choose_device.h) settles these three.
  int nproc = 0;
  bool nproc_is_given = false;
  BackendKind backend = BackendKind::kAuto;

  UpdateRule rule;
  Decay decay = Decay::kNone;
  int64_t warmup = 0;
  double clip = 0;  // Largest norm of all gradients; 0: any.
  Sharding sharding = Sharding::kSlices;

  bool joins = true;
  DivideBy divide_by = DivideBy::kSamples;
  bool stops_early = false;

  bool goes_on = false;              // When a rank is lost, the others go on.
  bool lost_shard_is_fresh = false;  // Its part of a sharded optimizer's state begins anew; goes_on needs it then.
  std::optional<VerifyLevel> verify;

  std::vector<Bytes> bucket_caps;
  bool gradients_are_views = false;
  TrainabilityPolicy trainability = TrainabilityPolicy::kAlways;
  int64_t check_trainable_every = 1;  // With kEveryN.
  FreezeSchedule freeze;

  CheckpointOptions checkpoints;

  std::string init_file;  // Of these, empty: none.
  std::string save_file;
  std::string metrics_file;
  std::string tensorboard_folder;
  std::string prometheus_file;
  std::string flight_folder;
  std::string report_file;
  std::string trace_file;

  bool dry_run = false;  // A few steps, nothing is written, and what the run would do and need is told.

  bool wants_record() const { return !report_file.empty() || !trace_file.empty(); }
  int64_t samples_per_step() const { return batch_size * accumulate; }  // Of one rank.
};

// As --model has it.
absl::string_view NameOf(ModelKind model);

absl::StatusOr<TrainOptions> MakeTrainOptions(const TrainFlags& flags);

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_TRAIN_OPTIONS_H_
