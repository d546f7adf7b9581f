// The model against PyTorch in float64: the loss, every gradient, and five steps of AdamW.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "evenkeel/bucket/parameter_set.h"
#include "evenkeel/comm/types.h"
#include "evenkeel/trainer/data/batch.h"
#include "evenkeel/trainer/gpt/gpt.h"
#include "evenkeel/trainer/gpt/testing/recorded.h"
#include "evenkeel/trainer/models/model.h"
#include "evenkeel/zero_optim/update_rule.h"

namespace evenkeel {
namespace {

constexpr int kSteps = 5;
constexpr int64_t kContext = 8, kTokens = 3 * kContext;

class GptParityTest : public testing::Test {
 protected:
  const Recorded recorded_{"model"};
  const std::vector<int32_t> inputs_ = recorded_.Get<int32_t>("inputs");
  const std::vector<int32_t> targets_ = recorded_.Get<int32_t>("targets");
  const std::vector<double> losses_ = recorded_.Get<double>("loss");

  TokenBatch BatchOf(int step) const {
    return {std::span(inputs_).subspan(step * kTokens, kTokens),
            std::span(targets_).subspan(step * kTokens, kTokens), kContext};
  }

  template <typename T>
  std::unique_ptr<Gpt> Make() const {
    absl::StatusOr<std::unique_ptr<Gpt>> model = MakeGpt(
        {.vocabulary = 32,
         .context = kContext,
         .layers = 2,
         .width = 16,
         .heads = 2,
         .compute = std::is_same_v<T, double> ? GptCompute::kFloat64 : GptCompute::kFloat32});
    EXPECT_TRUE(model.ok()) << model.status();
    ParameterSet& parameters = (*model)->parameters();
    for (int i = 0; i < parameters.size(); ++i) {
      std::ranges::copy(recorded_.Get<T>("init." + parameters[i].name),
                        parameters[i].value.as<T>().begin());
    }
    return *std::move(model);
  }

  // How far a tensor may be from the recorded one: relative in float64, absolute in float32, where
  // it is three times what PyTorch's own float32 is off by, and what its last bit is worth near 1.
  template <typename T>
  void ExpectNear(const std::string& kind, const std::string& name,
                  std::span<const T> actual) const {
    const std::vector<double> expected = recorded_.Get<double>(kind + "." + name);
    // A bias of keys has the gradient 0; what rounding makes of it, some 1e-17, AdamW divides by
    // epsilon, 1e-8.
    double bound = kind == "final" && name.ends_with("c_attn.bias") ? 5e-11 : 1e-12;
    if (std::is_same_v<T, float>) {
      const auto differences = nlohmann::json::parse(recorded_.Metadata("float32." + kind));
      const double largest =
          std::abs(*std::ranges::max_element(expected, {}, [](double x) { return std::abs(x); }));
      bound = (3 * differences.at(name).get<double>() + 1.2e-7) / largest;
    }
    EXPECT_LE(Difference<T>(actual, expected), bound) << kind << " of " << name;
  }

  template <typename T>
  void ExpectParity() {
    const std::unique_ptr<Gpt> model = Make<T>();
    ParameterSet& parameters = model->parameters();
    std::vector<std::vector<T>> first, second;
    for (int i = 0; i < parameters.size(); ++i) {
      first.emplace_back(parameters[i].value.count), second.emplace_back(parameters[i].value.count);
    }
    const auto settings = nlohmann::json::parse(recorded_.Metadata("adamw"));
    const AdamW rule{.learning_rate = settings.at("lr"),
                     .beta1 = settings.at("betas").at(0),
                     .beta2 = settings.at("betas").at(1),
                     .epsilon = settings.at("eps"),
                     .weight_decay = settings.at("weight_decay")};
    for (int step = 0; step < kSteps; ++step) {
      parameters.ClearGradients();
      const absl::StatusOr<BatchResult> result = model->Forward(BatchOf(step), Mode::kTraining);
      ASSERT_TRUE(result.ok()) << result.status();
      // A loss near 4, and float's rounding of it for each of the twenty operations on the way.
      const double bound = std::is_same<T, double>::value ? 1e-12 : 5e-6;
      EXPECT_NEAR(result->loss_mean, losses_[step], bound) << "step " << step;
      EXPECT_EQ(result->predictions, kTokens);
      ASSERT_TRUE(model->Backward([](int) { return absl::OkStatus(); }).ok());
      for (int i = 0; i < parameters.size(); ++i) {
        if (step == 0) ExpectNear<T>("grad", parameters[i].name, parameters[i].grad.as<T>());
        ApplyUpdate(rule, step + 1, 1.0, parameters[i].value, parameters[i].grad,
                    {TensorView(absl::MakeSpan(first[i])), TensorView(absl::MakeSpan(second[i]))});
      }
    }
    for (int i = 0; i < parameters.size(); ++i) {
      ExpectNear<T>("final", parameters[i].name, parameters[i].value.as<T>());
    }
  }
};

TEST_F(GptParityTest, Float64AgreesWithPyTorch) { ExpectParity<double>(); }

TEST_F(GptParityTest, Float32AgreesWithPyTorch) { ExpectParity<float>(); }

}  // namespace
}  // namespace evenkeel
