#include "evenkeel/zero_optim/internal/placement/slice_recovery.h"

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel::internal {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

const std::vector<int64_t> kSizes = {10, 4, 6};

// Ranks of an old group of 3 in which parameter 0 was split over all, parameter 1 was rank 0's, and
// 2 had no state.
std::vector<SliceFacts> Facts(const std::vector<int>& survivors) {
  std::vector<SliceFacts> facts;
  for (int rank : survivors) {
    SliceFacts mine{.standing = {.steps_finished = 5, .holds_state = true},
                    .old_rank = rank,
                    .old_world_size = 3};
    mine.held = {{.step = 5, .begin = 4 * rank, .count = rank == 2 ? 2 : 4},
                 {.step = 3, .begin = 0, .count = rank == 0 ? 4 : 0},
                 {.step = 0, .begin = 2 * rank, .count = 2}};
    facts.push_back(mine);
  }
  return facts;
}

TEST(SliceRecoveryTest, NothingMovesIfAllAreThere) {
  const auto start = PlanSliceStart(Facts({0, 1, 2}), kSizes);
  ASSERT_TRUE(start.ok()) << start.status();
  EXPECT_THAT(start->steps, ElementsAre(5, 3, 0));
  EXPECT_THAT(start->holders[0],
              ElementsAre(HeldRange{0, 4, 0}, HeldRange{4, 8, 1}, HeldRange{8, 10, 2}));
  EXPECT_THAT(start->holders[1], ElementsAre(HeldRange{0, 4, 0}));
  EXPECT_THAT(start->holders[2], IsEmpty());
  const auto turned = PlanSliceStart(Facts({2, 0, 1}), kSizes);  // By other numbers.
  EXPECT_THAT(turned->holders[0],
              ElementsAre(HeldRange{0, 4, 1}, HeldRange{4, 8, 2}, HeldRange{8, 10, 0}));
}

TEST(SliceRecoveryTest, ALostPartIsRefusedWithTheCheckpoint) {
  std::vector<SliceFacts> facts = Facts({0, 2});
  facts[1].standing.checkpoint_hint = "step_4.safetensors";
  const absl::Status refused = PlanSliceStart(facts, kSizes).status();
  EXPECT_TRUE(absl::IsFailedPrecondition(refused));
  EXPECT_THAT(
      std::string(refused.message()),
      HasSubstr(
          "rank 1 is lost, and with it its part of the optimizer's state: resume from a checkpoint "
          "(step_4.safetensors)"));
}

TEST(SliceRecoveryTest, AParameterThatIsNotWholeBeginsAnewIfAllMayLose) {
  std::vector<SliceFacts> facts = Facts({0, 2});
  facts[0].standing.may_lose = true;
  EXPECT_FALSE(PlanSliceStart(facts, kSizes).ok());
  facts[1].standing.may_lose = true;
  const auto start = PlanSliceStart(facts, kSizes);
  ASSERT_TRUE(start.ok()) << start.status();
  EXPECT_THAT(start->steps, ElementsAre(0, 3, 0));
  EXPECT_THAT(start->holders[0], IsEmpty());
  EXPECT_THAT(start->holders[1], ElementsAre(HeldRange{0, 4, 0}));
}

// Two ranks may hold the same elements: a move had not ended everywhere.
TEST(SliceRecoveryTest, TakesWhatTwoHoldFromOne) {
  std::vector<SliceFacts> facts = Facts({0, 1, 2});
  facts[0].held[0] = {.step = 5, .begin = 0, .count = 9};
  const auto start = PlanSliceStart(facts, kSizes);
  ASSERT_TRUE(start.ok()) << start.status();
  EXPECT_THAT(start->holders[0], ElementsAre(HeldRange{0, 9, 0}, HeldRange{9, 10, 2}));
}

TEST(SliceRecoveryTest, ASliceCanNotBeTakenBack) {
  std::vector<SliceFacts> facts = Facts({0, 1, 2});
  facts[1].standing.is_torn = true;
  EXPECT_THAT(std::string(PlanSliceStart(facts, kSizes).status().message()),
              HasSubstr("rank 1 was in the middle of an update"));
  facts[1].standing.is_torn = false;
  facts[2].standing.steps_finished = 6;
  EXPECT_THAT(std::string(PlanSliceStart(facts, kSizes).status().message()),
              HasSubstr("rank 0 has finished 5 optimizer steps, rank 2 6"));
}

TEST(SliceRecoveryTest, FactsComeBackAsTheyWere) {
  for (const SliceFacts& facts : Facts({0, 1, 2})) {
    const std::string bytes = facts.Serialize();
    const auto read = SliceFacts::Parse(bytes, kSizes);
    ASSERT_TRUE(read.ok()) << read.status();
    EXPECT_EQ(read->Serialize(), bytes);
    EXPECT_FALSE(SliceFacts::Parse(bytes, {10, 4}).ok());  // Another number of parameters.
    EXPECT_FALSE(
        SliceFacts::Parse(bytes, {3, 4, 6}).ok());  // A range that goes beyond its parameter.
    for (size_t length = 0; length < bytes.size(); ++length) {
      EXPECT_FALSE(SliceFacts::Parse(bytes.substr(0, length), kSizes).ok()) << length;
    }
  }
}

}  // namespace
}  // namespace evenkeel::internal
