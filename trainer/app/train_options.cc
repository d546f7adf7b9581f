#include "evenkeel/trainer/app/train_options.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/types/span.h"
#include "evenkeel/comm/base/names.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/trainer/checkpoint/checkpoint_folder.h"
#include "evenkeel/trainer/data/image_dataset.h"
#include "evenkeel/trainer/data/text_dataset.h"
#include "evenkeel/trainer/gpt/gpt_file.h"
#include "evenkeel/trainer/models/mlp.h"
#include "evenkeel/trainer/models/model_file.h"
#include "evenkeel/trainer/tokenizer/tokenizer_file.h"
#include "evenkeel/zero_optim/checkpoint/safetensors.h"
#include "evenkeel/zero_optim/loss_scaler.h"

namespace evenkeel {
namespace {

constexpr int kMaxRanksPerHost = 1024;  // Larger values are taken for typing errors.
constexpr int kMaxShift = 16;
constexpr int64_t kMaxAccumulated = 1 << 20;
constexpr int64_t kMaxSampleTokens = 10'000;  // The other ranks wait for them.
constexpr double kMaxBucketMegabytes = 100000;
constexpr int kMaxPowerSgdRank = 1024;

template <typename... Parts>
absl::Status InvalidArgument(const Parts&... parts) {
  return absl::InvalidArgumentError(absl::StrCat(parts...));
}

using Names = absl::Span<const absl::string_view>;

// In the order of the enumerations.
constexpr absl::string_view kModels[] = {"mlp", "cnn", "gpt"};
constexpr absl::string_view kDevices[] = {"auto", "cpu", "cuda"};
constexpr absl::string_view kBackends[] = {"auto", "local", "shm", "tcp", "hierarchical", "nccl"};
constexpr absl::string_view kCommHooks[] = {"none", "fp16", "bf16", "int8", "power_sgd"};
constexpr absl::string_view kDivisors[] = {"initial", "effective", "samples"};

// Returns the value whose place in the list of names is that of `given`.
template <typename Value>
absl::StatusOr<Value> Choose(absl::string_view flag, absl::string_view given, Names names) {
  if (const auto value = internal::ValueIn<Value>(names, given)) return *value;
  return InvalidArgument("--", flag, "=", given, " is not a valid value; choose ",
                         absl::StrJoin(names, ", "));
}

template <typename Number>
absl::Status CheckRange(absl::string_view flag, Number given, Number lowest, Number highest) {
  if (given >= lowest && given <= highest) return absl::OkStatus();  // False for NaN.
  return InvalidArgument("--", flag, "=", given, " is out of range; choose a value from ", lowest,
                         " to ", highest);
}

template <typename Number>
absl::Status CheckAtLeast(absl::string_view flag, Number given, Number lowest) {
  if (given >= lowest && std::isfinite(static_cast<double>(given))) return absl::OkStatus();
  return InvalidArgument("--", flag, "=", given, " is out of range; it must be at least ", lowest);
}

absl::StatusOr<std::vector<int64_t>> ParseRankSteps(absl::string_view text) {
  std::vector<int64_t> steps;
  if (text.empty()) return steps;
  for (absl::string_view part : absl::StrSplit(text, ',')) {
    if (!ParseCount(part, steps.emplace_back())) {
      return InvalidArgument("--rank_steps=", text, ": \"", part,
                             "\" is not a number of batches; an example is 3,5");
    }
  }
  return steps;
}

struct SizeLimits {
  absl::string_view unit;
  int64_t highest;
  size_t most;
};

constexpr SizeLimits kHiddenLimits{"units", MlpOptions::kMaxUnits, MlpOptions::kMaxLayers};
constexpr SizeLimits kWidthLimits{"channels", CnnOptions::kMaxChannels, CnnOptions::kMaxWidths};

// "64" or "1024,1024".
absl::StatusOr<std::vector<int>> ParseSizes(absl::string_view flag, absl::string_view text,
                                            const SizeLimits& limits) {
  std::vector<int> sizes;
  for (absl::string_view part : absl::StrSplit(text, ',')) {
    int64_t size = 0;
    if (!ParseCount(part, size) || size < 1 || size > limits.highest) {
      return InvalidArgument("--", flag, "=", text, " is not a valid value; choose 1 to ",
                             limits.highest, " ", limits.unit, ", or several such numbers: 32,64");
    }
    sizes.push_back(static_cast<int>(size));
  }
  if (sizes.size() <= limits.most) return sizes;
  return InvalidArgument("--", flag, " names ", sizes.size(), " layers; the limit is ",
                         limits.most);
}

absl::Status ParseRefresh(absl::string_view text, TrainOptions& options) {
  options.trainability = text == "always"  ? TrainabilityPolicy::kAlways
                         : text == "never" ? TrainabilityPolicy::kNever
                                           : TrainabilityPolicy::kEveryN;
  if (options.trainability != TrainabilityPolicy::kEveryN) return absl::OkStatus();
  if (ParseCount(text, options.check_trainable_every) && options.check_trainable_every >= 1)
    return absl::OkStatus();
  return InvalidArgument("--auto_refresh_trainable=", text,
                         " is not a valid value; choose always, never, or a number of steps");
}

// The defaults of a model.
struct ModelDefaults {
  int epochs;
  int64_t batch_size;
  double learning_rate;  // For adam and adamw.
  double weight_decay;   // For adamw.
  Decay decay;
  int64_t warmup;
  double clip;
};

ModelDefaults DefaultsOf(ModelKind model) {
  switch (model) {
    case ModelKind::kMlp:
      return {4, 96, 1e-3, AdamW().weight_decay, Decay::kNone, 0, 0};
    case ModelKind::kCnn:  // 60,000 samples are 1875 batches: an odd number, so two ranks are
                           // uneven.
      return {8, 32, 3e-3, 0.05, Decay::kLinear, 100, 0};
    default:
      return {6, 8, 3e-3, 0.1, Decay::kCosine, 100, 1};
  }
}

absl::StatusOr<UpdateRule> ParseRule(const TrainFlags& flags, ModelKind model) {
  enum class Kind { kSgd, kAdam, kAdamW };
  EK_ASSIGN_OR_RETURN(const Kind kind,
                      Choose<Kind>("optimizer", flags.optimizer, {"sgd", "adam", "adamw"}));
  const double lr =
      flags.lr.value_or(flags.optimizer == "sgd" ? 0.1 : DefaultsOf(model).learning_rate);
  EK_RETURN_IF_ERROR(CheckAtLeast("lr", lr, 0.0));
  EK_RETURN_IF_ERROR(CheckAtLeast("momentum", flags.momentum, 0.0));
  if (kind != Kind::kSgd && flags.momentum != 0)
    return InvalidArgument("--momentum is for --optimizer=sgd; ", flags.optimizer, " has its own");
  const double decay =
      flags.weight_decay.value_or(kind == Kind::kAdamW ? DefaultsOf(model).weight_decay : 0);
  EK_RETURN_IF_ERROR(CheckAtLeast("weight_decay", decay, 0.0));
  const bool has_betas =
      flags.beta1.has_value() || flags.beta2.has_value() || flags.epsilon.has_value();
  if (kind == Kind::kSgd && has_betas)
    return InvalidArgument("--beta1, --beta2 and --epsilon are for --optimizer=adam and adamw");
  UpdateRule rule = Sgd{.learning_rate = lr, .momentum = flags.momentum, .weight_decay = decay};
  const auto set = [&](auto adam) {
    adam.learning_rate = lr;
    adam.beta1 = flags.beta1.value_or(adam.beta1);
    adam.beta2 = flags.beta2.value_or(adam.beta2);
    adam.epsilon = flags.epsilon.value_or(adam.epsilon);
    adam.weight_decay = decay;
    rule = adam;
  };
  if (kind == Kind::kAdam) set(Adam());
  if (kind == Kind::kAdamW) set(AdamW());
  EK_RETURN_IF_ERROR(Annotate(Validate(rule), "--optimizer"));
  return rule;
}

absl::StatusOr<Decay> ParseDecay(const TrainFlags& flags, ModelKind model) {
  EK_ASSIGN_OR_RETURN(const int chosen, Choose<int>("lr_decay", flags.lr_decay,
                                                    {"auto", "none", "linear", "cosine"}));
  return chosen == 0 ? DefaultsOf(model).decay : static_cast<Decay>(chosen - 1);
}

// Checks flags that apply to one model only.
absl::Status CheckModelFlags(const TrainFlags& flags) {
  struct ModelFlag {
    absl::string_view name;
    bool is_given;
    absl::string_view models;
  };
  const ModelFlag table[] = {{"hidden", flags.hidden.has_value(), "mlp"},
                             {"sync_batch_norm", flags.sync_batch_norm, "cnn"},
                             {"widths", flags.widths.has_value(), "cnn"},
                             {"blocks", flags.blocks.has_value(), "cnn"},
                             {"mirror", flags.mirror.has_value(), "mlp and cnn"},
                             {"shift", flags.shift.has_value(), "mlp and cnn"},
                             {"preset", flags.preset.has_value(), "gpt"},
                             {"layers", flags.layers.has_value(), "gpt"},
                             {"width", flags.width.has_value(), "gpt"},
                             {"heads", flags.heads.has_value(), "gpt"},
                             {"context", flags.context.has_value(), "gpt"},
                             {"dropout", flags.dropout.has_value(), "gpt"},
                             {"vocabulary", flags.vocabulary.has_value(), "gpt"},
                             {"tokenizer", !flags.tokenizer.empty(), "gpt"},
                             {"sample_every", flags.sample_every != 0, "gpt"}};
  for (const auto& [flag, is_given, models] : table) {
    if (is_given && !absl::StrContains(models, flags.model))
      return InvalidArgument("--", flag, " is for --model=", models, ", not ", flags.model);
  }
  // Ranks whose last batches have different numbers of passes would send different collectives.
  if (flags.sync_batch_norm && flags.accumulate > 1) {
    return InvalidArgument("--sync_batch_norm and --accumulate=", flags.accumulate,
                           " exclude each other; use a larger --batch_size");
  }
  if (flags.sync_batch_norm && (!flags.join || flags.on_failure == "continue")) {
    return InvalidArgument("--sync_batch_norm needs --join and --on_failure=stop");
  }
  return absl::OkStatus();
}

// Sizes of the mlp and the cnn are in the shapes of --init. Without flags they are taken from
// there; flags that differ are reported when the weights are loaded. A file that is missing is
// reported by rank 0, since other hosts need not have it.
absl::Status TakeSizes(const TrainFlags& flags, TrainOptions& options) {
  const absl::StatusOr<std::string> path = FindWeights(flags.init);
  if (!path.ok()) return absl::OkStatus();
  const absl::StatusOr<SafetensorsFile> file = SafetensorsFile::Read(*path);
  if (absl::IsNotFound(file.status())) return absl::OkStatus();
  EK_RETURN_IF_ERROR(file.status());
  if (options.model == ModelKind::kMlp) {
    if (flags.hidden.has_value()) return absl::OkStatus();
    EK_ASSIGN_OR_RETURN(options.hidden, Annotate(HiddenUnitsOf(*file), *path));
    return absl::OkStatus();
  }
  EK_ASSIGN_OR_RETURN(const CnnOptions sizes, Annotate(CnnSizesOf(*file), *path));
  if (!flags.widths.has_value()) options.cnn.widths = sizes.widths;
  if (!flags.blocks.has_value()) options.cnn.blocks_per_stage = sizes.blocks_per_stage;
  return absl::OkStatus();
}

// A gpt that begins with given weights has their sizes; a flag with another one is an error.
absl::Status TakeGptSizes(const TrainFlags& flags, TrainOptions& options) {
  EK_ASSIGN_OR_RETURN(const std::string path, FindWeights(flags.init));
  EK_ASSIGN_OR_RETURN(const GptFile file, GptFile::Read(path));
  const GptOptions& found = file.options();
  const auto take = [&](absl::string_view flag, bool is_given, int64_t of_file,
                        int64_t& size) -> absl::Status {
    if (is_given && size != of_file) {
      return InvalidArgument(path, " is a gpt with ", flag, " ", of_file, ", but --", flag, " is ",
                             size);
    }
    size = of_file;
    return absl::OkStatus();
  };
  GptOptions& gpt = options.gpt;
  const bool is_preset = flags.preset.has_value();
  EK_RETURN_IF_ERROR(
      take("layers", is_preset || flags.layers.has_value(), found.layers, gpt.layers));
  EK_RETURN_IF_ERROR(take("width", is_preset || flags.width.has_value(), found.width, gpt.width));
  // Without a number in the file, any is possible.
  const bool has_heads = is_preset || flags.heads.has_value();
  if (file.has_heads() || !has_heads)
    EK_RETURN_IF_ERROR(take("heads", has_heads, found.heads, gpt.heads));
  EK_RETURN_IF_ERROR(
      take("vocabulary", flags.vocabulary.has_value(), found.vocabulary,
           options.data.vocabulary.emplace(flags.vocabulary.value_or(found.vocabulary))));
  if (flags.context.value_or(0) > found.context) {
    return InvalidArgument(path, " is a gpt with context ", found.context, ", but --context is ",
                           *flags.context);
  }
  gpt.context = found.context;
  gpt.text_tokens = found.text_tokens;
  options.data.context = flags.context.value_or(found.context);
  options.data.may_make_tokenizer = false;
  if (options.data.tokenizer.empty()) options.data.tokenizer = TokenizerBeside(path);
  return absl::OkStatus();
}

absl::Status ParseGpt(const TrainFlags& flags, GptOptions& gpt) {
  EK_ASSIGN_OR_RETURN(gpt, Annotate(GptPreset(flags.preset.value_or("mini")), "--preset"));
  gpt.layers = flags.layers.value_or(gpt.layers);
  gpt.width = flags.width.value_or(gpt.width);
  gpt.heads = flags.heads.value_or(gpt.heads);
  gpt.context = flags.context.value_or(gpt.context);
  gpt.dropout = flags.dropout.value_or(gpt.dropout);
  gpt.seed = flags.seed;
  if (flags.compute == "bfloat16") gpt.compute = GptCompute::kBFloat16;
  return absl::OkStatus();
}

absl::Status ParseCommHook(const TrainFlags& flags, TrainOptions& options) {
  EK_ASSIGN_OR_RETURN(options.comm_hook,
                      Choose<CommHook>("comm_hook", flags.comm_hook, kCommHooks));
  const CommHook hook = options.comm_hook;
  const bool is_power_sgd = hook == CommHook::kPowerSgd;
  if (!is_power_sgd && (flags.power_sgd_rank.has_value() || flags.power_sgd_start.has_value())) {
    return InvalidArgument("--power_sgd_rank and --power_sgd_start are for --comm_hook=power_sgd");
  }
  options.power_sgd_rank = flags.power_sgd_rank.value_or(options.power_sgd_rank);
  options.power_sgd_start = flags.power_sgd_start.value_or(options.power_sgd_start);
  EK_RETURN_IF_ERROR(CheckRange("power_sgd_rank", options.power_sgd_rank, 1, kMaxPowerSgdRank));
  EK_RETURN_IF_ERROR(CheckAtLeast("power_sgd_start", options.power_sgd_start, int64_t{0}));
  if ((is_power_sgd || hook == CommHook::kInt8) && options.sharding == Sharding::kSlices) {
    return InvalidArgument(
        "--comm_hook=", flags.comm_hook,
        " reduces whole gradients, not the equal slices of --zero (the default); "
        "choose --nozero or --shards=tensors, or --comm_hook=bf16");
  }
  if (hook != CommHook::kNone && options.compute == DType::kFloat64)
    return InvalidArgument("--comm_hook=", flags.comm_hook,
                           " would round the reference computation of --compute=float64; "
                           "choose --comm_hook=none");
  return absl::OkStatus();
}

// With samples as the divisor, batches are weighted by their size. Without join the divisor is the
// number of ranks, since all have equally many batches; a smaller last batch has the same weight as
// the others then.
absl::StatusOr<DivideBy> ParseDivisor(const TrainFlags& flags) {
  EK_ASSIGN_OR_RETURN(
      const DivideBy divide_by,
      Choose<DivideBy>("divide_by", flags.divide_by.value_or("samples"), kDivisors));
  if (flags.join) return divide_by;
  if (!flags.divide_by.has_value() || divide_by == DivideBy::kInitialWorldSize)
    return DivideBy::kInitialWorldSize;
  return InvalidArgument("--divide_by=", *flags.divide_by, " needs --join");
}

absl::Status CheckNumbers(const TrainFlags& flags) {
  EK_RETURN_IF_ERROR(CheckRange("nproc", flags.nproc.value_or(1), 1, kMaxRanksPerHost));
  EK_RETURN_IF_ERROR(CheckAtLeast("epochs", flags.epochs.value_or(1), 1));
  EK_RETURN_IF_ERROR(CheckAtLeast("max_steps", flags.max_steps, int64_t{0}));
  EK_RETURN_IF_ERROR(
      CheckRange("batch_size", flags.batch_size.value_or(1), int64_t{1}, int64_t{INT32_MAX}));
  EK_RETURN_IF_ERROR(CheckRange("blocks", flags.blocks.value_or(1), 1, CnnOptions::kMaxBlocks));
  EK_RETURN_IF_ERROR(CheckRange("shift", flags.shift.value_or(0), 0, kMaxShift));
  EK_RETURN_IF_ERROR(CheckRange("accumulate", flags.accumulate, int64_t{1}, kMaxAccumulated));
  EK_RETURN_IF_ERROR(CheckAtLeast("warmup", flags.warmup.value_or(0), int64_t{0}));
  EK_RETURN_IF_ERROR(CheckAtLeast("clip", flags.clip.value_or(0), 0.0));
  EK_RETURN_IF_ERROR(CheckAtLeast("check_replicas", flags.check_replicas, int64_t{0}));
  EK_RETURN_IF_ERROR(CheckAtLeast("eval_every", flags.eval_every, int64_t{0}));
  EK_RETURN_IF_ERROR(CheckRange("eval_batches", flags.eval_batches, int64_t{0}, kMaxAccumulated));
  EK_RETURN_IF_ERROR(CheckAtLeast("patience", flags.patience, int64_t{0}));
  EK_RETURN_IF_ERROR(CheckAtLeast("sample_every", flags.sample_every, int64_t{0}));
  EK_RETURN_IF_ERROR(
      CheckRange("sample_tokens", flags.sample_tokens, int64_t{1}, kMaxSampleTokens));
  EK_RETURN_IF_ERROR(CheckRange("bucket_cap_mb", flags.bucket_cap_mb, 0.0, kMaxBucketMegabytes));
  return CheckRange("first_bucket_mb", flags.first_bucket_mb, 0.0, kMaxBucketMegabytes);
}

// Options about certain ranks, or equal numbers of batches, have no meaning for the remaining
// ranks.
absl::Status CheckGoingOn(const TrainFlags& flags) {
  const std::string why = "--on_failure=continue redistributes the rest of an epoch: ";
  if (!flags.rank_steps.empty())
    return InvalidArgument(why, "--rank_steps does not apply to the remaining ranks");
  if (!flags.join) return InvalidArgument(why, "it may be uneven, which needs --join");
  if (flags.stop_early)
    return InvalidArgument(why, "--stop_early would end the run there for a different reason");
  if (flags.backend == "local") {
    return InvalidArgument(
        "--on_failure=continue is for ranks that are processes; choose --backend=auto");
  }
  if (flags.zero && flags.lost_shard == "refuse") {
    return InvalidArgument(
        "--on_failure=continue cannot continue with --zero (the default), since the part of the "
        "optimizer's state on the lost rank is lost; choose --nozero, or --lost_shard=fresh to "
        "reinitialize that of each parameter of which a part is lost");
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
    return InvalidArgument(
        "--resume= is not a valid value; choose auto, never, or the path of a checkpoint");
  }
  if (!options.folder.empty()) return options;
  const bool is_path = options.resume != kResumeAuto && options.resume != kResumeNever;
  if (!flags.checkpoint_every.has_value() && !flags.keep.has_value() &&
      (!flags.resume.has_value() || is_path)) {
    return options;
  }
  return InvalidArgument(
      "--checkpoint_every, --keep and --resume require --checkpoint_dir; pass it, "
      "too");
}

Bytes Megabytes(double megabytes) { return Bytes{static_cast<int64_t>(megabytes * (1 << 20))}; }

}  // namespace

void AddTrainFlags(FlagTable& table, TrainFlags& flags) {
#define GROUP(title) table.Group(title);
#define FLAG(type, name, value, help) table.Add(#name, flags.name, help);
#define OPTION(type, name, shown, help) table.Add<type>(#name, flags.name, shown, help);
#include "evenkeel/trainer/app/train_flags.inc"
}

absl::string_view NameOf(ModelKind model) { return internal::NameIn(kModels, model, ""); }
absl::string_view NameOf(BackendKind backend) { return internal::NameIn(kBackends, backend, ""); }
absl::string_view NameOf(CommHook hook) { return internal::NameIn(kCommHooks, hook, ""); }

absl::StatusOr<TrainOptions> MakeTrainOptions(const TrainFlags& flags) {
  EK_RETURN_IF_ERROR(CheckNumbers(flags));
  TrainOptions options{
      .flags = flags,
      .nproc = flags.nproc.value_or(kDefaultRanks),
      .bucket_caps = {Megabytes(flags.first_bucket_mb), Megabytes(flags.bucket_cap_mb)}};
  EK_ASSIGN_OR_RETURN(options.model, Choose<ModelKind>("model", flags.model, kModels));
  EK_RETURN_IF_ERROR(CheckModelFlags(flags));
  const ModelDefaults defaults = DefaultsOf(options.model);
  options.epochs = flags.epochs.value_or(defaults.epochs);
  options.batch_size = flags.batch_size.value_or(defaults.batch_size);
  options.warmup = flags.warmup.value_or(defaults.warmup);
  options.clip = flags.clip.value_or(defaults.clip);
  static constexpr DType kComputed[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16,
                                        DType::kFloat64};
  EK_ASSIGN_OR_RETURN(
      const size_t computed,
      Choose<size_t>("compute", flags.compute, {"float32", "bfloat16", "float16", "float64"}));
  options.compute = kComputed[computed];
  if (options.compute == DType::kFloat16 && options.model == ModelKind::kGpt) {
    return InvalidArgument(
        "--compute=float16 is for --model=mlp and cnn, not gpt; choose bfloat16");
  }
  if (options.compute == DType::kFloat64 && options.model != ModelKind::kMlp)
    return InvalidArgument("--compute=float64 is for --model=mlp, not ", NameOf(options.model));
  EK_RETURN_IF_ERROR(
      CheckRange("loss_scale", flags.loss_scale, 1.0, LossScalerOptions().largest_scale));
  EK_RETURN_IF_ERROR(ParseGpt(flags, options.gpt));
  if (flags.widths.has_value()) {
    EK_ASSIGN_OR_RETURN(options.cnn.widths, ParseSizes("widths", *flags.widths, kWidthLimits));
  }
  options.cnn.blocks_per_stage = flags.blocks.value_or(options.cnn.blocks_per_stage);
  options.cnn.seed = flags.seed;
  options.cnn.syncs_norms = flags.sync_batch_norm;
  options.data = {.path = flags.data.value_or(
                      options.model == ModelKind::kGpt ? kJargonFile : kFashionMnistFolder),
                  .context = options.gpt.context,
                  .tokenizer = flags.tokenizer,
                  .vocabulary = flags.vocabulary,
                  .test_path = flags.test_data};
  if (flags.data_kind == "bytes") {
    options.data.kind = DataKind::kText;
  } else if (flags.data_kind != "auto") {
    return InvalidArgument("--data_kind=", flags.data_kind,
                           " is not a valid value; choose auto, bytes");
  }
  if (options.model == ModelKind::kGpt && !flags.init.empty())
    EK_RETURN_IF_ERROR(Annotate(TakeGptSizes(flags, options), "--init"));
  // Clothes may be mirrored, digits and letters may not: other data is unchanged by default.
  const bool is_known =
      options.model == ModelKind::kCnn && options.data.path == kFashionMnistFolder;
  options.augment = {.max_shift = flags.shift.value_or(is_known ? 1 : 0),
                     .mirrors = flags.mirror.value_or(is_known),
                     .seed = flags.seed};
  EK_ASSIGN_OR_RETURN(options.hidden,
                      ParseSizes("hidden", flags.hidden.value_or(kDefaultHidden), kHiddenLimits));
  if (options.model != ModelKind::kGpt && !flags.init.empty())
    EK_RETURN_IF_ERROR(Annotate(TakeSizes(flags, options), "--init"));
  EK_ASSIGN_OR_RETURN(options.rank_steps, ParseRankSteps(flags.rank_steps));
  EK_ASSIGN_OR_RETURN(options.device, Choose<DeviceKind>("device", flags.device, kDevices));
  EK_ASSIGN_OR_RETURN(
      options.backend,
      Choose<BackendKind>("backend", flags.backend == "gloo" ? "tcp" : flags.backend, kBackends));
  EK_ASSIGN_OR_RETURN(options.rule, ParseRule(flags, options.model));
  EK_ASSIGN_OR_RETURN(options.decay, ParseDecay(flags, options.model));
  EK_ASSIGN_OR_RETURN(const bool shards_tensors,
                      Choose<bool>("shards", flags.shards, {"slices", "tensors"}));
  if (!flags.zero && shards_tensors)
    return InvalidArgument("--shards=", flags.shards, " is for --zero");
  options.sharding = !flags.zero      ? Sharding::kNone
                     : shards_tensors ? Sharding::kTensors
                                      : Sharding::kSlices;
  EK_RETURN_IF_ERROR(ParseCommHook(flags, options));
  EK_ASSIGN_OR_RETURN(options.divide_by, ParseDivisor(flags));
  EK_RETURN_IF_ERROR(ParseRefresh(flags.auto_refresh_trainable, options));
  EK_ASSIGN_OR_RETURN(options.freeze, Annotate(ParseFreezeSchedule(flags.freeze), "--freeze"));
  EK_ASSIGN_OR_RETURN(options.goes_on,
                      Choose<bool>("on_failure", flags.on_failure, {"stop", "continue"}));
  EK_ASSIGN_OR_RETURN(options.lost_shard_is_fresh,
                      Choose<bool>("lost_shard", flags.lost_shard, {"refuse", "fresh"}));
  if (options.goes_on) EK_RETURN_IF_ERROR(CheckGoingOn(flags));
  EK_ASSIGN_OR_RETURN(options.checkpoints, ParseCheckpoints(flags));
  if (options.lost_shard_is_fresh && !(options.goes_on && flags.zero))
    return InvalidArgument("--lost_shard=fresh is for --on_failure=continue with --zero");
  if (!flags.verify.empty()) {
    EK_ASSIGN_OR_RETURN(options.verify, Annotate(VerifyLevelFromString(flags.verify), "--verify"));
  }
  if (flags.eval_batches > 0 && flags.eval_every == 0)
    return InvalidArgument("--eval_batches has no effect without --eval_every; pass both");
  if (flags.save_best && flags.save.empty())
    return InvalidArgument("--save_best writes to --save; pass --save=PATH");
  if (flags.stop_early && !flags.join) {
    return InvalidArgument(
        "--stop_early needs --join: without it no rank learns that another one is exhausted");
  }
  return options;
}

}  // namespace evenkeel
