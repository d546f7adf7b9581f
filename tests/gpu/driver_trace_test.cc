#include "evenkeel/tests/gpu/driver_trace.h"

#include "gtest/gtest.h"

namespace evenkeel {
namespace {

TEST(DriverTraceTest, KnowsWhichCallsWait) {
  for (const char* call :
       {"cuStreamSynchronize", "cuCtxSynchronize_v2", "cuEventSynchronize_ptsz", "cuMemcpyDtoH_v2",
        "cuMemAlloc_v2", "cuMemFree_v2", "cuModuleLoadData"}) {
    EXPECT_TRUE(WaitsForDevice(call)) << call;
  }
  for (const char* call :
       {"cuLaunchKernel", "cuMemcpyAsync_ptsz", "cuMemcpyDtoHAsync_v2", "cuEventRecord",
        "cuStreamWaitEvent", "cuEventQuery", "cuMemAllocAsync", "cuGraphLaunch"}) {
    EXPECT_FALSE(WaitsForDevice(call)) << call;
  }
}

}  // namespace
}  // namespace evenkeel
