// Replaces a rank again and again: neither the store's process nor a rank that stays grows, and a
// step takes as long as in the first group. WEAR_REGROUPS=500 is the long run.

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "evenkeel/tests/replacement/replaced_job.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

// Its use of the system's resources.
struct Use {
  int descriptors = 0, threads = 0, maps = 0;
  double memory_mib = 0;  // Private and resident.
};

Use UseOf(const std::string& process) {
  const auto entries = [&](const char* folder) {
    const std::filesystem::directory_iterator all("/proc/" + process + folder);
    return static_cast<int>(std::distance(begin(all), end(all)));
  };
  Use use{.descriptors = entries("/fd"), .threads = entries("/task")};
  std::ifstream maps("/proc/" + process + "/maps");
  for (std::string line; std::getline(maps, line);) ++use.maps;
  std::ifstream status("/proc/" + process + "/smaps_rollup");
  for (std::string word; status >> word;) {
    if (word != "Private_Dirty:") continue;
    status >> use.memory_mib;
    use.memory_mib /= 1024;
  }
  return use;
}

void Print(int regroups, const char* whose, const Use& use, int64_t ns) {
  std::printf(
      "%4d regroups  %-5s  %3d descriptors  %2d threads  %3d maps  %6.2f MiB  step %.3f ms\n",
      regroups, whose, use.descriptors, use.threads, use.maps, use.memory_mib, ns * 1e-6);
}

TEST(WearTest, ManyReplacementsLeaveNothingBehind) {
  int regroups = 20;
  const char* const text = std::getenv("WEAR_REGROUPS");
  ASSERT_TRUE(text == nullptr || (absl::SimpleAtoi(text, &regroups) && regroups >= 4));
  ReplacedJob job(/*steps=*/100'000'000, /*pause_us=*/0,
                  {{"REPLACEMENT_TIMES", "1"},
                   {"REPLACEMENT_SIZE", "100000"},
                   {"MALLOC_ARENA_MAX", "1"}});  // Else threads of each group fill further ones.
  const auto await = [&](size_t times) {
    while (job.times().size() < times) ASSERT_FALSE(job.Listen(absl::Milliseconds(10)));
  };
  ASSERT_NO_FATAL_FAILURE(await(1));
  Use early_rank, early_store;
  for (int i = 1; i <= regroups; ++i) {
    const int place = 1 + i % (ReplacedJob::kRanks - 1);
    job.Kill(place);
    job.StartPlace(place);
    ASSERT_NO_FATAL_FAILURE(await(i + 1));
    const Use rank = UseOf(absl::StrCat(job.process_of(0))), store = UseOf("self");
    if (i == regroups / 4) early_rank = rank, early_store = store;
    if (i == 1 || i == 10 || i == 100 || i == regroups) {
      Print(i, "rank", rank, job.times().back());
      Print(i, "store", store, job.times().back());
    }
    if (i < regroups) continue;
    EXPECT_LE(rank.descriptors, early_rank.descriptors);
    EXPECT_LE(rank.threads, early_rank.threads);
    EXPECT_LE(rank.maps, early_rank.maps + 6);
    EXPECT_LE(rank.memory_mib, early_rank.memory_mib + 2);
    EXPECT_LE(store.descriptors, early_store.descriptors);
    EXPECT_LE(store.threads, early_store.threads);
    EXPECT_LE(store.maps, early_store.maps + 6);
    EXPECT_LE(store.memory_mib, early_store.memory_mib + 2);
  }
  // The fastest of the first and of the last quarter: other programs run on the machine, too.
  const auto begin = job.times().begin(), end = job.times().end();
  const int64_t first = *std::min_element(begin, begin + regroups / 4),
                last = *std::min_element(end - regroups / 4, end);
  EXPECT_LE(last, 2 * first);
}

}  // namespace
}  // namespace evenkeel
