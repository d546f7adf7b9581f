#include "evenkeel/trainer/layers/tensor_memory.h"

#include <gtest/gtest.h>

#include <cstdint>

#include "evenkeel/comm/types.h"

namespace evenkeel {
namespace {

TEST(TensorMemoryTest, GivesAlignedZeros) {
  TensorMemory memory;
  for (DType dtype : kAllDTypes) {
    for (int64_t count : {0, 1, 63, 1000}) {
      const TensorView view = memory.Allocate(dtype, count);
      EXPECT_EQ(reinterpret_cast<uintptr_t>(view.data) % 64, 0u);
      EXPECT_EQ(view.count, count);
      EXPECT_EQ(view.dtype, dtype);
      for (int64_t i = 0; i < view.bytes(); ++i)
        ASSERT_EQ(static_cast<const char*>(view.data)[i], 0);
    }
  }
}

TEST(TensorMemoryTest, KeepsWhatItGave) {
  TensorMemory memory;
  const TensorView first = memory.Allocate(DType::kFloat32, 3);
  first.as<float>()[2] = 7;
  for (int i = 0; i < 100; ++i) memory.Allocate(DType::kFloat32, 3).as<float>()[2] = 8;
  EXPECT_EQ(first.as<float>()[2], 7);
}

TEST(TensorMemoryTest, FreesOneAndKeepsTheOthers) {
  TensorMemory memory;
  const TensorView first = memory.Allocate(DType::kFloat32, 3),
                   second = memory.Allocate(DType::kFloat32, 3);
  second.as<float>()[2] = 7;
  memory.Free(first.data);
  EXPECT_EQ(second.as<float>()[2], 7);
}

}  // namespace
}  // namespace evenkeel
