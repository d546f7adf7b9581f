// Loads libraries into this process, without a GPU.

#include "evenkeel/trainer/device/cuda_parts.h"

#include <dlfcn.h>

#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel::internal {
namespace {

using ::testing::HasSubstr;

// `folder` is the one in which the library is; empty if programs find it by LD_LIBRARY_PATH at
// most.
void ExpectLoads(absl::Status (*load)(), absl::string_view function, absl::string_view folder) {
  EXPECT_EQ(dlsym(RTLD_DEFAULT, std::string(function).c_str()), nullptr) << "is linked";
  const absl::Status status = load();
  if (!folder.empty()) {
    EXPECT_TRUE(status.ok()) << status;
  } else if (!status.ok() && !absl::IsUnimplemented(status)) {  // There is a header.
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(std::string(status.message()), HasSubstr("or set LD_LIBRARY_PATH to the folder"));
  }
}

TEST(CudaPartsTest, LibrariesOfTheBuildAreLoadedAndHaveAllFunctions) {
  ExpectLoads(&LoadCublas, "cublasLtCreate", EVENKEEL_CUBLASLT_FOLDER);
  ExpectLoads(&LoadCudnn, "cudnnCreate", EVENKEEL_CUDNN_FOLDER);
}

}  // namespace
}  // namespace evenkeel::internal
