// A test that runs at several world sizes, those that the tested backend can have here.
//
//   class ChannelsTest : public WorldTest {};
//   // 2 and more
//   INSTANTIATE_TEST_SUITE_P(WorldSize, ChannelsTest, testing::ValuesIn(WorldSizes(2)), ...);

#ifndef EVENKEEL_TESTS_CONFORMANCE_WORLD_TEST_H_
#define EVENKEEL_TESTS_CONFORMANCE_WORLD_TEST_H_

#include <string>
#include <vector>

#include "evenkeel/tests/conformance/tested_backend.h"
#include "gtest/gtest.h"

namespace evenkeel {

// The first call of a test: skips or fails it if the group lacks something.
inline void BeginTest(int world_size) {
  if (Tested().missing == nullptr) return;
  const Missing missing = Tested().missing(world_size);
  if (missing.is_failure) FAIL() << missing.sentence;
  if (!missing.sentence.empty()) GTEST_SKIP() << missing.sentence;
}

class WorldTest : public testing::TestWithParam<int> {
 protected:
  void SetUp() override { BeginTest(GetParam()); }
  void TearDown() override {
    if (Tested().end_test != nullptr) Tested().end_test();
  }
};

inline std::vector<int> WorldSizes(int smallest = 1, int largest = 8) {
  const std::vector<int> all =
      Tested().world_sizes == nullptr ? std::vector<int>{1, 2, 3, 5, 8} : Tested().world_sizes();
  std::vector<int> sizes;
  for (const int size : all) {
    if (size >= smallest && size <= largest) sizes.push_back(size);
  }
  return sizes;
}

}  // namespace evenkeel

#endif  // EVENKEEL_TESTS_CONFORMANCE_WORLD_TEST_H_
