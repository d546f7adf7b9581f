#include "evenkeel/trainer/checkpoint/run_settings.h"

#include <cstdint>
#include <set>
#include <utility>
#include <variant>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "evenkeel/bucket/parameter_set.h"
#include "evenkeel/comm/collective.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/types.h"
#include "evenkeel/trainer/augment.h"
#include "evenkeel/trainer/gpt/gpt_options.h"
#include "evenkeel/zero_optim/update_rule.h"

namespace evenkeel {
namespace {

// Which model it is, and which tensors it has: their names, types and shapes, as a hash.
std::string Fingerprint(const Model& model) {
  uint64_t hash = 0;
  int64_t elements = 0;
  const ParameterSet& parameters = model.parameters();
  for (int i = 0; i < parameters.size(); ++i) {
    hash = StableHash(StableHash(hash, parameters[i].name), ToString(parameters[i].value.dtype));
    for (int64_t size : model.shape(i)) hash = StableHash(hash, static_cast<uint64_t>(size));
    elements += parameters[i].value.count;
  }
  for (const NamedBuffer& buffer : model.buffers())
    hash = StableHash(StableHash(hash, buffer.name), buffer.shape.size());
  return absl::StrCat(parameters.size(), " tensors of ", elements, " elements, ", absl::Hex(hash, absl::kZeroPad16));
}

// The kind of rule, and the state that it keeps of a parameter.
std::string KindOf(const UpdateRule& rule) {
  static constexpr absl::string_view kKinds[] = {"sgd", "adam", "adamw"};
  const auto tensors = StateTensorNames(rule);
  return absl::StrCat(kKinds[rule.index()], " with {", absl::StrJoin(tensors, ", "), "}");
}

std::string Text(bool value) { return value ? "true" : "false"; }

std::string NamesOf(const FreezeSchedule& freeze) {
  std::string text;
  for (const FreezeRange& range : freeze) {
    absl::StrAppend(&text, text.empty() ? "" : ",", range.prefix, "@", range.begin, ":", range.end);
  }
  return text;
}

// Names whose values differ, or that only one of them has.
std::vector<std::string> Differences(const RunSettings::Values& a, const RunSettings::Values& b) {
  std::set<std::string> names;
  for (const auto& [name, value] : a) {
    const auto other = b.find(name);
    if (other == b.end() || other->second != value) names.insert(name);
  }
  for (const auto& [name, value] : b) {
    if (!a.contains(name)) names.insert(name);
  }
  return {names.begin(), names.end()};
}

std::string ValueOf(const RunSettings::Values& values, const std::string& name) {
  const auto found = values.find(name);
  return found == values.end() ? "not set" : found->second.empty() ? "none" : found->second;
}

}  // namespace

RunSettings SettingsOf(const TrainOptions& options, const Model& model, const TrainingData& data, int world_size) {
  RunSettings settings;
  settings.fixed = {
      {"model", std::string(NameOf(options.model))},
      {"the model's parameters", Fingerprint(model)},
      {"the number of training samples", absl::StrCat(data.train->size())},
      {"predictions per sample", absl::StrCat(data.train->predictions_per_sample())},
      {"seed", absl::StrCat(options.seed)},
      {"shuffle", Text(options.shuffle)},
      {"optimizer", KindOf(options.rule)},
  };
  if (options.model == ModelKind::kGpt) settings.fixed["heads"] = absl::StrCat(options.gpt.heads);
  settings.dealing = {
      {kRanksSetting, absl::StrCat(world_size)},
      {"batch_size", absl::StrCat(options.batch_size)},
      {"accumulate", absl::StrCat(options.accumulate)},
      {"rank_steps", absl::StrJoin(options.rank_steps, ",")},
  };
  settings.free = {
      {"augmentation", absl::StrCat("shift ", options.augment.max_shift, ", mirrors ", Text(options.augment.mirrors))},
      {"data", options.data.path},
      {"epochs", absl::StrCat(options.epochs)},
      {"max_steps", absl::StrCat(options.max_steps)},
      {"the optimizer's settings", ToString(options.rule)},
      {"lr_decay", absl::StrCat(static_cast<int>(options.decay))},
      {"warmup", absl::StrCat(options.warmup)},
      {"clip", absl::StrCat(options.clip)},
      {"join", Text(options.joins)},
      {"divide_by", absl::StrCat(static_cast<int>(options.divide_by))},
      {"stop_early", Text(options.stops_early)},
      {"freeze", NamesOf(options.freeze)},
      {"bucket sizes", absl::StrJoin(options.bucket_caps, ",",
                                     [](std::string* out, const Bytes& cap) { absl::StrAppend(out, cap.value); })},
  };
  if (options.model == ModelKind::kGpt) {
    settings.free["dropout"] = absl::StrCat(options.gpt.dropout);
  }
  if (options.model == ModelKind::kGpt || options.compute != DType::kFloat32) {
    settings.free["compute"] = std::string(ToString(options.compute));
  }
  return settings;
}

absl::StatusOr<ResumeTerms> CompareSettings(const RunSettings& saved, const RunSettings& mine) {
  for (const std::string& name : Differences(saved.fixed, mine.fixed)) {
    return absl::InvalidArgumentError(absl::StrCat("it is of another run: ", name, " is ", ValueOf(saved.fixed, name),
                                                   " there, and ", ValueOf(mine.fixed, name), " here"));
  }
  ResumeTerms terms;
  for (const auto& [before, now] : {std::pair(&saved.dealing, &mine.dealing), std::pair(&saved.free, &mine.free)}) {
    for (const std::string& name : Differences(*before, *now)) {
      terms.notes.push_back(
          absl::StrCat(name, " is ", ValueOf(*now, name), ", before it was ", ValueOf(*before, name)));
    }
  }
  terms.is_exact = saved.dealing == mine.dealing;
  if (terms.is_exact) return terms;
  terms.notes.push_back("the rest of the epoch is dealt out anew");
  for (const RunSettings* settings : {&saved, &mine}) {
    const auto limits = settings->dealing.find("rank_steps"), stops = settings->free.find("stop_early");
    const bool has_limits = limits != settings->dealing.end() && !limits->second.empty();
    const bool stops_early = stops != settings->free.end() && stops->second == Text(true);
    if (!has_limits && !stops_early) continue;
    return absl::InvalidArgumentError(absl::StrCat(
        "with --rank_steps or --stop_early a run goes on with the same ranks and batches alone: ", terms.notes[0]));
  }
  return terms;
}

}  // namespace evenkeel
