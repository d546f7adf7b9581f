#include "evenkeel/comm/nccl/plan.h"

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "evenkeel/comm/backend.h"
#include "evenkeel/comm/base/fields.h"
#include "evenkeel/comm/collective.h"
#include "evenkeel/comm/nccl/api.h"
#include "evenkeel/comm/nccl/group.h"
#include "evenkeel/comm/nccl/peers.h"
#include "evenkeel/comm/types.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel::internal {
namespace {

using ::testing::HasSubstr;

// Memory that is only pointed at.
TensorView At(int64_t element, int64_t count, DType dtype = DType::kFloat32) {
  static std::vector<double> memory(1000);
  return TensorView(memory.data(), 1000, dtype, Device::Cuda(0)).Slice(element, count);
}

Operation Sum(ReduceOp op, double scale, DType dtype = DType::kFloat32) {
  Operation operation;
  operation.what = {.kind = CollectiveKind::kAllReduce, .dtype = dtype, .count = 8, .op = op};
  operation.in = operation.out = {At(0, 8, dtype)};
  operation.scale = scale;
  return operation;
}

TEST(NcclPlanTest, AverageAndScaleAreNcclsWhereItHasThem) {
  NcclPlan plan = PlanForNccl(Sum(ReduceOp::kSum, 1.0), 0, 3, true);
  EXPECT_EQ(plan.op, kNcclSum);
  EXPECT_EQ(plan.inside, 1.0);
  plan = PlanForNccl(Sum(ReduceOp::kAverage, 1.0 / 3), 0, 3, true);
  EXPECT_EQ(plan.op, kNcclAverage);
  EXPECT_EQ(plan.inside, 1.0);
  plan = PlanForNccl(Sum(ReduceOp::kAverage, 0.5 / 3), 0, 3, true);
  EXPECT_EQ(plan.op, kNcclSum);
  EXPECT_EQ(plan.inside, 0.5 / 3);
  plan = PlanForNccl(Sum(ReduceOp::kSum, 0.5, DType::kInt32), 0, 3, true);
  EXPECT_EQ(plan.inside, 1.0);
  EXPECT_EQ(plan.after, 1.0);
}

TEST(NcclPlanTest, AScaleThatTheTypeCannotHoldIsAppliedBefore) {
  const double tiny = 1.0 / 65536 / 6;  // As in a loss scale: below float16's normal numbers.
  EXPECT_EQ(PlanForNccl(Sum(ReduceOp::kSum, tiny, DType::kFloat16), 0, 2, true).before, tiny);
  EXPECT_EQ(PlanForNccl(Sum(ReduceOp::kSum, tiny, DType::kFloat16), 0, 2, true).inside, 1.0);
  EXPECT_EQ(PlanForNccl(Sum(ReduceOp::kSum, tiny, DType::kBFloat16), 0, 2, true).inside, tiny);
  EXPECT_EQ(PlanForNccl(Sum(ReduceOp::kSum, 1e6, DType::kFloat16), 0, 2, true).before, 1e6);
  EXPECT_EQ(PlanForNccl(Sum(ReduceOp::kSum, 1.0 / 3, DType::kFloat16), 0, 2, true).inside, 1.0 / 3);
}

TEST(NcclPlanTest, AScaleOfWhatIsNoSumIsAppliedAfterwards) {
  for (const ReduceOp op : {ReduceOp::kMin, ReduceOp::kMax, ReduceOp::kProduct}) {
    const NcclPlan plan = PlanForNccl(Sum(op, 0.5), 0, 2, true);
    EXPECT_EQ(plan.after, 0.5);
    EXPECT_EQ(plan.inside, 1.0);
  }
}

TEST(NcclPlanTest, ViewsAreStagedWhereNcclTakesOnePiece) {
  Operation gather;
  gather.what = {.kind = CollectiveKind::kAllGather, .count = 4};
  gather.in = {At(100, 4)};
  gather.out = {At(0, 8)};
  EXPECT_FALSE(PlanForNccl(gather, 0, 2, true).stages_in);
  EXPECT_FALSE(PlanForNccl(gather, 0, 2, true).stages_out);
  EXPECT_TRUE(PlanForNccl(gather, 0, 2, false).stages_in);
  gather.in = {At(100, 1), At(200, 3)};
  EXPECT_TRUE(PlanForNccl(gather, 0, 2, true).stages_in);
  EXPECT_FALSE(PlanForNccl(gather, 0, 2, true).stages_out);
  gather.in = {At(4, 4)};  // Its own share, on rank 1 only.
  EXPECT_TRUE(PlanForNccl(gather, 0, 2, true).stages_in);
  EXPECT_FALSE(PlanForNccl(gather, 1, 2, true).stages_in);
  EXPECT_FALSE(PlanForNccl(Sum(ReduceOp::kSum, 1), 0, 2, true).stages_in);
  EXPECT_TRUE(PlanForNccl(Sum(ReduceOp::kSum, 1), 0, 2, false).stages_out);
}

TEST(NcclPlanTest, TheInputOfARankThatDoesNotContributeStaysAsItIs) {
  Operation scatter;
  scatter.what = {.kind = CollectiveKind::kReduceScatter, .count = 4};
  scatter.in = {At(0, 8)};
  scatter.out = {At(100, 4)};
  EXPECT_FALSE(PlanForNccl(scatter, 0, 2, true).stages_in);
  scatter.contributes = false;
  EXPECT_TRUE(PlanForNccl(scatter, 0, 2, true).stages_in);
  EXPECT_TRUE(PlanForNccl(scatter, 0, 2, true).fills_identity);
}

TEST(NcclPlanTest, SaysWhatNcclLacks) {
  Collective what{.kind = CollectiveKind::kAllReduce,
                  .dtype = DType::kInt32,
                  .count = 1,
                  .op = ReduceOp::kBitOr};
  EXPECT_EQ(SupportedByNccl(what), absl::UnimplementedError("nccl: no bit_or"));
  what.op = ReduceOp::kSum;
  EXPECT_TRUE(SupportedByNccl(what).ok());
  what.dtype = DType::kInt16;
  EXPECT_EQ(SupportedByNccl(what), absl::UnimplementedError("nccl: no all_reduce of int16"));
  what.kind = CollectiveKind::kBroadcast;
  EXPECT_TRUE(SupportedByNccl(what).ok());
}

TEST(NcclAnswerTest, EachResultHasAStatus) {
  const struct {
    NcclCode code;
    absl::StatusCode status;
  } cases[] = {
      {NcclCode::kSuccess, absl::StatusCode::kOk},
      {NcclCode::kInProgress, absl::StatusCode::kOk},
      {NcclCode::kUnhandledCudaError, absl::StatusCode::kInternal},
      {NcclCode::kSystemError, absl::StatusCode::kUnavailable},
      {NcclCode::kInternalError, absl::StatusCode::kInternal},
      {NcclCode::kInvalidArgument, absl::StatusCode::kInvalidArgument},
      {NcclCode::kInvalidUsage, absl::StatusCode::kInvalidArgument},
      {NcclCode::kRemoteError, absl::StatusCode::kUnavailable},
      {NcclCode::kUnimplemented, absl::StatusCode::kUnimplemented},
      {NcclCode::kUnknown, absl::StatusCode::kInternal},
  };
  for (const auto& [code, status] : cases) {
    EXPECT_EQ(ToStatus("all_reduce", {code, "the reason"}).code(), status);
    if (status == absl::StatusCode::kOk) continue;
    EXPECT_EQ(ToStatus("all_reduce", {code, "the reason"}).message(),
              "nccl: all_reduce: the reason");
  }
}

TEST(NcclAnswerTest, VersionsAreWrittenAsPeopleDo) {
  EXPECT_EQ(NcclVersionText(22809), "2.28.9");
  EXPECT_EQ(NcclVersionText(21903), "2.19.3");
  EXPECT_EQ(NcclVersionText(2708), "2.7.8");
}

std::vector<NcclPeer> Peers(int count) {
  std::vector<NcclPeer> peers(count);
  for (int rank = 0; rank < count; ++rank) {
    const std::string device = "0000:0" + std::to_string(rank);
    peers[rank] = {22809, rank, {.host = "a", .device = device}};
  }
  return peers;
}

TEST(NcclPeersTest, AreReadAsTheyWereWritten) {
  const NcclPeer peer{22809, 3, {"host a", "0000:1b:00.0", true}};
  const absl::StatusOr<NcclPeer> read = FromBytes<NcclPeer>(ToBytes(peer), "peer");
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(ToBytes(*read), ToBytes(peer));
  EXPECT_EQ(read->place.device, "0000:1b:00.0");
  EXPECT_FALSE(FromBytes<NcclPeer>("short", "peer").ok());
}

TEST(NcclPeersTest, VersionsMustBeEqual) {
  std::vector<NcclPeer> peers = Peers(3);
  EXPECT_TRUE(CheckPeers(peers).ok());
  peers[1].version = 22703;
  EXPECT_EQ(CheckPeers(peers),
            absl::FailedPreconditionError(
                "the version of NCCL: rank 1 has 2.27.3; ranks 0,2 have 2.28.9: the ranks need the "
                "same one"));
}

TEST(NcclPeersTest, TwoRanksOfAHostHaveTwoDevices) {
  std::vector<NcclPeer> peers = Peers(3);
  peers[2].place.device = peers[0].place.device;
  const absl::Status shared = CheckPeers(peers);
  EXPECT_EQ(shared.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(shared.message()),
              HasSubstr("ranks 0 and 2 are on one device, 0000:00 of a (cuda:0 and cuda:2)"));
  peers[2].place.host = "another NCCL_HOSTID";
  EXPECT_TRUE(CheckPeers(peers).ok());
  peers[2].place.host = "a";
  for (NcclPeer& peer : peers) peer.place.may_share_device = true;
  EXPECT_TRUE(CheckPeers(peers).ok());
}

TEST(NcclDeviceTest, IsTheOneThatTheRankCountsToOrTheOnlyOne) {
  EXPECT_EQ(NcclDeviceFor(3, 8), 3);
  EXPECT_EQ(NcclDeviceFor(3, 2), 3);  // Which is refused with a sentence.
  EXPECT_EQ(NcclDeviceFor(3, 1), 0);
}

}  // namespace
}  // namespace evenkeel::internal
