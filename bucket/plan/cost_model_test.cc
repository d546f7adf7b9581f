#include "evenkeel/bucket/plan/cost_model.h"

#include <cstdint>
#include <limits>
#include <vector>

#include "evenkeel/bucket/plan/planner.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

constexpr int64_t kMib = int64_t{1} << 20;

// Parameters of one MiB each.
std::vector<ParamSpec> Params(int size) {
  return std::vector<ParamSpec>(size, {.count = kMib / 4});
}

TEST(PredictTest, WhatIsSentWhileGradientsComeIsHidden) {
  // Each takes 1000 + 2000 on the link, and gradients come every 4000.
  const LinkCost link{.latency_ns = 1000, .ns_per_mib = 2000};
  const std::vector<int64_t> ready = {4000, 8000, 12000};
  const BucketPlan each{.buckets = {{0}, {1}, {2}}, .limits = {Bytes{1}, Bytes{1}, Bytes{1}}};
  const Prediction alone = Predict(each, Params(3), ready, link);
  ASSERT_EQ(alone.buckets.size(), 3u);
  EXPECT_EQ(alone.buckets[0].launched_ns, 4000);
  EXPECT_EQ(alone.buckets[0].reduced_ns, 7000);
  EXPECT_EQ(alone.buckets[1].reduced_ns, 11000);
  EXPECT_EQ(alone.end_ns, 15000);
  EXPECT_EQ(alone.exposed_ns, 3000);

  const BucketPlan together{.buckets = {{0, 1, 2}}, .limits = {kNoCap}};
  EXPECT_EQ(Predict(together, Params(3), ready, link).exposed_ns, 7000);
}

TEST(PredictTest, ALinkThatIsBusyHoldsUpWhatFollows) {
  const LinkCost link{.latency_ns = 1000, .ns_per_mib = 9000};
  const Prediction prediction = Predict({.buckets = {{0}, {1}, {2}}, .limits = {}}, Params(3),
                                        std::vector<int64_t>{4000, 8000, 12000}, link);
  EXPECT_EQ(prediction.buckets[1].launched_ns, 8000);
  EXPECT_EQ(prediction.buckets[1].reduced_ns, 24000);
  EXPECT_EQ(prediction.end_ns, 34000);
  EXPECT_EQ(prediction.exposed_ns, 22000);
}

TEST(PredictTest, ABucketThatIsReadyEarlyWaitsForItsTurn) {
  const Prediction prediction = Predict({.buckets = {{0}, {1}}, .limits = {}}, Params(2),
                                        std::vector<int64_t>{9000, 1000}, {.latency_ns = 500});
  EXPECT_EQ(prediction.buckets[1].ready_ns, 1000);
  EXPECT_EQ(prediction.buckets[1].launched_ns, 9000);
  EXPECT_EQ(prediction.buckets[1].reduced_ns, 10000);
}

TEST(PredictTest, LaunchesHoldUpBackward) {
  const Prediction prediction = Predict({.buckets = {{0}, {1}, {2}}, .limits = {}}, Params(3),
                                        std::vector<int64_t>{1000, 2000, 3000}, {.launch_ns = 100});
  EXPECT_EQ(prediction.buckets[2].launched_ns, 3200);
  EXPECT_EQ(prediction.last_gradient_ns, 3000);
  EXPECT_EQ(prediction.exposed_ns, 300);
}

TEST(PredictTest, WhatIsNotPlannedDoesNotCount) {
  const Prediction prediction =
      Predict({.buckets = {{1}}, .limits = {}}, Params(3), std::vector<int64_t>{77000, 1000, 99000},
              {.latency_ns = 10});
  EXPECT_EQ(prediction.last_gradient_ns, 1000);
  EXPECT_EQ(prediction.exposed_ns, 10);
  EXPECT_EQ(Predict({}, Params(3), std::vector<int64_t>(3), {}).end_ns, 0);
}

TEST(PredictTest, LargeModelsOnSlowLinksDoNotOverflow) {
  const std::vector<ParamSpec> params = {
      {.count = int64_t{1} << 38}};  // A tebibyte, at a megabyte per second.
  const Prediction prediction = Predict({.buckets = {{0}}, .limits = {}}, params,
                                        std::vector<int64_t>{0}, {.ns_per_mib = 1'048'576'000});
  EXPECT_EQ(prediction.end_ns, kMib * 1'048'576'000);
}

TEST(FitLinkTest, FindsLatencyAndBandwidthDespiteOutliers) {
  const LinkCost truth{.latency_ns = 50'000, .ns_per_mib = 1'000'000};
  std::vector<LinkSample> samples;
  for (int i = 1; i <= 40; ++i) {
    const int64_t bytes = i * kMib / 4;
    samples.push_back({.bytes = bytes, .ns = truth.ReductionNs(bytes) + (i % 2 == 0 ? 500 : -500)});
  }
  for (int i : {3, 11, 20, 33}) samples[i].ns *= 40;  // The rank was interrupted.
  const LinkCost link = FitLink(samples);
  EXPECT_NEAR(link.ns_per_mib, truth.ns_per_mib, 1000);
  EXPECT_NEAR(link.latency_ns, truth.latency_ns, 3000);
  EXPECT_NEAR(link.bytes_per_second(), 1.048576e9, 2e6);
}

TEST(FitLinkTest, NoCostIsNegative) {
  // Larger ones were faster.
  const std::vector<LinkSample> falling = {{.bytes = kMib, .ns = 900},
                                           {.bytes = 4 * kMib, .ns = 600}};
  const LinkCost link = FitLink(falling);
  EXPECT_EQ(link.ns_per_mib, 0);
  EXPECT_GT(link.latency_ns, 0);
  EXPECT_EQ(link.bytes_per_second(), std::numeric_limits<double>::infinity());
  // The line would meet the axis below zero.
  const std::vector<LinkSample> steep = {{.bytes = kMib, .ns = 100},
                                         {.bytes = 4 * kMib, .ns = 1000}};
  EXPECT_EQ(FitLink(steep).latency_ns, 0);
  EXPECT_EQ(FitLink(steep).ns_per_mib, 220);
}

TEST(FitLinkTest, OneSizeTellsNothingOfTheLatency) {
  const std::vector<LinkSample> same = {{.bytes = kMib, .ns = 900},
                                        {.bytes = kMib + 8, .ns = 1100}};
  EXPECT_FALSE(CanFit(same));
  EXPECT_EQ(FitLink(same).latency_ns, 0);
  EXPECT_NEAR(FitLink(same).ns_per_mib, 1000, 1);
  EXPECT_FALSE(CanFit({}));
  EXPECT_EQ(FitLink({}), LinkCost());
  EXPECT_EQ(FitLink(std::vector<LinkSample>{{.bytes = 0, .ns = 70}}).latency_ns, 70);
  EXPECT_FALSE(CanFit(std::vector<LinkSample>{{.bytes = 2, .ns = 1}, {.bytes = 3, .ns = 9}}));
  EXPECT_TRUE(CanFit(std::vector<LinkSample>{{.bytes = 1, .ns = 1}, {.bytes = 2, .ns = 1}}));
}

}  // namespace
}  // namespace evenkeel
