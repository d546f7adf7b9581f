#include "evenkeel/trainer/gpt/gpt.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "evenkeel/bucket/parameter_set.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/types.h"
#include "evenkeel/trainer/data/batch.h"
#include "evenkeel/trainer/data/stable_random.h"
#include "evenkeel/trainer/gpt/testing/recorded.h"
#include "evenkeel/trainer/layers/testing/gradient_check.h"
#include "evenkeel/trainer/models/model.h"

namespace evenkeel {
namespace {

using testing::HasSubstr;

constexpr int64_t kContext = 5;

// 2 sequences of 5 tokens.
struct Tokens {
  explicit Tokens(uint64_t seed, int64_t count = 2 * kContext, int64_t vocabulary = 7) {
    StableRandom random(seed);
    for (int64_t i = 0; i < count; ++i) {
      inputs.push_back(static_cast<int32_t>(random.Below(vocabulary)));
      targets.push_back(static_cast<int32_t>(random.Below(vocabulary)));
    }
  }
  TokenBatch Batch(int64_t context = kContext) const { return {inputs, targets, context}; }

  std::vector<int32_t> inputs, targets;
};

GptOptions Small(GptCompute compute = GptCompute::kFloat32) {
  return {.vocabulary = 7,
          .context = kContext,
          .layers = 2,
          .width = 6,
          .heads = 2,
          .compute = compute,
          .seed = 3};
}

std::unique_ptr<Gpt> Make(const GptOptions& options) {
  absl::StatusOr<std::unique_ptr<Gpt>> model = MakeGpt(options);
  EXPECT_TRUE(model.ok()) << model.status();
  return *std::move(model);
}

// As far from linear as a trained model is: values of their initial size leave attention nearly
// even.
template <typename T>
void Enlarge(Gpt& model) {
  for (int i = 0; i < model.parameters().size(); ++i) {
    const std::vector<T> more = RandomValues<T>(model.parameters()[i].value.count, i, 0.4);
    std::span<T> value = model.parameters()[i].value.as<T>();
    for (size_t k = 0; k < value.size(); ++k) value[k] += more[k];
  }
}

absl::StatusOr<double> Step(Gpt& model, const TokenBatch& batch, const PassOptions& options = {}) {
  EK_ASSIGN_OR_RETURN(const BatchResult result, model.Forward(batch, Mode::kTraining, options));
  EK_RETURN_IF_ERROR(model.Backward([](int) { return absl::OkStatus(); }));
  return result.loss_mean;
}

template <typename T>
std::vector<std::vector<T>> Gradients(const Gpt& model) {
  std::vector<std::vector<T>> all;
  for (int i = 0; i < model.parameters().size(); ++i) {
    const std::span<T> grad = model.parameters()[i].grad.as<T>();
    all.emplace_back(grad.begin(), grad.end());
  }
  return all;
}

TEST(GptTest, HasTheNamesShapesAndStartingValuesOfGpt2) {
  const std::unique_ptr<Gpt> model =
      Make({.vocabulary = 300, .context = 50, .layers = 2, .width = 64, .heads = 4});
  const double into_sum = 0.02 / std::sqrt(2 * 2);
  struct Expected {
    std::string name;
    std::vector<int64_t> shape;
    double mean, deviation;
  };
  std::vector<Expected> expected = {{"wte.weight", {300, 64}, 0, 0.02},
                                    {"wpe.weight", {50, 64}, 0, 0.02}};
  for (const char* layer : {"h.0.", "h.1."}) {
    const std::string at = layer;
    expected.insert(expected.end(), {{at + "ln_1.weight", {64}, 1, 0},
                                     {at + "ln_1.bias", {64}, 0, 0},
                                     {at + "attn.c_attn.weight", {64, 192}, 0, 0.02},
                                     {at + "attn.c_attn.bias", {192}, 0, 0},
                                     {at + "attn.c_proj.weight", {64, 64}, 0, into_sum},
                                     {at + "attn.c_proj.bias", {64}, 0, 0},
                                     {at + "ln_2.weight", {64}, 1, 0},
                                     {at + "ln_2.bias", {64}, 0, 0},
                                     {at + "mlp.c_fc.weight", {64, 256}, 0, 0.02},
                                     {at + "mlp.c_fc.bias", {256}, 0, 0},
                                     {at + "mlp.c_proj.weight", {256, 64}, 0, into_sum},
                                     {at + "mlp.c_proj.bias", {64}, 0, 0}});
  }
  expected.insert(expected.end(), {{"ln_f.weight", {64}, 1, 0}, {"ln_f.bias", {64}, 0, 0}});
  ASSERT_EQ(model->parameters().size(), static_cast<int>(expected.size()));
  EXPECT_TRUE(model->parameters().Validate().ok());
  for (int i = 0; i < model->parameters().size(); ++i) {
    SCOPED_TRACE(expected[i].name);
    const std::span<float> value = model->parameters()[i].value.as<float>();
    EXPECT_EQ(model->parameters()[i].name, expected[i].name);
    EXPECT_TRUE(std::ranges::equal(model->shape(i), expected[i].shape));
    double mean = 0, square = 0;
    for (double x : value) mean += x / value.size();
    for (double x : value) square += (x - mean) * (x - mean) / value.size();
    // At least 3200 draws: 6 of their mean's deviations, and 6 of the deviation's.
    EXPECT_NEAR(mean, expected[i].mean, expected[i].deviation * 0.11);
    EXPECT_NEAR(std::sqrt(square), expected[i].deviation, expected[i].deviation * 0.08);
  }
}

TEST(GptTest, GradientsMatchDifferencesInFloat64) {
  for (const double dropout : {0.0, 0.3}) {
    SCOPED_TRACE(dropout);
    GptOptions options = Small(GptCompute::kFloat64);
    options.dropout = dropout;
    const std::unique_ptr<Gpt> model = Make(options);
    Enlarge<double>(*model);
    const Tokens tokens(1);
    const PassOptions pass{.weight = 3, .noise = 11};
    ASSERT_TRUE(Step(*model, tokens.Batch(), pass).ok());
    const auto gradients = Gradients<double>(*model);
    for (int i = 0; i < model->parameters().size(); ++i) {
      const auto numeric = NumericGradient<double>(
          model->parameters()[i].value.as<double>(), 1e-4,
          [&] { return 3 * model->Forward(tokens.Batch(), Mode::kTraining, pass)->loss_mean; });
      // The truncation of central differences is of the order of the step's square, 1e-8, times
      // third derivatives.
      double difference = 0;
      for (size_t k = 0; k < numeric.size(); ++k) {
        difference = std::max(difference, std::abs(numeric[k] - gradients[i][k]));
      }
      EXPECT_LT(difference, 1e-6) << model->parameters()[i].name;
    }
  }
}

TEST(GptTest, AnnouncesEachGradientOnceFromTheLastToTheTable) {
  const std::unique_ptr<Gpt> model = Make(Small());
  const Tokens tokens(1);
  ASSERT_TRUE(model->Forward(tokens.Batch(), Mode::kTraining).ok());
  std::vector<int> order, expected;
  ASSERT_TRUE(model
                  ->Backward([&](int index) {
                    order.push_back(index);
                    EXPECT_EQ(model->parameters().grad_state(index), GradState::kLocal);
                    return absl::OkStatus();
                  })
                  .ok());
  for (int i = model->parameters().size(); i-- > 0;) expected.push_back(i);
  EXPECT_EQ(order, expected);
}

TEST(GptTest, AnnouncedParametersMayChangeWhileBackwardGoesOn) {
  const std::unique_ptr<Gpt> model = Make(Small()), other = Make(Small());
  const Tokens tokens(1);
  ASSERT_TRUE(Step(*model, tokens.Batch()).ok());
  ASSERT_TRUE(other->Forward(tokens.Batch(), Mode::kTraining).ok());
  ASSERT_TRUE(other
                  ->Backward([&](int index) {
                    std::ranges::fill(other->parameters()[index].value.as<float>(), 77.0f);
                    return absl::OkStatus();
                  })
                  .ok());
  EXPECT_EQ(Gradients<float>(*model), Gradients<float>(*other));
}

TEST(GptTest, GradientsAreAddedToThoseThatAreThere) {
  const std::unique_ptr<Gpt> model = Make(Small(GptCompute::kFloat64));
  Enlarge<double>(*model);
  const Tokens first(1), second(2);
  ASSERT_TRUE(Step(*model, first.Batch()).ok());
  const auto of_first = Gradients<double>(*model);
  model->parameters().ClearGradients();
  ASSERT_TRUE(Step(*model, second.Batch()).ok());
  const auto of_second = Gradients<double>(*model);
  ASSERT_TRUE(Step(*model, first.Batch()).ok());
  const auto of_both = Gradients<double>(*model);
  for (size_t i = 0; i < of_both.size(); ++i) {
    for (size_t k = 0; k < of_both[i].size(); ++k) {
      ASSERT_NEAR(of_both[i][k], of_first[i][k] + of_second[i][k], 1e-12)
          << model->parameters()[i].name;
    }
  }
}

// The head takes at most 256 rows of so many scores at once.
TEST(GptTest, ChunksOfTheHeadAreOneMean) {
  constexpr int64_t kVocabulary = 20000, kRows = 150;
  const std::unique_ptr<Gpt> model = Make({.vocabulary = kVocabulary,
                                           .context = kRows,
                                           .layers = 1,
                                           .width = 2,
                                           .heads = 1,
                                           .compute = GptCompute::kFloat64});
  Enlarge<double>(*model);
  const Tokens both(1, 2 * kRows, kVocabulary);
  const std::span<const int32_t> inputs = both.inputs, targets = both.targets;
  model->parameters().ClearGradients();
  const absl::StatusOr<double> loss = Step(*model, both.Batch(kRows));
  ASSERT_TRUE(loss.ok()) << loss.status();
  const std::vector<std::vector<double>> together = Gradients<double>(*model);
  EXPECT_LT(model->ActivationBytes(), 2 * kRows * kVocabulary * sizeof(double));

  model->parameters().ClearGradients();
  double mean = 0;
  for (const int64_t begin : {int64_t{0}, kRows}) {
    const absl::StatusOr<double> half =
        Step(*model, {inputs.subspan(begin, kRows), targets.subspan(begin, kRows), kRows},
             {.weight = 0.5});
    ASSERT_TRUE(half.ok()) << half.status();
    mean += *half / 2;
  }
  EXPECT_NEAR(*loss, mean, 1e-12);
  const std::vector<std::vector<double>> apart = Gradients<double>(*model);
  for (size_t i = 0; i < apart.size(); ++i)
    EXPECT_LT(RelativeError<double>(together[i], apart[i]), 1e-10) << i;
}

TEST(GptTest, TheTokenTableDoesNotBecomeTrainableBetweenForwardAndBackward) {
  const std::unique_ptr<Gpt> model = Make(Small());
  const Tokens tokens(1);
  model->parameters().SetTrainable(0, false);
  ASSERT_TRUE(model->Forward(tokens.Batch(), Mode::kTraining).ok());
  model->parameters().SetTrainable(0, true);
  const absl::Status status = model->Backward([](int) { return absl::OkStatus(); });
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()), HasSubstr("wte.weight became trainable"));
}

TEST(GptTest, FrozenParametersGetNoGradientAndTheOthersWhatTheyGotBefore) {
  const std::unique_ptr<Gpt> model = Make(Small());
  const Tokens tokens(1);
  ASSERT_TRUE(Step(*model, tokens.Batch()).ok());
  const auto all = Gradients<float>(*model);
  const int size = model->parameters().size();
  // The lowest trained parameter in turn, then each one alone; also none at all.
  for (int lowest = 0; lowest <= size; ++lowest) {
    for (const int end : {size, std::min(lowest + 1, size)}) {
      SCOPED_TRACE(testing::Message() << lowest << " to " << end);
      model->parameters().ClearGradients();
      std::vector<int> announced, expected;
      for (int i = 0; i < size; ++i) {
        model->parameters().SetTrainable(i, i >= lowest && i < end);
        std::ranges::fill(model->parameters()[i].grad.as<float>(), -5.0f);
      }
      for (int i = end; i-- > lowest;) expected.push_back(i);
      ASSERT_TRUE(model->Forward(tokens.Batch(), Mode::kTraining).ok());
      ASSERT_TRUE(model
                      ->Backward([&](int index) {
                        announced.push_back(index);
                        return absl::OkStatus();
                      })
                      .ok());
      EXPECT_EQ(announced, expected);
      const auto gradients = Gradients<float>(*model);
      for (int i = 0; i < size; ++i) {
        const std::vector<float> untouched(all[i].size(), -5.0f);
        EXPECT_EQ(gradients[i], i >= lowest && i < end ? all[i] : untouched)
            << model->parameters()[i].name;
      }
    }
  }
}

TEST(GptTest, GradientsGoWhereTheParameterSetSays) {
  const std::unique_ptr<Gpt> model = Make(Small());
  const Tokens tokens(1);
  ASSERT_TRUE(Step(*model, tokens.Batch()).ok());
  const auto expected = Gradients<float>(*model);
  std::vector<std::vector<float>> elsewhere;
  for (int i = 0; i < model->parameters().size(); ++i) {
    elsewhere.emplace_back(expected[i].size(), std::numeric_limits<float>::quiet_NaN());
    model->parameters().SetGradMemory(i, TensorView(absl::MakeSpan(elsewhere[i])));
  }
  model->parameters().ClearGradients();
  ASSERT_TRUE(Step(*model, tokens.Batch()).ok());
  EXPECT_EQ(elsewhere, expected);
}

TEST(GptTest, StepsAreEqualBitForBit) {
  GptOptions options = Small();
  options.dropout = 0.2;
  const std::unique_ptr<Gpt> model = Make(options), other = Make(options);
  const Tokens tokens(1);
  const absl::StatusOr<double> loss = Step(*model, tokens.Batch(), {.noise = 4});
  ASSERT_TRUE(loss.ok()) << loss.status();
  // Another step before, of another size, leaves no trace.
  const Tokens others(2, 9);
  ASSERT_TRUE(Step(*other, others.Batch(3), {.noise = 5}).ok());
  other->parameters().ClearGradients();
  EXPECT_EQ(*loss, *Step(*other, tokens.Batch(), {.noise = 4}));
  EXPECT_EQ(Gradients<float>(*model), Gradients<float>(*other));
}

TEST(GptTest, NoiseMattersInTrainingOnly) {
  GptOptions options = Small(GptCompute::kFloat64);
  options.dropout = 0.2;
  const std::unique_ptr<Gpt> model = Make(options);
  options.dropout = 0;
  const std::unique_ptr<Gpt> without = Make(options);
  const Tokens tokens(1);
  const auto loss = [&](Gpt& gpt, Mode mode, uint64_t noise) {
    return gpt.Forward(tokens.Batch(), mode, {.noise = noise})->loss_mean;
  };
  EXPECT_NE(loss(*model, Mode::kTraining, 1), loss(*model, Mode::kTraining, 2));
  EXPECT_EQ(loss(*model, Mode::kTraining, 1), loss(*model, Mode::kTraining, 1));
  EXPECT_EQ(loss(*model, Mode::kEvaluation, 1), loss(*without, Mode::kTraining, 2));
}

// Whether a batch is computed in one pass or in several, on one rank or on several.
TEST(GptTest, NoiseIsThatOfASamplesPlaceInTheBatch) {
  constexpr int64_t kSequences = 4;
  GptOptions options = Small(GptCompute::kFloat64);
  options.dropout = 0.3;
  const Tokens tokens(1, kSequences * kContext);
  const auto gradients = [&](const std::vector<int64_t>& passes, bool has_places) {
    const std::unique_ptr<Gpt> model = Make(options);
    Enlarge<double>(*model);
    int64_t first = 0;
    for (const int64_t count : passes) {
      const std::span<const int32_t> inputs(tokens.inputs), targets(tokens.targets);
      const TokenBatch part{inputs.subspan(first * kContext, count * kContext),
                            targets.subspan(first * kContext, count * kContext), kContext};
      EXPECT_TRUE(Step(*model, part,
                       {.weight = static_cast<double>(count),
                        .noise = 11,
                        .first_sample = has_places ? first : 0})
                      .ok());
      first += count;
    }
    std::vector<double> all;
    for (const std::vector<double>& gradient : Gradients<double>(*model))
      all.insert(all.end(), gradient.begin(), gradient.end());
    return all;
  };
  const std::vector<double> whole = gradients({kSequences}, true);
  const double largest = *std::ranges::max_element(whole);
  const auto difference = [&](const std::vector<double>& other) {
    double most = 0;
    for (size_t i = 0; i < whole.size(); ++i) most = std::max(most, std::abs(whole[i] - other[i]));
    return most / largest;
  };
  // Only the order of additions differs.
  EXPECT_LE(difference(gradients({1, 3}, true)), 1e-14);
  EXPECT_LE(difference(gradients({2, 1, 1}, true)), 1e-14);
  EXPECT_GE(difference(gradients({1, 3}, false)), 1e-2);
}

TEST(GptTest, WhatFollowsHasNoInfluence) {
  const std::unique_ptr<Gpt> model = Make(Small(GptCompute::kFloat64));
  Enlarge<double>(*model);
  const std::vector<int32_t> prompt = {1, 2, 3};
  const std::vector<int32_t> longer = {1, 2, 3, 6, 5};
  // The loss of the first three positions is that of three: the last one's, times five, less the
  // other two's.
  const auto losses = [&](const std::vector<int32_t>& tokens) {
    const std::span<const int32_t> all(tokens);
    double sum = 0;
    for (size_t n = 1; n <= 3; ++n) {
      const absl::StatusOr<std::span<const float>> scores = model->NextToken(all.first(n));
      EXPECT_TRUE(scores.ok()) << scores.status();
      double total = 0;
      for (double score : *scores) total += std::exp(score);
      sum += std::log(total) - (*scores)[0];
    }
    return sum;
  };
  const std::vector<int32_t> zeros(3, 0);
  const absl::StatusOr<BatchResult> result =
      model->Forward(TokenBatch{prompt, zeros, 3}, Mode::kEvaluation);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_NEAR(losses(prompt), 3 * result->loss_mean, 1e-5);  // The scores are rounded to float.
  EXPECT_EQ(losses(prompt), losses(longer));
}

TEST(GptTest, NextTokenCountsTheLastTokensOnly) {
  const std::unique_ptr<Gpt> model = Make(Small());
  const std::vector<int32_t> window = {1, 2, 3, 4, 5}, longer = {6, 6, 1, 2, 3, 4, 5};
  const auto copy = [](absl::StatusOr<std::span<const float>> scores) {
    EXPECT_TRUE(scores.ok()) << scores.status();
    return std::vector<float>(scores->begin(), scores->end());
  };
  const std::vector<float> scores = copy(model->NextToken(window));
  EXPECT_EQ(scores.size(), 7u);
  EXPECT_EQ(scores, copy(model->NextToken(longer)));
  EXPECT_THAT(model->NextToken({}).status().message(), HasSubstr("requires at least one token"));
  EXPECT_THAT(model->NextToken(std::vector<int32_t>{7}).status().message(),
              HasSubstr("token 7 is not within 0 to 6"));
}

TEST(GptTest, NextTokenEndsATrainingPass) {
  const std::unique_ptr<Gpt> model = Make(Small());
  const Tokens tokens(1);
  ASSERT_TRUE(model->Forward(tokens.Batch(), Mode::kTraining).ok());
  ASSERT_TRUE(model->NextToken(std::vector<int32_t>{1}).ok());
  EXPECT_EQ(model->Backward([](int) { return absl::OkStatus(); }).code(),
            absl::StatusCode::kFailedPrecondition);
}

TEST(GptTest, LearnsARepeatedSequence) {
  const std::unique_ptr<Gpt> model = Make(Small());
  const std::vector<int32_t> sequence = {0, 1, 2, 3, 4, 5};
  const TokenBatch batch{std::span(sequence).first(5), std::span(sequence).last(5), kContext};
  double before = 0, after = 0;
  for (int step = 0; step < 300; ++step) {
    model->parameters().ClearGradients();
    after = *Step(*model, batch);
    if (step == 0) before = after;
    for (int i = 0; i < model->parameters().size(); ++i) {
      const Parameter& parameter = model->parameters()[i];
      for (int64_t k = 0; k < parameter.value.count; ++k) {
        parameter.value.as<float>()[k] -= 0.3f * parameter.grad.as<float>()[k];
      }
    }
  }
  EXPECT_NEAR(before, std::log(7.0), 0.1);
  EXPECT_LT(after, 0.1);
  EXPECT_EQ(model->Forward(batch, Mode::kEvaluation)->correct, 5);
}

TEST(GptTest, ActivationsAreHeldFromStepToStep) {
  const std::unique_ptr<Gpt> model = Make(Small());
  EXPECT_EQ(model->ActivationBytes(), 0);
  const Tokens tokens(1);
  ASSERT_TRUE(model->Forward(tokens.Batch(), Mode::kEvaluation).ok());
  const int64_t evaluation = model->ActivationBytes();
  ASSERT_TRUE(Step(*model, tokens.Batch()).ok());
  const int64_t training = model->ActivationBytes();
  EXPECT_GT(evaluation, 0);
  EXPECT_GT(training, evaluation);
  const Tokens fewer(1, kContext);
  ASSERT_TRUE(Step(*model, fewer.Batch()).ok());
  ASSERT_TRUE(Step(*model, tokens.Batch()).ok());
  EXPECT_EQ(model->ActivationBytes(), training);
}

TEST(GptTest, APlanCountsAStepThatTrainsTheTokenTableAgain) {
  GptOptions options = Small();
  const std::unique_ptr<Gpt> model = Make(options);
  options.is_plan = true;
  const std::unique_ptr<Gpt> plan = Make(options);
  for (Gpt* const one : {model.get(), plan.get()}) one->parameters().SetTrainable(0, false);
  ASSERT_TRUE(plan->PlanPass(/*samples=*/2, Mode::kTraining).ok());
  const Tokens tokens(1);
  ASSERT_TRUE(Step(*model, tokens.Batch()).ok());
  EXPECT_LT(model->ActivationBytes(), plan->ActivationBytes());
  model->parameters().SetTrainable(0, true);
  ASSERT_TRUE(Step(*model, tokens.Batch()).ok());
  EXPECT_EQ(model->ActivationBytes(), plan->ActivationBytes());
}

TEST(GptTest, OnlyAPlanPlansPasses) {
  const std::unique_ptr<Gpt> model = Make(Small());
  EXPECT_EQ(model->PlanPass(/*samples=*/2, Mode::kTraining).code(),
            absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(model->ActivationBytes(), 0);
}

TEST(GptTest, RefusesWhatIsNotPossibleWithItsValue) {
  const auto error = [](void (*change)(GptOptions&)) {
    GptOptions options = Small();
    change(options);
    const absl::Status status = MakeGpt(options).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    return std::string(status.message());
  };
  EXPECT_THAT(error([](GptOptions& o) { o.vocabulary = 1; }),
              HasSubstr("vocabulary may be 2 to 1000000, not 1"));
  EXPECT_THAT(error([](GptOptions& o) { o.vocabulary = 1'000'001; }), HasSubstr("not 1000001"));
  EXPECT_THAT(error([](GptOptions& o) { o.context = 0; }),
              HasSubstr("context may be 1 to 65536, not 0"));
  EXPECT_THAT(error([](GptOptions& o) { o.layers = 0; }),
              HasSubstr("layers may be 1 to 1024, not 0"));
  EXPECT_THAT(error([](GptOptions& o) { o.width = -4; }),
              HasSubstr("width may be 1 to 65536, not -4"));
  EXPECT_THAT(error([](GptOptions& o) { o.heads = 0; }),
              HasSubstr("heads may be 1 to 1024, not 0"));
  EXPECT_THAT(error([](GptOptions& o) { o.heads = 4; }),
              HasSubstr("4 heads do not divide the width, 6"));
  EXPECT_THAT(error([](GptOptions& o) { o.dropout = 1; }),
              HasSubstr("dropout must be at least 0 and below 1, got 1"));
  EXPECT_THAT(error([](GptOptions& o) { o.dropout = -0.1; }), HasSubstr("got -0.1"));
  EXPECT_THAT(error([](GptOptions& o) { o.dropout = std::nan(""); }), HasSubstr("got nan"));
  EXPECT_THAT(error([](GptOptions& o) { o.layers = 1000, o.width = 65536, o.heads = 1; }),
              HasSubstr("parameters"));
  EXPECT_THAT(error([](GptOptions& o) { o.compute = static_cast<GptCompute>(9); }),
              HasSubstr("number 9"));
}

TEST(GptTest, RefusesBatchesThatDoNotFit) {
  const std::unique_ptr<Gpt> model = Make(Small());
  const Tokens tokens(1, 12);
  EXPECT_THAT(model->Forward(tokens.Batch(6), Mode::kTraining).status().message(),
              HasSubstr("context of 5"));
  EXPECT_THAT(model->Forward(ImageBatch{}, Mode::kTraining).status().message(),
              HasSubstr("for tokens"));
  const Tokens wide(1, 10, 1000);
  EXPECT_THAT(model->Forward(wide.Batch(), Mode::kTraining).status().message(),
              HasSubstr("not within 0 to 6"));
}

}  // namespace
}  // namespace evenkeel
