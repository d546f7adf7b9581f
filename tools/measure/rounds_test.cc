#include "evenkeel/tools/measure/rounds.h"

#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

using testing::ElementsAre;

TEST(RoundsTest, EachRoundHasEachCaseAndTheOrderChanges) {
  std::vector<std::vector<size_t>> rounds;
  const auto run = [&](size_t index, int round) {
    rounds.resize(round + 1);
    rounds.back().push_back(index);
    return absl::OkStatus();
  };
  EXPECT_TRUE(RunRounds(3, /*rounds=*/4, run).ok());
  EXPECT_THAT(rounds, ElementsAre(ElementsAre(0, 1, 2), ElementsAre(2, 1, 0), ElementsAre(1, 2, 0),
                                  ElementsAre(0, 2, 1)));
}

TEST(RoundsTest, AnErrorEndsTheLoop) {
  int calls = 0;
  const auto run = [&](size_t, int) {
    return ++calls < 5 ? absl::OkStatus() : absl::DataLossError("the fifth block");
  };
  EXPECT_EQ(RunRounds(2, /*rounds=*/100, run), absl::DataLossError("the fifth block"));
  EXPECT_EQ(calls, 5);
}

}  // namespace
}  // namespace evenkeel
