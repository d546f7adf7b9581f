// The model on a device against the CPU's, and against PyTorch in float64.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "evenkeel/bucket/parameter_set.h"
#include "evenkeel/comm/types.h"
#include "evenkeel/trainer/data/batch.h"
#include "evenkeel/trainer/device/device_models.h"
#include "evenkeel/trainer/device/testing/device_gpt_fixture.h"
#include "evenkeel/trainer/gpt/gpt.h"
#include "evenkeel/trainer/gpt/gpt_options.h"
#include "evenkeel/trainer/gpt/testing/recorded.h"
#include "evenkeel/trainer/models/batch_result.h"
#include "evenkeel/trainer/models/model.h"
#include "evenkeel/trainer/models/place.h"
#include "evenkeel/zero_optim/update_rule.h"

namespace evenkeel {
namespace {

TEST_F(DeviceGptTest, HasTheLossAndTheGradientsOfTheCpu) { ExpectParity(kTiny, kFloatBound); }

TEST_F(DeviceGptTest, HasThoseOfTheCpuInBFloat16) {
  GptOptions options = kTiny;
  options.compute = GptCompute::kBFloat16;
  ExpectParity(options, kBFloatBound);
}

// A mask that differs in one element is far outside of the bound.
TEST_F(DeviceGptTest, DropsWhatTheCpuDrops) {
  GptOptions options = kTiny;
  options.dropout = 0.2;
  ExpectParity(options, kFloatBound);
  options.compute = GptCompute::kBFloat16;
  ExpectParity(options, kBFloatBound);
}

TEST_F(DeviceGptTest, AttentionMayGoInBlocksOfAnySize) {
  GptOptions options = kTiny;
  options.dropout = 0.2;
  options.context = 8;
  for (const int64_t rows : {1, 3, 8}) ExpectParity(options, kFloatBound, {.attention_rows = rows});
}

TEST_F(DeviceGptTest, SizesThatAreNoMultiplesOfFour) {
  ExpectParity(
      {.vocabulary = 67, .context = 17, .layers = 1, .width = 33, .heads = 3, .dropout = 0.1},
      kFloatBound);
  ExpectParity({.vocabulary = 67, .context = 16, .layers = 3, .width = 5, .heads = 1}, kFloatBound);
}

TEST_F(DeviceGptTest, AddsToGradientsThatAreThere) {
  const std::unique_ptr<Gpt> host = MakeHost(kTiny), model = MakeOnDevice(*host);
  for (Gpt* const own : {host.get(), model.get()}) Pass(*own, Tokens(2, 16, 7).Batch());
  const Tokens tokens(3, 9);
  const Gradients expected = Pass(*host, tokens.Batch(), {}, /*clears=*/false);
  ExpectNear(Pass(*model, tokens.Batch(), {}, /*clears=*/false), expected, kFloatBound);
}

TEST_F(DeviceGptTest, FrozenParametersGetNothingAndEndBackward) {
  const Tokens tokens(2, 16);
  for (const std::vector<std::string>& frozen :
       {std::vector<std::string>{"wte", "h.0."},
        {"wte", "wpe", "h.0.", "h.1.ln_1", "h.1.attn.c_attn"},
        {"h.1.", "ln_f"},
        {"wpe", "h.0.ln_1.bias"},
        {"wte", "wpe", "h."},
        {""}}) {
    SCOPED_TRACE(testing::PrintToString(frozen));
    const std::unique_ptr<Gpt> host = MakeHost(kTiny);
    for (const std::string& prefix : frozen) host->parameters().SetTrainable(prefix, false);
    const std::unique_ptr<Gpt> model = MakeOnDevice(*host);  // With the mask.
    const Gradients expected = Pass(*host, tokens.Batch());
    const std::vector<int> order = announced_;
    ExpectNear(Pass(*model, tokens.Batch()), expected, kFloatBound);
    EXPECT_EQ(announced_, order);
  }
}

// Adam moves an element by the learning rate times a mean gradient over its root mean square: what
// a gradient is off by, 1e-5 of its tensor's largest, is divided by epsilon at worst.
TEST_F(DeviceGptTest, TrainsAsTheCpuDoes) {
  const std::unique_ptr<Gpt> host = MakeHost(kTiny), model = MakeOnDevice(*host);
  const AdamW rule{.learning_rate = 1e-3, .epsilon = 1e-3, .weight_decay = 0.1};
  constexpr int kSteps = 5;
  std::vector<std::vector<float>> moments[2][2];
  std::map<std::string, double> largest;
  for (int step = 0; step < kSteps; ++step) {
    const Tokens tokens(3, 16, step);
    double losses[2];
    for (Gpt* const own : {host.get(), model.get()}) {
      const bool is_host = own == host.get();
      Gradients gradients = Pass(*own, tokens.Batch());
      losses[is_host] = result_.loss_mean;
      const absl::StatusOr<HostTensors> values = own->ToHost();
      ASSERT_TRUE(values.ok()) << values.status();
      auto& [first, second] = moments[is_host];
      for (int i = 0; i < own->parameters().size(); ++i) {
        std::vector<float>& gradient = gradients.at(own->parameters()[i].name);
        if (step == 0) first.emplace_back(gradient.size()), second.emplace_back(gradient.size());
        ApplyUpdate(rule, step + 1, 1.0, values->values[i], TensorView(absl::MakeSpan(gradient)),
                    {TensorView(absl::MakeSpan(first[i])), TensorView(absl::MakeSpan(second[i]))});
        double& most = largest[own->parameters()[i].name];
        for (const float g : gradient) most = std::max(most, std::abs(static_cast<double>(g)));
      }
      ASSERT_TRUE(own->FromHost(*values).ok());
    }
    EXPECT_NEAR(losses[0], losses[1], 1e-5 * losses[1]) << "step " << step;
  }
  for (int i = 0; i < host->parameters().size(); ++i) {
    const Parameter& expected = host->parameters()[i];
    const std::vector<float> actual = ToHost(*model, model->parameters()[i].value);
    double difference = 0;
    for (size_t k = 0; k < actual.size(); ++k) {
      difference = std::max(
          difference, std::abs(static_cast<double>(actual[k]) - expected.value.as<float>()[k]));
    }
    const double gradient_error = 10 * kFloatBound * largest[expected.name];
    EXPECT_LE(difference, kSteps * rule.learning_rate * gradient_error / rule.epsilon + 2e-7)
        << expected.name;
  }
}

// The recorded model and steps of trainer/gpt/gpt_parity_test.cc, with its bounds for float32.
TEST_F(DeviceGptTest, AgreesWithPyTorch) {
  const Recorded recorded("model");
  constexpr int64_t kContext = 8, kTokens = 3 * kContext;
  const std::unique_ptr<Gpt> host =
      MakeHost({.vocabulary = 32, .context = kContext, .layers = 2, .width = 16, .heads = 2});
  for (int i = 0; i < host->parameters().size(); ++i) {
    const Parameter& parameter = host->parameters()[i];
    std::ranges::copy(recorded.Get<float>("init." + parameter.name),
                      parameter.value.as<float>().begin());
  }
  const std::unique_ptr<Gpt> model = MakeOnDevice(*host);
  const auto inputs = recorded.Get<int32_t>("inputs"), targets = recorded.Get<int32_t>("targets");
  const auto losses = recorded.Get<double>("loss");
  const Gradients gradients =
      Pass(*model, {std::span(inputs).first(kTokens), std::span(targets).first(kTokens), kContext});
  EXPECT_NEAR(result_.loss_mean, losses[0], 5e-6);
  const auto differences = nlohmann::json::parse(recorded.Metadata("float32.grad"));
  for (const auto& [name, gradient] : gradients) {
    const std::vector<double> expected = recorded.Get<double>("grad." + name);
    const double largest =
        std::abs(*std::ranges::max_element(expected, {}, [](double x) { return std::abs(x); }));
    const double bound = (3 * differences.at(name).get<double>() + 1.2e-7) / largest;
    EXPECT_LE(Difference<float>(gradient, expected), bound) << name;
  }
}

TEST_F(DeviceGptTest, EvaluatesInLessMemory) {
  GptOptions options = kTiny;
  options.layers = 4;
  options.dropout = 0.5;
  const std::unique_ptr<Gpt> host = MakeHost(options), trains = MakeOnDevice(*host),
                             evaluates = MakeOnDevice(*host);
  const Tokens tokens(3, 16);
  const absl::StatusOr<BatchResult> expected = host->Forward(tokens.Batch(), Mode::kEvaluation);
  ASSERT_TRUE(expected.ok());
  EXPECT_EQ(evaluates->ActivationBytes(), trains->ActivationBytes());
  Pass(*trains, tokens.Batch());
  for (Gpt* const model : {trains.get(), evaluates.get()}) {
    const absl::StatusOr<BatchResult> actual = model->Forward(tokens.Batch(), Mode::kEvaluation);
    ASSERT_TRUE(actual.ok()) << actual.status();
    EXPECT_NEAR(actual->loss_mean, expected->loss_mean, kFloatBound * expected->loss_mean);
    EXPECT_EQ(actual->correct, expected->correct);
  }
  EXPECT_LT(evaluates->ActivationBytes(), trains->ActivationBytes() / 2);
  EXPECT_EQ(evaluates->Backward([](int) { return absl::OkStatus(); }).code(),
            absl::StatusCode::kFailedPrecondition);
}

TEST_F(DeviceGptTest, SaysWhatFollows) {
  const std::unique_ptr<Gpt> host = MakeHost(kTiny), model = MakeOnDevice(*host);
  const Tokens tokens(2, 16);
  for (const size_t length : {1, 5, 16, 20}) {
    const std::span<const int32_t> prompt = std::span(tokens.inputs).first(length);
    const absl::StatusOr<std::span<const float>> expected = host->NextToken(prompt),
                                                 actual = model->NextToken(prompt);
    ASSERT_TRUE(expected.ok() && actual.ok()) << actual.status();
    EXPECT_LE(Difference<float>(*actual, std::vector<double>(expected->begin(), expected->end())),
              kFloatBound);
  }
  EXPECT_EQ(model->NextToken({}).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST_F(DeviceGptTest, RefusesWhatADeviceDoesNotCompute) {
  GptOptions options = kTiny;
  options.compute = GptCompute::kFloat64;
  EXPECT_EQ(MakeDeviceGpt(*MakeHost(options), Place()).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(MakeDeviceGpt(*MakeHost(kTiny), DevicePlace()).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(MakeDeviceGpt(*MakeHost(kTiny), Place(), {.attention_rows = 0}).status().code(),
            absl::StatusCode::kInvalidArgument);
  const std::unique_ptr<Gpt> host = MakeHost(kTiny), model = MakeOnDevice(*host);
  Tokens tokens(1, 16);
  tokens.inputs[3] = 67;
  EXPECT_EQ(model->StartForward(tokens.Batch(), Mode::kTraining).status().code(),
            absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace evenkeel
