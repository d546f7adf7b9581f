// A DataParallel that changes its group, after errors and without, against fresh ones that were
// made for each group.

#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "evenkeel/bucket/data_parallel.h"
#include "evenkeel/bucket/reduction.h"
#include "evenkeel/bucket/testing/toy_model.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/testing/tested_group.h"
#include "evenkeel/join/join.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

using Group = std::vector<std::unique_ptr<Communicator>>;

const std::vector<int> kSizes = {3, 5, 1, 8, 2};

DataParallelOptions Options(bool views) {
  return {.reducer = {.caps = {Bytes{8}, Bytes{24}}, .gradient_as_bucket_view = views}};
}

Group MakeGroup(int world) { return *CreateTestGroup(world); }

// Runs `body(rank)` on a thread per rank.
std::vector<absl::Status> OnEach(int ranks, const std::function<absl::Status(int rank)>& body) {
  std::vector<absl::Status> results(ranks);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank)
    threads.emplace_back([&, rank] { results[rank] = body(rank); });
  for (std::thread& thread : threads) thread.join();
  return results;
}

void ExpectOk(const std::vector<absl::Status>& results) {
  for (size_t rank = 0; rank < results.size(); ++rank)
    EXPECT_TRUE(results[rank].ok()) << rank << ": " << results[rank];
}

void Descend(ToyModel& model) {
  for (int p = 0; p < model.params().size(); ++p) {
    if (model.params().grad_state(p) == GradState::kNone) continue;
    const auto value = model.params()[p].value.as<float>(),
               grad = model.params()[p].grad.as<float>();
    for (size_t j = 0; j < value.size(); ++j) value[j] -= 0.5f * grad[j];
  }
}

constexpr int kNever = -1;

// One rank's model and what trains it.
struct Replica {
  ToyModel model{kSizes};
  std::unique_ptr<DataParallel> ddp;

  absl::Status Create(Communicator& comm, bool views) {
    EK_ASSIGN_OR_RETURN(
        ddp, DataParallel::Create(&comm, &model.params(), model.buffers(), Options(views)));
    return absl::OkStatus();
  }
  // Fails before it announces the gradient of parameter `fails_at`.
  absl::Status Step(int step, int fails_at = kNever) {
    const int rank = ddp->communicator().rank();
    model.params().ClearGradients();
    EK_RETURN_IF_ERROR(ddp->BeginStep());
    model.Forward(rank, step);
    EK_RETURN_IF_ERROR(model.Backward(rank, step, [&](int param) {
      return param == fails_at ? absl::InternalError("the loss is not a number")
                               : ddp->GradientReady(param);
    }));
    EK_RETURN_IF_ERROR(ddp->FinishStep());
    Descend(model);
    return absl::OkStatus();
  }
  absl::Status Steps(int first, int end) {
    for (int step = first; step < end; ++step) EK_RETURN_IF_ERROR(Step(step));
    return absl::OkStatus();
  }
  // The error handling of a training loop when a step fails.
  absl::Status FailingStep(int step, int fails_at) {
    absl::Status status = Step(step, fails_at);
    EXPECT_FALSE(status.ok());
    ddp->communicator().Abort(status);
    return absl::OkStatus();
  }
  // Whoever is new in a group takes the model of its rank 0.
  absl::Status FollowRankZero() {
    for (int p = 0; p < model.params().size(); ++p) {
      EK_RETURN_IF_ERROR(ddp->communicator().Broadcast(model.params()[p].value, 0));
    }
    return ddp->communicator().Broadcast(model.buffers()[0], 0);
  }
};

// The same steps with a group and a DataParallel of their own.
void FreshRun(std::vector<Replica>& replicas, int world, int first, int end, bool views) {
  absl::Status status = RunTestRanks(world, [&](Communicator& comm) -> absl::Status {
    Replica& replica = replicas[comm.rank()];
    EK_RETURN_IF_ERROR(replica.Create(comm, views));
    EK_RETURN_IF_ERROR(replica.Steps(first, end));
    replica.ddp.reset();
    return absl::OkStatus();
  });
  ASSERT_TRUE(status.ok()) << status;
}

class ReplaceGroupTest : public testing::TestWithParam<bool> {
 protected:
  bool views() const { return GetParam(); }
  void ExpectEqual(const std::vector<Replica>& actual, const std::vector<Replica>& expected,
                   int ranks) {
    for (int rank = 0; rank < ranks; ++rank)
      EXPECT_EQ(actual[rank].model.values(), expected[rank].model.values());
  }
};

// A group of 2, then one of 3, then 2 again; in each but the last, backward fails in the middle on
// one rank.
TEST_P(ReplaceGroupTest, AfterAnErrorInTheMiddleOfBackwardTrainingGoesOnAsIfNew) {
  Group first = MakeGroup(2), alone = MakeGroup(1), second = MakeGroup(3), third = MakeGroup(2);
  std::vector<Replica> replicas(3);
  ExpectOk(OnEach(3, [&](int rank) -> absl::Status {
    Replica& mine = replicas[rank];
    if (rank < 2) {
      EK_RETURN_IF_ERROR(mine.Create(*first[rank], views()));
      EK_RETURN_IF_ERROR(mine.Steps(0, 2));
      EK_RETURN_IF_ERROR(mine.FailingStep(2, rank == 1 ? 2 : kNever));
    } else {
      EK_RETURN_IF_ERROR(mine.Create(*alone[0], views()));
    }
    EK_RETURN_IF_ERROR(mine.ddp->ReplaceGroup(second[rank].get()));
    EXPECT_EQ(&mine.ddp->communicator(), second[rank].get());
    EK_RETURN_IF_ERROR(mine.FollowRankZero());
    EK_RETURN_IF_ERROR(mine.Steps(2, 4));
    EK_RETURN_IF_ERROR(mine.FailingStep(4, rank == 0 ? 3 : kNever));
    if (rank == 2) return absl::OkStatus();
    EK_RETURN_IF_ERROR(mine.ddp->ReplaceGroup(third[rank].get()));
    return mine.Steps(4, 7);
  }));
  std::vector<Replica> fresh(3);
  FreshRun(fresh, 2, 0, 2, views());
  FreshRun(fresh, 3, 2, 4, views());
  FreshRun(fresh, 2, 4, 7, views());
  ExpectEqual(replicas, fresh, 2);
  EXPECT_EQ(replicas[0].ddp->reducer().generation(), replicas[1].ddp->reducer().generation());
  for (Replica& replica : replicas) replica.ddp.reset();
}

TEST_P(ReplaceGroupTest, ASoundGroupCanBeLeftAndComeBackTo) {
  Group first = MakeGroup(2), alone = MakeGroup(1), second = MakeGroup(3);
  std::vector<Replica> replicas(3);
  ExpectOk(OnEach(3, [&](int rank) -> absl::Status {
    Replica& mine = replicas[rank];
    EK_RETURN_IF_ERROR(mine.Create(rank < 2 ? *first[rank] : *alone[0], views()));
    if (rank < 2) EK_RETURN_IF_ERROR(mine.Steps(0, 1));  // The order is recorded and not adopted.
    EK_RETURN_IF_ERROR(mine.ddp->ReplaceGroup(second[rank].get()));
    EK_RETURN_IF_ERROR(mine.FollowRankZero());
    EK_RETURN_IF_ERROR(mine.Steps(1, 4));
    EXPECT_EQ(mine.ddp->reducer().generation(), 1u);
    if (rank == 2) {
      mine.ddp.reset();
      return second[2]->Finalize();
    }
    EK_RETURN_IF_ERROR(mine.ddp->ReplaceGroup(first[rank].get()));
    EK_RETURN_IF_ERROR(second[rank]->Finalize());
    second[rank].reset();
    EK_RETURN_IF_ERROR(mine.Steps(4, 6));
    EXPECT_EQ(mine.ddp->reducer().generation(), 1u) << "the plan comes along";
    mine.ddp.reset();
    return first[rank]->Finalize();
  }));
  std::vector<Replica> fresh(3);
  FreshRun(fresh, 2, 0, 1, views());
  FreshRun(fresh, 3, 1, 4, views());
  FreshRun(fresh, 2, 4, 6, views());
  ExpectEqual(replicas, fresh, 2);
}

TEST_P(ReplaceGroupTest, TheOldGroupMayBeDestroyedBefore) {
  Group first = MakeGroup(2), second = MakeGroup(1);
  std::vector<Replica> replicas(2);
  ExpectOk(OnEach(2, [&](int rank) -> absl::Status {
    EK_RETURN_IF_ERROR(replicas[rank].Create(*first[rank], views()));
    EK_RETURN_IF_ERROR(replicas[rank].Steps(0, 2));
    return replicas[rank].FailingStep(2, rank == 1 ? 3 : kNever);
  }));
  first.clear();
  ASSERT_TRUE(replicas[0].ddp->ReplaceGroup(second[0].get()).ok());
  ASSERT_TRUE(replicas[0].Steps(2, 4).ok());
  std::vector<Replica> fresh(2);
  FreshRun(fresh, 2, 0, 2, views());
  FreshRun(fresh, 1, 2, 4, views());
  ExpectEqual(replicas, fresh, 1);
  second.clear();
  for (Replica& replica : replicas) replica.ddp.reset();  // Also those whose group is gone.
}

TEST_P(ReplaceGroupTest, RanksWithDifferentPlansTakeTheNewest) {
  Group first = MakeGroup(2), second = MakeGroup(2);
  std::vector<Replica> replicas(2);
  ExpectOk(OnEach(2, [&](int rank) -> absl::Status {
    Replica& mine = replicas[rank];
    // Without buffers, so that a step begins without the other rank.
    EK_ASSIGN_OR_RETURN(mine.ddp, DataParallel::Create(first[rank].get(), &mine.model.params(), {},
                                                       Options(views())));
    EK_RETURN_IF_ERROR(mine.Steps(0, 1));
    if (rank == 0) {
      EK_RETURN_IF_ERROR(
          mine.ddp->BeginStep());  // Adopts the recorded order; rank 1 does not come to it.
      EXPECT_EQ(mine.ddp->reducer().generation(), 1u);
    }
    EK_RETURN_IF_ERROR(mine.ddp->ReplaceGroup(second[rank].get()));
    EXPECT_EQ(mine.ddp->reducer().generation(), 1u);
    EXPECT_GT(mine.ddp->buckets().size(), 1u);
    EK_RETURN_IF_ERROR(mine.Steps(1, 4));
    EXPECT_EQ(mine.ddp->reducer().generation(), 1u) << "recorded already";
    return absl::OkStatus();
  }));
  EXPECT_EQ(replicas[0].model.values(), replicas[1].model.values());
  for (Replica& replica : replicas) replica.ddp.reset();
}

TEST_P(ReplaceGroupTest, WhatOneRankHadFrozenIsFrozenOnAll) {
  Group first = MakeGroup(2), second = MakeGroup(2);
  std::vector<Replica> replicas(2);
  ExpectOk(OnEach(2, [&](int rank) -> absl::Status {
    Replica& mine = replicas[rank];
    EK_ASSIGN_OR_RETURN(mine.ddp, DataParallel::Create(first[rank].get(), &mine.model.params(), {},
                                                       Options(views())));
    EK_RETURN_IF_ERROR(mine.Steps(0, 3));
    if (rank == 1) {
      mine.model.params().SetTrainable("p3", false);
      EK_RETURN_IF_ERROR(mine.ddp->BeginStep());
    }
    EK_RETURN_IF_ERROR(mine.ddp->ReplaceGroup(second[rank].get()));
    EXPECT_FALSE(mine.model.params().trainable(3));
    return mine.Steps(3, 5);
  }));
  EXPECT_EQ(replicas[0].model.values(), replicas[1].model.values());
  for (Replica& replica : replicas) replica.ddp.reset();
}

// A step of several backward passes is repeated from its first.
TEST_P(ReplaceGroupTest, GradientsAreForgottenAndBuffersAreThoseBeforeTheStep) {
  Group first = MakeGroup(2), second = MakeGroup(2);
  std::vector<Replica> replicas(2);
  ExpectOk(OnEach(2, [&](int rank) -> absl::Status {
    Replica& mine = replicas[rank];
    EK_RETURN_IF_ERROR(mine.Create(*first[rank], views()));
    EK_RETURN_IF_ERROR(mine.Steps(0, 2));
    const std::vector<float> before = mine.model.buffer();
    mine.model.params().ClearGradients();
    EK_RETURN_IF_ERROR(mine.ddp->BeginStep(StepMode::kAccumulate));
    mine.model.Forward(rank, 2);
    EK_RETURN_IF_ERROR(
        mine.model.Backward(rank, 2, [&](int param) { return mine.ddp->GradientReady(param); }));
    EK_RETURN_IF_ERROR(mine.ddp->FinishStep());
    EK_RETURN_IF_ERROR(mine.ddp->BeginStep());
    mine.model.Forward(rank, 3);
    EXPECT_NE(mine.model.buffer(), before);
    EK_RETURN_IF_ERROR(mine.ddp->ReplaceGroup(second[rank].get()));
    EXPECT_EQ(mine.model.buffer(), before);
    for (int p = 0; p < mine.model.params().size(); ++p)
      EXPECT_EQ(mine.model.params().grad_state(p), GradState::kNone);
    return absl::OkStatus();
  }));
  // Its buckets were in use: a sound group that is left in the middle of a step ends.
  EXPECT_FALSE(first[0]->status().ok());
  for (Replica& replica : replicas) replica.ddp.reset();
}

TEST_P(ReplaceGroupTest, BuffersOfAFinishedStepStay) {
  Group first = MakeGroup(2), second = MakeGroup(2);
  std::vector<Replica> replicas(2);
  ExpectOk(OnEach(2, [&](int rank) -> absl::Status {
    Replica& mine = replicas[rank];
    EK_RETURN_IF_ERROR(mine.Create(*first[rank], views()));
    EK_RETURN_IF_ERROR(mine.Steps(0, 2));
    const std::vector<float> before = mine.model.buffer();
    EK_RETURN_IF_ERROR(mine.ddp->ReplaceGroup(second[rank].get()));
    EXPECT_EQ(mine.model.buffer(), before);
    return absl::OkStatus();
  }));
  EXPECT_TRUE(first[0]->status().ok());
  for (Replica& replica : replicas) replica.ddp.reset();
}

// Shares a bucket equally, as a sharded optimizer does, and notes for how many ranks each plan is.
class EqualShares : public BucketReduction {
 public:
  explicit EqualShares(std::vector<int>* planned_for) : planned_for_(planned_for) {}
  void OnGroup(Communicator& comm) override { world_size_ = comm.world_size(); }
  int64_t CountMultiple() const override { return world_size_; }
  std::vector<Collective> CollectivesFor(const BucketInfo& bucket) const override {
    return {{.kind = CollectiveKind::kAllReduce,
             .dtype = bucket.data.dtype,
             .count = bucket.data.count}};
  }
  absl::Status OnPlan(absl::Span<const BucketInfo> buckets) override {
    planned_for_->push_back(world_size_);
    for (const BucketInfo& bucket : buckets) EXPECT_EQ(bucket.data.count % world_size_, 0);
    return absl::OkStatus();
  }

 private:
  std::vector<int>* const planned_for_;
  int world_size_ = 0;
};

TEST_P(ReplaceGroupTest, TheReductionPlansAnewForItsNewGroup) {
  Group three = MakeGroup(3), two = MakeGroup(2), also_two = MakeGroup(2);
  ExpectOk(OnEach(3, [&](int rank) -> absl::Status {
    ToyModel model(kSizes);
    std::vector<int> planned_for;
    EK_ASSIGN_OR_RETURN(
        auto ddp,
        DataParallel::Create(three[rank].get(), &model.params(), model.buffers(),
                             Options(GetParam()), std::make_unique<EqualShares>(&planned_for)));
    EK_RETURN_IF_ERROR(three[rank]->Finalize());
    EXPECT_THAT(planned_for, ElementsAre(3));
    if (rank == 2) return absl::OkStatus();
    EK_RETURN_IF_ERROR(ddp->ReplaceGroup(two[rank].get()));
    EXPECT_THAT(planned_for, ElementsAre(3, 2));
    for (int step = 0; step < 2; ++step) {  // The second has another plan: the order is known.
      model.params().ClearGradients();
      EK_RETURN_IF_ERROR(ddp->BeginStep());
      EK_RETURN_IF_ERROR(
          model.Backward(rank, step, [&](int param) { return ddp->GradientReady(param); }));
      EK_RETURN_IF_ERROR(ddp->FinishStep());
      EXPECT_EQ(model.Gradient(0)[0],
                (model.GradientAt(0, 0, 0, step) + model.GradientAt(0, 0, 1, step)) * 0.5f);
    }
    EK_RETURN_IF_ERROR(two[rank]->Finalize());
    EK_RETURN_IF_ERROR(ddp->ReplaceGroup(also_two[rank].get()));
    EXPECT_THAT(planned_for, ElementsAre(3, 2, 2, 2));
    return also_two[rank]->Finalize();
  }));
}

INSTANTIATE_TEST_SUITE_P(CopyAndViews, ReplaceGroupTest, testing::Bool());

// Two models that train in one step, and a third that is made later.
TEST(ReplaceGroupNamesTest, NamesComeAlongAndAreNotGivenOutAgain) {
  Group first = MakeGroup(2), second = MakeGroup(2);
  std::vector<Replica> a(2), b(2), c(2);
  const std::vector<absl::Status> results = OnEach(2, [&](int rank) -> absl::Status {
    EK_RETURN_IF_ERROR(a[rank].Create(*first[rank], false));
    EK_RETURN_IF_ERROR(b[rank].Create(*first[rank], false));
    // In another order on each rank: both learn it, and nothing has changed.
    absl::Status crossed = (rank == 0 ? a : b)[rank].ddp->ReplaceGroup(second[rank].get());
    EXPECT_EQ(crossed.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(
        std::string(crossed.message()),
        HasSubstr(
            "rank 0 passes data_parallel#0, rank 1 data_parallel#1: all ranks must pass the same"));
    EXPECT_EQ(&a[rank].ddp->communicator(), first[rank].get());
    EK_RETURN_IF_ERROR(b[rank].ddp->ReplaceGroup(second[rank].get()));
    EK_RETURN_IF_ERROR(c[rank].Create(*second[rank], false));
    EXPECT_EQ(b[rank].ddp->join_name(), "data_parallel#1");
    EXPECT_EQ(c[rank].ddp->join_name(), "data_parallel#0");
    // Now that name is taken.
    absl::Status taken = a[rank].ddp->ReplaceGroup(second[rank].get());
    EXPECT_THAT(std::string(taken.message()),
                HasSubstr("another object in the new group has that name"));
    Replica late;
    EK_RETURN_IF_ERROR(late.Create(*second[rank], false));
    EXPECT_EQ(late.ddp->join_name(), "data_parallel#2");
    for (int step = 0; step < 3; ++step) {
      EK_RETURN_IF_ERROR(a[rank].Step(step));  // Still in the first group.
      EK_RETURN_IF_ERROR(b[rank].Step(step));
      EK_RETURN_IF_ERROR(c[rank].Step(step));
    }
    return absl::OkStatus();
  });
  ExpectOk(results);
  for (std::vector<Replica>* replicas : {&a, &b, &c}) {
    EXPECT_EQ((*replicas)[0].model.values(), (*replicas)[1].model.values());
    for (Replica& replica : *replicas) replica.ddp.reset();
  }
}

TEST(ReplaceGroupErrorsTest, WhatCannotBeReplacedIsRefusedOnAllRanksAndNothingChanges) {
  Group first = MakeGroup(2), second = MakeGroup(2);
  std::vector<Replica> replicas(2);
  ExpectOk(OnEach(2, [&](int rank) -> absl::Status {
    Replica& mine = replicas[rank];
    EK_RETURN_IF_ERROR(mine.Create(*first[rank], false));
    EXPECT_EQ(mine.ddp->ReplaceGroup(nullptr).code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(mine.ddp->ReplaceGroup(first[rank].get()).message()),
                HasSubstr("in that group already"));
    EK_RETURN_IF_ERROR(RunJoined({mine.ddp.get()}, {}, [&](JoinScope&) -> absl::Status {
      absl::Status inside = mine.ddp->ReplaceGroup(second[rank].get());
      EXPECT_THAT(std::string(inside.message()), HasSubstr("inside RunJoined()"));
      return mine.Steps(0, 2);
    }));
    EK_RETURN_IF_ERROR(mine.Steps(2, 3));
    EXPECT_TRUE(second[rank]->status().ok());
    return mine.ddp->ReplaceGroup(second[rank].get());
  }));
  for (Replica& replica : replicas) replica.ddp.reset();
}

TEST(ReplaceGroupErrorsTest, OtherParametersEndTheNewGroup) {
  Group alone = MakeGroup(1), apart = MakeGroup(1), second = MakeGroup(2);
  ToyModel small({3, 5}), large({3, 6});
  const std::vector<absl::Status> results = OnEach(2, [&](int rank) -> absl::Status {
    Communicator* comm = rank == 0 ? alone[0].get() : apart[0].get();
    EK_ASSIGN_OR_RETURN(
        auto ddp, DataParallel::Create(comm, rank == 0 ? &small.params() : &large.params(), {}));
    return ddp->ReplaceGroup(second[rank].get());
  });
  for (const absl::Status& result : results) {
    EXPECT_THAT(std::string(result.message()), HasSubstr("rank 1")) << result;
    EXPECT_FALSE(result.ok());
  }
  EXPECT_FALSE(second[0]->status().ok());
}

}  // namespace
}  // namespace evenkeel
