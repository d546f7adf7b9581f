#include "evenkeel/comm/base/available_memory.h"

#include <filesystem>
#include <fstream>
#include <limits>
#include <string>

#include "absl/strings/string_view.h"
#include "gtest/gtest.h"

namespace evenkeel::internal {
namespace {

// A host whose /proc and /sys are files of the test.
class Host {
 public:
  Host()
      : root_(std::filesystem::path(testing::TempDir()) /
              testing::UnitTest::GetInstance()->current_test_info()->name()) {
    std::filesystem::remove_all(root_);
  }
  void Write(absl::string_view path, absl::string_view content) {
    const std::filesystem::path file = root_ / std::string(path);
    std::filesystem::create_directories(file.parent_path());
    std::ofstream(file) << content;
  }
  AvailableMemory Read() const { return ReadAvailableMemory(root_.string()); }

 private:
  const std::filesystem::path root_;
};

TEST(AvailableMemoryTest, IsReadOnThisHost) {
  const AvailableMemory left = ReadAvailableMemory();
  EXPECT_GT(left.bytes, 0) << left.of;
  EXPECT_LT(left.bytes, int64_t{1} << 50) << left.of;
}

TEST(AvailableMemoryTest, IsUnlimitedWhereNothingCanBeRead) {
  EXPECT_EQ(Host().Read().bytes, std::numeric_limits<int64_t>::max());
}

TEST(AvailableMemoryTest, IsTheHostsWithoutLimits) {
  Host host;
  host.Write("proc/meminfo", "MemTotal: 2000 kB\nMemFree: 10 kB\nMemAvailable:    1000 kB\n");
  host.Write("proc/self/cgroup", "0::/job\n");
  host.Write("sys/fs/cgroup/job/memory.max", "max\n");
  host.Write("sys/fs/cgroup/job/memory.current", "5\n");
  EXPECT_EQ(host.Read().bytes, 1024000);
  EXPECT_EQ(host.Read().of, "the host");
}

TEST(AvailableMemoryTest, AnyGroupAroundTheProcessMayHaveLess) {
  Host host;
  host.Write("proc/meminfo", "MemAvailable: 1000 kB\n");
  host.Write("proc/self/cgroup", "0::/job/step\n");
  host.Write("sys/fs/cgroup/job/step/memory.max", "900\n");
  host.Write("sys/fs/cgroup/job/step/memory.current", "100\n");
  EXPECT_EQ(host.Read().bytes, 800);
  EXPECT_EQ(host.Read().of, "the control group /job/step");
  host.Write("sys/fs/cgroup/job/memory.max", "700\n");
  host.Write("sys/fs/cgroup/job/memory.current", "600\n");
  EXPECT_EQ(host.Read().bytes, 100);
  EXPECT_EQ(host.Read().of, "the control group /job");
  host.Write("sys/fs/cgroup/job/memory.stat", "anon 3\ninactive_file 200\nactive_file 50\n");
  EXPECT_EQ(host.Read().bytes, 350) << "the page cache is not in the way";
  host.Write("sys/fs/cgroup/job/memory.current", "100000\n");
  EXPECT_EQ(host.Read().bytes, 0) << "over its limit";
}

TEST(AvailableMemoryTest, KnowsVersion1AndContainersThatSeeTheHostsPath) {
  Host host;
  host.Write("proc/meminfo", "MemAvailable: 1000 kB\n");
  host.Write("proc/self/cgroup", "4:cpu,memory:/docker/abc\n3:cpuset:/\n");
  host.Write("sys/fs/cgroup/memory/memory.limit_in_bytes", "500\n");
  host.Write("sys/fs/cgroup/memory/memory.usage_in_bytes", "450\n");
  host.Write("sys/fs/cgroup/memory/memory.stat",
             "inactive_file 1\ntotal_inactive_file 30\ntotal_active_file 3\n");
  EXPECT_EQ(host.Read().bytes, 83);
  EXPECT_EQ(host.Read().of, "the control group /");
  host.Write("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
  EXPECT_EQ(host.Read().of, "the host");
}

TEST(AvailableMemoryTest, TakesNonsenseForNoLimit) {
  Host host;
  host.Write("proc/meminfo", "MemAvailable: lots\nMemAvailable:\n");
  host.Write("proc/self/cgroup", "0::\n::\n\n0:memory\n0:memory:relative\n0::////\n");
  host.Write("sys/fs/cgroup/memory.max", "-\n");
  EXPECT_EQ(host.Read().bytes, std::numeric_limits<int64_t>::max());
}

}  // namespace
}  // namespace evenkeel::internal
