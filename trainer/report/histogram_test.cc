#include "evenkeel/trainer/report/histogram.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>
#include <random>
#include <vector>

namespace evenkeel {
namespace {

using testing::DoubleEq;
using testing::ElementsAre;

TEST(HistogramTest, OfNothingIsEmpty) {
  const Histogram histogram = MakeHistogram({});
  EXPECT_EQ(histogram.count, 0);
  EXPECT_TRUE(histogram.limits.empty());
}

TEST(HistogramTest, AddsUpAndListsGapsOnce) {
  const std::vector<double> values = {1, 1, 1.05, 100};
  const Histogram histogram = MakeHistogram(values);
  EXPECT_EQ(histogram.min, 1);
  EXPECT_EQ(histogram.max, 100);
  EXPECT_EQ(histogram.sum, 103.05);
  EXPECT_DOUBLE_EQ(histogram.sum_squares, 2 + 1.05 * 1.05 + 10000);
  // 1 is a limit itself; 100 lies between the 48th and the 49th power.
  EXPECT_THAT(histogram.limits, ElementsAre(1, DoubleEq(1.1), DoubleEq(std::pow(1.1, 48)),
                                            DoubleEq(std::pow(1.1, 49))));
  EXPECT_THAT(histogram.counts, ElementsAre(2, 1, 0, 1));
}

TEST(HistogramTest, LeavesOutWhatIsNotFinite) {
  const std::vector<double> values = {NAN, 2, INFINITY, -INFINITY};
  const Histogram histogram = MakeHistogram(values);
  EXPECT_EQ(histogram.count, 1);
  EXPECT_EQ(histogram.sum, 2);
}

TEST(HistogramTest, EveryValueIsInTheBucketThatHasItsPlace) {
  std::mt19937_64 random(7);
  for (int round = 0; round < 200; ++round) {
    std::vector<double> values(round);
    for (double& value : values) {
      value =
          std::pow(10.0, static_cast<double>(random() % 616) - 310) * (random() % 3 == 0 ? -1 : 1);
      if (random() % 10 == 0) value = 0;
    }
    const Histogram histogram = MakeHistogram(values);
    EXPECT_EQ(std::accumulate(histogram.counts.begin(), histogram.counts.end(), 0.0),
              values.size());
    const std::vector<double>& limits = histogram.limits;
    ASSERT_EQ(std::adjacent_find(limits.begin(), limits.end(), std::greater_equal<>()),
              limits.end());
    for (double limit : histogram.limits) ASSERT_TRUE(std::isfinite(limit));
    std::sort(values.begin(), values.end());
    size_t seen = 0;
    for (size_t i = 0; i < histogram.limits.size(); ++i) {
      seen += static_cast<size_t>(histogram.counts[i]);
      // Those so far are at most the limit, the others at least.
      if (seen > 0 && std::abs(values[seen - 1]) < 1e300) {
        EXPECT_LE(values[seen - 1], limits[i]);
      }
      if (seen < values.size() && std::abs(values[seen]) > 1e-300) {
        EXPECT_GE(values[seen], limits[i]);
      }
    }
  }
}

}  // namespace
}  // namespace evenkeel
