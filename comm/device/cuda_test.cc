#include "evenkeel/comm/device/cuda.h"

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "evenkeel/comm/device/runtime.h"
#include "evenkeel/comm/types.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

// Everywhere: without a device each call says so, and none crashes.
TEST(CudaWithoutDeviceTest, SaysThatThereIsNone) {
  DeviceRuntime& cuda = CudaDevices();
  const absl::StatusOr<int> devices = cuda.DeviceCount();
  if (devices.ok()) GTEST_SKIP() << "there are " << *devices << " CUDA devices";
  constexpr Device kDevice = Device::Cuda(0);
  for (const absl::Status& status :
       {devices.status(), cuda.Facts(kDevice).status(), cuda.Allocate(kDevice, 8).status(),
        cuda.CreateStream(kDevice).status()}) {
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
    EXPECT_TRUE(absl::StartsWith(status.message(), "no CUDA device: ")) << status;
  }
}

}  // namespace
}  // namespace evenkeel
