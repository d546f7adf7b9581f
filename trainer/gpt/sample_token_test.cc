#include "evenkeel/trainer/gpt/sample_token.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "evenkeel/trainer/data/stable_random.h"

namespace evenkeel {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kMax = std::numeric_limits<float>::max();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
const double kAlmostOne = std::nextafter(1.0, 0.0);

int32_t Sample(const std::vector<float>& scores, const SampleOptions& options, double uniform) {
  const absl::StatusOr<int32_t> token = SampleToken(scores, options, uniform);
  EXPECT_TRUE(token.ok()) << token.status();
  return token.ok() ? *token : -1;
}

std::vector<double> Frequencies(const std::vector<float>& scores, const SampleOptions& options) {
  constexpr int kDraws = 100'000;
  StableRandom random(/*seed=*/1);
  std::vector<double> frequencies(scores.size());
  for (int i = 0; i < kDraws; ++i)
    frequencies[Sample(scores, options, random.Uniform())] += 1.0 / kDraws;
  return frequencies;
}

TEST(SampleTokenTest, TakesTokensAsOftenAsTheirScoresSay) {
  const std::vector<float> scores = {std::log(1.0f), std::log(5.0f), std::log(4.0f)};
  // For a frequency near 1 / 2, after 100 000 draws, 0.008 is five standard deviations.
  const std::vector<double> even = Frequencies(scores, {});
  for (int i = 0; i < 3; ++i) EXPECT_NEAR(even[i], std::vector<double>({0.1, 0.5, 0.4})[i], 0.008);
  const std::vector<double> sharper = Frequencies(scores, {.temperature = 0.5});
  for (int i = 0; i < 3; ++i)
    EXPECT_NEAR(sharper[i], std::vector<double>({1, 25, 16})[i] / 42, 0.008);
}

TEST(SampleTokenTest, FollowsTheIndicesAsTheRandomNumberGrows) {
  const std::vector<float> scores = {0, 0, 0, 0};
  EXPECT_EQ(Sample(scores, {}, 0), 0);
  EXPECT_EQ(Sample(scores, {}, 0.2499), 0);
  EXPECT_EQ(Sample(scores, {}, 0.25), 1);
  EXPECT_EQ(Sample(scores, {}, kAlmostOne), 3);
}

TEST(SampleTokenTest, TemperatureZeroIsTheFirstOfTheBest) {
  for (double uniform : {0.0, 0.5, kAlmostOne}) {
    EXPECT_EQ(Sample({1, 3, 2, 3}, {.temperature = 0}, uniform), 1);
    EXPECT_EQ(Sample({-kInfinity, -5}, {.temperature = 0}, uniform), 1);
    EXPECT_EQ(Sample({1, 3, 2, 3}, {.temperature = 0, .top_k = 2}, uniform), 1);
  }
}

TEST(SampleTokenTest, TopKLeavesTheRestOut) {
  const std::vector<float> scores = {2, 9, 1, 9, 2};
  for (double uniform = 0; uniform < 1; uniform += 1.0 / 64) {
    EXPECT_EQ(Sample(scores, {.temperature = 1e9, .top_k = 1}, uniform),
              1);  // The first of equal ones.
    EXPECT_EQ(Sample(scores, {.temperature = 1e9, .top_k = 2}, uniform), uniform < 0.5 ? 1 : 3);
  }
  const std::vector<double> three = Frequencies(scores, {.temperature = 1e9, .top_k = 3});
  EXPECT_GT(three[0], 0.3);
  EXPECT_EQ(three[2] + three[4], 0);
  // As many as there are, or more, are all.
  for (int64_t all : {int64_t{0}, int64_t{5}, int64_t{6}, std::numeric_limits<int64_t>::max()}) {
    EXPECT_EQ(Sample(scores, {.temperature = 1e9, .top_k = all}, kAlmostOne), 4);
  }
}

TEST(SampleTokenTest, BearsExtremes) {
  for (double temperature : {1e-300, 1.0, 1e300}) {
    EXPECT_EQ(Sample({-kMax, kMax, -kMax}, {.temperature = temperature}, 0.5), 1) << temperature;
    EXPECT_EQ(Sample({kMax, kMax}, {.temperature = temperature}, 0.75), 1) << temperature;
    EXPECT_EQ(Sample({-kMax, -kInfinity}, {.temperature = temperature}, kAlmostOne), 0)
        << temperature;
    EXPECT_EQ(Sample({-kInfinity, 7}, {.temperature = temperature, .top_k = 2}, 0), 1)
        << temperature;
  }
  EXPECT_EQ(Sample({-kInfinity, 1, 2, -kInfinity}, {.temperature = HUGE_VAL}, kAlmostOne), 2);
  EXPECT_EQ(Sample({4}, {}, kAlmostOne), 0);
}

TEST(SampleTokenTest, NeverTakesWhatCannotCome) {
  const std::vector<float> scores = {-kInfinity, 0, -kInfinity, 0, -kInfinity};
  StableRandom random(/*seed=*/2);
  for (int i = 0; i < 1000; ++i) {
    EXPECT_EQ(Sample(scores, {}, random.Uniform()) % 2, 1);
    EXPECT_EQ(Sample(scores, {.top_k = 4}, random.Uniform()) % 2, 1);
  }
  EXPECT_EQ(Sample(scores, {}, 0), 1);
  EXPECT_EQ(Sample(scores, {}, kAlmostOne), 3);
}

TEST(SampleTokenTest, SaysWhatIsWrong) {
  struct Case {
    std::vector<float> scores;
    SampleOptions options;
    std::string message;
  };
  for (const Case& wrong : {
           Case{{1, kNan}, {}, "the score of token 1 is nan"},
           Case{{kNan, 1}, {.temperature = 0}, "the score of token 0 is nan"},
           Case{{1, 2, kInfinity}, {}, "the score of token 2 is inf"},
           Case{{-kInfinity, -kInfinity}, {}, "none of the 2 tokens has a finite score"},
           Case{{}, {}, "none of the 0 tokens has a finite score"},
           Case{{1}, {.temperature = -0.5}, "temperature -0.5 must not be negative"},
           Case{{1}, {.temperature = std::nan("")}, "temperature nan must not be negative"},
           Case{{1}, {.top_k = -1}, "top_k -1 must not be negative; 0 is all tokens"},
       }) {
    EXPECT_EQ(SampleToken(wrong.scores, wrong.options, 0.5).status(),
              absl::InvalidArgumentError(wrong.message));
  }
}

}  // namespace
}  // namespace evenkeel
