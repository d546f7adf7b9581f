#include "evenkeel/join/internal/device_calls.h"

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/device/simulated.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/testing/simulated_group.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel::internal {
namespace {

using testing::ElementsAreArray;

// Each of two streams far behind the host writes its own number into the memory, and reads it back.
TEST(DeviceCallsTest, AStreamWaitsForWhoeverHadTheMemoryBeforeAndNotTheHost) {
  SimulatedDevices devices({.count = 1, .delay = absl::Milliseconds(1)});
  const absl::Status status =
      RunSimulatedRanks(devices, 1, [&](Communicator& comm) -> absl::Status {
        EK_ASSIGN_OR_RETURN(const auto calls, DeviceCalls::Create(comm));
        EK_ASSIGN_OR_RETURN(const Stream other, devices.CreateStream(comm.device()));
        std::vector<int32_t> in(100), out(100);
        for (int i = 0; i < 100; ++i) {
          in[i] = i;
          const StreamRef stream = i % 2 == 0 ? other.ref() : calls->stream();
          const DeviceCalls::Use use(*calls, stream);
          // Sometimes there is not enough, and then more than is needed.
          EK_ASSIGN_OR_RETURN(const TensorView scratch,
                              calls->Scratch(DeviceCalls::kOut, 1 + i / 10, DType::kInt32, stream));
          EK_RETURN_IF_ERROR(devices.Copy(scratch.data, &in[i], sizeof(int32_t), stream));
          EK_RETURN_IF_ERROR(devices.Copy(&out[i], scratch.data, sizeof(int32_t), stream));
          EK_RETURN_IF_ERROR(calls->Confirm());
        }
        EXPECT_EQ(devices.host_waits(), 0);
        EK_RETURN_IF_ERROR(calls->Drain());
        EK_RETURN_IF_ERROR(devices.Synchronize(other.ref(), absl::Now() + absl::Minutes(1)));
        EXPECT_THAT(out, ElementsAreArray(in));
        return absl::OkStatus();
      });
  EXPECT_TRUE(status.ok()) << status;
}

}  // namespace
}  // namespace evenkeel::internal
