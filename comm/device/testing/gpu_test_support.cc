#include "evenkeel/comm/device/testing/gpu_test_support.h"

#include <cstdlib>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "evenkeel/comm/device/cuda_if_built.h"

namespace evenkeel {
namespace {

std::string Devices(int count) {
  return absl::StrCat(count, count == 1 ? " CUDA device" : " CUDA devices");
}

std::string WhatIsMissing(int needed, const absl::StatusOr<int>& devices) {
  if (devices.ok()) {
    return absl::StrCat("needs ", Devices(needed), ", there ", *devices == 1 ? "is " : "are ",
                        *devices);
  }
  return absl::StrCat("needs ", Devices(needed), ", there are 0: ", devices.status().message());
}

}  // namespace

absl::StatusOr<int> GpusForTest() {
  const absl::StatusOr<DeviceRuntime*> cuda = CudaIfBuilt();
  return cuda.ok() ? (*cuda)->DeviceCount() : cuda.status();
}

GpuVerdict JudgeGpus(int needed, const absl::StatusOr<int>& devices, absl::string_view required) {
  int least = 0;
  if (!required.empty() && (!absl::SimpleAtoi(required, &least) || least < 1)) {
    return {GpuAnswer::kFail,
            absl::StrCat("EVENKEEL_REQUIRE_GPU='", required, "' is not a number of at least 1")};
  }
  const int here = devices.ok() ? *devices : 0;
  if (here >= needed) return {};
  const std::string missing = WhatIsMissing(needed, devices);
  if (here >= least) return {GpuAnswer::kSkip, missing};
  return {GpuAnswer::kFail, absl::StrCat(missing, "; EVENKEEL_REQUIRE_GPU=", least,
                                         ", so this machine must have ", Devices(least))};
}

GpuVerdict JudgeGpus(int needed) {
  const char* required = std::getenv("EVENKEEL_REQUIRE_GPU");
  return JudgeGpus(needed, GpusForTest(), required == nullptr ? "" : required);
}

}  // namespace evenkeel
