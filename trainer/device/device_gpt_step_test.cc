// Cases that only simulated devices show: steps that run behind the host, and memory that runs out.
// The rest: device_gpt_test.cc.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "evenkeel/comm/device/simulated.h"
#include "evenkeel/trainer/device/device_models.h"
#include "evenkeel/trainer/device/testing/device_gpt_fixture.h"
#include "evenkeel/trainer/gpt/gpt.h"
#include "evenkeel/trainer/gpt/gpt_options.h"
#include "evenkeel/trainer/models/batch_result.h"
#include "evenkeel/trainer/models/model.h"

namespace evenkeel {
namespace {

using testing::HasSubstr;

TEST_F(DeviceGptTest, AStepDoesNotWaitForTheDevice) {
  SimulatedDevices devices({.delay = absl::Microseconds(200)});
  devices_ = &devices;
  GptOptions options = kTiny;
  options.dropout = 0.1;
  for (const GptCompute compute : {GptCompute::kFloat32, GptCompute::kBFloat16}) {
    options.compute = compute;
    const std::unique_ptr<Gpt> host = MakeHost(options), model = MakeOnDevice(*host);
    Pass(*model, Tokens(2, 16).Batch());
    const int64_t waits = devices.host_waits();
    absl::StatusOr<PendingResult> pending;
    {
      const Tokens tokens(2, 16, 3);  // Gone before the device has come to it.
      pending = model->StartForward(tokens.Batch(), Mode::kTraining);
      ASSERT_TRUE(pending.ok()) << pending.status();
    }
    ASSERT_TRUE(model->Backward([](int) { return absl::OkStatus(); }).ok());
    EXPECT_EQ(devices.host_waits(), waits);
    const Tokens tokens(2, 16, 3);
    const absl::StatusOr<BatchResult> actual = pending->Wait(absl::Now() + absl::Minutes(2));
    ASSERT_TRUE(actual.ok()) << actual.status();
    EXPECT_GT(devices.host_waits(), waits);
    Pass(*host, tokens.Batch());
    EXPECT_NEAR(actual->loss_mean, result_.loss_mean, 0.01 * result_.loss_mean);
  }
}

TEST_F(DeviceGptTest, SaysHowMuchMemoryIsLacking) {
  SimulatedDevices devices({.bytes = 1'500'000});
  devices_ = &devices;
  const std::unique_ptr<Gpt> host = MakeHost(kTiny), model = MakeOnDevice(*host);
  const Tokens small(1, 16), large(64, 16);
  const absl::Status status = model->StartForward(large.Batch(), Mode::kTraining).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
  EXPECT_THAT(status.ToString(), HasSubstr("training on 64 sequences of 16 tokens takes"));
  EXPECT_EQ(model->Backward([](int) { return absl::OkStatus(); }).code(),
            absl::StatusCode::kFailedPrecondition);
  const Gradients expected = Pass(*host, small.Batch());
  ExpectNear(Pass(*model, small.Batch()), expected, kFloatBound);
}

}  // namespace
}  // namespace evenkeel
