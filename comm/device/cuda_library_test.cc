// The result of cuda_library() for a source with nvcc: an image with all kernels for all
// architectures. The layout of a "fat binary" is from CUDA's <fatbinary_section.h> and from
// inspection: a header of 16 bytes, then entries, each with its own header that gives its kind (PTX
// or a cubin), its architecture, and its length.

#include "evenkeel/comm/device/cuda_library_test.cuh"

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "evenkeel/comm/device/cuda_library_test_kernels_image.h"
#include "evenkeel/comm/device/kernel.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

struct Entry {
  std::string arch;  // "sm_80", or "compute_90" for PTX
  absl::string_view code;
};

template <typename T>
T ReadAt(absl::string_view bytes, size_t at) {
  T value;
  std::memcpy(&value, bytes.substr(at, sizeof(T)).data(), sizeof(T));
  return value;
}

std::vector<Entry> EntriesOf(const DeviceImage& image) {
  absl::string_view rest(reinterpret_cast<const char*>(image.data),
                         static_cast<size_t>(image.size));
  EXPECT_EQ(ReadAt<uint32_t>(rest, 0), 0xba55ed50u);
  EXPECT_EQ(ReadAt<uint16_t>(rest, 6) + ReadAt<uint64_t>(rest, 8), rest.size()) << "cut short";
  rest.remove_prefix(ReadAt<uint16_t>(rest, 6));
  std::vector<Entry> entries;
  while (rest.size() >= 64) {
    const bool is_ptx = ReadAt<uint16_t>(rest, 0) == 1;
    const auto header = ReadAt<uint32_t>(rest, 4);
    const auto size = static_cast<size_t>(ReadAt<uint64_t>(rest, 8));
    entries.push_back({absl::StrCat(is_ptx ? "compute_" : "sm_", ReadAt<uint32_t>(rest, 28)),
                       rest.substr(header, size)});
    rest.remove_prefix(header + size);
  }
  EXPECT_TRUE(rest.empty());
  return entries;
}

TEST(CudaLibraryTest, HasEveryKernelForEachArchitecture) {
  if (!EK_HAS_NVCC) GTEST_SKIP() << "no nvcc";
  const std::vector<Entry> entries = EntriesOf(cuda_library_test_kernels_image);
  ASSERT_FALSE(entries.empty());
  for (const Entry& entry : entries) {
    SCOPED_TRACE(entry.arch);
    for (const absl::string_view name : {"ek_test_image_scale", "ek_test_image_sum"}) {
      EXPECT_TRUE(absl::StrContains(entry.code, name)) << name;
    }
  }
}

TEST(CudaLibraryTest, IsEmptyWithoutACompiler) {
  if (EK_HAS_NVCC) {
    EXPECT_GT(cuda_library_test_kernels_image.size, 0);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(cuda_library_test_kernels_image.data) % 8, 0u);
  } else {
    EXPECT_EQ(cuda_library_test_kernels_image.size, 0);
    EXPECT_EQ(cuda_library_test_kernels_image.data, nullptr);
  }
}

TEST(CudaLibraryTest, IsCompiledForTheHostAsWell) {
  const auto scale =
      MakeKernel<&ek_test_image_scale>("ek_test_image_scale", cuda_library_test_kernels_image);
  const auto sum = MakeKernel<&ek_test_image_sum>(
      "ek_test_image_sum", cuda_library_test_kernels_image, KernelKind::kSynchronises);
  EXPECT_NE(scale.on_host, nullptr);
  EXPECT_NE(sum.on_host, nullptr);
}

}  // namespace
}  // namespace evenkeel
