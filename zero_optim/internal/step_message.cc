#include "evenkeel/zero_optim/internal/step_message.h"

#include <cmath>
#include <utility>
#include <variant>

#include "absl/strings/str_cat.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/zero_optim/internal/pod_bytes.h"

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

template <typename Rule>
bool TakeRule(absl::string_view& bytes, UpdateRule& rule) {
  Rule taken;
  bool good = true;
  ForEachSetting(taken, [&](auto& setting) { good = good && TakePod(bytes, setting); });
  rule = taken;
  return good;
}

bool TakeRuleOfKind(uint8_t kind, absl::string_view& bytes, UpdateRule& rule) {
  switch (kind) {
    case 0:
      return TakeRule<Sgd>(bytes, rule);
    case 1:
      return TakeRule<Adam>(bytes, rule);
    case 2:
      return TakeRule<AdamW>(bytes, rule);
    default:
      return false;
  }
}

}  // namespace

absl::Status CheckOptions(const StepOptions& options) {
  if (std::isfinite(options.grad_scale)) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("the step's grad_scale is ", options.grad_scale));
}

std::string StepMessage::Serialize() const {
  std::string bytes;
  AppendPod(bytes, static_cast<uint8_t>(rule.index()));
  UpdateRule copy = rule;
  std::visit([&](auto& r) { ForEachSetting(r, [&](auto setting) { AppendPod(bytes, setting); }); }, copy);
  AppendPod(bytes, options.grad_scale);
  AppendPod(bytes, options.skip);
  std::string packed((sources.size() + kSourcesPerByte - 1) / kSourcesPerByte, '\0');
  for (size_t i = 0; i < sources.size(); ++i) {
    packed[i / kSourcesPerByte] |= static_cast<char>(static_cast<int>(sources[i]) << (2 * (i % kSourcesPerByte)));
  }
  return bytes + packed;
}

absl::StatusOr<StepMessage> StepMessage::Parse(absl::string_view bytes, int param_count) {
  const absl::Status malformed = absl::InvalidArgumentError(
      absl::StrCat("an optimizer step of ", bytes.size(), " bytes for ", param_count, " parameters is malformed"));
  StepMessage step;
  uint8_t kind = 0;
  if (!TakePod(bytes, kind) || !TakeRuleOfKind(kind, bytes, step.rule) || !TakePod(bytes, step.options.grad_scale) ||
      !TakePod(bytes, step.options.skip)) {
    return malformed;
  }
  if (bytes.size() != static_cast<size_t>((param_count + kSourcesPerByte - 1) / kSourcesPerByte)) return malformed;
  step.sources.resize(param_count);
  for (int i = 0; i < param_count; ++i) {
    const int source = (static_cast<uint8_t>(bytes[i / kSourcesPerByte]) >> (2 * (i % kSourcesPerByte))) & 3;
    if (source > static_cast<int>(GradientSource::kToReduce)) return malformed;
    step.sources[i] = static_cast<GradientSource>(source);
  }
  if (!Validate(step.rule).ok()) return malformed;
  return step;
}

}  // namespace evenkeel::internal
