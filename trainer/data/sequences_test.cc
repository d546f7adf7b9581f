#include "evenkeel/trainer/data/sequences.h"

#include <gtest/gtest.h>

#include <vector>

#include "absl/status/status.h"

namespace evenkeel {
namespace {

std::vector<int64_t> Begins(int64_t context, int64_t tokens) {
  SequencePlan plan(context);
  plan.AddRun({.begin = 0, .tokens = tokens});
  std::vector<int64_t> begins;
  for (int64_t i = 0; i < plan.size(); ++i) begins.push_back(plan.At(i).begin);
  return begins;
}

TEST(SequencePlanTest, TheLastSequenceEndsWithItsRun) {
  EXPECT_EQ(Begins(4, 4), std::vector<int64_t>{});
  EXPECT_EQ(Begins(4, 5), (std::vector<int64_t>{0}));
  EXPECT_EQ(Begins(4, 6), (std::vector<int64_t>{0, 1}));
  EXPECT_EQ(Begins(4, 8), (std::vector<int64_t>{0, 3}));  // One prediction comes twice: of token 4.
  EXPECT_EQ(Begins(4, 9), (std::vector<int64_t>{0, 4}));
  EXPECT_EQ(Begins(4, 11), (std::vector<int64_t>{0, 4, 6}));
  EXPECT_EQ(Begins(1, 3), (std::vector<int64_t>{0, 1}));
}

TEST(SequencePlanTest, PredictsEveryTokenButARunsFirstAndFewTwice) {
  for (int64_t context : {1, 2, 3, 7, 16, 100}) {
    for (int64_t tokens = 0; tokens < 120; ++tokens) {
      SCOPED_TRACE(testing::Message() << context << " of " << tokens);
      std::vector<int> predicted(tokens);
      for (int64_t begin : Begins(context, tokens)) {
        ASSERT_GE(begin, 0);
        ASSERT_LE(begin + context + 1, tokens);
        for (int64_t i = 1; i <= context; ++i) ++predicted[begin + i];
      }
      if (tokens <= context) {
        EXPECT_EQ(predicted, std::vector<int>(tokens, 0));
        continue;
      }
      EXPECT_EQ(predicted[0], 0);
      int twice = 0;
      for (int64_t i = 1; i < tokens; ++i) {
        EXPECT_TRUE(predicted[i] == 1 || predicted[i] == 2) << i;
        twice += predicted[i] - 1;
      }
      EXPECT_LT(twice, context);
    }
  }
}

TEST(SequencePlanTest, FindsTheRunOfEachSequence) {
  SequencePlan plan(4);
  plan.AddRun({.begin = 7, .tokens = 3});  // Too short.
  plan.AddRun({.begin = 100, .tokens = 11});
  plan.AddRun({.begin = 0, .tokens = 0});
  plan.AddRun({.begin = 1, .tokens = 4});
  plan.AddRun({.begin = 50, .tokens = 5});
  plan.AddRun({.begin = 8, .tokens = 2});
  ASSERT_EQ(plan.size(), 4);
  EXPECT_EQ(plan.At(0), (SequencePlace{.run = 1, .begin = 100}));
  EXPECT_EQ(plan.At(1), (SequencePlace{.run = 1, .begin = 104}));
  EXPECT_EQ(plan.At(2), (SequencePlace{.run = 1, .begin = 106}));
  EXPECT_EQ(plan.At(3), (SequencePlace{.run = 4, .begin = 50}));
}

TEST(SequencePlanTest, NeedsASequenceAndNotTooMany) {
  SequencePlan plan(8);
  plan.AddRun({.begin = 0, .tokens = 8});
  EXPECT_EQ(plan.Check(), absl::InvalidArgumentError(
                              "the data has no sequence of 8 inputs and their targets, which needs "
                              "8 + 1 tokens in a row; use a shorter context"));
  plan.AddRun({.begin = 0, .tokens = 9});
  EXPECT_TRUE(plan.Check().ok());
  plan.AddRun({.begin = 0, .tokens = int64_t{8} * INT32_MAX + 1});
  EXPECT_EQ(plan.Check(), absl::InvalidArgumentError(
                              "a context of 8 gives 2147483648 sequences, more than the "
                              "2147483647 that can be assigned to ranks; use a longer context"));
}

TEST(SequencePlanTest, NoLengthOverflows) {
  SequencePlan plan(INT64_MAX);
  plan.AddRun({.begin = 0, .tokens = INT64_MAX});
  EXPECT_EQ(plan.size(), 0);
  SequencePlan longest(INT64_MAX - 1);
  longest.AddRun({.begin = 0, .tokens = INT64_MAX});
  EXPECT_EQ(longest.size(), 1);
  EXPECT_EQ(longest.At(0).begin, 0);
}

TEST(GatherSequencesTest, TargetsFollowTheirInputs) {
  SequencePlan plan(3);
  plan.AddRun({.begin = 10, .tokens = 6});
  plan.AddRun({.begin = 0, .tokens = 4});
  BatchMemory memory;
  const std::vector<int32_t> sequences = {2, 1};
  const auto token_at = [](size_t run, int64_t position) {
    return static_cast<int32_t>(1000 * run + position);
  };
  const auto batch = std::get<TokenBatch>(GatherSequences(plan, sequences, memory, token_at));
  EXPECT_EQ(batch.context, 3);
  EXPECT_EQ(std::vector<int32_t>(batch.inputs.begin(), batch.inputs.end()),
            (std::vector<int32_t>{1000, 1001, 1002, 12, 13, 14}));
  EXPECT_EQ(std::vector<int32_t>(batch.targets.begin(), batch.targets.end()),
            (std::vector<int32_t>{1001, 1002, 1003, 13, 14, 15}));
  // The memory is used again for a smaller batch.
  const std::vector<int32_t> one = {0};
  EXPECT_EQ(SamplesOf(GatherSequences(plan, one, memory, token_at)), 1);
}

}  // namespace
}  // namespace evenkeel
