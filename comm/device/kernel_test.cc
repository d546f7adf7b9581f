#include "evenkeel/comm/device/kernel.h"

#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "evenkeel/comm/device/runtime.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

EK_KERNEL(256, ek_test_scale)(float* data, int64_t count, float factor) {
  for (int64_t i = kernel::GlobalIndex(); i < count; i += kernel::GlobalThreads())
    data[i] *= factor;
}

// Each block's sum of its part, and the largest index in it.
EK_KERNEL(256, ek_test_sum)(const float* data, int64_t count, float* sums, float* largest) {
  EK_SHARED float scratch[32];
  float sum = 0, most = -1;
  for (int64_t i = kernel::GlobalIndex(); i < count; i += kernel::GlobalThreads()) {
    sum += data[i];
    most = static_cast<float>(i);
  }
  sum = kernel::BlockSum(sum, scratch);
  most = kernel::BlockMax(most, scratch);
  if (kernel::ThreadX() == 0) {
    sums[kernel::BlockX()] = sum;
    largest[kernel::BlockX()] = most;
  }
}

EK_KERNEL(64, ek_test_leaves_early)(int*) {
  if (kernel::ThreadX() < 3) return;
  kernel::SyncThreads();
}

const DeviceImage kNone;

template <typename... Params, typename... Args>
void RunHere(const Kernel<Params...>& kernel, const LaunchShape& shape, Args... args) {
  std::tuple<Params...> values(static_cast<Params>(args)...);
  std::apply(
      [&](auto&... value) {
        void* const pointers[] = {static_cast<void*>(&value)...};
        internal::RunOnHost(kernel, shape, pointers);
      },
      values);
}

TEST(KernelTest, EachElementOnceWhateverTheShape) {
  for (const LaunchShape shape :
       {LaunchShape{1, 32}, LaunchShape{3, 64}, LaunchShape{7, 256}, ShapeFor(1000, 4)}) {
    std::vector<float> data(1000, 2.0f);
    RunHere(MakeKernel<&ek_test_scale>("ek_test_scale", kNone), shape, data.data(), 1000, 3.0f);
    EXPECT_EQ(data, std::vector<float>(1000, 6.0f));
  }
}

TEST(KernelTest, ThreadsOfABlockWaitForEachOther) {
  std::vector<float> data(1001);
  for (size_t i = 0; i < data.size(); ++i) data[i] = static_cast<float>(i % 17);
  for (const int threads : {32, 64, 256}) {
    std::vector<float> sums(3), largest(3);
    RunHere(MakeKernel<&ek_test_sum>("ek_test_sum", kNone, KernelKind::kSynchronises), {3, threads},
            data.data(), 1001, sums.data(), largest.data());
    double sum = 0, wanted = 0;
    for (const float s : sums) sum += s;
    for (const float x : data) wanted += x;
    EXPECT_EQ(sum, wanted) << threads;
    EXPECT_EQ(std::max({largest[0], largest[1], largest[2]}), 1000) << threads;
  }
}

TEST(KernelDeathTest, SaysThatThreadsHaveLeft) {
  EXPECT_DEATH(RunHere(MakeKernel<&ek_test_leaves_early>("x", kNone, KernelKind::kSynchronises),
                       {1, 64}, nullptr),
               "3 of its 64 threads have ended");
  EXPECT_DEATH(RunHere(MakeKernel<&ek_test_leaves_early>("x", kNone), {1, 64}, nullptr),
               "kSynchronises");
}

TEST(KernelLanguageTest, SixteenBitFloatsRoundToNearestEven) {
  EXPECT_EQ(kernel::BFloatOf(1.0f).bits, 0x3f80);
  EXPECT_EQ(kernel::BFloatOf(1.00390625f).bits, 0x3f80);  // Half way: to the even one.
  EXPECT_EQ(kernel::BFloatOf(1.01171875f).bits, 0x3f82);
  EXPECT_TRUE(
      std::isnan(kernel::ToFloat(kernel::BFloatOf(std::numeric_limits<float>::quiet_NaN()))));
  EXPECT_EQ(kernel::HalfOf(65504.0f).bits, 0x7bff);
  EXPECT_EQ(kernel::ToFloat(kernel::Half{0x3c01}), 1.0009765625f);
}

}  // namespace
}  // namespace evenkeel
