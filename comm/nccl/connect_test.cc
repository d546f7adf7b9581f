// Ranks that NCCL can't connect, and what they say of it: with NCCL and its devices simulated.

#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/control/control.h"
#include "evenkeel/comm/device/simulated.h"
#include "evenkeel/comm/local/link.h"
#include "evenkeel/comm/nccl/group.h"
#include "evenkeel/comm/testing/simulated_nccl.h"
#include "evenkeel/comm/testing/simulated_nccl_group.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel::internal {
namespace {

using ::testing::HasSubstr;
using Ranks = std::vector<absl::StatusOr<std::unique_ptr<Communicator>>>;

std::string TextOf(const absl::Status& status) { return std::string(status.message()); }

class NcclConnectTest : public testing::Test {
 protected:
  SimulatedDevices devices_{{.count = 4}};
  SimulatedNccl nccl_{devices_};
};

TEST_F(NcclConnectTest, OtherVersionsAreNamedOnEveryRank) {
  (void)nccl_.Library(1, {.version = 22703});
  for (const auto& rank : ConnectSimulatedNccl(devices_, nccl_, 3, {})) {
    EXPECT_EQ(rank.status(), absl::FailedPreconditionError(
                                 "the version of NCCL: rank 1 has 2.27.3; ranks 0,2 have "
                                 "2.28.9: the ranks need the same one"));
  }
}

TEST_F(NcclConnectTest, TwoRanksOnOneDeviceAreNamedOnEveryRank) {
  for (const auto& rank : ConnectSimulatedNccl(devices_, nccl_, 3, {}, {0, 1, 0})) {
    EXPECT_EQ(rank.status().code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(TextOf(rank.status()),
                HasSubstr("ranks 0 and 2 are on one device, 0000:00:00.0 of host (cuda:0)"));
  }
}

TEST_F(NcclConnectTest, RanksThatCallThemselvesOtherHostsShareADevice) {
  for (int rank = 0; rank < 3; ++rank)
    (void)nccl_.Library(rank, {.host = absl::StrCat("NCCL_HOSTID ", rank)});
  for (const auto& rank : ConnectSimulatedNccl(devices_, nccl_, 3, {}, {0, 0, 0}))
    EXPECT_TRUE(rank.ok()) << rank.status();
}

TEST_F(NcclConnectTest, WhatNcclItselfFindsOutHasItsWords) {
  // NCCL_MULTI_RANK_GPU_ENABLE on one rank only.
  (void)nccl_.Library(1, {.may_share_device = true});
  for (const auto& rank : ConnectSimulatedNccl(devices_, nccl_, 2, {}, {0, 0})) {
    EXPECT_FALSE(rank.ok());
    EXPECT_THAT(TextOf(rank.status()),
                HasSubstr("Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 0"));
  }
}

TEST_F(NcclConnectTest, ADeviceThatIsNotThereIsNamedOnEveryRank) {
  const Ranks ranks = ConnectSimulatedNccl(devices_, nccl_, 2, {}, {0, 7});
  EXPECT_TRUE(absl::IsInvalidArgument(ranks[1].status())) << ranks[1].status();
  EXPECT_EQ(TextOf(ranks[1].status()), "rank 1 wants CUDA device 7, there are 4");
  EXPECT_THAT(TextOf(ranks[0].status()), HasSubstr("rank 1 wants CUDA device 7, there are 4"));
}

TEST_F(NcclConnectTest, WithoutADeviceThereIsNoGroup) {
  SimulatedDevices none({.count = 0});
  const Ranks ranks = ConnectSimulatedNccl(none, nccl_, 2, {});
  for (const auto& rank : ranks)
    EXPECT_THAT(TextOf(rank.status()), HasSubstr("no CUDA device: none is simulated"));
}

TEST_F(NcclConnectTest, ConnectingThatNeverEndsMissesItsDeadline) {
  nccl_.NeverConnect(1);
  const absl::Time start = absl::Now();
  for (const auto& rank :
       ConnectSimulatedNccl(devices_, nccl_, 3, {.connect_timeout = absl::Milliseconds(300)})) {
    EXPECT_FALSE(rank.ok());
    EXPECT_THAT(TextOf(rank.status()),
                HasSubstr("connecting the group: still in progress at the deadline"));
    EXPECT_THAT(TextOf(rank.status()), HasSubstr("rank "));
  }
  EXPECT_LT(absl::Now() - start, absl::Seconds(10));
}

TEST_F(NcclConnectTest, ARankThatIsLostWhileTheyConnectEndsTheWaitOfTheOthers) {
  std::vector<std::unique_ptr<ControlLink>> links = CreateLocalLinks(2);
  const absl::Time start = absl::Now();
  std::thread lost([&] {
    // Comes to the control plane, says what it has, and goes.
    ControlChannel control(1, 2, std::move(links[1]));
    (void)control.Exchange("nccl peers", "", absl::Seconds(10));
    control.Fail(absl::UnavailableError("rank 1 was killed"));
  });
  const absl::StatusOr<std::unique_ptr<Communicator>> comm =
      CreateNcclGroupOver(devices_, &nccl_.Library(0), 0, 2, std::move(links[0]), {});
  lost.join();
  EXPECT_FALSE(comm.ok());
  EXPECT_LT(absl::Now() - start, absl::Seconds(10));
}

TEST_F(NcclConnectTest, ARankWithoutNcclIsReportedOnAllRanks) {
  std::vector<std::unique_ptr<ControlLink>> links = CreateLocalLinks(2);
  absl::StatusOr<std::unique_ptr<Communicator>> without;
  std::thread rank([&] {
    without = CreateNcclGroupOver(devices_, absl::FailedPreconditionError("cannot load NCCL"), 1, 2,
                                  std::move(links[1]), {.device = 1});
  });
  const absl::StatusOr<std::unique_ptr<Communicator>> other =
      CreateNcclGroupOver(devices_, &nccl_.Library(0), 0, 2, std::move(links[0]), {});
  rank.join();
  EXPECT_EQ(without.status(), absl::FailedPreconditionError("cannot load NCCL"));
  EXPECT_EQ(other.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(TextOf(other.status()), HasSubstr("rank 1: cannot load NCCL"));
}

TEST_F(NcclConnectTest, AFailureToConnectReachesAllRanks) {
  nccl_.FailNext(2, "Init", {NcclCode::kSystemError, "no socket interface"});
  for (const auto& rank : ConnectSimulatedNccl(devices_, nccl_, 3, {})) {
    EXPECT_EQ(rank.status().code(), absl::StatusCode::kUnavailable);
    EXPECT_THAT(TextOf(rank.status()), HasSubstr("ncclCommInitRankConfig: no socket interface"));
  }
}

}  // namespace
}  // namespace evenkeel::internal
