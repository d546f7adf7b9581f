#include <gtest/gtest.h>
#include <sys/stat.h>

#include <fstream>
#include <string>

#include "evenkeel/trainer/layers/compute_threads.h"

namespace evenkeel {
namespace {

std::string NewFolder(const std::string& name) {
  const std::string folder = testing::TempDir() + "/" + name;
  mkdir(folder.c_str(), 0755);
  return folder;
}

void Write(const std::string& path, const std::string& text) { std::ofstream(path) << text; }

TEST(UsableCoresTest, QuotaIsRoundedUp) {
  EXPECT_EQ(CoresOfQuota("200000", "100000"), 2);
  EXPECT_EQ(CoresOfQuota("150000", "100000"), 2);
  EXPECT_EQ(CoresOfQuota("1000", "100000"), 1);
  EXPECT_EQ(CoresOfQuota("max", "100000"), 0);
  EXPECT_EQ(CoresOfQuota("-1", "100000"), 0);
  EXPECT_EQ(CoresOfQuota("200000", "0"), 0);
  EXPECT_EQ(CoresOfQuota("", ""), 0);
}

TEST(UsableCoresTest, ControlGroupsOfBothVersionsLimit) {
  const std::string second = NewFolder("v2");
  Write(second + "/cpu.max", "200000 100000\n");
  EXPECT_EQ(UsableCores(64, second), 2);
  EXPECT_EQ(UsableCores(1, second), 1);
  Write(second + "/cpu.max", "max 100000\n");
  EXPECT_EQ(UsableCores(64, second), 64);

  const std::string first = NewFolder("v1");
  NewFolder("v1/cpu");
  Write(first + "/cpu/cpu.cfs_quota_us", "350000\n");
  Write(first + "/cpu/cpu.cfs_period_us", "100000\n");
  EXPECT_EQ(UsableCores(64, first), 4);
}

TEST(UsableCoresTest, WithoutControlGroupTheMaskCounts) {
  EXPECT_EQ(UsableCores(3, testing::TempDir() + "/nothing"), 3);
  EXPECT_EQ(UsableCores(0, testing::TempDir() + "/nothing"), 1);  // Unknown.
  EXPECT_GE(UsableCores(), 1);
}

}  // namespace
}  // namespace evenkeel
