#include "evenkeel/trainer/device/token_buckets.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <span>
#include <vector>

namespace evenkeel {
namespace {

using testing::ElementsAre;

TEST(TokenBucketsTest, ListsWhereEachTokenStandsInOrder) {
  TokenBuckets buckets(6);
  for (int turn = 0; turn < 2; ++turn) {
    const std::vector<int32_t> inputs = {4, 0, 4, 5, 0, 4};
    std::vector<int32_t> tokens(6), ends(6), order(6);
    const int64_t count = buckets.Fill(inputs, {tokens.data(), ends.data(), order.data()});
    EXPECT_EQ(count, 3);
    tokens.resize(count), ends.resize(count);
    EXPECT_THAT(tokens, ElementsAre(0, 4, 5));
    EXPECT_THAT(ends, ElementsAre(2, 5, 6));
    EXPECT_THAT(order, ElementsAre(1, 4, 0, 2, 5, 3));
  }
}

TEST(TokenBucketsTest, OneTokenIsOneBucket) {
  int32_t token = -1, end = -1, order = -1;
  const std::vector<int32_t> inputs = {2};
  EXPECT_EQ(TokenBuckets(3).Fill(inputs, {&token, &end, &order}), 1);
  EXPECT_EQ(token, 2);
  EXPECT_EQ(end, 1);
  EXPECT_EQ(order, 0);
}

}  // namespace
}  // namespace evenkeel
