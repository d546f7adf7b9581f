// One communicator of NCCL's, with NCCL simulated: who may call into it when, and how it ends.

#include "evenkeel/comm/nccl/connection.h"

#include <atomic>
#include <memory>
#include <string>
#include <thread>

#include "absl/status/status.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "evenkeel/comm/device/simulated.h"
#include "evenkeel/comm/memory.h"
#include "evenkeel/comm/testing/simulated_nccl.h"
#include "evenkeel/comm/types.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel::internal {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;

// For a mistake to show. A test without one passes however long it takes.
constexpr absl::Duration kAWhile = absl::Milliseconds(50);

absl::Time Soon() { return absl::Now() + absl::Minutes(1); }

class NcclConnectionTest : public testing::Test {
 protected:
  void TearDown() override { EXPECT_THAT(nccl_.mistakes(), IsEmpty()); }

  absl::Status Open(NcclConnection& connection) { return connection.Open("id", 0, 1, Soon()); }

  SimulatedDevices devices_{{.count = 1}};
  SimulatedNccl nccl_{devices_};
  NcclApi& api_ = nccl_.Library(0);
};

TEST_F(NcclConnectionTest, WhatIsOpenedAfterAnAbortIsEndedToo) {
  nccl_.HangNext(0, "Init");
  NcclConnection connection(api_, Device::Cuda(0), /*patience=*/absl::Milliseconds(200));
  const absl::Time deadline = Soon();
  absl::Status opened;
  std::thread opens([&] { opened = Open(connection); });
  while (nccl_.hanging() == 0 && absl::Now() < deadline) absl::SleepFor(absl::Milliseconds(1));
  EXPECT_FALSE(connection.Abort(absl::CancelledError("had enough")).ok())
      << "a call into NCCL is not back";
  nccl_.Release();
  opens.join();
  EXPECT_EQ(opened, absl::CancelledError("had enough"));
  while (nccl_.communicators() > 0 && absl::Now() < deadline) absl::SleepFor(absl::Milliseconds(1));
  EXPECT_EQ(nccl_.communicators(), 0);
}

TEST_F(NcclConnectionTest, OneCallComesAfterTheOther) {
  NcclConnection connection(api_, Device::Cuda(0));
  ASSERT_TRUE(Open(connection).ok());
  std::atomic<bool> is_inside = false;
  absl::Notification has_begun;
  std::thread first([&] {
    const absl::Status status = connection.Call("first", Soon(), [&](NcclComm) {
      is_inside = true;
      has_begun.Notify();
      absl::SleepFor(kAWhile);
      is_inside = false;
      return NcclAnswer();
    });
    EXPECT_TRUE(status.ok()) << status;
  });
  has_begun.WaitForNotification();
  std::thread asks([&] {
    EXPECT_TRUE(connection.CheckErrors("errors").ok());
    EXPECT_FALSE(is_inside) << "a question came into a call";
  });
  const absl::Status second = connection.Call("second", Soon(), [&](NcclComm) {
    EXPECT_FALSE(is_inside) << "a call came into a call";
    return NcclAnswer();
  });
  EXPECT_TRUE(second.ok()) << second;
  first.join();
  asks.join();
}

TEST_F(NcclConnectionTest, ACallWaitsForWhatIsInProgress) {
  NcclConnection connection(api_, Device::Cuda(0));
  ASSERT_TRUE(Open(connection).ok());
  const auto begins = [](NcclComm) { return NcclAnswer{NcclCode::kInProgress}; };
  ASSERT_TRUE(connection.Call("first", Soon(), begins).ok());
  std::atomic<bool> may_come = false;
  std::thread second([&] {
    const absl::Status status = connection.Call("second", Soon(), [&](NcclComm) {
      EXPECT_TRUE(may_come) << "while the first one was in progress";
      return NcclAnswer();
    });
    EXPECT_TRUE(status.ok()) << status;
  });
  absl::SleepFor(kAWhile);
  may_come = true;
  EXPECT_TRUE(connection.AwaitProgress("first", Soon()).ok());
  second.join();
}

TEST_F(NcclConnectionTest, ACallDoesNotWaitBeyondItsDeadline) {
  NcclConnection connection(api_, Device::Cuda(0));
  ASSERT_TRUE(Open(connection).ok());
  const auto begins = [](NcclComm) { return NcclAnswer{NcclCode::kInProgress}; };
  ASSERT_TRUE(connection.Call("first", Soon(), begins).ok());
  const absl::Status second = connection.Call("second", absl::Now() + kAWhile, begins);
  EXPECT_EQ(second.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_THAT(std::string(second.message()),
              HasSubstr("nccl: second: an earlier call is still in progress"));
}

TEST_F(NcclConnectionTest, MemoryIsFreedUnlessItMayBeInUse) {
  const Device device = Device::Cuda(0);
  auto connection = std::make_shared<NcclConnection>(api_, device);
  ASSERT_TRUE(Open(*connection).ok());
  Memory memory = FreedByLeaveOf(connection, *devices_.Allocate(device, 64));
  Memory later = FreedByLeaveOf(connection, *devices_.Allocate(device, 64));
  Memory left = FreedByLeaveOf(connection, *devices_.Allocate(device, 64));
  EXPECT_EQ(devices_.held_bytes(device), 192);
  memory = Memory();
  EXPECT_EQ(devices_.held_bytes(device), 128);
  EXPECT_TRUE(connection->Abort(absl::CancelledError("enough")).ok());
  later = Memory();
  EXPECT_EQ(devices_.held_bytes(device), 64);
  connection->LeaveBehind();
  left = Memory();
  EXPECT_EQ(devices_.held_bytes(device), 64);
}

}  // namespace
}  // namespace evenkeel::internal
