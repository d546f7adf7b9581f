#include "evenkeel/bucket/plan/plan_state.h"

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "evenkeel/bucket/plan/planner.h"
#include "evenkeel/bucket/plan/trainable_mask.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

using testing::ElementsAre;

const std::vector<Bytes> kCaps = {Bytes{8}, Bytes{16}};

std::vector<ParamSpec> Params(int count) {
  return std::vector<ParamSpec>(count, ParamSpec{.count = 2});
}

TEST(PlanStateTest, BeginsWithOneBucketAndGetsRealOnesWithTheOrder) {
  const std::vector<ParamSpec> specs = Params(4);
  PlanState state{.mask = TrainableMask(4)};
  EXPECT_THAT(PlanFor(state, specs, kCaps)->buckets, ElementsAre(ElementsAre(3, 2, 1, 0)));
  AdoptOrder(state, std::vector<int>{2, 0, 3, 1});
  EXPECT_EQ(state.generation, 1u);
  EXPECT_TRUE(state.order_final);
  EXPECT_THAT(PlanFor(state, specs, kCaps)->buckets,
              ElementsAre(ElementsAre(2), ElementsAre(0, 3), ElementsAre(1)));
}

TEST(PlanStateTest, AFrozenParameterKeepsItsPlaceForLater) {
  const std::vector<ParamSpec> specs = Params(4);
  PlanState state{.mask = TrainableMask(4)};
  AdoptOrder(state, std::vector<int>{2, 0, 3, 1});
  TrainableMask mask(4);
  mask.Set(0, false);
  AdoptMask(state, mask);
  EXPECT_FALSE(state.order_final);
  EXPECT_THAT(PlanFor(state, specs, kCaps)->buckets,
              ElementsAre(ElementsAre(2), ElementsAre(3, 1)));
  AdoptOrder(state, std::vector<int>{3, 2, 1});
  EXPECT_THAT(state.order, ElementsAre(3, 2, 1, 0));
  AdoptMask(state, TrainableMask(4));
  EXPECT_THAT(PlanFor(state, specs, kCaps)->buckets,
              ElementsAre(ElementsAre(3), ElementsAre(2, 1), ElementsAre(0)));
}

TEST(PlanStateTest, MeasuredCapsGoBeforeTheOptionsAndStayWhenTheMaskChanges) {
  const std::vector<ParamSpec> specs = Params(4);
  PlanState state{.mask = TrainableMask(4)};
  AdoptOrder(state, std::vector<int>{2, 0, 3, 1});
  AdoptCaps(state, {Bytes{0}, kNoCap}, CapOrder::kFromLastReady);
  EXPECT_EQ(state.generation, 2u);
  EXPECT_THAT(PlanFor(state, specs, kCaps)->buckets,
              ElementsAre(ElementsAre(2, 0, 3), ElementsAre(1)));
  TrainableMask mask(4);
  mask.Set(1, false);
  AdoptMask(state, mask);
  EXPECT_THAT(PlanFor(state, specs, kCaps)->buckets,
              ElementsAre(ElementsAre(2, 0), ElementsAre(3)));
}

TEST(PlanStateTest, EverythingFrozenIsAPlanWithoutBuckets) {
  PlanState state{.mask = TrainableMask(3, false)};
  EXPECT_TRUE(PlanFor(state, Params(3), kCaps)->buckets.empty());
  AdoptOrder(state, std::vector<int>{});
  EXPECT_TRUE(PlanFor(state, Params(3), kCaps)->buckets.empty());
}

TEST(PlanStateTest, SurvivesTheWireAndRefusesEverythingElse) {
  PlanState state{.mask = TrainableMask(5)};
  state.mask.Set(3, false);
  AdoptOrder(state, std::vector<int>{4, 0});
  AdoptCaps(state, {Bytes{100}, kNoCap}, CapOrder::kFromLastReady);
  const std::string bytes = state.Serialize();
  absl::StatusOr<PlanState> parsed = PlanState::Parse(bytes, 5);
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  EXPECT_EQ(*parsed, state);
  EXPECT_FALSE(PlanState::Parse(bytes, 6).ok());
  for (size_t size = 0; size < bytes.size(); ++size) {
    EXPECT_FALSE(PlanState::Parse(bytes.substr(0, size), 5).ok()) << size;
  }
  std::string twice = bytes;
  twice[twice.size() - sizeof(int)] =
      twice[twice.size() - 2 * sizeof(int)];  // Names a parameter twice.
  EXPECT_FALSE(PlanState::Parse(twice, 5).ok());
  for (size_t i = 0; i < bytes.size();
       ++i) {  // Whatever a flipped bit makes of it, it is read or refused.
    std::string flipped = bytes;
    flipped[i] ^= 0x41;
    (void)PlanState::Parse(flipped, 5).ok();
  }
}

}  // namespace
}  // namespace evenkeel
