// Compares sums over the ranks with those of a plain loop in rank order: bit for bit where the
// tested backend adds in that order, else within a bound.
//
//   EXPECT_THAT(model.Gradient(p), SameSums(expected));
//
// The default bound is for 8 ranks' numbers below 2: 8 roundings of sums below 16, each of at most
// 2^-21, over 8.

#ifndef EVENKEEL_COMM_TESTING_SAME_SUMS_H_
#define EVENKEEL_COMM_TESTING_SAME_SUMS_H_

#include <vector>

#include "evenkeel/comm/testing/tested_group.h"
#include "gmock/gmock.h"

namespace evenkeel {

inline constexpr float kSumBound = 4e-6f;

// Results of a loop that is written in another form may differ by 4 units in the last place.
inline testing::Matcher<float> SameSum(float expected, float bound = kSumBound) {
  if (TheTestBackend().adds_in_rank_order) return testing::FloatEq(expected);
  return testing::FloatNear(expected, bound);
}

inline testing::Matcher<std::vector<float>> SameSums(const std::vector<float>& expected,
                                                     float bound = kSumBound) {
  if (TheTestBackend().adds_in_rank_order) return testing::Eq(expected);
  return testing::Pointwise(testing::FloatNear(bound), expected);
}

inline testing::Matcher<std::vector<std::vector<float>>> SameSums(
    const std::vector<std::vector<float>>& expected, float bound = kSumBound) {
  std::vector<testing::Matcher<std::vector<float>>> each;
  for (const std::vector<float>& part : expected) each.push_back(SameSums(part, bound));
  return testing::ElementsAreArray(each);
}

}  // namespace evenkeel

#endif  // EVENKEEL_COMM_TESTING_SAME_SUMS_H_
