// The promises about memory: views hold one copy of the gradients, and a sharded optimizer's state
// shrinks with the number of ranks.

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "evenkeel/comm/testing/heap_counter.h"
#include "evenkeel/tests/memory/memory_use.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

// Plans, names, channels, rings of messages: what does not grow with tensors.
constexpr int64_t kSmallThings = 128 << 10;

class MemoryTest : public testing::TestWithParam<int> {
 protected:
  void SetUp() override {
    if (!HeapIsCounted()) GTEST_SKIP() << "the heap is not counted under sanitizers";
  }
  static MemoryUse Measure(bool views, OptimizerKind optimizer) {
    const absl::StatusOr<MemoryUse> use =
        MeasureMemory({.world = GetParam(), .views = views, .optimizer = optimizer});
    EXPECT_TRUE(use.ok()) << use.status();
    return use.value_or(MemoryUse());
  }
};

TEST_P(MemoryTest, ViewsHoldOneCopyOfTheGradients) {
  const MemoryUse use = Measure(/*views=*/true, OptimizerKind::kUnsharded);
  EXPECT_GE(use.gradients + use.buckets, ParameterBytes());
  EXPECT_LE(use.gradients + use.buckets, ParameterBytes() + kSmallThings);
}

TEST_P(MemoryTest, CopiesHoldTwo) {
  const MemoryUse use = Measure(/*views=*/false, OptimizerKind::kUnsharded);
  EXPECT_GE(use.gradients + use.buckets, 2 * ParameterBytes());
  EXPECT_LE(use.gradients + use.buckets, 2 * ParameterBytes() + kSmallThings);
}

TEST_P(MemoryTest, AnUnshardedOptimizerHoldsAllOfTheState) {
  const MemoryUse use = Measure(/*views=*/true, OptimizerKind::kUnsharded);
  EXPECT_EQ(use.most_state, 2 * ParameterBytes());
  EXPECT_LE(use.optimizer, 2 * ParameterBytes() + kSmallThings);
}

// Whole tensors: as even as the largest of them allows. What travels together after a step is
// copied into buckets of updated parameters, which the step gives back.
TEST_P(MemoryTest, OwnersOfTensorsHoldTheirShare) {
  const int64_t world = GetParam();
  const MemoryUse use = Measure(/*views=*/true, OptimizerKind::kSharded);
  EXPECT_LE(use.most_state, 2 * (ParameterBytes() / world + LargestTensorBytes()));
  EXPECT_LE(use.optimizer, 2 * ParameterBytes() / world + kSmallThings);
}

// Equal slices: as even as multiples of 16 elements per bucket allow, and padding that one bucket
//               may have.
TEST_P(MemoryTest, SlicesHoldAnEqualShare) {
  const int64_t world = GetParam();
  const MemoryUse use = Measure(/*views=*/true, OptimizerKind::kSliced);
  constexpr int64_t kBuckets =
      3;  // The first has 1 MiB, the second the rest; one more does no harm.
  constexpr int64_t kPadding = 16 * static_cast<int64_t>(sizeof(float)) * kBuckets;
  EXPECT_GT(use.most_state, 0);
  EXPECT_LE(use.most_state, 2 * ((ParameterBytes() + world - 1) / world + kPadding));
  // Updated slices of the parameters are sent from memory of their own, of which some may be given
  // back late.
  EXPECT_LE(use.optimizer, 3 * ParameterBytes() / world + kSmallThings);
  EXPECT_LE(use.steady_peak, use.parameters + use.gradients + use.buckets +
                                 3 * ParameterBytes() / world + kSmallThings);
}

// In a step nothing of the size of a tensor is taken that is not held anyway.
TEST_P(MemoryTest, AStepTakesNoMore) {
  const MemoryUse use = Measure(/*views=*/true, OptimizerKind::kUnsharded);
  EXPECT_LE(use.steady_peak,
            use.parameters + use.gradients + use.buckets + use.optimizer + kSmallThings);
}

INSTANTIATE_TEST_SUITE_P(Worlds, MemoryTest, testing::Values(1, 2, 4, 8),
                         [](const auto& info) { return absl::StrCat(info.param, "Ranks"); });

}  // namespace
}  // namespace evenkeel
