#include "evenkeel/trainer/app/describe_options.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "evenkeel/bucket/parameter_set.h"
#include "evenkeel/comm/collective.h"
#include "evenkeel/comm/types.h"
#include "evenkeel/join/step_divisor.h"
#include "evenkeel/trainer/app/flag_rules.h"
#include "evenkeel/trainer/app/freeze_schedule.h"
#include "evenkeel/trainer/app/learning_rate.h"
#include "evenkeel/trainer/data/augment.h"
#include "evenkeel/trainer/data/batch.h"
#include "evenkeel/trainer/data/dataset.h"
#include "evenkeel/trainer/gpt/gpt_options.h"
#include "evenkeel/trainer/report/trace_settings.h"
#include "evenkeel/zero_optim/update_rule.h"

namespace evenkeel {
namespace {

// Returns the number of tensors and elements, and a hash of the names, types and shapes of tensors.
std::string Fingerprint(const Model& model) {
  uint64_t hash = 0;
  const ParameterSet& parameters = model.parameters();
  for (int i = 0; i < parameters.size(); ++i) {
    hash = StableHash(StableHash(hash, parameters[i].name), ToString(parameters[i].value.dtype));
    for (int64_t size : model.shape(i)) hash = StableHash(hash, static_cast<uint64_t>(size));
  }
  for (const NamedBuffer& buffer : model.buffers())
    hash = StableHash(StableHash(hash, buffer.name), buffer.shape.size());
  return absl::StrCat(parameters.size(), " tensors of ", CountElements(model), " elements, ",
                      absl::Hex(hash, absl::kZeroPad16));
}

// Returns the kind of rule, and the tensors of its state of a parameter.
std::string KindOf(const UpdateRule& rule) {
  static constexpr absl::string_view kKinds[] = {"sgd", "adam", "adamw"};
  static_assert(std::size(kKinds) == std::variant_size_v<UpdateRule>);
  const auto tensors = StateTensorNames(rule);
  return absl::StrCat(kKinds[rule.index()], " with {", absl::StrJoin(tensors, ", "), "}");
}

std::string Text(const auto& value) { return absl::StrCat(value); }
std::string Text(bool value) { return value ? "true" : "false"; }
std::string Text(Decay value) { return Text(static_cast<int>(value)); }
std::string Text(DivideBy value) { return Text(static_cast<int>(value)); }
std::string Text(const std::vector<int64_t>& values) { return absl::StrJoin(values, ","); }
std::string Text(const FreezeSchedule& freeze) {
  return absl::StrJoin(freeze, ",", [](std::string* out, const FreezeRange& range) {
    absl::StrAppend(out, range.prefix, "@", range.begin, ":", range.end);
  });
}

// Takes the settings that are flags, or options with the name of a flag.
struct TakeSettings {
  const TrainOptions& options;
  RunSettings& settings;

  void operator()(const auto& flag, const FlagSetting& rule) const {
    Take(flag.name, rule.kind, Text(*flag.value));
  }
  template <typename Value>
  void operator()(const auto& flag, const OptionSetting<Value>& rule) const {
    Take(flag.name, rule.kind, Text(options.*rule.option));
  }
  void operator()(const auto&, const auto&) const {}

  void Take(absl::string_view name, SettingKind kind, std::string value) const {
    RunSettings::Values& values = kind == SettingKind::kFixed     ? settings.fixed
                                  : kind == SettingKind::kDealing ? settings.dealing
                                                                  : settings.free;
    values.emplace(name, std::move(value));
  }
};

// Returns a hash of samples from all parts of the data.
std::string ContentOf(const Dataset& data) {
  constexpr int64_t kSamples = 100;
  std::vector<int32_t> samples;
  for (int64_t i = 0; i < std::min(kSamples, data.size()); ++i)
    samples.push_back(static_cast<int32_t>(i * data.size() / std::min(kSamples, data.size())));
  BatchMemory memory;
  data.Gather(samples, memory);
  uint64_t hash = 0;
  const auto add = [&hash](const auto& values) {
    hash = StableHash(hash, absl::string_view(reinterpret_cast<const char*>(values.data()),
                                              values.size() * sizeof(values[0])));
  };
  add(memory.images);
  add(memory.labels);
  add(memory.inputs);
  add(memory.targets);
  return absl::StrCat(absl::Hex(hash, absl::kZeroPad16));
}

}  // namespace

absl::string_view DescribeSharding(Sharding sharding) {
  static constexpr absl::string_view kTexts[] = {
      TraceSettings::kReplicated, "state sharded by tensors", TraceSettings::kSliced};
  return kTexts[static_cast<int>(sharding)];
}

absl::string_view DescribeDecay(Decay decay) {
  static constexpr absl::string_view kTexts[] = {"", " with linear decay", " with cosine decay"};
  return kTexts[static_cast<int>(decay)];
}

int64_t CountElements(const Model& model) {
  int64_t count = 0;
  for (int i = 0; i < model.parameters().size(); ++i) count += model.parameters()[i].value.count;
  return count;
}

std::string DescribeJoin(const TrainOptions& options, const StepPlan& plan) {
  if (options.flags.balance) return "divided by the ranks' speed, every sample weighs the same";
  if (!plan.is_uneven()) return "even";
  if (options.flags.stop_early) return "uneven, all ranks stop with the first exhausted one";
  if (!options.flags.join) return "cut to the same number";
  if (options.divide_by == DivideBy::kSamples)
    return "uneven, joined, every sample weighs the same";
  return absl::StrCat("uneven, joined, gradients divided by the ",
                      options.divide_by == DivideBy::kActiveRanks ? "effective" : "initial",
                      " number of ranks");
}

RunSettings SettingsOf(const TrainOptions& options, const Model& model, const TrainingData& data,
                       int world_size) {
  RunSettings settings;
  settings.fixed = {
      {"the model's parameters", Fingerprint(model)},
      {"the number of training samples", absl::StrCat(data.train->size())},
      {kContentSetting, ContentOf(*data.train)},
      {"predictions per sample", absl::StrCat(data.train->predictions_per_sample())},
      {"optimizer", KindOf(options.rule)},
  };
  settings.dealing = {{kRanksSetting, absl::StrCat(world_size)}};
  settings.free = {
      {"augmentation", absl::StrCat("shift ", options.augment.max_shift, ", mirrors ",
                                    Text(options.augment.mirrors))},
      {"data", options.data.path},
      {"the optimizer's settings", ToString(options.rule)},
      {"bucket sizes",
       absl::StrJoin(options.bucket_caps, ",",
                     [](std::string* out, const Bytes& cap) { absl::StrAppend(out, cap.value); })},
  };
  VisitRules(options.flags, TakeSettings{options, settings});
  const bool is_gpt = options.model == ModelKind::kGpt;
  if (is_gpt) settings.fixed["heads"] = absl::StrCat(options.gpt.heads);
  if (is_gpt) settings.free["dropout"] = absl::StrCat(options.gpt.dropout);
  if (options.cnn.syncs_norms) settings.free["sync_batch_norm"] = "on";
  if (is_gpt || options.compute != DType::kFloat32)
    settings.free["compute"] = std::string(ToString(options.compute));
  return settings;
}

}  // namespace evenkeel
