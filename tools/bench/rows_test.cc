#include "evenkeel/tools/bench/rows.h"

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
  EXPECT_DOUBLE_EQ(BusFactor({.op = Op::kAllReduce, .world = 4}), 1.5);
  for (const Op op : {Op::kReduceScatter, Op::kAllGather, Op::kAllToAll}) {
    EXPECT_DOUBLE_EQ(BusFactor({.op = op, .world = 4}), 0.75) << NameOf(op);
  }
  for (const Op op : {Op::kBroadcast, Op::kReduce, Op::kSend}) {
    EXPECT_DOUBLE_EQ(BusFactor({.op = op, .world = 4}), 1) << NameOf(op);
  }
}

TEST(RowTest, HasTheMedianAndTheQuartilesOfAllRepetitions) {
  const std::vector<std::vector<double>> blocks = {{1, 5, 2}, {3, 4}};
  const Row row = MakeRow("tcp", false, {.op = Op::kAllReduce, .bytes = 3'000'000, .world = 4},
                          Timing::kEach, blocks);
  EXPECT_DOUBLE_EQ(row.seconds, 3);
  EXPECT_DOUBLE_EQ(row.spread, (4.0 - 2.0) / 3);
  EXPECT_EQ(row.repetitions, 5);
  EXPECT_THAT(row.blocks, ElementsAre(2, 3.5));
  EXPECT_DOUBLE_EQ(row.algorithm_bandwidth(), 1e6);
  EXPECT_DOUBLE_EQ(row.bus_bandwidth(), 1.5e6);
}

TEST(RowTest, OneRepetitionHasNoSpread) {
  const Row row =
      MakeRow("tcp", false, {.bytes = 4}, Timing::kEach, std::vector<std::vector<double>>{{2}});
  EXPECT_DOUBLE_EQ(row.spread, 0);
}

TEST(RowTest, ABarrierHasNoBandwidth) {
  const Row row = MakeRow("tcp", false, {.op = Op::kBarrier}, Timing::kEach,
                          std::vector<std::vector<double>>{{2e-6}});
  EXPECT_EQ(row.bus_bandwidth(), 0);
  EXPECT_THAT(
      TextOf(row),
      HasSubstr(
          "barrier                  0 B  tcp         no                  2.00             -"));
}

TEST(JsonTest, IsAnObjectInOneLine) {
  std::vector<Row> rows;
  rows.push_back(MakeRow("shm", true, {.bytes = 1 << 20, .world = 2}, Timing::kEach,
                         std::vector<std::vector<double>>{{1e-3}, {1e-3}}));
  rows[0].times["raw_gloo"] = PairedRatio{.median = 0.5, .low = 0.25, .high = 0.75, .pairs = 2};
  rows.push_back(MakeRow("tcp", false, {.op = Op::kReduce, .bytes = 8, .world = 2}, Timing::kLoop,
                         std::vector<std::vector<double>>{{1e-6}}));
  std::vector<nlohmann::json> json;
  for (const Row& row : rows) {
    EXPECT_THAT(JsonOf(row), Not(HasSubstr("\n")));
    json.push_back(nlohmann::json::parse(JsonOf(row)));
  }
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
  EXPECT_TRUE(json[1]["time_over"].empty());
}

TEST(RatioTableTest, HasAColumnForEachBase) {
  std::vector<Row> rows;
  rows.push_back(MakeRow("tcp", false, {.bytes = 1024, .world = 2}, Timing::kEach,
                         std::vector<std::vector<double>>{{1}}));
  rows[0].times["raw_gloo"] =
      PairedRatio{.median = 1234, .low = 0.000123456, .high = 1.5, .pairs = 1};
  rows.push_back(MakeRow("alone", false, {.bytes = 1024}, Timing::kEach,
                         std::vector<std::vector<double>>{{1}}));
  const std::vector<std::string> bases = {"raw_gloo", "mpich"};
  const std::string table = RatioTable(rows, bases);
  EXPECT_THAT(table, HasSubstr("time / mpich's"));
  EXPECT_THAT(table, HasSubstr("1234 [0.000123, 1.50]"));
  EXPECT_THAT(table, Not(HasSubstr("alone")));
}

}  // namespace
}  // namespace evenkeel::bench
