#include "evenkeel/trainer/app/train_options.h"

#include <cmath>
#include <cstddef>
#include <iterator>
#include <type_traits>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/types/span.h"
#include "evenkeel/comm/base/names.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/trainer/app/flag_rules.h"
#include "evenkeel/trainer/data/image_dataset.h"
#include "evenkeel/trainer/data/text_dataset.h"
#include "evenkeel/trainer/gpt/gpt_file.h"
#include "evenkeel/trainer/models/mlp.h"
#include "evenkeel/trainer/models/model_file.h"
#include "evenkeel/trainer/tokenizer/tokenizer_file.h"
#include "evenkeel/zero_optim/checkpoint/safetensors.h"

namespace evenkeel {
namespace {

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

// Checks the values of numbers. Has the first error.
struct CheckNumbers {
  absl::Status status;

  template <typename Number>
  void operator()(const GivenFlag<Number>& flag, const AtLeast& rule) {
    const auto lowest = static_cast<Number>(rule.lowest);
    if (flag.value == nullptr) return;
    if (*flag.value >= lowest && std::isfinite(static_cast<double>(*flag.value))) return;
    status.Update(InvalidArgument("--", flag.name, "=", *flag.value,
                                  " is out of range; it must be at least ", lowest));
  }
  template <typename Number>
  void operator()(const GivenFlag<Number>& flag, const Within& rule) {
    const auto lowest = static_cast<Number>(rule.lowest);
    const auto highest = static_cast<Number>(rule.highest);
    if (flag.value == nullptr) return;
    if (*flag.value >= lowest && *flag.value <= highest) return;  // False for NaN.
    status.Update(InvalidArgument("--", flag.name, "=", *flag.value,
                                  " is out of range; choose a value from ", lowest, " to ",
                                  highest));
  }
  void operator()(const auto&, const auto&) {}
};

// Checks flags that apply to certain models only. Has the first error.
struct CheckModels {
  absl::string_view model;
  absl::Status status;

  void operator()(const auto& flag, const ForModels& rule) {
    if (!flag.is_given || absl::StrContains(rule.models, model)) return;
    status.Update(
        InvalidArgument("--", flag.name, " is for --model=", rule.models, ", not ", model));
  }
  void operator()(const auto&, const auto&) {}
};

// Fills in the options that have a default for each model.
struct FillInByModel {
  TrainOptions& options;

  template <typename Value>
  void operator()(const auto& flag, const ModelDefault<Value>& rule) const {
    static_assert(std::extent_v<decltype(rule.of_model)> == std::size(kModels));
    options.*rule.option =
        flag.value != nullptr ? *flag.value : rule.of_model[static_cast<int>(options.model)];
  }
  void operator()(const auto&, const auto&) const {}
};

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

// The defaults of a model that also depend on the optimizer, and the schedule of --lr_decay=auto.
struct ModelDefaults {
  double learning_rate;  // For adam and adamw.
  double weight_decay;   // For adamw.
  Decay decay;
};
constexpr ModelDefaults kDefaults[] = {
    {1e-3, AdamW().weight_decay, Decay::kNone},  // mlp
    {3e-3, 0.05, Decay::kLinear},                // cnn
    {3e-3, 0.1, Decay::kCosine},                 // gpt
};
static_assert(std::size(kDefaults) == std::size(kModels));

const ModelDefaults& DefaultsOf(ModelKind model) { return kDefaults[static_cast<int>(model)]; }

absl::StatusOr<UpdateRule> ParseRule(const TrainFlags& flags, ModelKind model) {
  enum class Kind { kSgd, kAdam, kAdamW };
  EK_ASSIGN_OR_RETURN(const Kind kind,
                      Choose<Kind>("optimizer", flags.optimizer, {"sgd", "adam", "adamw"}));
  const double lr =
      flags.lr.value_or(flags.optimizer == "sgd" ? 0.1 : DefaultsOf(model).learning_rate);
  if (kind != Kind::kSgd && flags.momentum != 0)
    return InvalidArgument("--momentum is for --optimizer=sgd; ", flags.optimizer, " has its own");
  const double decay =
      flags.weight_decay.value_or(kind == Kind::kAdamW ? DefaultsOf(model).weight_decay : 0);
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

absl::Status CheckSyncBatchNorm(const TrainFlags& flags) {
  // Ranks whose last batches have different numbers of passes would send different collectives.
  if (flags.sync_batch_norm && flags.accumulate > 1) {
    return InvalidArgument("--sync_batch_norm and --accumulate=", flags.accumulate,
                           " exclude each other; use a larger --batch_size");
  }
  if (flags.sync_batch_norm && (!flags.join || flags.on_failure != "stop")) {
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
  switch (options.model) {
    case ModelKind::kMlp: {
      if (flags.hidden.has_value()) break;
      EK_ASSIGN_OR_RETURN(options.hidden, Annotate(HiddenUnitsOf(*file), *path));
      break;
    }
    case ModelKind::kCnn: {
      EK_ASSIGN_OR_RETURN(const CnnOptions sizes, Annotate(CnnSizesOf(*file), *path));
      if (!flags.widths.has_value()) options.cnn.widths = sizes.widths;
      if (!flags.blocks.has_value()) options.cnn.blocks_per_stage = sizes.blocks_per_stage;
      break;
    }
    case ModelKind::kGpt:
      break;  // See TakeGptSizes().
  }
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

absl::Status ParseCompute(const TrainFlags& flags, TrainOptions& options) {
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
  return absl::OkStatus();
}

// Sets the sizes of the models by the flags alone.
absl::Status ParseModels(const TrainFlags& flags, TrainOptions& options) {
  EK_RETURN_IF_ERROR(ParseGpt(flags, options.gpt));
  if (flags.widths.has_value()) {
    EK_ASSIGN_OR_RETURN(options.cnn.widths, ParseSizes("widths", *flags.widths, kWidthLimits));
  }
  options.cnn.blocks_per_stage = flags.blocks.value_or(options.cnn.blocks_per_stage);
  options.cnn.seed = flags.seed;
  options.cnn.syncs_norms = flags.sync_batch_norm;
  EK_ASSIGN_OR_RETURN(options.hidden,
                      ParseSizes("hidden", flags.hidden.value_or(kDefaultHidden), kHiddenLimits));
  return absl::OkStatus();
}

absl::Status ParseData(const TrainFlags& flags, TrainOptions& options) {
  options.data = {.path = flags.data.value_or(
                      options.model == ModelKind::kGpt ? kJargonFile : kFashionMnistFolder),
                  .context = options.gpt.context,
                  .tokenizer = flags.tokenizer,
                  .vocabulary = flags.vocabulary,
                  .test_path = flags.test_data};
  EK_ASSIGN_OR_RETURN(const bool is_text,
                      Choose<bool>("data_kind", flags.data_kind, {"auto", "bytes"}));
  if (is_text) options.data.kind = DataKind::kText;
  // Clothes may be mirrored, digits and letters may not: other data is unchanged by default.
  const bool is_known =
      options.model == ModelKind::kCnn && options.data.path == kFashionMnistFolder;
  options.augment = {.max_shift = flags.shift.value_or(is_known ? 1 : 0),
                     .mirrors = flags.mirror.value_or(is_known),
                     .seed = flags.seed};
  EK_ASSIGN_OR_RETURN(options.rank_steps, ParseRankSteps(flags.rank_steps));
  return absl::OkStatus();
}

absl::StatusOr<Sharding> ParseSharding(const TrainFlags& flags) {
  EK_ASSIGN_OR_RETURN(const bool shards_tensors,
                      Choose<bool>("shards", flags.shards, {"slices", "tensors"}));
  if (flags.zero) return shards_tensors ? Sharding::kTensors : Sharding::kSlices;
  if (shards_tensors) return InvalidArgument("--shards=", flags.shards, " is for --zero");
  return Sharding::kNone;
}

absl::Status ParseCommHook(const TrainFlags& flags, TrainOptions& options) {
  EK_ASSIGN_OR_RETURN(options.comm_hook,
                      Choose<CommHook>("comm_hook", flags.comm_hook, kCommHooks));
  const CommHook hook = options.comm_hook;
  const bool is_power_sgd = hook == CommHook::kPowerSgd;
  if (!is_power_sgd && (flags.power_sgd_rank.has_value() || flags.power_sgd_start.has_value())) {
    return InvalidArgument("--power_sgd_rank and --power_sgd_start are for --comm_hook=power_sgd");
  }
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

// Options about certain ranks, or equal numbers of batches, have no meaning for the remaining
// ranks.
absl::Status CheckGoingOn(const TrainFlags& flags) {
  const std::string flag = "--on_failure=" + flags.on_failure;
  const std::string why = flag + " redistributes the rest of an epoch: ";
  if (!flags.rank_steps.empty())
    return InvalidArgument(why, "--rank_steps does not apply to the remaining ranks");
  if (!flags.join) return InvalidArgument(why, "it may be uneven, which needs --join");
  if (flags.stop_early)
    return InvalidArgument(why, "--stop_early would end the run there for a different reason");
  if (flags.backend == "local") {
    return InvalidArgument(flag, " is for ranks that are processes; choose --backend=auto");
  }
  if (flags.zero && flags.lost_shard == "refuse") {
    return InvalidArgument(
        flag,
        " cannot continue with --zero (the default), since the part of the "
        "optimizer's state on the lost rank is lost; choose --nozero, or --lost_shard=fresh to "
        "reinitialize that of each parameter of which a part is lost");
  }
  return absl::OkStatus();
}

// A lost rank takes a part of the state of these along.
absl::Status CheckReplacing(const TrainFlags& flags) {
  if (flags.zero) {
    return InvalidArgument(
        "--on_failure=replace needs --nozero: the part of the optimizer's state on a lost rank "
        "cannot be restored");
  }
  const bool has_residuals = flags.comm_hook == "int8" || flags.comm_hook == "power_sgd";
  const std::pair<std::string, bool> refused[] = {
      {"--balance", flags.balance}, {"--comm_hook=" + flags.comm_hook, has_residuals}};
  for (const auto& [name, is_set] : refused) {
    if (is_set)
      return InvalidArgument("--on_failure=replace cannot be combined with ", name,
                             ": what a lost rank holds of it cannot be restored");
  }
  return absl::OkStatus();
}

absl::Status ParseOnFailure(const TrainFlags& flags, TrainOptions& options) {
  EK_ASSIGN_OR_RETURN(const int how,
                      Choose<int>("on_failure", flags.on_failure, {"stop", "continue", "replace"}));
  options.goes_on = how > 0;
  options.replaces = how == 2;
  if (options.replaces) EK_RETURN_IF_ERROR(CheckReplacing(flags));
  EK_ASSIGN_OR_RETURN(options.lost_shard_is_fresh,
                      Choose<bool>("lost_shard", flags.lost_shard, {"refuse", "fresh"}));
  if (options.goes_on) EK_RETURN_IF_ERROR(CheckGoingOn(flags));
  if (options.lost_shard_is_fresh && !(options.goes_on && flags.zero))
    return InvalidArgument("--lost_shard=fresh is for --on_failure=continue with --zero");
  return absl::OkStatus();
}

// With --balance all ranks take part in each step, with different numbers of samples.
absl::Status CheckBalance(const TrainFlags& flags, const TrainOptions& options) {
  if (!flags.balance) {
    if (flags.balance_log.empty() && flags.balance_repeat.empty()) return absl::OkStatus();
    return InvalidArgument("--balance_log and --balance_repeat need --balance; pass it, too");
  }
  if (!flags.join) {
    return InvalidArgument(
        "--balance needs --join: a rank may have no sample in the last step of an epoch");
  }
  if (flags.stop_early)
    return InvalidArgument(
        "--balance and --stop_early exclude each other: no rank has fewer steps");
  if (!flags.rank_steps.empty()) {
    return InvalidArgument(
        "--balance and --rank_steps exclude each other: both choose the samples of each rank");
  }
  if (options.divide_by != DivideBy::kSamples) {
    return InvalidArgument("--balance needs --divide_by=samples, not ", *flags.divide_by,
                           ": ranks have different numbers of samples");
  }
  if (!flags.balance_repeat.empty() && options.goes_on) {
    return InvalidArgument(
        "--balance_repeat needs --on_failure=stop: its shares are those of all ranks");
  }
  return absl::OkStatus();
}

absl::StatusOr<CheckpointOptions> ParseCheckpoints(const TrainFlags& flags) {
  CheckpointOptions options{.folder = flags.checkpoint_dir,
                            .every = flags.checkpoint_every.value_or(kDefaultCheckpointEvery),
                            .keep = flags.keep.value_or(CheckpointOptions().keep),
                            .resume = flags.resume.value_or(kResumeAuto)};
  if (options.resume.empty()) {
    return InvalidArgument(
        "--resume= is not a valid value; choose auto, never, or the path of a checkpoint");
  }
  if (!options.folder.empty()) return options;
  if (!flags.checkpoint_every.has_value() && !flags.keep.has_value() &&
      (!flags.resume.has_value() || options.resumes_from_path())) {
    return options;
  }
  return InvalidArgument(
      "--checkpoint_every, --keep and --resume require --checkpoint_dir; pass it, "
      "too");
}

// Checks flags that have no effect without another one.
absl::Status CheckPairs(const TrainFlags& flags) {
  if (flags.eval_batches > 0 && flags.eval_every == 0)
    return InvalidArgument("--eval_batches has no effect without --eval_every; pass both");
  if (flags.save_best && flags.save.empty())
    return InvalidArgument("--save_best writes to --save; pass --save=PATH");
  if (flags.stop_early && !flags.join) {
    return InvalidArgument(
        "--stop_early needs --join: without it no rank learns that another one is exhausted");
  }
  return absl::OkStatus();
}

Bytes Megabytes(double megabytes) { return Bytes{static_cast<int64_t>(megabytes * (1 << 20))}; }

}  // namespace

void AddTrainFlags(FlagTable& table, TrainFlags& flags) {
#define GROUP(title) table.Group(title);
#define FLAG(type, name, value, help, ...) table.Add(#name, flags.name, help);
#define OPTION(type, name, shown, help, ...) table.Add<type>(#name, flags.name, shown, help);
#include "evenkeel/trainer/app/train_flags.inc"
}

absl::string_view NameOf(ModelKind model) { return internal::NameIn(kModels, model, ""); }
absl::string_view NameOf(BackendKind backend) { return internal::NameIn(kBackends, backend, ""); }
absl::string_view NameOf(CommHook hook) { return internal::NameIn(kCommHooks, hook, ""); }

absl::StatusOr<TrainOptions> MakeTrainOptions(const TrainFlags& flags) {
  CheckNumbers numbers;
  VisitRules(flags, numbers);
  EK_RETURN_IF_ERROR(numbers.status);
  TrainOptions options{
      .flags = flags,
      .nproc = flags.nproc.value_or(kDefaultRanks),
      .bucket_caps = {Megabytes(flags.first_bucket_mb), Megabytes(flags.bucket_cap_mb)}};
  EK_ASSIGN_OR_RETURN(options.model, Choose<ModelKind>("model", flags.model, kModels));
  CheckModels models{.model = flags.model};
  VisitRules(flags, models);
  EK_RETURN_IF_ERROR(models.status);
  EK_RETURN_IF_ERROR(CheckSyncBatchNorm(flags));
  VisitRules(flags, FillInByModel{options});
  EK_RETURN_IF_ERROR(ParseCompute(flags, options));
  EK_RETURN_IF_ERROR(ParseModels(flags, options));
  EK_RETURN_IF_ERROR(ParseData(flags, options));
  if (!flags.init.empty()) {
    const auto take = options.model == ModelKind::kGpt ? TakeGptSizes : TakeSizes;
    EK_RETURN_IF_ERROR(Annotate(take(flags, options), "--init"));
  }
  EK_ASSIGN_OR_RETURN(options.device, Choose<DeviceKind>("device", flags.device, kDevices));
  EK_ASSIGN_OR_RETURN(
      options.backend,
      Choose<BackendKind>("backend", flags.backend == "gloo" ? "tcp" : flags.backend, kBackends));
  EK_ASSIGN_OR_RETURN(options.rule, ParseRule(flags, options.model));
  EK_ASSIGN_OR_RETURN(options.decay, ParseDecay(flags, options.model));
  EK_ASSIGN_OR_RETURN(options.sharding, ParseSharding(flags));
  EK_RETURN_IF_ERROR(ParseCommHook(flags, options));
  EK_ASSIGN_OR_RETURN(options.divide_by, ParseDivisor(flags));
  EK_RETURN_IF_ERROR(ParseRefresh(flags.auto_refresh_trainable, options));
  EK_ASSIGN_OR_RETURN(options.freeze, Annotate(ParseFreezeSchedule(flags.freeze), "--freeze"));
  EK_RETURN_IF_ERROR(ParseOnFailure(flags, options));
  EK_RETURN_IF_ERROR(CheckBalance(flags, options));
  EK_ASSIGN_OR_RETURN(options.checkpoints, ParseCheckpoints(flags));
  if (!flags.verify.empty()) {
    EK_ASSIGN_OR_RETURN(options.verify, Annotate(VerifyLevelFromString(flags.verify), "--verify"));
  }
  EK_RETURN_IF_ERROR(CheckPairs(flags));
  return options;
}

}  // namespace evenkeel
