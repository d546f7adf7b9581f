// Recovery with an optimizer in slices: what a lost rank held is gone, what the others hold is not.

#include <cstring>
#include <functional>
#include <latch>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/testing/tested_group.h"
#include "evenkeel/join/join.h"
#include "evenkeel/join/recovery.h"
#include "evenkeel/join/steps/step_control.h"
#include "evenkeel/tests/slices/sliced_rank.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::IsEmpty;
using Group = std::vector<std::unique_ptr<Communicator>>;

const UpdateRule kRule = Sgd{.learning_rate = 0.1, .momentum = 0.9};
constexpr int kWorld = 4, kSteps = 6;

void OnEach(int ranks, const std::function<absl::Status(int rank)>& body) {
  std::vector<absl::Status> results(ranks);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank)
    threads.emplace_back([&, rank] { results[rank] = body(rank); });
  for (std::thread& thread : threads) thread.join();
  for (int rank = 0; rank < ranks; ++rank)
    EXPECT_TRUE(results[rank].ok()) << rank << ": " << results[rank];
}

// Fails before it announces its last gradient, when all ranks have ended the step before.
absl::Status FailIn(SlicedRank& rank, int step) {
  ParameterSet& params = rank.model.params();
  params.ClearGradients();
  EK_RETURN_IF_ERROR(rank.ddp->BeginStep());
  EK_RETURN_IF_ERROR(StepControl::Of(rank.ddp->communicator()).current()->Wait().status());
  for (int param = params.size() - 1; param > 0; --param)
    EK_RETURN_IF_ERROR(rank.ddp->NoGradient(param));
  return absl::InternalError(absl::StrCat("step ", step, " failed"));
}

absl::Status Steps(auto& rank, int first, int end) {
  for (int step = first; step < end; ++step) EK_RETURN_IF_ERROR(rank.Step(step));
  return absl::OkStatus();
}

// Returns the weights of a run of `ranks_after` ranks that continues with the part `kept` of the
// state after `before` steps of `ranks_before` ranks.
std::string WithoutSlices(const OptimizerState& kept, int before, int ranks_before,
                          int ranks_after) {
  internal::TestModel model(kSizes);
  internal::PlainTraining first(&model, kRule);
  for (int step = 0; step < before; ++step)
    first.Step(Ranks(ranks_before), step, 1.0 / ranks_before);
  std::string result;
  RunGroup(ranks_after, [&](Communicator& comm) -> absl::Status {
    EK_ASSIGN_OR_RETURN(auto rank, WholeRank::Create(comm, kRule));
    for (int param = 0; param < model.size(); ++param) {
      const TensorView from = model.params()[param].value, to = rank->model.params()[param].value;
      if (to.count > 0) std::memcpy(to.data, from.data, to.bytes());
    }
    EK_RETURN_IF_ERROR(rank->optimizer->LoadState(kept));
    EK_RETURN_IF_ERROR(Steps(*rank, before, kSteps));
    if (comm.rank() == 0) result = rank->model.Bytes();
    return absl::OkStatus();
  });
  return result;
}

TEST(SlicedRecoveryTest, ALostSliceIsRefusedOnAllSurvivorsWithTheCheckpointToResumeFrom) {
  Group group = *CreateTestGroup(kWorld);
  std::vector<absl::Status> refused(kWorld);
  OnEach(kWorld, [&](int rank) -> absl::Status {
    EK_ASSIGN_OR_RETURN(auto mine, SlicedRank::Create(*group[rank], kRule));
    mine->optimizer->SetCheckpointHint("runs/7/step_2.safetensors");
    EK_RETURN_IF_ERROR(Steps(*mine, 0, 3));
    if (rank == 2) {
      EXPECT_FALSE(FailIn(*mine, 3).ok());
    } else {
      EXPECT_FALSE(mine->Step(3).ok());
      refused[rank] =
          Recover(mine->joinables(), *group[rank], {.timeout = absl::Seconds(60)}).status();
    }
    mine.reset();  // Although the new group is gone.
    group[rank].reset();
    return absl::OkStatus();
  });
  for (int rank : {0, 1, 3}) {
    EXPECT_EQ(refused[rank].code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(
        std::string(refused[rank].message()),
        HasSubstr(
            "rank 2 is lost, and with it its part of the optimizer's state: resume from a "
            "checkpoint "
            "(runs/7/step_2.safetensors), or choose what to do with a lost shard (lost_shard)"));
  }
}

// A parameter of which any part is lost begins anew, the others go on.
TEST(SlicedRecoveryTest, AFreshSliceBeginsAnewAndTheRestIsKept) {
  for (int lost : {0, 1, 3}) {
    SCOPED_TRACE(lost);
    Group group = *CreateTestGroup(kWorld);
    std::vector<OptimizerState> before(kWorld), after(kWorld);
    std::vector<std::string> values(kWorld);
    OnEach(kWorld, [&](int rank) -> absl::Status {
      const SlicedRankOptions options{.lost_shard = LostShard::kFresh};
      EK_ASSIGN_OR_RETURN(auto mine, SlicedRank::Create(*group[rank], kRule, options));
      EK_RETURN_IF_ERROR(Steps(*mine, 0, 3));
      EK_ASSIGN_OR_RETURN(before[rank], mine->optimizer->Consolidate());
      if (rank == lost) {
        EXPECT_FALSE(FailIn(*mine, 3).ok());
        mine.reset();
        group[rank].reset();
        return absl::OkStatus();
      }
      EXPECT_FALSE(mine->Step(3).ok());
      EK_ASSIGN_OR_RETURN(Recovered recovered,
                          Recover(mine->joinables(), *group[rank], {.timeout = absl::Seconds(60)}));
      EXPECT_EQ(recovered.steps, 3);
      EK_ASSIGN_OR_RETURN(after[rank], mine->optimizer->Consolidate());
      EK_RETURN_IF_ERROR(Steps(*mine, 3, kSteps));
      values[rank] = mine->model.Bytes();
      mine.reset();
      return recovered.comm->Finalize();
    });
    const int survivor = lost == 0 ? 1 : 0;
    EXPECT_LT(after[survivor].params.size(), before[survivor].params.size());
    EXPECT_GT(after[survivor].params.size(), 0u);
    for (const auto& [param, state] : after[survivor].params)
      EXPECT_TRUE(state == before[survivor].params.at(param));
    internal::TestModel expected(kSizes), trained(kSizes);
    expected.SetBytes(WithoutSlices(after[survivor], 3, kWorld, kWorld - 1));
    for (int rank = 0; rank < kWorld; ++rank) {
      if (rank == lost) continue;
      EXPECT_TRUE(after[rank] == after[survivor]);
      trained.SetBytes(values[rank]);
      EXPECT_TRUE(IsSame(trained, expected)) << rank;
    }
  }
}

// An error of one rank's own, who is not lost: nothing is. Also in the step whose buckets are new,
// where state moves.
TEST(SlicedRecoveryTest, WhereNobodyIsLostNoStateIs) {
  for (int failing : {0, 1, 3}) {
    SCOPED_TRACE(failing);
    Group group = *CreateTestGroup(kWorld);
    internal::TestModel plain_model(kSizes);
    internal::PlainTraining plain(&plain_model, kRule);
    for (int step = 0; step < kSteps; ++step) plain.Step(Ranks(kWorld), step, 1.0 / kWorld);
    OnEach(kWorld, [&](int rank) -> absl::Status {
      EK_ASSIGN_OR_RETURN(auto mine, SlicedRank::Create(*group[rank], kRule));
      EK_RETURN_IF_ERROR(Steps(*mine, 0, failing));
      const absl::Status failed = rank == 1 ? FailIn(*mine, failing) : mine->Step(failing);
      EK_ASSIGN_OR_RETURN(
          Recovered recovered,
          Recover(mine->joinables(), *group[rank], {.timeout = absl::Seconds(60), .why = failed}));
      EXPECT_THAT(recovered.lost, IsEmpty());
      EXPECT_EQ(recovered.steps, failing);
      EK_RETURN_IF_ERROR(Steps(*mine, failing, kSteps));
      EK_RETURN_IF_ERROR(ExpectEqual(*mine, plain_model, plain.state()));
      mine.reset();
      return recovered.comm->Finalize();
    });
  }
}

// Rank 1 fails when all have updated in backward, and no rank has called Step(), also if all have
// seen the end of the update: the step would be repeated.
TEST(SlicedRecoveryTest, AnUpdateThatWasBegunInBackwardCanNotBeTakenBack) {
  for (const bool has_arrived : {false, true}) {
    SCOPED_TRACE(has_arrived);
    Group group = *CreateTestGroup(2);
    std::latch updated(2);
    OnEach(2, [&](int rank) -> absl::Status {
      const SlicedRankOptions options{.placement = {.update_in_backward = true}};
      EK_ASSIGN_OR_RETURN(auto mine, SlicedRank::Create(*group[rank], kRule, options));
      EK_RETURN_IF_ERROR(Steps(*mine, 0, 3));
      EK_RETURN_IF_ERROR(mine->Backward(3));
      if (has_arrived) EK_RETURN_IF_ERROR(mine->optimizer->WaitForAll());
      updated.arrive_and_wait();
      const absl::Status failed =
          rank == 1 ? absl::InternalError("out of data") : absl::CancelledError("so do I");
      const absl::Status refused =
          Recover(mine->joinables(), *group[rank], {.timeout = absl::Seconds(60), .why = failed})
              .status();
      EXPECT_TRUE(absl::IsFailedPrecondition(refused)) << refused;
      EXPECT_THAT(std::string(refused.message()), HasSubstr("was in the middle of an update"));
      mine.reset();
      group[rank].reset();
      return absl::OkStatus();
    });
  }
}

// The group fails in the middle of a reduction, or when all ranks have updated in backward and none
// has called Step(). The first step in the next group begins as any other.
TEST(SlicedRecoveryTest, TheFirstReductionInTheNextGroupComparesTheValues) {
  for (const bool has_updated : {false, true}) {
    SCOPED_TRACE(has_updated);
    Group group = *CreateTestGroup(2);
    std::latch updated(2);
    OnEach(2, [&](int rank) -> absl::Status {
      const SlicedRankOptions options{.placement = {.update_in_backward = true},
                                      .lost_shard = LostShard::kFresh};
      EK_ASSIGN_OR_RETURN(auto mine, SlicedRank::Create(*group[rank], kRule, options));
      EK_RETURN_IF_ERROR(Steps(*mine, 0, 2));
      absl::Status failed = absl::InternalError("out of data");
      if (has_updated) {
        EK_RETURN_IF_ERROR(mine->Backward(2));
        updated.arrive_and_wait();
      } else {
        failed = rank == 1 ? FailIn(*mine, 2) : mine->Step(2);
      }
      EK_ASSIGN_OR_RETURN(
          Recovered recovered,
          Recover(mine->joinables(), *group[rank], {.timeout = absl::Seconds(60), .why = failed}));
      const absl::Status status = RunJoined(mine->joinables(), {}, [&](JoinScope&) -> absl::Status {
        if (rank == 0) return absl::OkStatus();
        mine->model.params()[1].value.as<float>()[0] += 1;
        return mine->Step(2);
      });
      EXPECT_THAT(std::string(status.message()),
                  AllOf(HasSubstr("\"p1\" is not equal on all ranks"), HasSubstr("AfterUpdate()")));
      mine.reset();
      return absl::OkStatus();
    });
  }
}

// Between two sound groups, in which the ranks have other numbers, and so other slices; whichever
// part goes first.
TEST(SlicedRecoveryTest, AnotherGroupOfTheSameRanksGoesOn) {
  for (bool optimizer_first : {false, true}) {
    Group first = *CreateTestGroup(3), second = *CreateTestGroup(3);
    OnEach(3, [&](int rank) -> absl::Status {
      EK_ASSIGN_OR_RETURN(auto sliced, SlicedRank::Create(*first[rank], kRule));
      EK_ASSIGN_OR_RETURN(auto whole, WholeRank::Create(*first[rank], kRule));
      EK_RETURN_IF_ERROR(Steps(*sliced, 0, 3));
      EK_RETURN_IF_ERROR(Steps(*whole, 0, 3));
      EK_RETURN_IF_ERROR(first[rank]->Finalize());
      Communicator& next = *second[(rank + 1) % 3];
      if (optimizer_first) EK_RETURN_IF_ERROR(sliced->optimizer->ReplaceGroup(&next));
      EK_RETURN_IF_ERROR(sliced->ddp->ReplaceGroup(&next));
      if (!optimizer_first) EK_RETURN_IF_ERROR(sliced->optimizer->ReplaceGroup(&next));
      EK_RETURN_IF_ERROR(whole->ddp->ReplaceGroup(&next));
      EK_RETURN_IF_ERROR(whole->optimizer->ReplaceGroup(&next));
      EK_RETURN_IF_ERROR(Steps(*sliced, 3, kSteps));
      EK_RETURN_IF_ERROR(Steps(*whole, 3, kSteps));
      EK_RETURN_IF_ERROR(ExpectEqual(*sliced, whole->model, whole->optimizer->state()));
      return next.Finalize();
    });
  }
}

// Also if the new group lies where the old one was.
TEST(SlicedRecoveryTest, TheOldGroupMayBeDestroyedBeforeEitherPartMoves) {
  for (bool next_exists : {false, true}) {
    Group first = *CreateTestGroup(2), second;
    if (next_exists) second = *CreateTestGroup(2);
    std::unique_ptr<SlicedRank> sliced[2];
    OnEach(2, [&](int rank) -> absl::Status {
      EK_ASSIGN_OR_RETURN(sliced[rank], SlicedRank::Create(*first[rank], kRule));
      EK_RETURN_IF_ERROR(Steps(*sliced[rank], 0, 3));
      return first[rank]->Finalize();
    });
    first.clear();
    if (!next_exists) second = *CreateTestGroup(2);
    OnEach(2, [&](int rank) -> absl::Status {
      EK_RETURN_IF_ERROR(sliced[rank]->ddp->ReplaceGroup(second[rank].get()));
      EK_RETURN_IF_ERROR(sliced[rank]->optimizer->ReplaceGroup(second[rank].get()));
      EK_RETURN_IF_ERROR(Steps(*sliced[rank], 3, kSteps));
      EK_ASSIGN_OR_RETURN(auto whole, WholeRank::Create(*second[rank], kRule));
      EK_RETURN_IF_ERROR(Steps(*whole, 0, kSteps));
      EK_RETURN_IF_ERROR(ExpectEqual(*sliced[rank], whole->model, whole->optimizer->state()));
      EK_RETURN_IF_ERROR(second[rank]->Finalize());
      sliced[rank].reset();
      return absl::OkStatus();
    });
  }
}

}  // namespace
}  // namespace evenkeel
