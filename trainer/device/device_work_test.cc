#include "evenkeel/trainer/device/device_work.h"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "evenkeel/comm/device/simulated.h"
#include "evenkeel/comm/types.h"
#include "evenkeel/trainer/data/batch.h"
#include "evenkeel/trainer/device/device_models.h"
#include "evenkeel/trainer/models/batch_result.h"
#include "evenkeel/trainer/models/place.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

class DeviceWorkTest : public ::testing::Test {
 protected:
  void Make(absl::Duration delay) {
    devices_ = std::make_unique<SimulatedDevices>(SimulatedOptions{.delay = delay});
    absl::StatusOr<DevicePlace> place = MakeDevicePlace(*devices_, Device::Cuda(0));
    ASSERT_TRUE(place.ok()) << place.status();
    place_ = *place;
    absl::StatusOr<std::unique_ptr<DeviceWork>> work = DeviceWork::Create(place_);
    ASSERT_TRUE(work.ok()) << work.status();
    work_ = *std::move(work);
  }
  void Finish() {
    ASSERT_TRUE(devices_->Synchronize(work_->stream(), absl::Now() + absl::Seconds(60)).ok());
  }

  std::unique_ptr<SimulatedDevices> devices_;
  DevicePlace place_;
  std::unique_ptr<DeviceWork> work_;
};

TEST_F(DeviceWorkTest, ABatchMayBeForgottenOnceItIsUploaded) {
  Make(absl::Milliseconds(2));
  std::vector<std::vector<float>> seen(5, std::vector<float>(6));
  std::vector<std::vector<uint8_t>> classes(5, std::vector<uint8_t>(2));
  for (int step = 0; step < 5; ++step) {
    std::vector<float> images(6, static_cast<float>(step));
    std::vector<uint8_t> labels(2, static_cast<uint8_t>(step));
    const absl::StatusOr<DeviceBatch> here = work_->Upload(ImageBatch{images, labels});
    ASSERT_TRUE(here.ok()) << here.status();
    EXPECT_EQ(here->inputs, nullptr);
    std::ranges::fill(images, -1.0f);
    std::ranges::fill(labels, uint8_t{77});
    ASSERT_TRUE(devices_->Copy(seen[step].data(), here->images, 24, work_->stream()).ok());
    ASSERT_TRUE(devices_->Copy(classes[step].data(), here->labels, 2, work_->stream()).ok());
  }
  Finish();
  for (int step = 0; step < 5; ++step) {
    EXPECT_EQ(seen[step], std::vector<float>(6, static_cast<float>(step)));
    EXPECT_EQ(classes[step], std::vector<uint8_t>(2, static_cast<uint8_t>(step)));
  }
}

TEST_F(DeviceWorkTest, TokensComeWithTheirTargets) {
  Make(absl::ZeroDuration());
  const std::vector<int32_t> inputs = {1, 2, 3, 4, 5, 6}, targets = {2, 3, 4, 5, 6, 7};
  const absl::StatusOr<DeviceBatch> here =
      work_->Upload(TokenBatch{inputs, targets, /*context=*/3});
  ASSERT_TRUE(here.ok()) << here.status();
  Finish();
  EXPECT_EQ(std::vector<int32_t>(here->inputs, here->inputs + 6), inputs);
  EXPECT_EQ(std::vector<int32_t>(here->targets, here->targets + 6), targets);
}

TEST_F(DeviceWorkTest, EachLossIsTheOneOfItsMoment) {
  Make(absl::Milliseconds(1));
  std::vector<PendingResult> pending;
  for (int step = 0; step < 100; ++step) {
    ASSERT_TRUE(devices_
                    ->Put(work_->stream(), [loss = work_->loss(),
                                            step] { *loss = {.sum = 4.0 * step, .correct = step}; })
                    .ok());
    absl::StatusOr<PendingResult> result = work_->FetchLoss(/*predictions=*/4);
    ASSERT_TRUE(result.ok()) << result.status();
    EXPECT_FALSE(result->is_there());
    pending.push_back(*std::move(result));
  }
  EXPECT_EQ(devices_->host_waits(), 0);
  work_ = nullptr;  // Results outlive it.
  for (int step = 99; step >= 0; --step) {
    const absl::StatusOr<BatchResult> result = pending[step].Wait(absl::Now() + absl::Seconds(60));
    ASSERT_TRUE(result.ok()) << result.status();
    EXPECT_EQ(result->loss_mean, step);
    EXPECT_EQ(result->correct, step);
  }
}

TEST_F(DeviceWorkTest, WhoAsksTooEarlyIsToldSo) {
  Make(absl::Seconds(1));
  const absl::StatusOr<PendingResult> result = work_->FetchLoss(/*predictions=*/4);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->Wait(absl::Now()).status().code(), absl::StatusCode::kDeadlineExceeded);
}

TEST_F(DeviceWorkTest, MemoryThatGrowsIsCountedOnceAndWaitedFor) {
  Make(absl::Milliseconds(1));
  DeviceBuffer buffer;
  ASSERT_TRUE(buffer.Need(*work_, 100).ok());
  ASSERT_TRUE(devices_->Zero(buffer.as<void>(), 100, work_->stream()).ok());
  ASSERT_TRUE(buffer.Need(*work_, 50).ok());
  EXPECT_EQ(devices_->host_waits(), 0);
  ASSERT_TRUE(buffer.Need(*work_, 200).ok());
  EXPECT_EQ(buffer.bytes(), 200);
  EXPECT_EQ(work_->held_bytes(), 200);
  const absl::Status status = buffer.Need(*work_, int64_t{1} << 40);
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(work_->held_bytes(), 0);
}

}  // namespace
}  // namespace evenkeel
