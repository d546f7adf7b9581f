#include "evenkeel/trainer/app/memory_reserve.h"

#include <sys/resource.h>

#include <cstddef>
#include <cstdlib>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "gtest/gtest.h"

namespace evenkeel {
namespace {

struct Free {
  void operator()(void* piece) const { std::free(piece); }
};

TEST(MemoryReserveTest, IsThereWhenALargeAllocationHasFailed) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "a sanitizer's shadow needs more address space than there is";
#endif
  KeepMemoryReserve();
  const rlimit limit{.rlim_cur = 256 << 20, .rlim_max = RLIM_INFINITY};
  ASSERT_EQ(setrlimit(RLIMIT_AS, &limit), 0);
  std::vector<std::unique_ptr<void, Free>> taken;
  taken.reserve(1 << 17);
  // malloc() does not release the reserve.
  for (size_t size = 1 << 20; size >= 4 << 10; size /= 2) {
    while (void* const piece = std::malloc(size)) taken.emplace_back(piece);
  }
  ASSERT_LT(taken.size(), taken.capacity());
  void* const small_before = std::malloc(64 << 10);
  void* const large = ::operator new(64 << 20, std::nothrow);
  std::string sentence;
  bool failed = false;
  try {
    for (int i = 0; i < 16; ++i) sentence += std::string(64 << 10, 'x');
  } catch (const std::bad_alloc&) {
    failed = true;
  }
  taken.clear();
  EXPECT_EQ(small_before, nullptr);
  EXPECT_EQ(large, nullptr);
  EXPECT_FALSE(failed);
}

}  // namespace
}  // namespace evenkeel
