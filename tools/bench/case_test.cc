#include "evenkeel/tools/bench/case.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "gtest/gtest.h"

namespace evenkeel::bench {
namespace {

TEST(CaseTest, BuffersHaveTheSizesOfNcclTests) {
  Case what{.bytes = 4096, .world = 4};
  const struct {
    Op op;
    int64_t in, out;
  } kTable[] = {{Op::kAllReduce, 0, 4096},    {Op::kReduceScatter, 4096, 1024},
                {Op::kAllGather, 1024, 4096}, {Op::kBroadcast, 0, 4096},
                {Op::kReduce, 0, 4096},       {Op::kAllToAll, 4096, 4096},
                {Op::kSend, 4096, 4096},      {Op::kBarrier, 0, 0}};
  for (const auto& row : kTable) {
    SCOPED_TRACE(NameOf(row.op));
    what.op = row.op;
    EXPECT_EQ(what.in_count() * 4, row.in);
    EXPECT_EQ(what.out_count() * 4, row.out);
  }
}

TEST(CaseTest, SizesAreWholePartsAndNeverNone) {
  EXPECT_EQ(WholeBytes({.op = Op::kAllGather, .bytes = 1024, .world = 3}), 1020);
  EXPECT_EQ(WholeBytes({.op = Op::kAllReduce, .bytes = 1023, .world = 3}), 1020);
  EXPECT_EQ(WholeBytes({.op = Op::kAllToAll, .bytes = 1, .world = 3}), 12);
  EXPECT_EQ(WholeBytes({.op = Op::kBarrier, .bytes = 1024, .world = 3}), 0);
}

// Returns each rank's result by the definitions, for Fill()'s inputs.
std::vector<std::vector<float>> ByDefinition(const Case& what) {
  const int world = what.world;
  const int64_t count = what.count(), part = what.part();
  std::vector<std::vector<float>> in(world), out(world);
  for (int rank = 0; rank < world; ++rank) {
    in[rank].resize(IsInPlace(what.op) ? what.out_count() : what.in_count());
    out[rank].resize(what.out_count());
    if (IsInPlace(what.op)) {
      Fill(what, rank, nullptr, in[rank].data());
    } else {
      Fill(what, rank, in[rank].data(), out[rank].data());
    }
  }
  for (int rank = 0; rank < world; ++rank) {
    for (int64_t i = 0; i < static_cast<int64_t>(out[rank].size()); ++i) {
      float& to = out[rank][i];
      const int64_t at = what.op == Op::kReduceScatter ? rank * part + i : i;
      float sum = 0;
      if (at < static_cast<int64_t>(in[rank].size())) {
        for (const std::vector<float>& each : in) sum += each[at];
      }
      switch (what.op) {
        case Op::kAllReduce:
        case Op::kReduce:
        case Op::kReduceScatter:
          to = sum;
          break;
        case Op::kBroadcast:
          to = in[kRoot][i];
          break;
        case Op::kAllGather:
          to = in[i / part][i % part];
          break;
        case Op::kAllToAll:
          to = in[i / part][rank * part + i % part];
          break;
        case Op::kSend:
          to = in[(rank + world - 1) % world][i];
          break;
        default:
          break;
      }
    }
  }
  EXPECT_GT(count, 0);
  return out;
}

TEST(CaseTest, AcceptsTheRightResultAndNoOther) {
  for (const Op op : kAllOps) {
    if (op == Op::kBarrier) continue;
    SCOPED_TRACE(NameOf(op));
    Case what{.op = op, .bytes = 4000, .world = 3};
    what.bytes = WholeBytes(what);
    std::vector<std::vector<float>> results = ByDefinition(what);
    for (int rank = 0; rank < what.world; ++rank) {
      std::vector<float>& result = results[rank];
      EXPECT_EQ(FindWrong(what, rank, result.data()), "");
      if (op == Op::kReduce && rank != kRoot) continue;
      const std::vector<float> right = result;
      result.back() += 1;
      EXPECT_NE(FindWrong(what, rank, result.data()), "") << "the last element is wrong";
      result = right;
      std::rotate(result.begin(), result.begin() + 1, result.end());
      EXPECT_NE(FindWrong(what, rank, result.data()), "") << "shifted by one";
      Fill(what, rank, std::vector<float>(what.in_count() + 1).data(), result.data());
      // The root of a broadcast has it from the beginning.
      if (op == Op::kBroadcast && rank == kRoot) continue;
      EXPECT_NE(FindWrong(what, rank, result.data()), "") << "nothing done";
    }
  }
}

TEST(CaseTest, SaysWhichElementIsWhat) {
  const Case what{.op = Op::kAllReduce, .bytes = 16, .world = 2};
  std::vector<float> data;
  for (int64_t i = 0; i < 4; ++i) data.push_back(static_cast<float>(Expected(what, 0, i)));
  const int expected = Expected(what, 0, 2);
  data[2] = static_cast<float>(expected == 5 ? 4 : 5);
  EXPECT_EQ(FindWrong(what, 0, data.data()), "element 2 of 4 is " +
                                                 std::to_string(expected == 5 ? 4 : 5) +
                                                 " instead of " + std::to_string(expected));
  data[2] = std::nanf("");
  EXPECT_NE(FindWrong(what, 0, data.data()).find("is nan instead of"), std::string::npos);
}

}  // namespace
}  // namespace evenkeel::bench
