#include "evenkeel/tools/measure/table.h"

#include "gtest/gtest.h"

namespace evenkeel {
namespace {

TEST(TableTest, CellsStandBelowTheirTitles) {
  const Table table({{"size", 9}, {"backend", -10}, {"us", 6}});
  EXPECT_EQ(table.Titles(), "     size  backend         us\n");
  EXPECT_EQ(table.Line({"4 MiB", "shm", "285.3"}), "    4 MiB  shm          285.3\n");
}

TEST(TableTest, LongCellsAreWholeAndMissingOnesEmpty) {
  const Table table({{"a", 2}, {"b", -3}, {"c", 4}});
  EXPECT_EQ(table.Line({"12345", "x"}), "12345  x\n");
}

TEST(SizeTextTest, TakesTheLargestUnitThatDivides) {
  EXPECT_EQ(SizeText(0), "0 B");
  EXPECT_EQ(SizeText(1020), "1020 B");
  EXPECT_EQ(SizeText(1536), "1536 B");
  EXPECT_EQ(SizeText(64 << 10), "64 KiB");
  EXPECT_EQ(SizeText(256 << 20), "256 MiB");
}

}  // namespace
}  // namespace evenkeel
