// That the benchmark measures what it says, in a moment.

#include "evenkeel/tests/skew/skewed_training.h"

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "evenkeel/comm/local/local.h"
#include "evenkeel/comm/status.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

constexpr int kWorld = 9;

SkewSetting Quick(JoinWay way, Skew skew) {
  return {.way = way,
          .skew = skew,
          .steps = 12,
          .forward = absl::Microseconds(10),
          .backward = absl::Microseconds(20),
          .layer_elements = 64};
}

TEST(SkewedTrainingTest, RanksHaveTheStepsThatTheSkewLeavesThem) {
  const SkewSetting ten = Quick(JoinWay::kShadow, Skew::kTen);
  EXPECT_EQ(ten.StepsOf(3, kWorld), 2);
  EXPECT_EQ(ten.StepsOf(4, kWorld), 12);
  const SkewSetting empty = Quick(JoinWay::kShadow, Skew::kEmptyEighth);
  EXPECT_EQ(empty.StepsOf(0, kWorld), 0);
  EXPECT_EQ(empty.StepsOf(7, kWorld), 12);
  EXPECT_EQ(empty.StepsOf(8, kWorld), 0);
}

TEST(SkewedTrainingTest, EveryRowRunsBlockAfterBlockAndKeepsItsBucketsInOrder) {
  for (const SkewSetting& setting :
       {Quick(JoinWay::kNone, Skew::kEven), Quick(JoinWay::kDisabled, Skew::kEven),
        Quick(JoinWay::kShadow, Skew::kEven), Quick(JoinWay::kShadow, Skew::kTen),
        Quick(JoinWay::kShadow, Skew::kEmptyEighth)}) {
    const absl::Status status = RunRanks(kWorld, [&](Communicator& comm) -> absl::Status {
      EK_ASSIGN_OR_RETURN(const auto training, SkewedTraining::Create(&comm, setting));
      for (int block = 0; block < 2; ++block) {
        EK_ASSIGN_OR_RETURN(const BlockTimes times, training->RunBlock());
        EXPECT_EQ(times.steps.size(), setting.StepsOf(comm.rank(), kWorld));
        EXPECT_EQ(times.backwards.size(), times.steps.size());
      }
      EXPECT_TRUE(training->BucketsFollowBackward()) << "rank " << comm.rank();
      return absl::OkStatus();
    });
    EXPECT_TRUE(status.ok()) << status;
  }
}

TEST(SkewedTrainingTest, AnOrderOfRegistrationIsSeenAsWrong) {
  SkewSetting setting = Quick(JoinWay::kNone, Skew::kEven);
  setting.registration_order = true;
  const absl::Status status = RunRanks(2, [&](Communicator& comm) -> absl::Status {
    EK_ASSIGN_OR_RETURN(const auto training, SkewedTraining::Create(&comm, setting));
    EK_RETURN_IF_ERROR(training->RunBlock().status());
    EXPECT_FALSE(training->BucketsFollowBackward());
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(SkewedTrainingTest, FewerInputsWithoutJoinAreRefused) {
  const absl::Status status = RunRanks(1, [&](Communicator& comm) -> absl::Status {
    EXPECT_TRUE(absl::IsInvalidArgument(
        SkewedTraining::Create(&comm, Quick(JoinWay::kDisabled, Skew::kTen)).status()));
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

}  // namespace
}  // namespace evenkeel
