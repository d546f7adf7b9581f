#include "evenkeel/comm/device/simulated.h"

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "evenkeel/comm/device/kernel.h"
#include "evenkeel/comm/device/runtime.h"
#include "evenkeel/comm/memory.h"
#include "evenkeel/comm/types.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

EK_KERNEL(256, ek_test_add)(float* data, int64_t count, float addend) {
  for (int64_t i = kernel::GlobalIndex(); i < count; i += kernel::GlobalThreads())
    data[i] += addend;
}
const DeviceImage kNoImage;
const auto kAdd = MakeKernel<&ek_test_add>("ek_test_add", kNoImage);

constexpr Device kDevice = Device::Cuda(0);
absl::Time Soon() { return absl::Now() + absl::Seconds(20); }

TEST(SimulatedDevicesTest, StreamsRunBesideTheHostAndWaitForEachOther) {
  SimulatedDevices devices({.delay = absl::Milliseconds(5)});
  const absl::StatusOr<Stream> first = devices.CreateStream(kDevice),
                               second = devices.CreateStream(kDevice);
  ASSERT_TRUE(first.ok() && second.ok());
  const absl::StatusOr<Memory> memory = devices.Allocate(kDevice, 1000 * sizeof(float));
  ASSERT_TRUE(memory.ok()) << memory.status();
  auto* const data = static_cast<float*>(memory->data.get());

  std::vector<float> host(1000, 1.0f), back(1000);
  ASSERT_TRUE(devices.Copy(data, host.data(), memory->bytes, first->ref()).ok());
  ASSERT_TRUE(Launch(devices, kAdd, ShapeFor(1000), first->ref(), data, 1000, 2.0f).ok());
  const absl::StatusOr<Event> added = devices.Record(first->ref());
  ASSERT_TRUE(added.ok());
  EXPECT_FALSE(*devices.IsDone(*added));
  ASSERT_TRUE(devices.Wait(second->ref(), *added).ok());
  ASSERT_TRUE(devices.Copy(back.data(), data, memory->bytes, second->ref()).ok());
  EXPECT_EQ(devices.host_waits(), 0);
  ASSERT_TRUE(devices.Synchronize(second->ref(), Soon()).ok());
  EXPECT_EQ(back, std::vector<float>(1000, 3.0f));
  EXPECT_TRUE(*devices.IsDone(*added));
  EXPECT_EQ(devices.host_waits(), 1);
  EXPECT_EQ(devices.launches(), 1);
}

TEST(SimulatedDevicesTest, TheTimeBetweenTwoMomentsIsTheStreamsAndNotTheHosts) {
  SimulatedDevices devices({.count = 2});
  const absl::StatusOr<Stream> stream = devices.CreateStream(kDevice),
                               other = devices.CreateStream(Device::Cuda(1));
  ASSERT_TRUE(stream.ok() && other.ok());
  const absl::StatusOr<Event> elsewhere = devices.RecordTimed(other->ref());
  absl::Notification go_on;
  const absl::StatusOr<Event> begin = devices.RecordTimed(stream->ref());
  ASSERT_TRUE(devices.Put(stream->ref(), [&] { go_on.WaitForNotification(); }).ok());
  const absl::StatusOr<Event> end = devices.RecordTimed(stream->ref());
  ASSERT_TRUE(begin.ok() && end.ok() && elsewhere.ok());
  ASSERT_TRUE(devices.Synchronize(*begin, Soon()).ok());
  EXPECT_EQ(devices.Elapsed(*begin, *end).status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(devices.Elapsed(*begin, *elsewhere).status().code(),
            absl::StatusCode::kInvalidArgument);
  absl::SleepFor(absl::Milliseconds(20));
  go_on.Notify();
  ASSERT_TRUE(devices.Synchronize(*end, Soon()).ok());
  EXPECT_GE(*devices.Elapsed(*begin, *end), absl::Milliseconds(20));
  EXPECT_EQ(devices.host_waits(), 2);
}

TEST(SimulatedDevicesTest, TheHostWaitsNoLongerThanItsDeadline) {
  SimulatedDevices devices({.delay = absl::Milliseconds(200)});
  const absl::StatusOr<Stream> stream = devices.CreateStream(kDevice);
  ASSERT_TRUE(stream.ok());
  EXPECT_EQ(devices.Synchronize(stream->ref(), absl::Now() + absl::Milliseconds(1)).code(),
            absl::StatusCode::kDeadlineExceeded);
}

TEST(SimulatedDevicesTest, MemoryIsCountedAndEnds) {
  SimulatedDevices devices({.count = 2, .bytes = 1000});
  {
    const absl::StatusOr<Memory> memory = devices.Allocate(Device::Cuda(1), 600);
    ASSERT_TRUE(memory.ok());
    EXPECT_EQ(devices.held_bytes(Device::Cuda(1)), 600);
    EXPECT_EQ(devices.Allocate(Device::Cuda(1), 401).status().code(),
              absl::StatusCode::kResourceExhausted);
    EXPECT_TRUE(devices.Allocate(kDevice, 1000).ok());
  }
  EXPECT_EQ(devices.held_bytes(Device::Cuda(1)), 0);
}

TEST(SimulatedDevicesTest, RefusesWhatADeviceWould) {
  SimulatedDevices devices;
  EXPECT_EQ(devices.CreateStream(Device::Cuda(1)).status().code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(devices.CreateStream(Device::Cpu()).status().code(),
            absl::StatusCode::kInvalidArgument);
  const absl::StatusOr<Stream> stream = devices.CreateStream(kDevice);
  ASSERT_TRUE(stream.ok());
  EXPECT_EQ(Launch(devices, kAdd, {.threads = 48}, stream->ref(), nullptr, 0, 0).code(),
            absl::StatusCode::kInvalidArgument);
  devices.FailNext("Record", absl::InternalError("scripted"), /*after=*/1);
  EXPECT_TRUE(devices.Record(stream->ref()).ok());
  EXPECT_EQ(devices.Record(stream->ref()).status(), absl::InternalError("scripted"));
  devices.FailNext("Record", absl::OkStatus());
  EXPECT_TRUE(devices.Record(stream->ref()).ok());
  EXPECT_EQ(SimulatedDevices({.count = 0}).DeviceCount().status().code(),
            absl::StatusCode::kFailedPrecondition);
}

TEST(SimulatedDevicesDeathTest, GuardsMemoryAgainstTheHost) {
  SimulatedDevices devices({.guards_memory = true});
  const absl::StatusOr<Stream> stream = devices.CreateStream(kDevice);
  const absl::StatusOr<Memory> memory = devices.Allocate(kDevice, 1000 * sizeof(float));
  ASSERT_TRUE(stream.ok() && memory.ok());
  auto* const data = static_cast<float*>(memory->data.get());
  ASSERT_TRUE(Launch(devices, kAdd, ShapeFor(1000), stream->ref(), data, 1000, 2.0f).ok());
  std::vector<float> host(1000);
  ASSERT_TRUE(devices.Copy(host.data(), data, memory->bytes, stream->ref()).ok());
  ASSERT_TRUE(devices.Synchronize(stream->ref(), Soon()).ok());
  EXPECT_EQ(host, std::vector<float>(1000, 2.0f));
  EXPECT_DEATH(EXPECT_EQ(*data, 2.0f), "the host touches a simulated device's memory");
}

}  // namespace
}  // namespace evenkeel
