#include "evenkeel/trainer/train_options.h"

#include <cmath>
#include <initializer_list>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/trainer/data/text_dataset.h"
#include "evenkeel/trainer/idx_dataset.h"
#include "evenkeel/zero_optim/loss_scaler.h"

namespace evenkeel {
namespace {

constexpr int kMaxRanksPerHost = 1024;  // More are a typing error, not a wish.
constexpr int kMaxBlocks = 16;          // MakeCnn's.
constexpr int kMaxShift = 16;
constexpr int64_t kMaxAccumulated = 1 << 20;
constexpr double kMaxBucketMegabytes = 100000;

template <typename Value>
using Choices = std::initializer_list<std::pair<absl::string_view, Value>>;

template <typename Value>
absl::StatusOr<Value> Choose(absl::string_view flag, absl::string_view given, Choices<Value> choices) {
  for (const auto& [name, value] : choices) {
    if (name == given) return value;
  }
  const auto name_of = [](std::string* out, const auto& choice) { absl::StrAppend(out, choice.first); };
  return absl::InvalidArgumentError(
      absl::StrCat("--", flag, "=", given, " is not possible; choose ", absl::StrJoin(choices, ", ", name_of)));
}

template <typename Number>
absl::Status CheckRange(absl::string_view flag, Number given, Number lowest, Number highest) {
  if (given >= lowest && given <= highest) return absl::OkStatus();  // False for NaN.
  return absl::InvalidArgumentError(
      absl::StrCat("--", flag, "=", given, " is not possible; it goes from ", lowest, " to ", highest));
}

template <typename Number>
absl::Status CheckAtLeast(absl::string_view flag, Number given, Number lowest) {
  if (given >= lowest && std::isfinite(static_cast<double>(given))) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("--", flag, "=", given, " is not possible; it must be at least ", lowest));
}

bool ParseCount(absl::string_view text, int64_t& count) {
  return !text.empty() && absl::ascii_isdigit(text[0]) && absl::SimpleAtoi(text, &count);
}

absl::StatusOr<std::vector<int64_t>> ParseRankSteps(absl::string_view text) {
  std::vector<int64_t> steps;
  if (text.empty()) return steps;
  for (absl::string_view part : absl::StrSplit(text, ',')) {
    if (!ParseCount(part, steps.emplace_back())) {
      return absl::InvalidArgumentError(
          absl::StrCat("--rank_steps=", text, ": \"", part, "\" is no number of batches; an example is 3,5"));
    }
  }
  return steps;
}

struct SizeLimits {
  absl::string_view unit;
  int64_t highest;
  size_t most;
};

constexpr SizeLimits kHiddenLimits{"units", 65536, 16};  // MakeMlp's.
constexpr SizeLimits kWidthLimits{"channels", 1024, 5};  // MakeCnn's.

// "64" or "1024,1024".
absl::StatusOr<std::vector<int>> ParseSizes(absl::string_view flag, absl::string_view text, const SizeLimits& limits) {
  std::vector<int> sizes;
  for (absl::string_view part : absl::StrSplit(text, ',')) {
    int64_t size = 0;
    if (!ParseCount(part, size) || size < 1 || size > limits.highest) {
      return absl::InvalidArgumentError(absl::StrCat("--", flag, "=", text, " is not possible; it is 1 to ",
                                                     limits.highest, " ", limits.unit,
                                                     ", or several such numbers: 32,64"));
    }
    sizes.push_back(static_cast<int>(size));
  }
  if (sizes.size() <= limits.most) return sizes;
  return absl::InvalidArgumentError(
      absl::StrCat("--", flag, " names ", sizes.size(), " layers; there may be up to ", limits.most));
}

absl::Status ParseRefresh(absl::string_view text, TrainOptions& options) {
  options.trainability = text == "always"  ? TrainabilityPolicy::kAlways
                         : text == "never" ? TrainabilityPolicy::kNever
                                           : TrainabilityPolicy::kEveryN;
  if (options.trainability != TrainabilityPolicy::kEveryN) return absl::OkStatus();
  if (ParseCount(text, options.check_trainable_every) && options.check_trainable_every >= 1) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("--auto_refresh_trainable=", text, " is not possible; choose always, never, or a number of steps"));
}

// What suits a model, where nothing else is said.
struct ModelDefaults {
  int epochs;
  int64_t batch_size;
  double learning_rate;  // Of adam and adamw.
  double weight_decay;   // Of adamw.
  Decay decay;
  int64_t warmup;
  double clip;
};

ModelDefaults DefaultsOf(ModelKind model) {
  switch (model) {
    case ModelKind::kMlp:
      return {4, 96, 1e-3, AdamW().weight_decay, Decay::kNone, 0, 0};
    case ModelKind::kCnn:  // 60,000 samples are 1875 batches: an odd number, so two ranks are uneven.
      return {8, 32, 3e-3, 0.05, Decay::kLinear, 100, 0};
    default:
      return {6, 8, 3e-3, 0.1, Decay::kCosine, 100, 1};
  }
}

absl::StatusOr<UpdateRule> ParseRule(const TrainFlags& flags, ModelKind model) {
  enum class Kind { kSgd, kAdam, kAdamW };
  EK_ASSIGN_OR_RETURN(const Kind kind,
                      Choose<Kind>("optimizer", flags.optimizer,
                                   {{"sgd", Kind::kSgd}, {"adam", Kind::kAdam}, {"adamw", Kind::kAdamW}}));
  const double lr = flags.lr.value_or(flags.optimizer == "sgd" ? 0.1 : DefaultsOf(model).learning_rate);
  EK_RETURN_IF_ERROR(CheckAtLeast("lr", lr, 0.0));
  EK_RETURN_IF_ERROR(CheckAtLeast("momentum", flags.momentum, 0.0));
  if (kind != Kind::kSgd && flags.momentum != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("--momentum is for --optimizer=sgd; ", flags.optimizer, " has its own"));
  }
  const double decay = flags.weight_decay.value_or(kind == Kind::kAdamW ? DefaultsOf(model).weight_decay : 0);
  EK_RETURN_IF_ERROR(CheckAtLeast("weight_decay", decay, 0.0));
  switch (kind) {
    case Kind::kSgd:
      return Sgd{.learning_rate = lr, .momentum = flags.momentum, .weight_decay = decay};
    case Kind::kAdam:
      return Adam{.learning_rate = lr, .weight_decay = decay};
    default:
      return AdamW{.learning_rate = lr, .weight_decay = decay};
  }
}

absl::StatusOr<Decay> ParseDecay(const TrainFlags& flags, ModelKind model) {
  const Decay usual = DefaultsOf(model).decay;
  return Choose<Decay>(
      "lr_decay", flags.lr_decay,
      {{"auto", usual}, {"none", Decay::kNone}, {"linear", Decay::kLinear}, {"cosine", Decay::kCosine}});
}

// Flags that are for one model only.
absl::Status CheckModelFlags(const TrainFlags& flags, ModelKind model) {
  if (flags.hidden.has_value() && model != ModelKind::kMlp) {
    return absl::InvalidArgumentError(
        absl::StrCat("--hidden is for --model=mlp; ", flags.model, " has no hidden units to choose"));
  }
  const bool is_gpt = model == ModelKind::kGpt;
  if (model != ModelKind::kCnn && (flags.widths.has_value() || flags.blocks.has_value())) {
    return absl::InvalidArgumentError(
        absl::StrCat("--", flags.widths.has_value() ? "widths" : "blocks", " is for --model=cnn, not ", flags.model));
  }
  if (is_gpt && (flags.mirror.has_value() || flags.shift.has_value())) {
    return absl::InvalidArgumentError(absl::StrCat("--", flags.mirror.has_value() ? "mirror" : "shift",
                                                   " is for images, and --model=gpt is for text"));
  }
  if (is_gpt) return absl::OkStatus();
  const std::pair<absl::string_view, bool> given[] = {
      {"preset", flags.preset.has_value()},   {"layers", flags.layers.has_value()},
      {"width", flags.width.has_value()},     {"heads", flags.heads.has_value()},
      {"context", flags.context.has_value()}, {"dropout", flags.dropout.has_value()}};
  for (const auto& [flag, is_given] : given) {
    if (is_given) return absl::InvalidArgumentError(absl::StrCat("--", flag, " is for --model=gpt, not ", flags.model));
  }
  return absl::OkStatus();
}

absl::StatusOr<GptOptions> ParseGpt(const TrainFlags& flags) {
  absl::StatusOr<GptOptions> preset = GptPreset(flags.preset.value_or("mini"));
  if (!preset.ok()) return Annotate(preset.status(), "--preset");
  GptOptions gpt = *preset;
  gpt.layers = flags.layers.value_or(gpt.layers);
  gpt.width = flags.width.value_or(gpt.width);
  gpt.heads = flags.heads.value_or(gpt.heads);
  gpt.context = flags.context.value_or(gpt.context);
  gpt.dropout = flags.dropout.value_or(gpt.dropout);
  gpt.seed = flags.seed;
  if (flags.compute == "bfloat16") gpt.compute = GptCompute::kBFloat16;
  return gpt;
}

// By samples, ranks' batches weigh what they hold. Without join the ranks have equally many, and their number is the
// divisor; a smaller last batch weighs as much as the others then.
absl::StatusOr<DivideBy> ParseDivisor(const TrainFlags& flags) {
  EK_ASSIGN_OR_RETURN(const DivideBy divide_by, Choose<DivideBy>("divide_by", flags.divide_by.value_or("samples"),
                                                                 {{"samples", DivideBy::kSamples},
                                                                  {"initial", DivideBy::kInitialWorldSize},
                                                                  {"effective", DivideBy::kActiveRanks}}));
  if (flags.join) return divide_by;
  if (!flags.divide_by.has_value() || divide_by == DivideBy::kInitialWorldSize) return DivideBy::kInitialWorldSize;
  return absl::InvalidArgumentError(absl::StrCat("--divide_by=", *flags.divide_by, " needs --join"));
}

absl::StatusOr<BackendKind> ParseBackend(absl::string_view text) {
  return Choose<BackendKind>("backend", text,
                             {{"auto", BackendKind::kAuto},
                              {"local", BackendKind::kLocal},
                              {"shm", BackendKind::kShm},
                              {"gloo", BackendKind::kGloo},
                              {"hierarchical", BackendKind::kHierarchical},
                              {"nccl", BackendKind::kNccl}});
}

absl::Status CheckNumbers(const TrainFlags& flags) {
  EK_RETURN_IF_ERROR(CheckRange("nproc", flags.nproc.value_or(1), 1, kMaxRanksPerHost));
  EK_RETURN_IF_ERROR(CheckAtLeast("epochs", flags.epochs.value_or(1), 1));
  EK_RETURN_IF_ERROR(CheckAtLeast("max_steps", flags.max_steps, int64_t{0}));
  EK_RETURN_IF_ERROR(CheckRange("batch_size", flags.batch_size.value_or(1), int64_t{1}, int64_t{INT32_MAX}));
  EK_RETURN_IF_ERROR(CheckRange("blocks", flags.blocks.value_or(1), 1, kMaxBlocks));
  EK_RETURN_IF_ERROR(CheckRange("shift", flags.shift.value_or(0), 0, kMaxShift));
  EK_RETURN_IF_ERROR(CheckRange("accumulate", flags.accumulate, int64_t{1}, kMaxAccumulated));
  EK_RETURN_IF_ERROR(CheckAtLeast("warmup", flags.warmup.value_or(0), int64_t{0}));
  EK_RETURN_IF_ERROR(CheckAtLeast("clip", flags.clip.value_or(0), 0.0));
  EK_RETURN_IF_ERROR(CheckRange("bucket_cap_mb", flags.bucket_cap_mb, 0.0, kMaxBucketMegabytes));
  return CheckRange("first_bucket_mb", flags.first_bucket_mb, 0.0, kMaxBucketMegabytes);
}

// What is about certain ranks, or about equal numbers of batches, has no meaning for the ranks that are left.
absl::Status CheckGoingOn(const TrainFlags& flags) {
  const std::string why = "--on_failure=continue deals out again what is left of an epoch: ";
  if (!flags.rank_steps.empty()) {
    return absl::InvalidArgumentError(absl::StrCat(why, "--rank_steps can't say for which ranks"));
  }
  if (!flags.join) return absl::InvalidArgumentError(absl::StrCat(why, "it may be uneven then, and needs --join"));
  if (flags.stop_early) {
    return absl::InvalidArgumentError(absl::StrCat(why, "--stop_early would end there for another reason"));
  }
  if (flags.backend == "local") {
    return absl::InvalidArgumentError("--on_failure=continue is for ranks that are processes; choose --backend=auto");
  }
  if (flags.zero && flags.lost_shard == "refuse") {
    return absl::InvalidArgumentError(
        "--on_failure=continue could not go on: with --zero (the default) a lost rank takes its part of the "
        "optimizer's "
        "state with it; choose --nozero, or --lost_shard=fresh to begin that part anew");
  }
  return absl::OkStatus();
}

absl::StatusOr<CheckpointOptions> ParseCheckpoints(const TrainFlags& flags) {
  CheckpointOptions options{.folder = flags.checkpoint_dir,
                            .every = flags.checkpoint_every.value_or(kDefaultCheckpointEvery),
                            .keep = flags.keep.value_or(CheckpointOptions().keep),
                            .resume = flags.resume.value_or(kResumeAuto)};
  EK_RETURN_IF_ERROR(CheckAtLeast("checkpoint_every", options.every, int64_t{0}));
  EK_RETURN_IF_ERROR(CheckAtLeast("keep", options.keep, 0));
  if (options.resume.empty()) {
    return absl::InvalidArgumentError("--resume= is not possible; choose auto, never, or the path of a checkpoint");
  }
  if (!options.folder.empty()) return options;
  const bool is_path = options.resume != kResumeAuto && options.resume != kResumeNever;
  if (!flags.checkpoint_every.has_value() && !flags.keep.has_value() && (!flags.resume.has_value() || is_path)) {
    return options;
  }
  return absl::InvalidArgumentError(
      "--checkpoint_every, --keep and --resume are for the checkpoints in --checkpoint_dir; give that, too");
}

Bytes Megabytes(double megabytes) { return Bytes{static_cast<int64_t>(megabytes * (1 << 20))}; }

}  // namespace

absl::string_view NameOf(ModelKind model) {
  switch (model) {
    case ModelKind::kMlp:
      return "mlp";
    case ModelKind::kCnn:
      return "cnn";
    case ModelKind::kGpt:
      return "gpt";
  }
  return "";
}

absl::StatusOr<TrainOptions> MakeTrainOptions(const TrainFlags& flags) {
  EK_RETURN_IF_ERROR(CheckNumbers(flags));
  TrainOptions options{
      .seed = flags.seed,
      .shuffle = flags.shuffle,
      .max_steps = flags.max_steps,
      .accumulate = flags.accumulate,
      .nproc = flags.nproc.value_or(kDefaultRanks),
      .nproc_is_given = flags.nproc.has_value(),
      .joins = flags.join,
      .stops_early = flags.stop_early,
      .bucket_caps = {Megabytes(flags.first_bucket_mb), Megabytes(flags.bucket_cap_mb)},
      .gradients_are_views = flags.grad_view,
      .init_file = flags.init,
      .save_file = flags.save,
      .metrics_file = flags.metrics,
      .tensorboard_folder = flags.tensorboard,
      .prometheus_file = flags.prometheus,
      .flight_folder = flags.flight,
      .report_file = flags.report,
      .trace_file = flags.trace,
  };
  EK_ASSIGN_OR_RETURN(
      options.model, Choose<ModelKind>("model", flags.model,
                                       {{"mlp", ModelKind::kMlp}, {"cnn", ModelKind::kCnn}, {"gpt", ModelKind::kGpt}}));
  options.dry_run = flags.dry_run;
  EK_RETURN_IF_ERROR(CheckModelFlags(flags, options.model));
  const ModelDefaults defaults = DefaultsOf(options.model);
  options.epochs = flags.epochs.value_or(defaults.epochs);
  options.batch_size = flags.batch_size.value_or(defaults.batch_size);
  options.warmup = flags.warmup.value_or(defaults.warmup);
  options.clip = flags.clip.value_or(defaults.clip);
  EK_ASSIGN_OR_RETURN(options.compute, Choose<DType>("compute", flags.compute,
                                                     {{"float32", DType::kFloat32},
                                                      {"bfloat16", DType::kBFloat16},
                                                      {"float16", DType::kFloat16},
                                                      {"float64", DType::kFloat64}}));
  if (options.compute == DType::kFloat16 && options.model == ModelKind::kGpt) {
    return absl::InvalidArgumentError("--compute=float16 is for --model=mlp and cnn, not gpt; choose bfloat16");
  }
  if (options.compute == DType::kFloat64 && options.model != ModelKind::kMlp) {
    return absl::InvalidArgumentError(
        absl::StrCat("--compute=float64 is for --model=mlp, not ", NameOf(options.model)));
  }
  EK_RETURN_IF_ERROR(CheckRange("loss_scale", flags.loss_scale, 1.0, LossScalerOptions().largest_scale));
  options.loss_scale = flags.loss_scale;
  EK_ASSIGN_OR_RETURN(options.gpt, ParseGpt(flags));
  if (flags.widths.has_value()) {
    EK_ASSIGN_OR_RETURN(options.cnn.widths, ParseSizes("widths", *flags.widths, kWidthLimits));
  }
  options.cnn.blocks_per_stage = flags.blocks.value_or(options.cnn.blocks_per_stage);
  options.cnn.seed = flags.seed;
  options.data = {.path = flags.data.value_or(options.model == ModelKind::kGpt ? kJargonFile : kFashionMnistFolder),
                  .context = options.gpt.context,
                  .test_path = flags.test_data};
  // Clothes may be mirrored, digits and letters may not: other data is taken as it is unless it is said.
  const bool is_known = options.model == ModelKind::kCnn && options.data.path == kFashionMnistFolder;
  options.augment = {.max_shift = flags.shift.value_or(is_known ? 1 : 0),
                     .mirrors = flags.mirror.value_or(is_known),
                     .seed = flags.seed};
  EK_ASSIGN_OR_RETURN(options.hidden, ParseSizes("hidden", flags.hidden.value_or(kDefaultHidden), kHiddenLimits));
  EK_ASSIGN_OR_RETURN(options.rank_steps, ParseRankSteps(flags.rank_steps));
  EK_ASSIGN_OR_RETURN(
      options.device,
      Choose<DeviceKind>("device", flags.device,
                         {{"auto", DeviceKind::kAuto}, {"cpu", DeviceKind::kCpu}, {"cuda", DeviceKind::kCuda}}));
  EK_ASSIGN_OR_RETURN(options.backend, ParseBackend(flags.backend));
  EK_ASSIGN_OR_RETURN(options.rule, ParseRule(flags, options.model));
  EK_ASSIGN_OR_RETURN(options.decay, ParseDecay(flags, options.model));
  EK_ASSIGN_OR_RETURN(
      options.sharding,
      Choose<Sharding>("shards", flags.shards, {{"slices", Sharding::kSlices}, {"tensors", Sharding::kTensors}}));
  if (!flags.zero && options.sharding != Sharding::kSlices) {
    return absl::InvalidArgumentError(absl::StrCat("--shards=", flags.shards, " is for --zero"));
  }
  if (!flags.zero) options.sharding = Sharding::kNone;
  EK_ASSIGN_OR_RETURN(options.divide_by, ParseDivisor(flags));
  EK_RETURN_IF_ERROR(ParseRefresh(flags.auto_refresh_trainable, options));
  absl::StatusOr<FreezeSchedule> freeze = ParseFreezeSchedule(flags.freeze);
  if (!freeze.ok()) return Annotate(freeze.status(), "--freeze");
  options.freeze = *std::move(freeze);
  EK_ASSIGN_OR_RETURN(options.goes_on,
                      Choose<bool>("on_failure", flags.on_failure, {{"stop", false}, {"continue", true}}));
  EK_ASSIGN_OR_RETURN(options.lost_shard_is_fresh,
                      Choose<bool>("lost_shard", flags.lost_shard, {{"refuse", false}, {"fresh", true}}));
  if (options.goes_on) EK_RETURN_IF_ERROR(CheckGoingOn(flags));
  EK_ASSIGN_OR_RETURN(options.checkpoints, ParseCheckpoints(flags));
  if (options.lost_shard_is_fresh && !(options.goes_on && flags.zero)) {
    return absl::InvalidArgumentError("--lost_shard=fresh is for --on_failure=continue with --zero");
  }
  if (!flags.verify.empty()) {
    EK_ASSIGN_OR_RETURN(options.verify, Choose<VerifyLevel>("verify", flags.verify,
                                                            {{"off", VerifyLevel::kOff},
                                                             {"positions", VerifyLevel::kPositions},
                                                             {"every", VerifyLevel::kEvery}}));
  }
  if (flags.stop_early && !flags.join) {
    return absl::InvalidArgumentError("--stop_early needs --join: without it nobody notices that a rank has run dry");
  }
  return options;
}

}  // namespace evenkeel
