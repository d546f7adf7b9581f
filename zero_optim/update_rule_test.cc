#include "evenkeel/zero_optim/update_rule.h"

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "evenkeel/comm/types.h"
#include "evenkeel/zero_optim/internal/update_kernels.h"
#include "evenkeel/zero_optim/optimizer_state.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

template <typename T>
struct Tensors {
  std::vector<T> value, gradient;
  std::vector<std::vector<T>> state;
};

template <typename T>
std::vector<T> RandomValues(int64_t n, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<double> normal;
  std::vector<T> values(n);
  for (T& value : values) value = static_cast<T>(normal(random));
  return values;
}

// The rules as torch::optim writes them: one operation on whole tensors after another. Its add(x,
// alpha) and addcmul() round once.
template <typename T>
void ReferenceSgd(const Sgd& rule, int64_t step, double grad_scale, Tensors<T>& t) {
  for (size_t i = 0; i < t.value.size(); ++i) {
    T d = t.gradient[i] * static_cast<T>(grad_scale);
    if (rule.weight_decay != 0) d = std::fma(t.value[i], static_cast<T>(rule.weight_decay), d);
    if (rule.momentum != 0) {
      T& buffer = t.state[0][i];
      if (step == 1) {
        buffer = d;
      } else {
        buffer = buffer * static_cast<T>(rule.momentum);
        buffer = buffer + d;
      }
      d = rule.nesterov ? std::fma(buffer, static_cast<T>(rule.momentum), d) : buffer;
    }
    t.value[i] = std::fma(d, static_cast<T>(-rule.learning_rate), t.value[i]);
  }
}

template <typename T>
void ReferenceAdam(const Adam& rule, bool decoupled, int64_t step, double grad_scale,
                   Tensors<T>& t) {
  const double correction1 = 1 - std::pow(rule.beta1, static_cast<double>(step));
  const double correction2 = 1 - std::pow(rule.beta2, static_cast<double>(step));
  const T step_size = static_cast<T>(-(rule.learning_rate / correction1));
  for (size_t i = 0; i < t.value.size(); ++i) {
    T g = t.gradient[i] * static_cast<T>(grad_scale);
    if (decoupled)
      t.value[i] = t.value[i] * static_cast<T>(1 - rule.learning_rate * rule.weight_decay);
    if (!decoupled && rule.weight_decay != 0)
      g = std::fma(t.value[i], static_cast<T>(rule.weight_decay), g);
    T& m = t.state[0][i];
    m = m * static_cast<T>(rule.beta1);
    m = std::fma(g, static_cast<T>(1 - rule.beta1), m);
    T& v = t.state[1][i];
    v = v * static_cast<T>(rule.beta2);
    v = std::fma(static_cast<T>(1 - rule.beta2) * g, g, v);
    T denominator = std::sqrt(v) / static_cast<T>(std::sqrt(correction2));
    denominator = denominator + static_cast<T>(rule.epsilon);
    t.value[i] = t.value[i] + step_size * m / denominator;
  }
}

template <typename T>
void Reference(const UpdateRule& rule, int64_t step, double grad_scale, Tensors<T>& t) {
  if (const Sgd* sgd = std::get_if<Sgd>(&rule)) return ReferenceSgd(*sgd, step, grad_scale, t);
  if (const Adam* adam = std::get_if<Adam>(&rule))
    return ReferenceAdam(*adam, false, step, grad_scale, t);
  const AdamW& w = std::get<AdamW>(rule);
  ReferenceAdam({w.learning_rate, w.beta1, w.beta2, w.epsilon, w.weight_decay}, true, step,
                grad_scale, t);
}

std::vector<UpdateRule> OneOfEach() {
  return {Sgd{.learning_rate = 0.1},
          Sgd{.learning_rate = 0.1, .weight_decay = 0.01},
          Sgd{.learning_rate = 0.1, .momentum = 0.9},
          Sgd{.learning_rate = 0.1, .momentum = 0.9, .weight_decay = 0.01},
          Sgd{.learning_rate = 0.1, .momentum = 0.9, .weight_decay = 0.01, .nesterov = true},
          Adam{},
          Adam{.weight_decay = 0.1},
          AdamW{},
          AdamW{.weight_decay = 0}};
}

template <typename T>
bool SameBits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() &&
         (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0);
}

template <typename T>
void ExpectReferenceBits() {
  for (const UpdateRule& rule : OneOfEach()) {
    for (int64_t n : {0, 1, 3, 8, 17, 1003}) {
      SCOPED_TRACE(absl::StrCat(ToString(rule), ", ", n, " elements"));
      Tensors<T> mine{.value = RandomValues<T>(n, 1)};
      mine.state.assign(StateTensorNames(rule).size(), std::vector<T>(n));
      Tensors<T> plain = mine;
      for (int64_t step = 1; step <= 4; ++step) {
        const double grad_scale = step == 3 ? 0.37 : 1.0;
        mine.gradient = plain.gradient = RandomValues<T>(n, 100 + step);
        std::vector<TensorView> state;
        for (std::vector<T>& tensor : mine.state) state.push_back(absl::MakeSpan(tensor));
        ApplyUpdate(rule, step, grad_scale, absl::MakeSpan(mine.value),
                    absl::MakeSpan(mine.gradient), state);
        Reference(rule, step, grad_scale, plain);
        EXPECT_TRUE(SameBits(mine.value, plain.value)) << "step " << step;
        for (size_t s = 0; s < state.size(); ++s)
          EXPECT_TRUE(SameBits(mine.state[s], plain.state[s])) << "step " << step;
      }
    }
  }
}

TEST(UpdateRuleTest, IsThePlainSequenceOfOperationsBitForBitInFloat32) {
  ExpectReferenceBits<float>();
}
TEST(UpdateRuleTest, IsThePlainSequenceOfOperationsBitForBitInFloat64) {
  ExpectReferenceBits<double>();
}

TEST(UpdateRuleTest, GivesTheValuesThatOneComputesByHand) {
  double value = 1.0, gradient = 0.5, momentum = 0.0;
  TensorView v(&value, 1, DType::kFloat64), g(&gradient, 1, DType::kFloat64),
      m(&momentum, 1, DType::kFloat64);
  const Sgd sgd{.learning_rate = 0.1, .momentum = 0.9};
  ApplyUpdate(sgd, 1, 1.0, v, g, {m});
  EXPECT_DOUBLE_EQ(value, 0.95);
  EXPECT_DOUBLE_EQ(momentum, 0.5);
  ApplyUpdate(sgd, 2, 1.0, v, g, {m});
  EXPECT_DOUBLE_EQ(momentum, 0.95);
  EXPECT_DOUBLE_EQ(value, 0.855);

  double second = 0.0;
  value = 1.0, momentum = 0.0;
  TensorView s(&second, 1, DType::kFloat64);
  ApplyUpdate(AdamW{.learning_rate = 0.1, .epsilon = 0, .weight_decay = 0.5}, 1, 1.0, v, g, {m, s});
  EXPECT_NEAR(value, 0.95 - 0.1, 1e-12);  // Adam's first step has the length of the learning rate.
}

template <typename T>
void ExpectEqualKernels() {
  constexpr int64_t kCount = 4099;
  const auto all = internal::SupportedUpdateKernels<T>();
  for (const auto& [name, kernels] : all) {
    SCOPED_TRACE(name);
    for (bool is_first : {true, false}) {
      std::vector<T> value[2], m[2], v[2];
      const std::vector<T> gradient = RandomValues<T>(kCount, 4);
      const internal::UpdateKernels<T>* sets[] = {&all.front().kernels, &kernels};
      for (int k = 0; k < 2; ++k) {
        value[k] = RandomValues<T>(kCount, 5);
        m[k].assign(kCount, T(0.1));
        v[k].assign(kCount, T(0.2));
        const internal::SgdCoefficients sgd{.grad_scale = 0.3,
                                            .weight_decay = 0.01,
                                            .momentum = 0.9,
                                            .negative_learning_rate = -0.1,
                                            .is_first = is_first,
                                            .nesterov = is_first};
        sets[k]->sgd(sgd, kCount, value[k].data(), gradient.data());
        sets[k]->sgd_with_momentum(sgd, kCount, value[k].data(), gradient.data(), m[k].data());
        const internal::AdamCoefficients adam{.weight_decay = 0.1,
                                              .beta1 = 0.9,
                                              .one_minus_beta1 = 0.1,
                                              .beta2 = 0.99,
                                              .one_minus_beta2 = 0.01,
                                              .epsilon = 1e-8,
                                              .negative_step_size = -0.1,
                                              .sqrt_bias_correction2 = 0.7};
        sets[k]->adam(adam, kCount, value[k].data(), gradient.data(), m[k].data(), v[k].data());
      }
      EXPECT_TRUE(SameBits(value[0], value[1]));
      EXPECT_TRUE(SameBits(m[0], m[1]));
      EXPECT_TRUE(SameBits(v[0], v[1]));
    }
  }
}

TEST(UpdateKernelsTest, GiveTheSameBitsOnEveryInstructionSet) {
  ExpectEqualKernels<float>();
  ExpectEqualKernels<double>();
}

TEST(UpdateRuleTest, RefusesSettingsOutOfTheirRange) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const struct {
    UpdateRule rule;
    const char* says;
  } cases[] = {
      {Sgd{.learning_rate = -1}, "SGD: learning_rate is -1"},
      {Sgd{.learning_rate = nan}, "learning_rate is nan"},
      {Sgd{.momentum = -0.5}, "momentum is -0.5"},
      {Sgd{.nesterov = true}, "nesterov needs a momentum"},
      {Adam{.beta1 = 1.0}, "Adam: beta1 is 1, but must be at least 0 and less than 1"},
      {AdamW{.beta2 = -0.1}, "AdamW: beta2 is -0.1"},
      {AdamW{.epsilon = -1e-8}, "epsilon is -1e-08"},
      {Adam{.weight_decay = std::numeric_limits<double>::infinity()}, "weight_decay is inf"},
  };
  for (const auto& [rule, says] : cases) {
    const absl::Status status = Validate(rule);
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    EXPECT_TRUE(absl::StrContains(status.message(), says)) << status;
  }
  for (const UpdateRule& rule : OneOfEach()) EXPECT_TRUE(Validate(rule).ok()) << ToString(rule);
}

TEST(UpdateRuleTest, NamesItsState) {
  EXPECT_THAT(StateTensorNames(Sgd{}), testing::IsEmpty());
  EXPECT_THAT(StateTensorNames(Sgd{.momentum = 0.9}), testing::ElementsAre("momentum"));
  EXPECT_THAT(StateTensorNames(Adam{}), testing::ElementsAre("exp_avg", "exp_avg_sq"));
  EXPECT_THAT(StateTensorNames(AdamW{}), testing::ElementsAre("exp_avg", "exp_avg_sq"));
  EXPECT_THAT(StateTensorNames(Sgd{}, DType::kBFloat16), testing::ElementsAre("master"));
  EXPECT_THAT(StateTensorNames(Sgd{.momentum = 0.9}, DType::kBFloat16),
              testing::ElementsAre("master", "momentum"));
  EXPECT_THAT(StateTensorNames(AdamW{}, DType::kBFloat16),
              testing::ElementsAre("exp_avg", "exp_avg_sq", "master"));
  EXPECT_EQ(StateDType(DType::kBFloat16), DType::kFloat32);
  EXPECT_EQ(StateDType(DType::kFloat64), DType::kFloat64);
}

TEST(UpdateRuleTest, SaysWhatItIsAndTakesANewLearningRate) {
  UpdateRule rule = AdamW{};
  SetLearningRate(rule, 0.25);
  EXPECT_EQ(LearningRate(rule), 0.25);
  EXPECT_EQ(ToString(rule),
            "AdamW(learning_rate=0.25, beta1=0.9, beta2=0.999, epsilon=1e-08, weight_decay=0.01)");
}

TEST(UpdateRuleTest, UpdatesFloats) {
  for (const DType dtype :
       {DType::kFloat32, DType::kFloat64, DType::kFloat16, DType::kBFloat16, DType::kInt32}) {
    SCOPED_TRACE(ToString(dtype));
    const bool is_float = dtype != DType::kInt32;
    EXPECT_EQ(CheckUpdatable(TensorView(nullptr, 1, dtype)).ok(), is_float);
    const absl::Status there = CheckUpdatable(TensorView(nullptr, 1, dtype, Device::Cuda(0)));
    EXPECT_EQ(there.ok(), dtype == DType::kFloat32 || dtype == DType::kBFloat16) << there;
  }
}

// Updates far below the last bit of the parameter add up in its master copy.
template <typename Half>
void ExpectUpdatesAsFloat32() {
  constexpr int64_t kCount = 5000;  // More than a block.
  for (const UpdateRule& rule : OneOfEach()) {
    SCOPED_TRACE(ToString(rule));
    std::vector<Half> value, gradient(kCount);
    for (const float start : RandomValues<float>(kCount, 1)) value.emplace_back(start);
    std::vector<float> plain(value.begin(), value.end()), plain_gradient(kCount);
    const auto names = StateTensorNames(rule, DTypeOf<Half>::value);
    std::vector<std::vector<float>> state(names.size(), std::vector<float>(kCount)), plain_state;
    std::vector<TensorView> views, plain_views;
    for (std::vector<float>& tensor : state) views.emplace_back(absl::MakeSpan(tensor));
    plain_state.resize(StateTensorNames(rule).size(), std::vector<float>(kCount));
    for (std::vector<float>& tensor : plain_state) plain_views.emplace_back(absl::MakeSpan(tensor));
    for (int64_t step = 1; step <= 10; ++step) {
      const std::vector<float> random = RandomValues<float>(kCount, 10 + step);
      for (int64_t i = 0; i < kCount; ++i) {
        gradient[i] = Half(random[i]);
        plain_gradient[i] = static_cast<float>(gradient[i]);
      }
      ApplyUpdate(rule, step, 0.5, absl::MakeSpan(value), absl::MakeSpan(gradient), views);
      ApplyUpdate(rule, step, 0.5, absl::MakeSpan(plain), absl::MakeSpan(plain_gradient),
                  plain_views);
    }
    int64_t rounded = 0;
    for (int64_t i = 0; i < kCount; ++i) {
      ASSERT_EQ(value[i].bits, Half(plain[i]).bits) << i;
      rounded += static_cast<float>(value[i]) != plain[i] ? 1 : 0;
    }
    EXPECT_GT(rounded, kCount / 2);
    size_t other = 0;
    for (size_t t = 0; t < names.size(); ++t)
      EXPECT_TRUE(state[t] == (names[t] == "master" ? plain : plain_state[other++])) << names[t];
  }
}

TEST(UpdateRuleTest, RoundsSixteenBitsFromAMasterCopy) {
  ExpectUpdatesAsFloat32<BFloat16>();
  ExpectUpdatesAsFloat32<Float16>();
}

}  // namespace
}  // namespace evenkeel
