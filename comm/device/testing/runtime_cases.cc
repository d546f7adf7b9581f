// Tests of every DeviceRuntime; each runtime has a test that defines TestedRuntime().

#include "evenkeel/comm/device/testing/runtime_cases.h"

#include <cstdint>
#include <thread>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "evenkeel/comm/base/clock.h"
#include "evenkeel/comm/device/copy.h"
#include "evenkeel/comm/memory.h"
#include "evenkeel/comm/types.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

constexpr Device kDevice = Device::Cuda(0);
absl::Time Soon() { return SteadyNow() + absl::Seconds(60); }

class RuntimeTest : public testing::Test {
 protected:
  void SetUp() override {
    runtime_ = TestedRuntime();
    if (const absl::StatusOr<int> count = runtime_->DeviceCount(); !count.ok())
      SkipOrFail(count.status());
  }

  DeviceRuntime* runtime_ = nullptr;
};

TEST_F(RuntimeTest, MemoryIsZeroedAndAligned) {
  for (const int64_t bytes : {0, 1, 1000, 1 << 20}) {
    const absl::StatusOr<Memory> memory = runtime_->Allocate(kDevice, bytes);
    ASSERT_TRUE(memory.ok()) << memory.status();
    EXPECT_EQ(reinterpret_cast<uintptr_t>(memory->data.get()) % 256, 0);
    const absl::StatusOr<Stream> stream = runtime_->CreateStream(kDevice);
    ASSERT_TRUE(stream.ok()) << stream.status();
    std::vector<uint8_t> host(bytes, 7);
    ASSERT_TRUE(runtime_->Copy(host.data(), memory->data.get(), bytes, stream->ref()).ok());
    ASSERT_TRUE(runtime_->Synchronize(stream->ref(), Soon()).ok());
    EXPECT_EQ(host, std::vector<uint8_t>(bytes, 0));
  }
  const absl::StatusOr<DeviceFacts> facts = runtime_->Facts(kDevice);
  ASSERT_TRUE(facts.ok()) << facts.status();
  EXPECT_EQ(runtime_->Allocate(kDevice, facts->total_bytes + 1).status().code(),
            absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(runtime_->Allocate(kDevice, -1).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_TRUE(runtime_->Allocate(kDevice, 1).ok());  // The failure left nothing behind.
}

// Two streams add to one number in turn, many times; without the events between them it would come
// out otherwise.
TEST_F(RuntimeTest, StreamsWaitForEachOtherAndTheHostForNone) {
  const absl::StatusOr<Stream> a = runtime_->CreateStream(kDevice);
  const absl::StatusOr<Stream> b = runtime_->CreateStream(kDevice, StreamPriority::kHigh);
  ASSERT_TRUE(a.ok() && b.ok());
  constexpr int64_t kCount = 100000;
  const absl::StatusOr<Memory> first = runtime_->Allocate(kDevice, kCount * 4);
  const absl::StatusOr<Memory> second = runtime_->Allocate(kDevice, kCount * 4);
  ASSERT_TRUE(first.ok() && second.ok());
  const TensorView x(first->data.get(), kCount, DType::kFloat32, kDevice);
  const TensorView y(second->data.get(), kCount, DType::kFloat32, kDevice);
  ASSERT_TRUE(CopySegmentsOnce(*runtime_, {{.to = x, .fill = 1}}, a->ref()).ok());
  const int64_t waits = runtime_->host_waits();
  for (int i = 0; i < 10; ++i) {
    absl::StatusOr<Event> done = runtime_->Record(a->ref());
    ASSERT_TRUE(done.ok() && runtime_->Wait(b->ref(), *done).ok());
    ASSERT_TRUE(CopySegmentsOnce(*runtime_, {{.to = y, .from = x}}, b->ref(), {.scale = 2}).ok());
    done = runtime_->Record(b->ref());
    ASSERT_TRUE(done.ok() && runtime_->Wait(a->ref(), *done).ok());
    ASSERT_TRUE(CopySegmentsOnce(*runtime_, {{.to = x, .from = y}}, a->ref()).ok());
  }
  EXPECT_EQ(runtime_->host_waits(), waits);
  std::vector<float> host(kCount);
  ASSERT_TRUE(runtime_->Copy(host.data(), x.data, x.bytes(), a->ref()).ok());
  ASSERT_TRUE(runtime_->Synchronize(a->ref(), Soon()).ok());
  EXPECT_EQ(host, std::vector<float>(kCount, 1024.0f));
  EXPECT_EQ(runtime_->host_waits(), waits + 1);
}

TEST_F(RuntimeTest, PinnedMemoryGoesThereAndBack) {
  const absl::StatusOr<Memory> pinned = runtime_->AllocatePinned(4096);
  ASSERT_TRUE(pinned.ok()) << pinned.status();
  auto* const bytes = static_cast<uint8_t*>(pinned->data.get());
  for (int i = 0; i < 4096; ++i) {
    ASSERT_EQ(bytes[i], 0);
    bytes[i] = static_cast<uint8_t>(i * 31);
  }
  const absl::StatusOr<Memory> memory = runtime_->Allocate(kDevice, 4096);
  const absl::StatusOr<Stream> stream = runtime_->CreateStream(kDevice);
  ASSERT_TRUE(memory.ok() && stream.ok());
  std::vector<uint8_t> back(4096);
  ASSERT_TRUE(runtime_->Copy(memory->data.get(), bytes, 4096, stream->ref()).ok());
  ASSERT_TRUE(runtime_->Copy(back.data(), memory->data.get(), 4096, stream->ref()).ok());
  const absl::StatusOr<Event> copied = runtime_->Record(stream->ref());
  ASSERT_TRUE(copied.ok() && runtime_->Synchronize(*copied, Soon()).ok());
  EXPECT_TRUE(*runtime_->IsDone(*copied));
  EXPECT_TRUE(*runtime_->IsDone(Event{}));
  for (int i = 0; i < 4096; ++i) ASSERT_EQ(back[i], static_cast<uint8_t>(i * 31));
}

// A stream's moments are in its order, and so are their times.
TEST_F(RuntimeTest, TellsTheTimeBetweenTwoMomentsWithoutAWait) {
  const absl::StatusOr<Stream> stream = runtime_->CreateStream(kDevice);
  constexpr int64_t kCount = 1 << 20;
  const absl::StatusOr<Memory> memory = runtime_->Allocate(kDevice, kCount * 4);
  ASSERT_TRUE(stream.ok() && memory.ok());
  const TensorView data(memory->data.get(), kCount, DType::kFloat32, kDevice);
  for (int round = 0; round < 2; ++round) {  // The second with events that have been used before.
    std::vector<Event> moments;
    const absl::Time begin = SteadyNow();
    for (int i = 0; i < 3; ++i) {
      const absl::StatusOr<Event> moment = runtime_->RecordTimed(stream->ref());
      ASSERT_TRUE(moment.ok()) << moment.status();
      moments.push_back(*moment);
      ASSERT_TRUE(CopySegmentsOnce(*runtime_, {{.to = data, .fill = 1}}, stream->ref()).ok());
    }
    const absl::StatusOr<Event> plain = runtime_->Record(stream->ref());
    ASSERT_TRUE(plain.ok() && runtime_->Synchronize(*plain, Soon()).ok());
    const absl::Duration most =
        SteadyNow() - begin + absl::Milliseconds(1);  // The two clocks may differ a little.
    const int64_t waits = runtime_->host_waits();
    const absl::StatusOr<absl::Duration> first = runtime_->Elapsed(moments[0], moments[1]);
    const absl::StatusOr<absl::Duration> second = runtime_->Elapsed(moments[1], moments[2]);
    const absl::StatusOr<absl::Duration> both = runtime_->Elapsed(moments[0], moments[2]);
    ASSERT_TRUE(first.ok() && second.ok() && both.ok()) << both.status();
    EXPECT_GT(*first, absl::ZeroDuration());
    EXPECT_GT(*second, absl::ZeroDuration());
    EXPECT_LT(*both, most);
    EXPECT_LT(absl::AbsDuration(*both - *first - *second), absl::Microseconds(5));
    EXPECT_EQ(*runtime_->Elapsed(moments[1], moments[1]), absl::ZeroDuration());
    EXPECT_EQ(runtime_->host_waits(), waits);
    for (const absl::Status& status : {runtime_->Elapsed(moments[0], *plain).status(),
                                       runtime_->Elapsed(*plain, moments[0]).status(),
                                       runtime_->Elapsed(moments[0], Event{}).status()}) {
      EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    }
  }
}

// Such as a library's own, which never chose a device.
TEST_F(RuntimeTest, AnyThreadMayUseIt) {
  const absl::StatusOr<Stream> stream = runtime_->CreateStream(kDevice);
  const absl::StatusOr<Memory> memory = runtime_->Allocate(kDevice, 400);
  ASSERT_TRUE(stream.ok() && memory.ok());
  const TensorView data(memory->data.get(), 100, DType::kFloat32, kDevice);
  ASSERT_TRUE(CopySegmentsOnce(*runtime_, {{.to = data, .fill = 1}}, stream->ref())
                  .ok());  // Loads the kernel here.
  std::vector<absl::Status> statuses;
  std::thread([&] {
    statuses.push_back(
        CopySegmentsOnce(*runtime_, {{.to = data, .from = data}}, stream->ref(), {.scale = 3}));
    statuses.push_back(runtime_->AllocatePinned(100).status());
    const absl::StatusOr<Event> scaled = runtime_->Record(stream->ref());
    statuses.push_back(scaled.status());
    if (scaled.ok()) statuses.push_back(runtime_->Synchronize(*scaled, Soon()));
  }).join();
  for (const absl::Status& status : statuses) EXPECT_TRUE(status.ok()) << status;
  std::vector<float> host(100);
  ASSERT_TRUE(runtime_->Copy(host.data(), data.data, data.bytes(), stream->ref()).ok());
  ASSERT_TRUE(runtime_->Synchronize(stream->ref(), Soon()).ok());
  EXPECT_EQ(host, std::vector<float>(100, 3.0f));
}

TEST_F(RuntimeTest, RefusesADeviceThatIsNotThere) {
  const Device beyond = Device::Cuda(*runtime_->DeviceCount());
  for (const absl::Status& status :
       {runtime_->CreateStream(beyond).status(), runtime_->Allocate(beyond, 1).status(),
        runtime_->Facts(beyond).status(), runtime_->Facts(Device::Cpu()).status()}) {
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  }
}

}  // namespace
}  // namespace evenkeel
