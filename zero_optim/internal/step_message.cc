#include "evenkeel/zero_optim/internal/step_message.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "evenkeel/comm/base/fields.h"
#include "evenkeel/comm/collective.h"
#include "evenkeel/comm/status.h"

namespace evenkeel::internal {
namespace {

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

std::string StepMessage::Serialize() const { return ToBytes(*this); }

absl::StatusOr<StepMessage> StepMessage::Parse(absl::string_view bytes, int param_count) {
  EK_ASSIGN_OR_RETURN(StepMessage step,
                      FromBytes<StepMessage>(bytes, absl::StrCat("an optimizer step for ",
                                                                 param_count, " parameters")));
  EK_RETURN_IF_ERROR(step.CheckFor(param_count));
  return step;
}

absl::Status StepMessage::CheckFor(int param_count) const {
  const auto count = static_cast<size_t>(param_count);
  const auto is_valid = [](const UpdateRule& rule) { return Validate(rule).ok(); };
  if (sources.size() == count && (hashes.empty() || hashes.size() == 2 * count) &&
      std::ranges::all_of(rules, is_valid) && CheckOptions(options).ok())
    return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("an optimizer step for ", param_count, " parameters: value out of range"));
}

}  // namespace evenkeel::internal
