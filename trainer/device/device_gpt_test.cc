// The model on a simulated device against the CPU's, and against PyTorch in float64.

#include "evenkeel/trainer/device/device_gpt.h"

#include <gmock/gmock.h>
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
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "evenkeel/bucket/parameter_set.h"
#include "evenkeel/comm/device/simulated.h"
#include "evenkeel/comm/types.h"
#include "evenkeel/trainer/batch.h"
#include "evenkeel/trainer/batch_result.h"
#include "evenkeel/trainer/device/make_place.h"
#include "evenkeel/trainer/device/place.h"
#include "evenkeel/trainer/gpt/gpt.h"
#include "evenkeel/trainer/gpt/gpt_options.h"
#include "evenkeel/trainer/gpt/recorded.h"
#include "evenkeel/trainer/model.h"
#include "evenkeel/trainer/stable_random.h"
#include "evenkeel/zero_optim/update_rule.h"

namespace evenkeel {
namespace {

using testing::HasSubstr;

constexpr GptOptions kTiny{.vocabulary = 67, .context = 16, .layers = 2, .width = 48, .heads = 3, .seed = 5};

// Of a gradient's largest element. float32: some hundred additions on the way, each off by 2^-24, in another order.
// bfloat16: an operand that float32 computed a little differently may round to the other side, 2^-8 away; few do, and
// a sum of operands sees them diluted.
constexpr double kFloatBound = 1e-5, kBFloatBound = 1e-2;

struct Tokens {
  Tokens(int64_t sequences, int64_t context, uint64_t seed = 1) : context(context) {
    StableRandom random(seed);
    for (int64_t i = 0; i < sequences * context; ++i) {
      // Some of them often.
      inputs.push_back(static_cast<int32_t>(random.Below(random.Below(2) == 0 ? 3 : 67)));
      targets.push_back(static_cast<int32_t>(random.Below(67)));
    }
  }
  TokenBatch Batch() const { return {inputs, targets, context}; }
  std::vector<int32_t> inputs, targets;
  int64_t context;
};

using Gradients = std::map<std::string, std::vector<float>>;

class DeviceGptTest : public testing::Test {
 protected:
  std::unique_ptr<Gpt> MakeHost(const GptOptions& options) {
    absl::StatusOr<std::unique_ptr<Gpt>> host = MakeGpt(options);
    EXPECT_TRUE(host.ok()) << host.status();
    return *std::move(host);
  }
  DevicePlace Place() {
    absl::StatusOr<DevicePlace> place = MakeDevicePlace(*devices_, Device::Cuda(0));
    EXPECT_TRUE(place.ok()) << place.status();
    return *place;
  }
  std::unique_ptr<Gpt> MakeOnDevice(const Gpt& host, const DeviceGptOptions& options = {}) {
    absl::StatusOr<std::unique_ptr<Gpt>> model = MakeDeviceGpt(host, Place(), options);
    EXPECT_TRUE(model.ok()) << model.status();
    return *std::move(model);
  }

  // Forward, Backward, and the gradients of all that are trained, on the host.
  Gradients Pass(Gpt& model, const TokenBatch& batch, const PassOptions& options = {}, bool clears = true) {
    ParameterSet& parameters = model.parameters();
    if (clears) parameters.ClearGradients();
    const absl::StatusOr<PendingResult> pending = model.StartForward(batch, Mode::kTraining, options);
    EXPECT_TRUE(pending.ok()) << pending.status();
    announced_.clear();
    const absl::Status backward = model.Backward([&](int index) {
      announced_.push_back(index);
      return absl::OkStatus();
    });
    EXPECT_TRUE(backward.ok()) << backward;
    const absl::StatusOr<BatchResult> result = pending->Wait(absl::Now() + absl::Minutes(2));
    EXPECT_TRUE(result.ok()) << result.status();
    result_ = *result;
    Gradients gradients;
    for (int i = 0; i < parameters.size(); ++i) {
      if (!parameters.trainable(i)) continue;
      gradients[parameters[i].name] = ToHost(model, parameters[i].grad);
    }
    return gradients;
  }
  std::vector<float> ToHost(const Gpt& model, const TensorView& tensor) {
    std::vector<float> values(tensor.count);
    if (tensor.device.is_cpu()) {
      std::ranges::copy(tensor.as<float>(), values.begin());
      return values;
    }
    const StreamRef stream = model.place().stream.ref();
    EXPECT_TRUE(devices_->Copy(values.data(), tensor.data, tensor.bytes(), stream).ok());
    EXPECT_TRUE(devices_->Synchronize(stream, absl::Now() + absl::Minutes(2)).ok());
    return values;
  }

  void ExpectNear(const Gradients& actual, const Gradients& expected, double bound) {
    ASSERT_EQ(actual.size(), expected.size());
    for (const auto& [name, values] : expected) {
      const std::vector<double> wanted(values.begin(), values.end());
      EXPECT_LE(Difference<float>(actual.at(name), wanted), bound) << name;
    }
  }

  void ExpectParity(GptOptions options, double bound, const DeviceGptOptions& device_options = {}) {
    const std::unique_ptr<Gpt> host = MakeHost(options), model = MakeOnDevice(*host, device_options);
    for (const Tokens& tokens : {Tokens(3, 16), Tokens(1, 1), Tokens(2, 7)}) {
      SCOPED_TRACE(testing::Message() << tokens.inputs.size() << " tokens");
      const PassOptions pass{.weight = 3, .noise = 11};
      const Gradients expected = Pass(*host, tokens.Batch(), pass);
      const BatchResult wanted = result_;
      const std::vector<int> order = announced_;
      const Gradients actual = Pass(*model, tokens.Batch(), pass);
      ExpectNear(actual, expected, bound);
      EXPECT_NEAR(result_.loss_mean, wanted.loss_mean, bound * wanted.loss_mean);
      EXPECT_EQ(result_.predictions, wanted.predictions);
      EXPECT_EQ(announced_, order);
      EXPECT_EQ(Pass(*model, tokens.Batch(), pass), actual) << "another time, other bits";
    }
  }

  std::unique_ptr<SimulatedDevices> devices_ = std::make_unique<SimulatedDevices>();
  std::vector<int> announced_;
  BatchResult result_;
};

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
  for (const int64_t rows : {1, 5, 16}) ExpectParity(options, kFloatBound, {.attention_rows = rows});
}

TEST_F(DeviceGptTest, ProbabilitiesThatWereForgottenAreTheSameAgain) {
  GptOptions options = kTiny;
  options.dropout = 0.2;
  for (const GptCompute compute : {GptCompute::kFloat32, GptCompute::kBFloat16}) {
    options.compute = compute;
    const std::unique_ptr<Gpt> host = MakeHost(options), keeps = MakeOnDevice(*host, {.attention_rows = 8}),
                               forgets = MakeOnDevice(*host, {.keeps_probabilities = false, .attention_rows = 8});
    const Tokens tokens(3, 16);
    EXPECT_EQ(Pass(*forgets, tokens.Batch()), Pass(*keeps, tokens.Batch()));
    EXPECT_LT(forgets->ActivationBytes(), keeps->ActivationBytes());
  }
}

TEST_F(DeviceGptTest, SizesThatAreNoMultiplesOfFour) {
  ExpectParity({.vocabulary = 67, .context = 17, .layers = 1, .width = 33, .heads = 3, .dropout = 0.1}, kFloatBound);
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
  for (const std::vector<std::string>& frozen : {std::vector<std::string>{"wte", "h.0."},
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

// Adam moves an element by the learning rate times a mean gradient over its root mean square: what a gradient is off
// by, 1e-5 of its tensor's largest, is divided by epsilon at worst.
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
      difference = std::max(difference, std::abs(static_cast<double>(actual[k]) - expected.value.as<float>()[k]));
    }
    const double gradient_error = 10 * kFloatBound * largest[expected.name];
    EXPECT_LE(difference, kSteps * rule.learning_rate * gradient_error / rule.epsilon + 2e-7) << expected.name;
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
    std::ranges::copy(recorded.Get<float>("init." + parameter.name), parameter.value.as<float>().begin());
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
    const double largest = std::abs(*std::ranges::max_element(expected, {}, [](double x) { return std::abs(x); }));
    const double bound = (3 * differences.at(name).get<double>() + 1.2e-7) / largest;
    EXPECT_LE(Difference<float>(gradient, expected), bound) << name;
  }
}

TEST_F(DeviceGptTest, AStepDoesNotWaitForTheDevice) {
  devices_ = std::make_unique<SimulatedDevices>(SimulatedOptions{.delay = absl::Microseconds(200)});
  GptOptions options = kTiny;
  options.dropout = 0.1;
  for (const GptCompute compute : {GptCompute::kFloat32, GptCompute::kBFloat16}) {
    options.compute = compute;
    const std::unique_ptr<Gpt> host = MakeHost(options), model = MakeOnDevice(*host);
    Pass(*model, Tokens(2, 16).Batch());
    const int64_t waits = devices_->host_waits();
    absl::StatusOr<PendingResult> pending;
    {
      const Tokens tokens(2, 16, 3);  // Gone before the device has come to it.
      pending = model->StartForward(tokens.Batch(), Mode::kTraining);
      ASSERT_TRUE(pending.ok()) << pending.status();
    }
    ASSERT_TRUE(model->Backward([](int) { return absl::OkStatus(); }).ok());
    EXPECT_EQ(devices_->host_waits(), waits);
    const Tokens tokens(2, 16, 3);
    const absl::StatusOr<BatchResult> actual = pending->Wait(absl::Now() + absl::Minutes(2));
    ASSERT_TRUE(actual.ok()) << actual.status();
    EXPECT_GT(devices_->host_waits(), waits);
    Pass(*host, tokens.Batch());
    EXPECT_NEAR(actual->loss_mean, result_.loss_mean, 0.01 * result_.loss_mean);
  }
}

TEST_F(DeviceGptTest, EvaluatesInLessMemory) {
  GptOptions options = kTiny;
  options.layers = 5;
  options.dropout = 0.5;
  const std::unique_ptr<Gpt> host = MakeHost(options), trains = MakeOnDevice(*host), evaluates = MakeOnDevice(*host);
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
  EXPECT_EQ(evaluates->Backward([](int) { return absl::OkStatus(); }).code(), absl::StatusCode::kFailedPrecondition);
}

TEST_F(DeviceGptTest, SaysWhatFollows) {
  const std::unique_ptr<Gpt> host = MakeHost(kTiny), model = MakeOnDevice(*host);
  const Tokens tokens(2, 16);
  for (const size_t length : {1, 5, 16, 20}) {
    const std::span<const int32_t> prompt = std::span(tokens.inputs).first(length);
    const absl::StatusOr<std::span<const float>> expected = host->NextToken(prompt), actual = model->NextToken(prompt);
    ASSERT_TRUE(expected.ok() && actual.ok()) << actual.status();
    EXPECT_LE(Difference<float>(*actual, std::vector<double>(expected->begin(), expected->end())), kFloatBound);
  }
  EXPECT_EQ(model->NextToken({}).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST_F(DeviceGptTest, SaysHowMuchMemoryIsLacking) {
  devices_ = std::make_unique<SimulatedDevices>(SimulatedOptions{.bytes = 1'500'000});
  const std::unique_ptr<Gpt> host = MakeHost(kTiny), model = MakeOnDevice(*host);
  const Tokens small(1, 16), large(64, 16);
  const absl::Status status = model->StartForward(large.Batch(), Mode::kTraining).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
  EXPECT_THAT(status.ToString(), HasSubstr("training on 64 sequences of 16 tokens takes"));
  EXPECT_EQ(model->Backward([](int) { return absl::OkStatus(); }).code(), absl::StatusCode::kFailedPrecondition);
  const Gradients expected = Pass(*host, small.Batch());
  ExpectNear(Pass(*model, small.Batch()), expected, kFloatBound);
}

TEST_F(DeviceGptTest, RefusesWhatADeviceDoesNotCompute) {
  GptOptions options = kTiny;
  options.compute = GptCompute::kFloat64;
  EXPECT_EQ(MakeDeviceGpt(*MakeHost(options), Place()).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(MakeDeviceGpt(*MakeHost(kTiny), DevicePlace()).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(MakeDeviceGpt(*MakeHost(kTiny), Place(), {.attention_rows = 0}).status().code(),
            absl::StatusCode::kInvalidArgument);
  const std::unique_ptr<Gpt> host = MakeHost(kTiny), model = MakeOnDevice(*host);
  Tokens tokens(1, 16);
  tokens.inputs[3] = 67;
  EXPECT_EQ(model->StartForward(tokens.Batch(), Mode::kTraining).status().code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace evenkeel
