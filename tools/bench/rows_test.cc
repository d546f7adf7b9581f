#include "evenkeel/tools/bench/rows.h"

#include <algorithm>
#include <string>
#include <vector>

#include "evenkeel/tools/measure/paired_ratio.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"

namespace evenkeel::bench {
namespace {

using testing::DoubleNear;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;

TEST(BusFactorTest, IsTheOneOfNcclTests) {
  EXPECT_DOUBLE_EQ(BusFactor("tcp", Op::kAllReduce, 4), 1.5);
  for (const Op op : {Op::kReduceScatter, Op::kAllGather, Op::kAllToAll}) {
    EXPECT_DOUBLE_EQ(BusFactor("tcp", op, 4), 0.75) << NameOf(op);
  }
  for (const Op op : {Op::kBroadcast, Op::kReduce, Op::kSendRecv}) {
    EXPECT_DOUBLE_EQ(BusFactor("tcp", op, 4), 1) << NameOf(op);
  }
  EXPECT_DOUBLE_EQ(BusFactor("memcpy", Op::kAllReduce, 4), 1);
}

TEST(RowTest, HasTheMedianAndTheQuartilesOfAllRepetitions) {
  const std::vector<std::vector<double>> blocks = {{1, 5, 2}, {3, 4}};
  const Row row =
      MakeRow("tcp", {.op = Op::kAllReduce, .bytes = 3'000'000, .world = 4}, Timing::kEach, blocks);
  EXPECT_DOUBLE_EQ(row.seconds, 3);
  EXPECT_DOUBLE_EQ(row.spread, (4.0 - 2.0) / 3);
  EXPECT_EQ(row.repetitions, 5);
  EXPECT_THAT(row.blocks, ElementsAre(2, 3.5));
  EXPECT_DOUBLE_EQ(row.algorithm_bandwidth(), 1e6);
  EXPECT_DOUBLE_EQ(row.bus_bandwidth(), 1.5e6);
}

TEST(RowTest, OneRepetitionHasNoSpread) {
  const Row row =
      MakeRow("tcp", {.bytes = 4}, Timing::kEach, std::vector<std::vector<double>>{{2}});
  EXPECT_DOUBLE_EQ(row.spread, 0);
}

TEST(RowTest, ABarrierHasNoBandwidth) {
  const Row row =
      MakeRow("tcp", {.op = Op::kBarrier}, Timing::kEach, std::vector<std::vector<double>>{{2e-6}});
  EXPECT_EQ(row.bus_bandwidth(), 0);
  EXPECT_THAT(
      TextOf(row),
      HasSubstr("barrier                 0 B  tcp        no                 2.00            -"));
}

TEST(JsonTest, HasAnObjectForEachRowOnALineOfItsOwn) {
  std::vector<Row> rows;
  rows.push_back(MakeRow("shm", {.bytes = 1 << 20, .world = 2, .registered = true}, Timing::kEach,
                         std::vector<std::vector<double>>{{1e-3}, {1e-3}}));
  rows[0].times["raw_gloo"] = PairedRatio{.median = 0.5, .low = 0.25, .high = 0.75, .pairs = 2};
  rows.push_back(MakeRow("tcp",
                         {.op = Op::kReduce, .scalar = Scalar::kInt64, .bytes = 8, .world = 2},
                         Timing::kLoop, std::vector<std::vector<double>>{{1e-6}}));
  const std::string text = JsonOf(rows);
  EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), 4);
  const nlohmann::json json = nlohmann::json::parse(text);
  ASSERT_EQ(json.size(), 2u);
  EXPECT_EQ(json[0]["backend"], "shm");
  EXPECT_EQ(json[0]["op"], "all_reduce");
  EXPECT_EQ(json[0]["world"], 2);
  EXPECT_EQ(json[0]["dtype"], "float32");
  EXPECT_EQ(json[0]["bytes"], 1 << 20);
  EXPECT_EQ(json[0]["registered"], true);
  EXPECT_EQ(json[0]["timing"], "each");
  EXPECT_THAT(json[0]["median_us"].get<double>(), DoubleNear(1000, 1e-6));
  EXPECT_THAT(json[0]["algbw_gbs"].get<double>(), DoubleNear(1.048576, 1e-9));
  EXPECT_THAT(json[0]["busbw_gbs"].get<double>(), DoubleNear(1.048576, 1e-9));
  EXPECT_EQ(json[0]["spread_pct"], 0);
  EXPECT_EQ(json[0]["pairs"], 2);
  EXPECT_EQ(json[0]["time_over"]["raw_gloo"]["low"], 0.25);
  EXPECT_EQ(json[1]["registered"], false);
  EXPECT_EQ(json[1]["timing"], "loop");
  EXPECT_EQ(json[1]["dtype"], "int64");
  EXPECT_TRUE(json[1]["time_over"].empty());
}

TEST(JsonTest, NoRowsAreAnEmptyArray) { EXPECT_TRUE(nlohmann::json::parse(JsonOf({})).empty()); }

TEST(RatioTableTest, HasAColumnForEachBase) {
  std::vector<Row> rows;
  rows.push_back(MakeRow("tcp", {.bytes = 1024, .world = 2}, Timing::kEach,
                         std::vector<std::vector<double>>{{1}}));
  rows[0].times["raw_gloo"] =
      PairedRatio{.median = 1234, .low = 0.000123456, .high = 1.5, .pairs = 1};
  rows.push_back(
      MakeRow("alone", {.bytes = 1024}, Timing::kEach, std::vector<std::vector<double>>{{1}}));
  const std::vector<std::string> bases = {"raw_gloo", "mpich"};
  const std::string table = RatioTable(rows, bases);
  EXPECT_THAT(table, HasSubstr("time / mpich's"));
  EXPECT_THAT(table, HasSubstr("1234 [0.000123, 1.50]"));
  EXPECT_THAT(table, Not(HasSubstr("alone")));
}

TEST(SizeTextTest, TakesTheLargestUnitThatDivides) {
  EXPECT_EQ(SizeText(0), "0 B");
  EXPECT_EQ(SizeText(1020), "1020 B");
  EXPECT_EQ(SizeText(1536), "1536 B");
  EXPECT_EQ(SizeText(64 << 10), "64 KiB");
  EXPECT_EQ(SizeText(256 << 20), "256 MiB");
}

}  // namespace
}  // namespace evenkeel::bench
