#include "evenkeel/tools/bench/sweep.h"

#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "evenkeel/tools/bench/rows.h"
#include "evenkeel/tools/measure/paired_ratio.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel::bench {
namespace {

using testing::DoubleNear;
using testing::ElementsAre;

// A machine that becomes slower and slower.
struct Machine {
  double slowness = 1;
  std::vector<std::string> blocks;  // The contender of each.
  int held = 0;                     // Contenders with buffers.
};

class FakeContender : public Contender {
 public:
  FakeContender(Machine& machine, std::string name, double seconds)
      : machine_(machine), name_(std::move(name)), seconds_(seconds) {}

  const std::string& name() const override { return name_; }
  bool registered() const override { return false; }
  absl::StatusOr<std::vector<double>> Time(const Case& what, const Block& block) override {
    if (what.op == refused) return absl::UnimplementedError(name_ + ": no");
    Hold();
    machine_.blocks.push_back(name_);
    std::vector<double> seconds;
    for (int i = 0; i < block.warmups + block.repetitions; ++i) {
      const double each = seconds_ * machine_.slowness;
      if (i >= block.warmups) seconds.push_back(each);
    }
    machine_.slowness *= drift;
    if (block.timing == Timing::kEach) return seconds;
    loops.push_back(block.repetitions);
    return std::vector<double>{seconds[0]};
  }
  absl::Status Check(const Case& what) override {
    Hold();
    ++checks;
    return what.op == wrong ? absl::DataLossError(name_ + " has a wrong result") : absl::OkStatus();
  }
  void Forget() override {
    machine_.held -= holds_ ? 1 : 0;
    holds_ = false;
  }

  double drift = 1;
  int checks = 0;
  std::vector<int> loops;
  Op refused = Op::kSend, wrong = Op::kSend;

 private:
  void Hold() {
    machine_.held += holds_ ? 0 : 1;
    holds_ = true;
  }

  Machine& machine_;
  const std::string name_;
  const double seconds_;
  bool holds_ = false;
};

class SweepTest : public testing::Test {
 protected:
  SweepTest() { options_.bases = {"base"}; }

  Machine machine_;
  FakeContender base_{machine_, "base", 2e-3}, half_{machine_, "half", 1e-3};
  std::vector<Contender*> contenders_ = {&base_, &half_};
  SweepOptions options_;
};

TEST_F(SweepTest, PairsAreBlocksOfOneRound) {
  options_.pairs = 30;
  base_.drift = half_.drift = 1.02;  // Three times slower at the end.
  const auto rows = RunSweep(contenders_, std::vector<Cell>{{Op::kAllReduce, 1024}}, options_);
  ASSERT_TRUE(rows.ok()) << rows.status();
  ASSERT_EQ(rows->size(), 2u);
  EXPECT_EQ((*rows)[0].blocks.size(), 30u);
  EXPECT_TRUE((*rows)[0].times.empty()) << "with itself";
  const PairedRatio& ratio = (*rows)[1].times.at("base");
  EXPECT_EQ(ratio.pairs, 30);
  EXPECT_THAT(ratio.median, DoubleNear(0.5, 0.02));
  EXPECT_THAT(ratio.low, DoubleNear(0.5, 0.03));
  EXPECT_THAT(ratio.high, DoubleNear(0.5, 0.03));
}

TEST_F(SweepTest, TurnsChangeFromRoundToRound) {
  options_.pairs = 3;
  ASSERT_TRUE(RunSweep(contenders_, std::vector<Cell>{{Op::kAllReduce, 1024}}, options_).ok());
  const std::vector<std::string> measured(machine_.blocks.end() - 6, machine_.blocks.end());
  EXPECT_THAT(measured, ElementsAre("base", "half", "half", "base", "half", "base"));
}

TEST_F(SweepTest, BlocksAreAsLongAsTheyShallBe) {
  options_.pairs = 1;
  options_.block_time = absl::Milliseconds(40);
  const auto rows = RunSweep(contenders_, std::vector<Cell>{{Op::kAllReduce, 1024}}, options_);
  EXPECT_EQ((*rows)[0].repetitions, 20);
  EXPECT_EQ((*rows)[1].repetitions, 40);
}

TEST_F(SweepTest, LoopsAreOneNumberToABlock) {
  options_.pairs = 4;
  const auto rows =
      RunSweep(contenders_, std::vector<Cell>{{Op::kAllReduce, 1024, Timing::kLoop}}, options_);
  EXPECT_EQ((*rows)[0].timing, Timing::kLoop);
  EXPECT_EQ((*rows)[0].repetitions, 4);
  EXPECT_THAT(half_.loops, ElementsAre(10, 10, 10, 10));
}

TEST_F(SweepTest, AWrongResultEndsItAndEachCellIsChecked) {
  options_.pairs = 1;
  half_.wrong = Op::kBroadcast;
  const std::vector<Cell> cells = {
      {Op::kAllReduce, 1024}, {Op::kReduce, 1024}, {Op::kBroadcast, 1024}, {Op::kBarrier}};
  const auto rows = RunSweep(contenders_, cells, options_);
  EXPECT_EQ(rows.status(), absl::DataLossError("half has a wrong result"));
  EXPECT_EQ(base_.checks, 3);
  EXPECT_EQ(half_.checks, 3);
}

TEST_F(SweepTest, WhoDoesNotDoItIsLeftOutAndToldOfOnce) {
  options_.pairs = 1;
  half_.refused = Op::kReduce;
  std::vector<std::string> told;
  std::vector<size_t> rows_of_cells;
  const std::vector<Cell> cells = {
      {Op::kReduce, 1024}, {Op::kReduce, 4096}, {Op::kBroadcast, 1024}};
  const auto rows = RunSweep(
      contenders_, cells, options_,
      {.on_cell = [&](std::span<const Row> of_cell) { rows_of_cells.push_back(of_cell.size()); },
       .on_left_out = [&](const std::string& sentence) { told.push_back(sentence); }});
  ASSERT_TRUE(rows.ok()) << rows.status();
  EXPECT_THAT(told, ElementsAre("half: no"));
  EXPECT_THAT(rows_of_cells, ElementsAre(1, 1, 2));
}

TEST_F(SweepTest, ACellThatNeedsTooMuchMemoryIsLeftOut) {
  options_.pairs = 1;
  options_.world = 4;
  options_.memory = 8 << 20;  // An all_to_all has two buffers on each rank.
  std::vector<std::string> told;
  const std::vector<Cell> cells = {
      {Op::kAllToAll, 1 << 20}, {Op::kAllToAll, 2 << 20}, {Op::kAllReduce, 2 << 20}};
  const auto rows =
      RunSweep(contenders_, cells, options_,
               {.on_left_out = [&](const std::string& sentence) { told.push_back(sentence); }});
  ASSERT_TRUE(rows.ok()) << rows.status();
  EXPECT_EQ(rows->size(), 4u);
  EXPECT_THAT(told, ElementsAre("all_to_all of 2 MiB: the buffers of 4 ranks need 16 MiB of 8 MiB; "
                                "choose smaller --sizes"));
}

TEST_F(SweepTest, BuffersAreFreedAfterACell) {
  options_.pairs = 2;
  ASSERT_TRUE(RunSweep(contenders_, std::vector<Cell>{{Op::kAllReduce, 1024}}, options_).ok());
  EXPECT_EQ(machine_.held, 0);
}

TEST(CellsOfTest, ABarrierHasNoSizesAndLoopsComeFirst) {
  const std::vector<Op> ops = {Op::kAllReduce, Op::kBarrier};
  const std::vector<int64_t> sizes = {1, 2}, loops = {7};
  const std::vector<Cell> cells = CellsOf(ops, sizes, loops);
  ASSERT_EQ(cells.size(), 4u);
  EXPECT_EQ(cells[0].timing, Timing::kLoop);
  EXPECT_EQ(cells[0].bytes, 7);
  EXPECT_EQ(cells[2].bytes, 2);
  EXPECT_EQ(cells[3].op, Op::kBarrier);
}

}  // namespace
}  // namespace evenkeel::bench
