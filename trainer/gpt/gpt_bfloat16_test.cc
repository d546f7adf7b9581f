// The model in bfloat16 beside float32. Runs a second time as gpt_bfloat16_plain_test, with oneDNN
// told to use AVX2 at most, where it has no bfloat16.

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "evenkeel/trainer/data/batch.h"
#include "evenkeel/trainer/data/stable_random.h"
#include "evenkeel/trainer/gpt/gpt.h"
#include "evenkeel/trainer/gpt/gpt_options.h"
#include "evenkeel/trainer/models/model.h"

namespace evenkeel {
namespace {

constexpr int64_t kContext = 16;

std::unique_ptr<Gpt> Make(GptCompute compute) {
  absl::StatusOr<std::unique_ptr<Gpt>> model = MakeGpt({.vocabulary = 16,
                                                        .context = kContext,
                                                        .layers = 2,
                                                        .width = 32,
                                                        .heads = 2,
                                                        .compute = compute,
                                                        .seed = 1});
  EXPECT_TRUE(model.ok()) << model.status();
  return *std::move(model);
}

// Sequences that count up from anywhere, two apart.
struct Counting {
  Counting() {
    StableRandom random(1);
    for (int sequence = 0; sequence < 4; ++sequence) {
      const auto first = static_cast<int32_t>(random.Below(16));
      for (int32_t i = 0; i < kContext; ++i) {
        inputs.push_back((first + 2 * i) % 16), targets.push_back((first + 2 * i + 2) % 16);
      }
    }
  }
  TokenBatch Batch() const { return {inputs, targets, kContext}; }
  std::vector<int32_t> inputs, targets;
};

double Loss(Gpt& model, Mode mode = Mode::kTraining) {
  const Counting data;
  const absl::StatusOr<BatchResult> result = model.Forward(data.Batch(), mode);
  EXPECT_TRUE(result.ok()) << result.status();
  return result.ok() ? result->loss_mean : NAN;
}

double Step(Gpt& model, float rate) {
  const Counting data;
  model.parameters().ClearGradients();
  const absl::StatusOr<BatchResult> result = model.Forward(data.Batch(), Mode::kTraining);
  EXPECT_TRUE(result.ok()) << result.status();
  EXPECT_TRUE(model.Backward([](int) { return absl::OkStatus(); }).ok());
  for (int i = 0; i < model.parameters().size(); ++i) {
    const std::span<float> value = model.parameters()[i].value.as<float>();
    const std::span<float> grad = model.parameters()[i].grad.as<float>();
    for (size_t k = 0; k < value.size(); ++k) value[k] -= rate * grad[k];
  }
  return result->loss_mean;
}

TEST(GptBFloat16Test, TheLossIsNearThatOfFloat32) {
  // A score is a product of a normalised state, of length sqrt(32), with a row of wte, of elements
  // near 0.02: about 0.1. On the way each of some ten operands is rounded by at most 2^-9: by 10 *
  // 2^-9 * 0.1 a score, and the loss, is off.
  const std::unique_ptr<Gpt> exact = Make(GptCompute::kFloat32),
                             rounded = Make(GptCompute::kBFloat16);
  EXPECT_NEAR(Loss(*exact), Loss(*rounded), 10 * 0x1p-9 * 0.1);
  EXPECT_NE(Loss(*exact), Loss(*rounded));
  EXPECT_EQ(Loss(*rounded, Mode::kTraining), Loss(*rounded, Mode::kEvaluation));
}

TEST(GptBFloat16Test, GradientsPointWhereFloat32sDo) {
  const std::unique_ptr<Gpt> exact = Make(GptCompute::kFloat32),
                             rounded = Make(GptCompute::kBFloat16);
  Step(*exact, 0), Step(*rounded, 0);
  for (int i = 0; i < exact->parameters().size(); ++i) {
    const std::span<float> a = exact->parameters()[i].grad.as<float>(),
                           b = rounded->parameters()[i].grad.as<float>();
    double difference = 0, size = 0;
    for (size_t k = 0; k < a.size(); ++k) {
      difference += (a[k] - b[k]) * (a[k] - b[k]), size += a[k] * a[k];
    }
    // Some twenty roundings of 2^-9, mostly not of one sign. The keys' biases have the gradient 0;
    // they are apart from it by what rounding leaves of the others' next to them.
    EXPECT_LT(std::sqrt(difference), 20 * 0x1p-9 * std::sqrt(size)) << exact->parameters()[i].name;
  }
}

TEST(GptBFloat16Test, LearnsAsFloat32Does) {
  const std::unique_ptr<Gpt> exact = Make(GptCompute::kFloat32),
                             rounded = Make(GptCompute::kBFloat16);
  double loss_exact = 0, loss_rounded = 0;
  for (int step = 0; step < 150; ++step) {
    loss_exact = Step(*exact, 0.5f), loss_rounded = Step(*rounded, 0.5f);
  }
  EXPECT_LT(loss_exact, 0.7);
  EXPECT_NEAR(loss_exact, loss_rounded, 0.1 * (std::log(16.0) - loss_exact));
}

}  // namespace
}  // namespace evenkeel
