#include "evenkeel/bucket/reduction.h"

#include <atomic>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "evenkeel/bucket/data_parallel.h"
#include "evenkeel/bucket/testing/toy_model.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/testing/same_sums.h"
#include "evenkeel/comm/testing/tested_group.h"
#include "evenkeel/join/join.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

using testing::HasSubstr;

const std::vector<int> kSizes = {3, 5, 1, 8, 2};

DataParallelOptions Options(bool views) {
  return {.reducer = {.caps = {Bytes{8}, Bytes{24}}, .gradient_as_bucket_view = views}};
}

// All-reduce by hand: two rounds, on the reducer's thread.
class ScatterAndGather : public BucketReduction {
 public:
  explicit ScatterAndGather(int world_size) : world_size_(world_size) {}

  std::vector<Collective> CollectivesFor(const BucketInfo& bucket) const override {
    const int64_t part = bucket.data.count / world_size_;
    return {{.kind = CollectiveKind::kReduceScatter, .dtype = bucket.data.dtype, .count = part},
            {.kind = CollectiveKind::kAllGather, .dtype = bucket.data.dtype, .count = part}};
  }
  absl::StatusOr<RoundBuffers> BeginRound(const BucketInfo& bucket, int round,
                                          const ReductionStep& step) override {
    if (bucket.index == fails_at) return absl::ResourceExhaustedError("no memory left");
    std::vector<float>& part = parts_[bucket.index];
    if (round == 0)
      return RoundBuffers{.in = {bucket.data}, .out = {absl::MakeSpan(part)}, .scale = step.scale};
    return RoundBuffers{.in = {absl::MakeSpan(part)}, .out = {bucket.data}};
  }
  absl::StatusOr<GradFate> OnReduced(const BucketInfo&, const ReductionStep&) override {
    ++reduced;
    return GradFate::kReduced;
  }
  bool HasThread() const override { return true; }
  int64_t CountMultiple() const override { return world_size_; }
  absl::Status OnPlan(absl::Span<const BucketInfo> buckets) override {
    parts_.clear();
    for (const BucketInfo& bucket : buckets) parts_.emplace_back(bucket.data.count / world_size_);
    return absl::OkStatus();
  }
  std::string StepMessage() override { return absl::StrCat("message ", ++messages_); }
  absl::Status OnShadow(absl::string_view message) override {
    heard.push_back(std::string(message));
    return absl::OkStatus();
  }

  int fails_at = -1;
  std::atomic<int> reduced = 0;
  std::vector<std::string> heard;

 private:
  const int world_size_;
  std::vector<std::vector<float>> parts_;
  int messages_ = 0;
};

// Refuses plans, and expects each round in the buckets of the last plan that it has seen.
class RefusesPlans : public AllReduceBuckets {
 public:
  absl::Status OnPlan(absl::Span<const BucketInfo> buckets) override {
    ++plans;
    seen_.clear();
    for (const BucketInfo& bucket : buckets) seen_[bucket.index] = bucket.data.data;
    if (refusals == 0) return absl::OkStatus();
    --refusals;
    return absl::ResourceExhaustedError("no memory for this plan");
  }
  absl::StatusOr<RoundBuffers> BeginRound(const BucketInfo& bucket, int round,
                                          const ReductionStep& step) override {
    EXPECT_EQ(seen_[bucket.index], bucket.data.data) << "bucket " << bucket.index;
    return AllReduceBuckets::BeginRound(bucket, round, step);
  }

  int refusals = 0;  // The number of plans that it refuses from now on.
  int plans = 0;     // The number of plans that it has seen.

 private:
  std::map<int, const void*> seen_;  // By bucket: its memory.
};

absl::Status TrainStep(DataParallel& ddp, ToyModel& model, int rank, int batch) {
  model.params().ClearGradients();
  EK_RETURN_IF_ERROR(ddp.BeginStep());
  model.Forward(rank, batch);
  EK_RETURN_IF_ERROR(
      model.Backward(rank, batch, [&](int param) { return ddp.GradientReady(param); }));
  return ddp.FinishStep();
}

class ReductionTest : public testing::TestWithParam<std::tuple<int, bool>> {
 protected:
  bool views() const { return std::get<1>(GetParam()); }
  void Run(absl::FunctionRef<absl::Status(Communicator&)> body) {
    absl::Status status = RunTestRanks(std::get<0>(GetParam()), body);
    EXPECT_TRUE(status.ok()) << status;
  }
};

TEST_P(ReductionTest, RoundsOfItsOwnGiveWhatAllReduceGives) {
  Run([&](Communicator& comm) -> absl::Status {
    ToyModel model(kSizes), reference(kSizes);
    EK_ASSIGN_OR_RETURN(
        auto ddp, DataParallel::Create(&comm, &model.params(), {}, Options(views()),
                                       std::make_unique<ScatterAndGather>(comm.world_size())));
    EK_ASSIGN_OR_RETURN(auto plain,
                        DataParallel::Create(&comm, &reference.params(), {}, Options(views())));
    for (int step = 0; step < 4; ++step) {  // Before and after the rebuild.
      EK_RETURN_IF_ERROR(TrainStep(*ddp, model, comm.rank(), step));
      EK_RETURN_IF_ERROR(TrainStep(*plain, reference, comm.rank(), step));
      for (size_t p = 0; p < kSizes.size(); ++p) {
        EXPECT_EQ(model.params().grad_state(p), GradState::kReduced);
        EXPECT_THAT(model.Gradient(p), SameSums(reference.Gradient(p)))
            << "p" << p << " in step " << step;
      }
    }
    for (const BucketInfo& bucket : ddp->buckets())
      EXPECT_EQ(bucket.data.count % comm.world_size(), 0);
    return absl::OkStatus();
  });
}

TEST_P(ReductionTest, ABucketGoesThroughAllItsRoundsWhileBackwardRuns) {
  Run([&](Communicator& comm) -> absl::Status {
    ToyModel model(kSizes);
    auto owned = std::make_unique<ScatterAndGather>(comm.world_size());
    ScatterAndGather& reduction = *owned;
    EK_ASSIGN_OR_RETURN(auto ddp, DataParallel::Create(&comm, &model.params(), {}, Options(views()),
                                                       std::move(owned)));
    EK_RETURN_IF_ERROR(TrainStep(*ddp, model, comm.rank(), 0));  // Records the order.
    model.params().ClearGradients();
    EK_RETURN_IF_ERROR(ddp->BeginStep());
    reduction.reduced = 0;
    const auto announce = [&](int param) { return ddp->GradientReady(param); };
    for (int p = 4; p >= 3; --p) EK_RETURN_IF_ERROR(model.BackwardOf(p, comm.rank(), 1, announce));
    const absl::Time deadline = absl::Now() + absl::Seconds(30);
    while (reduction.reduced == 0 && absl::Now() < deadline) absl::SleepFor(absl::Milliseconds(1));
    EXPECT_GT(reduction.reduced, 0);
    for (int p = 2; p >= 0; --p) EK_RETURN_IF_ERROR(model.BackwardOf(p, comm.rank(), 1, announce));
    return ddp->FinishStep();
  });
}

TEST_P(ReductionTest, RanksThatRanDryRunTheSameRoundsAndHearWhatTheyMustKnow) {
  Run([&](Communicator& comm) -> absl::Status {
    ToyModel model(kSizes);
    auto owned = std::make_unique<ScatterAndGather>(comm.world_size());
    ScatterAndGather& reduction = *owned;
    EK_ASSIGN_OR_RETURN(auto ddp, DataParallel::Create(&comm, &model.params(), {}, Options(views()),
                                                       std::move(owned)));
    const int steps = comm.rank();
    EK_RETURN_IF_ERROR(RunJoined({ddp.get()}, {}, [&](JoinScope&) -> absl::Status {
      for (int step = 0; step < steps; ++step)
        EK_RETURN_IF_ERROR(TrainStep(*ddp, model, comm.rank(), step));
      return absl::OkStatus();
    }));
    EXPECT_EQ(reduction.heard.size(), static_cast<size_t>(comm.world_size() - 1 - steps));
    for (const std::string& message : reduction.heard) EXPECT_THAT(message, HasSubstr("message "));
    return absl::OkStatus();
  });
}

// No gradient on any rank: nothing that an optimizer may decay or move by momentum.
TEST_P(ReductionTest, AGradientThatNoRankHasStaysNone) {
  for (const bool separate : {false, true}) {
    Run([&](Communicator& comm) -> absl::Status {
      ToyModel model(kSizes);
      std::unique_ptr<BucketReduction> reduction;
      if (separate) reduction = std::make_unique<ScatterAndGather>(comm.world_size());
      EK_ASSIGN_OR_RETURN(auto ddp, DataParallel::Create(&comm, &model.params(), {},
                                                         Options(views()), std::move(reduction)));
      for (int step = 0; step < 3; ++step) {
        model.params().ClearGradients();
        EK_RETURN_IF_ERROR(ddp->BeginStep());
        for (int p = 4; p >= 0; --p) {
          const bool has_none = p == 1 || (p == 3 && comm.rank() > 0);
          EK_RETURN_IF_ERROR(has_none ? ddp->NoGradient(p)
                                      : model.BackwardOf(p, comm.rank(), step, [&](int param) {
                                          return ddp->GradientReady(param);
                                        }));
        }
        EK_RETURN_IF_ERROR(ddp->FinishStep());
        EXPECT_EQ(model.params().grad_state(1), GradState::kNone) << "separate " << separate;
        EXPECT_EQ(model.params().grad_state(3), GradState::kReduced) << "separate " << separate;
        for (int j = 0; j < kSizes[3]; ++j) {
          EXPECT_FLOAT_EQ(model.Gradient(3)[j],
                          model.GradientAt(3, j, 0, step) / comm.world_size());
        }
      }
      return absl::OkStatus();
    });
  }
}

// With two refusals the reduction also refuses the return to the plan before, which it sees again
// when the next step begins.
TEST_P(ReductionTest, ARefusedPlanLeavesTheOneBeforeItInForce) {
  for (const int refusals : {1, 2}) {
    Run([&](Communicator& comm) -> absl::Status {
      ToyModel model(kSizes), reference(kSizes);
      auto owned = std::make_unique<RefusesPlans>();
      RefusesPlans& reduction = *owned;
      EK_ASSIGN_OR_RETURN(auto ddp, DataParallel::Create(&comm, &model.params(), {},
                                                         Options(views()), std::move(owned)));
      EK_ASSIGN_OR_RETURN(auto plain,
                          DataParallel::Create(&comm, &reference.params(), {}, Options(views())));
      const auto train = [&](int step) -> absl::Status {
        EK_RETURN_IF_ERROR(TrainStep(*ddp, model, comm.rank(), step));
        EK_RETURN_IF_ERROR(TrainStep(*plain, reference, comm.rank(), step));
        for (size_t p = 0; p < kSizes.size(); ++p) {
          EXPECT_EQ(model.params().grad_state(p), reference.params().grad_state(p));
          if (model.params().grad_state(p) != GradState::kReduced) continue;
          EXPECT_THAT(model.Gradient(p), SameSums(reference.Gradient(p))) << "p" << p;
        }
        return absl::OkStatus();
      };
      for (int step = 0; step < 2; ++step) EK_RETURN_IF_ERROR(train(step));  // With the rebuild.
      const int plans = reduction.plans;
      reduction.refusals = refusals;
      model.params().SetTrainable(3, false);
      const absl::Status refused = ddp->RefreshTrainable();
      EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted) << refused;
      EXPECT_EQ(reduction.plans, plans + 2);
      model.params().SetTrainable(3, true);
      EK_RETURN_IF_ERROR(train(2));
      EXPECT_EQ(reduction.plans, plans + 1 + refusals);
      model.params().SetTrainable(3, false);
      reference.params().SetTrainable(3, false);
      for (int step = 3; step < 5; ++step) EK_RETURN_IF_ERROR(train(step));
      return absl::OkStatus();
    });
  }
}

INSTANTIATE_TEST_SUITE_P(Worlds, ReductionTest,
                         testing::Combine(testing::Values(1, 2, 3, 5, 8), testing::Bool()),
                         [](const testing::TestParamInfo<std::tuple<int, bool>>& info) {
                           return absl::StrCat("World", std::get<0>(info.param),
                                               std::get<1>(info.param) ? "Views" : "Copies");
                         });

TEST(ReductionErrorsTest, WhatARoundCanNotDoEndsTheStepOnAllRanks) {
  std::vector<absl::Status> results(3);
  (void)RunTestRanks(3, [&](Communicator& comm) -> absl::Status {
    ToyModel model(kSizes);
    auto owned = std::make_unique<ScatterAndGather>(comm.world_size());
    ScatterAndGather& reduction = *owned;
    absl::StatusOr<std::unique_ptr<DataParallel>> ddp =
        DataParallel::Create(&comm, &model.params(), {}, Options(false), std::move(owned));
    EK_RETURN_IF_ERROR(ddp.status());
    EK_RETURN_IF_ERROR(TrainStep(**ddp, model, comm.rank(), 0));
    if (comm.rank() == 1) reduction.fails_at = 1;
    return results[comm.rank()] = TrainStep(**ddp, model, comm.rank(), 1);
  });
  EXPECT_EQ(results[1].code(), absl::StatusCode::kResourceExhausted);
  for (const absl::Status& status : results) {
    EXPECT_THAT(std::string(status.message()), HasSubstr("bucket 1, round 0"));
    EXPECT_THAT(std::string(status.message()), HasSubstr("no memory left"));
  }
  for (const int rank : {0, 2})
    EXPECT_THAT(std::string(results[rank].message()), HasSubstr("rank 1"));
}

// Shared between the ranks of one test.
struct Progress {
  std::atomic<int> first_rounds = 0;           // That rank 0 has begun.
  std::atomic<bool> last_round_is_on = false;  // Bucket 0, on rank 1.
};

// Three times as long as a deadlock must last before the hub reports it.
constexpr absl::Duration kLongRound = absl::Seconds(3);

// Three rounds. Rank 0's thread takes its time over the last round of bucket 0, rank 1's over the
// first of bucket 1: so each rank waits in an operation that the other one's thread is about to
// begin.
class SlowRounds : public BucketReduction {
 public:
  SlowRounds(int rank, Progress* progress) : rank_(rank), progress_(*progress) {}
  std::vector<Collective> CollectivesFor(const BucketInfo& bucket) const override {
    const Collective what{
        .kind = CollectiveKind::kAllReduce, .dtype = bucket.data.dtype, .count = bucket.data.count};
    return {what, what, what};
  }
  absl::StatusOr<RoundBuffers> BeginRound(const BucketInfo& bucket, int round,
                                          const ReductionStep& step) override {
    if (is_slow && rank_ == 0 && round == 0) ++progress_.first_rounds;
    if (is_slow && rank_ == 1 && round == 2 && bucket.index == 0) progress_.last_round_is_on = true;
    const bool is_long = is_slow && bucket.index == rank_ && round == (rank_ == 0 ? 2 : 0);
    if (is_long) absl::SleepFor(kLongRound);
    return RoundBuffers{{bucket.data}, {bucket.data}, step.scale};
  }
  bool HasThread() const override { return true; }
  bool is_slow = false;

 private:
  const int rank_;
  Progress& progress_;
};

TEST(ReductionErrorsTest, AThreadThatTakesItsTimeIsNoDeadlock) {
  Progress progress;
  CommunicatorOptions often;
  often.watch.beat = absl::Milliseconds(50);
  const absl::Status status = RunTestRanks(
      2,
      [&](Communicator& comm) -> absl::Status {
        ToyModel model(kSizes);
        auto owned = std::make_unique<SlowRounds>(comm.rank(), &progress);
        SlowRounds& reduction = *owned;
        EK_ASSIGN_OR_RETURN(auto ddp, DataParallel::Create(&comm, &model.params(), {},
                                                           Options(false), std::move(owned)));
        EK_RETURN_IF_ERROR(TrainStep(*ddp, model, comm.rank(), 0));
        reduction.is_slow = true;
        const bool is_late = comm.rank() == 1;
        const auto wait_for = [&](auto has_come) {
          while (is_late && !has_come() && comm.status().ok())
            absl::SleepFor(absl::Milliseconds(1));
        };
        model.params().ClearGradients();
        EK_RETURN_IF_ERROR(ddp->BeginStep());
        wait_for([&] { return progress.first_rounds == static_cast<int>(ddp->buckets().size()); });
        for (int p = 4; p >= 0; --p) {
          if (p == 3) wait_for([&] { return progress.last_round_is_on.load(); });
          EK_RETURN_IF_ERROR(
              model.BackwardOf(p, comm.rank(), 1, [&](int i) { return ddp->GradientReady(i); }));
        }
        return ddp->FinishStep();
      },
      often);
  EXPECT_TRUE(status.ok()) << status;
}

class NotOneCollective : public AllReduceBuckets {
 public:
  std::vector<Collective> CollectivesFor(const BucketInfo&) const override { return {}; }
};

TEST(ReductionErrorsTest, EveryBucketNeedsACollective) {
  const absl::Status status = RunTestRanks(2, [&](Communicator& comm) -> absl::Status {
    ToyModel model(kSizes);
    return DataParallel::Create(&comm, &model.params(), {}, Options(false),
                                std::make_unique<NotOneCollective>())
        .status();
  });
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("has for bucket 0 0 collectives"));
}

}  // namespace
}  // namespace evenkeel
