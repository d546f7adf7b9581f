#include "evenkeel/trainer/layers/compute_threads.h"

#include <gtest/gtest.h>

namespace evenkeel {
namespace {

TEST(ComputeThreadsTest, AreWhatWasSet) {
  SetComputeThreads(3);
  EXPECT_EQ(ComputeThreads(), 3);
  SetComputeThreads(0);
  EXPECT_EQ(ComputeThreads(), 1);
}

}  // namespace
}  // namespace evenkeel
