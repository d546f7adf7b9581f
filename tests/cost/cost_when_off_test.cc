// Tests a step's cost where no feature is asked for: counted collectives, control messages, copied
// bytes and allocations, against those before there were any features (hooks, unused and delayed
// parameters, static graphs, mixed precision, statistics, tuned plans, parameter groups, clipping,
// loss scaling, divergence checks, sample weights, leaving): a feature that is off adds nothing.

#include <cstdint>
#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "evenkeel/bucket/data_parallel.h"
#include "evenkeel/bucket/testing/toy_model.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/control/control.h"
#include "evenkeel/comm/control/link.h"
#include "evenkeel/comm/local/local.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/testing/heap_counter.h"
#include "evenkeel/zero_optim/optimizer.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

constexpr int kElements = 1 << 15;
constexpr int kBuckets = 4;
constexpr double kGradientBytes = kElements * sizeof(float);
constexpr Bytes kCap{kElements * sizeof(float) / kBuckets};
constexpr int kWarmUp = 10;  // Past the rebuild of the buckets.
constexpr int kSteps = 500;

struct Setting {
  std::string name;
  int params = 8;
  bool is_sharded = false;
  bool views = false;
  // For all threads, per step and rank. Allocations: as in the version before; nearly all are for
  // the control plane's messages and the operations.
  double allocations;
  double collectives;
  double copies;  // Times the size of all gradients. One is the in-process backend's own.
};

const Setting kSettings[] = {
    {"Copies", 8, false, false, 110.5, kBuckets, 3},
    {"CopiesOfManyParameters", 64, false, false, 110.5, kBuckets, 3},
    {"Views", 8, false, true, 110.5, kBuckets, 1},
    {"ViewsOfManyParameters", 64, false, true, 110.5, kBuckets, 1},
    // Each rank also sends the parameters that it has updated, which the backend copies: half of
    // them.
    {"Sharded", 8, true, false, 161.5, kBuckets + 2, 3.5},
    {"ShardedViews", 8, true, true, 161.5, kBuckets + 2, 1.5},
};

void PrintTo(const Setting& setting, std::ostream* out) { *out << setting.name; }

struct Cost {
  double allocations = 0, collectives = 0, copies = 0;
  double messages = 0;  // Rank 0's control plane, both ways.
};

// A rank with nothing but what has no default.
class Rank {
 public:
  explicit Rank(const Setting& setting)
      : model_(std::vector<int>(setting.params, kElements / setting.params)) {}

  absl::Status MakeParts(const Setting& setting, Communicator& comm) {
    DataParallelOptions options;
    options.reducer.caps = {kCap};
    options.reducer.gradient_as_bucket_view = setting.views;
    EK_ASSIGN_OR_RETURN(ddp_, DataParallel::Create(&comm, &model_.params(), {}, options));
    if (setting.is_sharded) {
      EK_ASSIGN_OR_RETURN(sharded_, Optimizer::Create(comm, model_.params(), AdamW{},
                                                      {.placement = WholeTensors{}}));
    } else {
      EK_ASSIGN_OR_RETURN(unsharded_, Optimizer::Create(comm, model_.params(), AdamW{}));
    }
    return absl::OkStatus();
  }

  absl::Status Step(int rank, int step) {
    model_.params().ClearGradients();
    EK_RETURN_IF_ERROR(ddp_->BeginStep());
    EK_RETURN_IF_ERROR(
        model_.Backward(rank, step, [this](int param) { return ddp_->GradientReady(param); }));
    EK_RETURN_IF_ERROR(ddp_->FinishStep());
    return sharded_ != nullptr ? sharded_->Step() : unsharded_->Step();
  }

 private:
  ToyModel model_;
  std::unique_ptr<DataParallel> ddp_;
  std::unique_ptr<Optimizer> unsharded_;
  std::unique_ptr<Optimizer> sharded_;
};

absl::StatusOr<Cost> CostOf(const Setting& setting, int world) {
  Cost cost;
  EK_RETURN_IF_ERROR(RunRanks(world, [&](Communicator& comm) -> absl::Status {
    Rank rank(setting);
    EK_RETURN_IF_ERROR(rank.MakeParts(setting, comm));
    HeapCounts before;
    int64_t issued = 0, messages = 0;
    const auto messages_so_far = [&] {
      const ControlCounters counters = comm.control().link().Counters();
      return counters.messages_sent + counters.messages_received;
    };
    for (int step = 0; step < kWarmUp + kSteps; ++step) {
      if (step == kWarmUp) {
        before = HeapCountsOfProcess();
        issued = comm.flight().issued();
        messages = messages_so_far();
      }
      EK_RETURN_IF_ERROR(rank.Step(comm.rank(), step));
    }
    if (comm.rank() != 0) return absl::OkStatus();
    cost.messages = static_cast<double>(messages_so_far() - messages) / kSteps;
    const HeapCounts after = HeapCountsOfProcess();
    cost.allocations = static_cast<double>(after.allocations - before.allocations) / kSteps / world;
    cost.copies = static_cast<double>(after.copied_bytes - before.copied_bytes) / kSteps / world /
                  kGradientBytes;
    cost.collectives = static_cast<double>(comm.flight().issued() - issued) / kSteps;
    return absl::OkStatus();
  }));
  return cost;
}

class CostWhenOffTest : public testing::TestWithParam<Setting> {};

TEST_P(CostWhenOffTest, AStepCostsNoMoreThanBeforeThereWereFeatures) {
  const absl::StatusOr<Cost> cost = CostOf(GetParam(), /*world=*/2);
  ASSERT_TRUE(cost.ok()) << cost.status();
  EXPECT_EQ(cost->collectives, GetParam().collectives);
  // The step's record, and its answer; once, at the end, the word that the other rank finalizes.
  EXPECT_GE(cost->messages, 2);
  EXPECT_LE(cost->messages, 2 + 2.0 / kSteps);
  if (!HeapIsCounted()) GTEST_SKIP() << "nothing but collectives is counted under sanitizers";
  // A hundredth is for heartbeats, which come by the second, and for the other rank's being a step
  // ahead.
  EXPECT_LE(cost->allocations, GetParam().allocations * 1.01);
  EXPECT_LE(cost->copies, GetParam().copies * 1.01);
  EXPECT_GE(cost->copies, GetParam().copies * 0.99)
      << "they are counted, and less than before: lower the budget";
}

INSTANTIATE_TEST_SUITE_P(All, CostWhenOffTest, testing::ValuesIn(kSettings),
                         [](const auto& info) { return info.param.name; });

TEST(HeapCounterTest, CountsWhatIsTakenGivenAndCopied) {
  if (!HeapIsCounted()) GTEST_SKIP() << "nothing is counted under sanitizers";
  const HeapCounts before = HeapCountsOfThread();
  const int64_t live = LiveBytes();
  ResetPeakBytes();
  {
    const std::vector<char> block(100000, 'x');
    const std::vector<char> copy = block;
    EXPECT_EQ(HeapCountsOfThread().allocations - before.allocations, 2);
    EXPECT_EQ(HeapCountsOfThread().copied_bytes - before.copied_bytes, 100000);
    EXPECT_GE(LiveBytes() - live, 200000);
  }
  EXPECT_LT(LiveBytes() - live, 200000);
  EXPECT_GE(PeakBytes() - live, 200000);
}

}  // namespace
}  // namespace evenkeel
