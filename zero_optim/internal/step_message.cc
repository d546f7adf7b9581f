#include "evenkeel/zero_optim/internal/step_message.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <utility>
#include <variant>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "evenkeel/comm/base/bytes.h"
#include "evenkeel/comm/collective.h"
#include "evenkeel/comm/status.h"

namespace evenkeel::internal {
namespace {

constexpr int kSourcesPerByte = 4;

// Calls `visit` with each setting of a rule, in a fixed order.
template <typename Visitor>
void ForEachSetting(Sgd& rule, Visitor visit) {
  visit(rule.learning_rate);
  visit(rule.momentum);
  visit(rule.weight_decay);
  visit(rule.nesterov);
}
template <typename AdamLike, typename Visitor>
void ForEachSetting(AdamLike& rule, Visitor visit) {
  visit(rule.learning_rate);
  visit(rule.beta1);
  visit(rule.beta2);
  visit(rule.epsilon);
  visit(rule.weight_decay);
}

void Write(ByteWriter& writer, double setting) { writer.F64(setting); }
void Write(ByteWriter& writer, bool setting) { writer.Bool(setting); }
void Read(ByteReader& reader, double& setting) { setting = reader.F64(); }
void Read(ByteReader& reader, bool& setting) { setting = reader.Bool(); }

template <typename Rule>
Rule ReadRule(ByteReader& reader) {
  Rule rule;
  ForEachSetting(rule, [&](auto& setting) { Read(reader, setting); });
  return rule;
}

UpdateRule ReadRuleOfKind(uint8_t kind, ByteReader& reader) {
  switch (kind) {
    case 0:
      return ReadRule<Sgd>(reader);
    case 1:
      return ReadRule<Adam>(reader);
    case 2:
      return ReadRule<AdamW>(reader);
    default:
      reader.Refuse();
      return Sgd();
  }
}

// Reads the rest of the message; its last bits must be those of a parameter, or zero.
void ReadSources(ByteReader& reader, int param_count, std::vector<GradientSource>& sources) {
  const absl::string_view packed = reader.Rest();
  if (packed.size() != static_cast<size_t>((param_count + kSourcesPerByte - 1) / kSourcesPerByte)) {
    return reader.Refuse();
  }
  sources.resize(param_count);
  for (int i = 0; i < static_cast<int>(packed.size()) * kSourcesPerByte; ++i) {
    const int source =
        (static_cast<uint8_t>(packed[i / kSourcesPerByte]) >> (2 * (i % kSourcesPerByte))) & 3;
    const int most = i < param_count ? static_cast<int>(GradientSource::kToReduce) : 0;
    if (source > most) return reader.Refuse();
    if (i < param_count) sources[i] = static_cast<GradientSource>(source);
  }
}

constexpr size_t kMostRates = 8;  // That are told by group.

std::string RatesText(const ParameterGroups& groups, const std::vector<UpdateRule>& rules) {
  const auto rate_of = [](const UpdateRule& rule) {
    return std::bit_cast<uint64_t>(LearningRate(rule));
  };
  uint64_t hash = 0;
  bool is_one = true;
  for (const UpdateRule& rule : rules) {
    hash = StableHash(hash, rate_of(rule));
    is_one = is_one && rate_of(rule) == rate_of(rules[0]);
  }
  if (rules.empty()) return "";
  if (is_one) return absl::StrCat("learning_rate=", SettingText(LearningRate(rules[0])));
  std::vector<std::string> texts;
  for (size_t i = 0; i < std::min(rules.size(), kMostRates); ++i) {
    texts.push_back(absl::StrCat("learning_rate of ", groups[static_cast<int>(i)].name, "=",
                                 SettingText(LearningRate(rules[i]))));
  }
  if (rules.size() > kMostRates)
    texts.push_back(absl::StrCat("hash of all learning rates=", absl::Hex(hash)));
  return absl::StrJoin(texts, ", ");
}

}  // namespace

std::string SettingsText(const ParameterGroups& groups, const std::vector<UpdateRule>& rules,
                         const StepOptions& options) {
  std::string text = RatesText(groups, rules);
  const auto add = [&](auto... parts) {
    absl::StrAppend(&text, text.empty() ? "" : ", ", parts...);
  };
  if (options.grad_scale != 1) add("grad_scale=", SettingText(options.grad_scale));
  if (options.clip.has_value()) add("max_norm=", SettingText(options.clip->max_norm));
  if (options.clip.has_value() && options.clip->norm != 2)
    add("norm=", SettingText(options.clip->norm));
  if (options.skip) add("skip=true");
  if (options.skip_nonfinite) add("skip_nonfinite=true");
  return text;
}

absl::Status CheckOptions(const StepOptions& options) {
  if (!std::isfinite(options.grad_scale)) {
    return absl::InvalidArgumentError(
        absl::StrCat("the step's grad_scale is ", options.grad_scale));
  }
  if (!options.clip.has_value()) return absl::OkStatus();
  if (!(options.clip->max_norm > 0)) {
    return absl::InvalidArgumentError(
        absl::StrCat("the step's max_norm is ", options.clip->max_norm));
  }
  if (!(options.clip->norm >= 1)) {
    return absl::InvalidArgumentError(
        absl::StrCat("the step clips by a ", options.clip->norm, "-norm"));
  }
  return absl::OkStatus();
}

std::string StepMessage::Serialize() const {
  ByteWriter writer;
  writer.U32(static_cast<uint32_t>(rules.size()));
  for (UpdateRule rule : rules) {
    writer.U8(static_cast<uint8_t>(rule.index()));
    std::visit([&](auto& r) { ForEachSetting(r, [&](auto setting) { Write(writer, setting); }); },
               rule);
  }
  writer.F64(options.grad_scale)
      .Bool(options.skip)
      .Bool(options.skip_nonfinite)
      .Bool(options.clip.has_value());
  if (options.clip.has_value()) writer.F64(options.clip->max_norm).F64(options.clip->norm);
  writer.U32(static_cast<uint32_t>(hashes.size()));
  for (const uint64_t hash : hashes) writer.U64(hash);
  std::string packed((sources.size() + kSourcesPerByte - 1) / kSourcesPerByte, '\0');
  for (size_t i = 0; i < sources.size(); ++i) {
    packed[i / kSourcesPerByte] |=
        static_cast<char>(static_cast<int>(sources[i]) << (2 * (i % kSourcesPerByte)));
  }
  return writer.Take() + packed;
}

absl::StatusOr<StepMessage> StepMessage::Parse(absl::string_view bytes, int param_count) {
  ByteReader reader(bytes);
  StepMessage step;
  const uint32_t rule_count = reader.U32();
  for (uint32_t i = 0; i < rule_count && reader.ok(); ++i) {
    const uint8_t kind = reader.U8();
    step.rules.push_back(ReadRuleOfKind(kind, reader));
    if (!Validate(step.rules.back()).ok()) reader.Refuse();
  }
  step.options.grad_scale = reader.F64();
  step.options.skip = reader.Bool();
  step.options.skip_nonfinite = reader.Bool();
  if (reader.Bool()) {
    ClipOptions& clip = step.options.clip.emplace();
    clip.max_norm = reader.F64();
    clip.norm = reader.F64();
  }
  const uint32_t hash_count = reader.U32();
  if (hash_count != 0 && hash_count != 2 * static_cast<uint32_t>(param_count)) reader.Refuse();
  for (uint32_t i = 0; i < hash_count && reader.ok(); ++i) step.hashes.push_back(reader.U64());
  ReadSources(reader, param_count, step.sources);
  if (!CheckOptions(step.options).ok()) reader.Refuse();
  EK_RETURN_IF_ERROR(
      reader.Finish(absl::StrCat("an optimizer step for ", param_count, " parameters")));
  return step;
}

}  // namespace evenkeel::internal
