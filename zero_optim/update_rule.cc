#include "evenkeel/zero_optim/update_rule.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <iterator>
#include <limits>
#include <type_traits>

#include "absl/container/inlined_vector.h"
#include "absl/strings/str_cat.h"
#include "evenkeel/comm/arith/convert.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/zero_optim/internal/update_kernels.h"
#include "evenkeel/zero_optim/optimizer_state.h"

namespace evenkeel {
namespace {

using internal::AdamCoefficients;
using internal::SgdCoefficients;
using internal::UpdateKernels;

constexpr double kNoLimit = std::numeric_limits<double>::infinity();

// Another rule does not compile until it has functions of its own.
template <typename Rule>
concept AdamLike = std::is_same_v<Rule, Adam> || std::is_same_v<Rule, AdamW>;

absl::string_view NameOf(const Sgd&) { return "SGD"; }
absl::string_view NameOf(const Adam&) { return "Adam"; }
absl::string_view NameOf(const AdamW&) { return "AdamW"; }

// lower <= value < below; the comparison is false for NaN.
absl::Status CheckRange(absl::string_view name, double value, double lower, double below) {
  if (value >= lower && value < below) return absl::OkStatus();
  return absl::InvalidArgumentError(
      below == kNoLimit
          ? absl::StrCat(name, " is ", value, ", but must be finite and at least ", lower)
          : absl::StrCat(name, " is ", value, ", but must be at least ", lower, " and less than ",
                         below));
}

absl::Status ValidateRule(const Sgd& rule) {
  EK_RETURN_IF_ERROR(CheckRange("learning_rate", rule.learning_rate, 0, kNoLimit));
  EK_RETURN_IF_ERROR(CheckRange("momentum", rule.momentum, 0, kNoLimit));
  EK_RETURN_IF_ERROR(CheckRange("weight_decay", rule.weight_decay, 0, kNoLimit));
  if (rule.nesterov && rule.momentum == 0)
    return absl::InvalidArgumentError("nesterov needs a momentum above 0");
  return absl::OkStatus();
}

absl::Status ValidateRule(const AdamLike auto& rule) {
  EK_RETURN_IF_ERROR(CheckRange("learning_rate", rule.learning_rate, 0, kNoLimit));
  EK_RETURN_IF_ERROR(CheckRange("beta1", rule.beta1, 0, 1));
  EK_RETURN_IF_ERROR(CheckRange("beta2", rule.beta2, 0, 1));
  EK_RETURN_IF_ERROR(CheckRange("epsilon", rule.epsilon, 0, kNoLimit));
  return CheckRange("weight_decay", rule.weight_decay, 0, kNoLimit);
}

std::string SettingsOf(const Sgd& rule) {
  return absl::StrCat(
      "learning_rate=", SettingText(rule.learning_rate), ", momentum=", SettingText(rule.momentum),
      ", weight_decay=", SettingText(rule.weight_decay), rule.nesterov ? ", nesterov" : "");
}

std::string SettingsOf(const AdamLike auto& rule) {
  return absl::StrCat("learning_rate=", SettingText(rule.learning_rate),
                      ", beta1=", SettingText(rule.beta1), ", beta2=", SettingText(rule.beta2),
                      ", epsilon=", SettingText(rule.epsilon),
                      ", weight_decay=", SettingText(rule.weight_decay));
}

template <typename T>
void Apply(const Sgd& rule, int64_t step, double grad_scale, int64_t n, T* value, const T* gradient,
           absl::Span<const TensorView> state) {
  const UpdateKernels<T>& kernels = internal::BestUpdateKernels<T>();
  const SgdCoefficients coefficients = {.grad_scale = grad_scale,
                                        .weight_decay = rule.weight_decay,
                                        .momentum = rule.momentum,
                                        .negative_learning_rate = -rule.learning_rate,
                                        .is_first = step == 1,
                                        .nesterov = rule.nesterov};
  if (rule.momentum == 0) return kernels.sgd(coefficients, n, value, gradient);
  kernels.sgd_with_momentum(coefficients, n, value, gradient, static_cast<T*>(state[0].data));
}

template <AdamLike Rule, typename T>
void Apply(const Rule& rule, int64_t step, double grad_scale, int64_t n, T* value,
           const T* gradient, absl::Span<const TensorView> state) {
  constexpr bool kDecoupled = std::is_same_v<Rule, AdamW>;
  const double count = static_cast<double>(step);
  const double bias_correction1 = 1 - std::pow(rule.beta1, count);
  const double bias_correction2 = 1 - std::pow(rule.beta2, count);
  const AdamCoefficients coefficients = {
      .grad_scale = grad_scale,
      .weight_decay = kDecoupled ? 0 : rule.weight_decay,
      .keep = kDecoupled ? 1 - rule.learning_rate * rule.weight_decay : 1,
      .beta1 = rule.beta1,
      .one_minus_beta1 = 1 - rule.beta1,
      .beta2 = rule.beta2,
      .one_minus_beta2 = 1 - rule.beta2,
      .epsilon = rule.epsilon,
      .negative_step_size = -(rule.learning_rate / bias_correction1),
      .sqrt_bias_correction2 = std::sqrt(bias_correction2)};
  internal::BestUpdateKernels<T>().adam(coefficients, n, value, gradient,
                                        static_cast<T*>(state[0].data),
                                        static_cast<T*>(state[1].data));
}

template <typename T>
void ApplyTyped(const UpdateRule& rule, int64_t step, double grad_scale, const TensorView& value,
                const TensorView& gradient, absl::Span<const TensorView> state) {
  std::visit(
      [&](const auto& r) {
        Apply(r, step, grad_scale, value.count, static_cast<T*>(value.data),
              static_cast<const T*>(gradient.data), state);
      },
      rule);
}

// Updates the master copy, block by block, and rounds the parameter from it.
void ApplyToMaster(const UpdateRule& rule, int64_t step, double grad_scale, const TensorView& value,
                   const TensorView& gradient, absl::Span<const TensorView> state) {
  constexpr int64_t kBlock = 4096;
  float widened[kBlock];
  const auto names = StateTensorNames(rule, value.dtype);
  for (int64_t begin = 0; begin < value.count; begin += kBlock) {
    const int64_t count = std::min(kBlock, value.count - begin);
    TensorView master;
    absl::InlinedVector<TensorView, kMaxStateTensors> others;
    for (size_t t = 0; t < names.size(); ++t) {
      const TensorView block = state[t].Slice(begin, count);
      names[t] == "master" ? void(master = block) : others.push_back(block);
    }
    const TensorView own = value.Slice(begin, count);
    const TensorView block_gradient(widened, count, DType::kFloat32);
    if (step == 1) ConvertFloats(own, master);
    ConvertFloats(gradient.Slice(begin, count), block_gradient);
    ApplyTyped<float>(rule, step, grad_scale, master, block_gradient, others);
    ConvertFloats(master, own);
  }
}

}  // namespace

std::string SettingText(double value) {
  char text[32];
  return std::string(text, std::to_chars(std::begin(text), std::end(text), value).ptr);
}

absl::Status Validate(const UpdateRule& rule) {
  return std::visit([](const auto& r) { return Annotate(ValidateRule(r), NameOf(r)); }, rule);
}

double LearningRate(const UpdateRule& rule) {
  return std::visit([](const auto& r) { return r.learning_rate; }, rule);
}

void SetLearningRate(UpdateRule& rule, double learning_rate) {
  std::visit([learning_rate](auto& r) { r.learning_rate = learning_rate; }, rule);
}

std::string ToString(const UpdateRule& rule) {
  return std::visit([](const auto& r) { return absl::StrCat(NameOf(r), "(", SettingsOf(r), ")"); },
                    rule);
}

std::span<const absl::string_view> StateTensorNames(const UpdateRule& rule, DType dtype) {
  // In alphabetical order, as they are in an OptimizerState.
  static constexpr absl::string_view kMomentum[] = {"master", "momentum"};
  static constexpr absl::string_view kMoments[] = {"exp_avg", "exp_avg_sq", "master"};
  const bool has_master = StateDType(dtype) != dtype;
  static_assert(std::variant_size_v<UpdateRule> == 3);  // All but Sgd have these moments.
  const Sgd* sgd = std::get_if<Sgd>(&rule);
  if (sgd == nullptr) return std::span(kMoments).first(has_master ? 3 : 2);
  const auto names = std::span(kMomentum).first(sgd->momentum == 0 ? 1 : 2);
  return has_master ? names : names.subspan(1);
}

absl::Status CheckUpdatable(const TensorView& value) {
  const DType dtype = value.dtype;
  if (dtype == DType::kFloat32 || dtype == DType::kBFloat16) return absl::OkStatus();
  if (value.device.is_cpu() && (dtype == DType::kFloat64 || dtype == DType::kFloat16))
    return absl::OkStatus();
  return absl::UnimplementedError(
      value.device.is_cpu()
          ? absl::StrCat("optimizers update parameters of floats, not ", ToString(value))
          : absl::StrCat("optimizers update float32 and bfloat16 parameters on a device, not ",
                         ToString(value)));
}

void ApplyUpdate(const UpdateRule& rule, int64_t step, double grad_scale, const TensorView& value,
                 const TensorView& gradient, absl::Span<const TensorView> state) {
  if (value.dtype == DType::kFloat64)
    return ApplyTyped<double>(rule, step, grad_scale, value, gradient, state);
  if (StateDType(value.dtype) != value.dtype)
    return ApplyToMaster(rule, step, grad_scale, value, gradient, state);
  ApplyTyped<float>(rule, step, grad_scale, value, gradient, state);
}

}  // namespace evenkeel
