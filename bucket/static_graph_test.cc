// Graphs that are the same in every step: gradients that are announced several times.

#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
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

DataParallelOptions Options(bool views, bool is_static) {
  return {.reducer = {.caps = {Bytes{8}, Bytes{24}},
                      .gradient_as_bucket_view = views,
                      .static_graph = is_static}};
}

// How often backward comes by each parameter: p1 is used by three layers, p2 by none, p4 by two.
const std::vector<int> kUses = {1, 3, 0, 1, 2};

// Two forwards and one backward, which comes by the parameters in turn, so that they are complete
// in another order than they are first announced.
absl::Status Backward(ToyModel& model, int rank, int batch, const std::vector<int>& uses,
                      absl::FunctionRef<absl::Status(int)> announce) {
  for (int round = 0; round < 3; ++round) {
    for (int p = static_cast<int>(uses.size()) - 1; p >= 0; --p) {
      if (round < uses[p])
        EK_RETURN_IF_ERROR(model.BackwardOf(p, rank, 10 * batch + round, announce));
    }
  }
  return absl::OkStatus();
}

absl::Status StaticStep(DataParallel& ddp, ToyModel& model, int rank, int batch,
                        const std::vector<int>& uses = kUses) {
  model.params().ClearGradients();
  EK_RETURN_IF_ERROR(ddp.BeginStep());
  EK_RETURN_IF_ERROR(
      Backward(model, rank, batch, uses, [&](int param) { return ddp.GradientReady(param); }));
  return ddp.FinishStep();
}

// The same, announced when all is done.
absl::Status PlainStep(DataParallel& ddp, ToyModel& model, int rank, int batch) {
  model.params().ClearGradients();
  EK_RETURN_IF_ERROR(ddp.BeginStep());
  EK_RETURN_IF_ERROR(Backward(model, rank, batch, kUses, [](int) { return absl::OkStatus(); }));
  for (int p = 0; p < model.params().size(); ++p) {
    if (model.params().trainable(p))
      EK_RETURN_IF_ERROR(kUses[p] > 0 ? ddp.GradientReady(p) : ddp.NoGradient(p));
  }
  return ddp.FinishStep();
}

void ExpectSame(ToyModel& a, ToyModel& b, absl::string_view where) {
  for (int p = 0; p < a.params().size(); ++p) {
    EXPECT_EQ(a.params().grad_state(p), b.params().grad_state(p)) << where << ", p" << p;
    if (a.params().grad_state(p) == GradState::kNone) continue;
    EXPECT_THAT(a.Gradient(p), SameSums(b.Gradient(p))) << where << ", p" << p;
  }
}

class StaticGraphTest : public testing::TestWithParam<std::tuple<int, bool>> {
 protected:
  bool views() const { return std::get<1>(GetParam()); }
  void Run(absl::FunctionRef<absl::Status(Communicator&)> body) {
    absl::Status status = RunTestRanks(std::get<0>(GetParam()), body);
    EXPECT_TRUE(status.ok()) << status;
  }
};

TEST_P(StaticGraphTest, AParameterIsCompleteWithTheLastOfItsUses) {
  Run([&](Communicator& comm) -> absl::Status {
    ToyModel model(kSizes), reference(kSizes);
    EK_ASSIGN_OR_RETURN(auto ddp,
                        DataParallel::Create(&comm, &model.params(), {}, Options(views(), true)));
    EK_ASSIGN_OR_RETURN(
        auto plain, DataParallel::Create(&comm, &reference.params(), {}, Options(views(), false)));
    for (int step = 0; step < 4; ++step) {
      EK_RETURN_IF_ERROR(StaticStep(*ddp, model, comm.rank(), step));
      EK_RETURN_IF_ERROR(PlainStep(*plain, reference, comm.rank(), step));
      ExpectSame(model, reference, absl::StrCat("step ", step));
      EXPECT_EQ(model.params().grad_state(2), GradState::kNone);
    }
    return absl::OkStatus();
  });
}

TEST_P(StaticGraphTest, BucketsLeaveDuringBackwardOnceTheGraphIsKnown) {
  Run([&](Communicator& comm) -> absl::Status {
    ToyModel model(kSizes);
    EK_ASSIGN_OR_RETURN(auto ddp,
                        DataParallel::Create(&comm, &model.params(), {}, Options(views(), true)));
    for (int step = 0; step < 3; ++step)
      EK_RETURN_IF_ERROR(StaticStep(*ddp, model, comm.rank(), step));
    const StepTimes& times = ddp->reducer().last_step();
    EXPECT_GT(times.buckets.size(), 1u);
    EXPECT_LT(times.buckets[0].ready, times.last_gradient);
    return absl::OkStatus();
  });
}

TEST_P(StaticGraphTest, TheRecordedOrderIsThatInWhichParametersAreComplete) {
  Run([&](Communicator& comm) -> absl::Status {
    ToyModel model(kSizes);
    EK_ASSIGN_OR_RETURN(auto ddp,
                        DataParallel::Create(&comm, &model.params(), {}, Options(views(), true)));
    EK_RETURN_IF_ERROR(StaticStep(*ddp, model, comm.rank(), 0));
    EK_RETURN_IF_ERROR(ddp->RebuildNow());
    EXPECT_THAT(ddp->reducer().plan_state().order, testing::ElementsAre(3, 0, 4, 1, 2));
    return absl::OkStatus();
  });
}

TEST_P(StaticGraphTest, ARankWithoutInputsFollowsAndRecordsWhenItHasSome) {
  Run([&](Communicator& comm) -> absl::Status {
    ToyModel model(kSizes), reference(kSizes);
    EK_ASSIGN_OR_RETURN(auto ddp,
                        DataParallel::Create(&comm, &model.params(), {}, Options(views(), true)));
    EK_ASSIGN_OR_RETURN(
        auto plain, DataParallel::Create(&comm, &reference.params(), {}, Options(views(), false)));
    ddp->SetOptimizerState({});  // There is none.
    plain->SetOptimizerState({});
    for (const bool reversed :
         {false, true}) {  // Rank 0 has nothing in the first epoch, the last rank in the second.
      const int steps = reversed ? comm.world_size() - 1 - comm.rank() : comm.rank();
      EK_RETURN_IF_ERROR(RunJoined({ddp.get(), plain.get()}, {}, [&](JoinScope&) -> absl::Status {
        for (int step = 0; step < steps; ++step) {
          EK_RETURN_IF_ERROR(StaticStep(*ddp, model, comm.rank(), step));
          EK_RETURN_IF_ERROR(PlainStep(*plain, reference, comm.rank(), step));
          ExpectSame(model, reference, absl::StrCat("step ", step));
        }
        return absl::OkStatus();
      }));
    }
    return absl::OkStatus();
  });
}

TEST_P(StaticGraphTest, WhatIsTrainedMayChange) {
  Run([&](Communicator& comm) -> absl::Status {
    ToyModel model(kSizes), reference(kSizes);
    EK_ASSIGN_OR_RETURN(auto ddp,
                        DataParallel::Create(&comm, &model.params(), {}, Options(views(), true)));
    EK_ASSIGN_OR_RETURN(
        auto plain, DataParallel::Create(&comm, &reference.params(), {}, Options(views(), false)));
    for (int step = 0; step < 6; ++step) {
      for (ToyModel* each : {&model, &reference}) {
        each->params().SetTrainable(1, step != 2 && step != 3);
        each->params().SetTrainable(3, step < 4);
      }
      EK_RETURN_IF_ERROR(StaticStep(*ddp, model, comm.rank(), step));
      EK_RETURN_IF_ERROR(PlainStep(*plain, reference, comm.rank(), step));
      ExpectSame(model, reference, absl::StrCat("step ", step));
    }
    return absl::OkStatus();
  });
}

INSTANTIATE_TEST_SUITE_P(Worlds, StaticGraphTest,
                         testing::Combine(testing::Values(1, 2, 3, 5, 8), testing::Bool()),
                         [](const testing::TestParamInfo<std::tuple<int, bool>>& info) {
                           return absl::StrCat("World", std::get<0>(info.param),
                                               std::get<1>(info.param) ? "Views" : "Copies");
                         });

// Rank 1 has another graph in its third step.
std::vector<absl::Status> WithChangedGraph(const std::vector<int>& uses) {
  std::vector<absl::Status> results(2);
  const absl::Status run = RunTestRanks(2, [&](Communicator& comm) -> absl::Status {
    ToyModel model(kSizes);
    EK_ASSIGN_OR_RETURN(auto ddp,
                        DataParallel::Create(&comm, &model.params(), {}, Options(false, true)));
    absl::Status status;
    for (int step = 0; step < 3 && status.ok();
         ++step) {  // A rank may still be in its second step when it ends.
      status =
          StaticStep(*ddp, model, comm.rank(), step, step == 2 && comm.rank() == 1 ? uses : kUses);
    }
    if (!status.ok()) comm.Abort(status);
    return results[comm.rank()] = status;
  });
  EXPECT_THAT(std::string(run.message()), HasSubstr("the graph has changed"));
  return results;
}

TEST(StaticGraphErrorsTest, AGradientOfAFrozenParameterIsAnErrorOfTheStepThatRecordsToo) {
  const absl::Status status = RunTestRanks(1, [&](Communicator& comm) -> absl::Status {
    ToyModel model(kSizes);
    model.params().SetTrainable(1, false);
    EK_ASSIGN_OR_RETURN(auto ddp,
                        DataParallel::Create(&comm, &model.params(), {}, Options(false, true)));
    EK_RETURN_IF_ERROR(ddp->BeginStep());
    model.params().SetGradState(1, GradState::kLocal);
    return ddp->GradientReady(1);
  });
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()), HasSubstr("it was frozen when the step began"));
}

TEST(StaticGraphErrorsTest, AParameterThatIsUsedOnceMoreIsAnErrorOnAllRanks) {
  for (const absl::Status& status : WithChangedGraph({1, 3, 0, 2, 2})) {
    EXPECT_THAT(std::string(status.message()), HasSubstr("the graph has changed"));
    EXPECT_THAT(std::string(status.message()), HasSubstr("\"p3\" (3) was announced 2 times"));
  }
}

TEST(StaticGraphErrorsTest, AParameterThatIsUsedLessOftenIsAnErrorOnAllRanks) {
  for (const absl::Status& status : WithChangedGraph({1, 2, 0, 1, 2})) {
    EXPECT_THAT(std::string(status.message()), HasSubstr("\"p1\" (1) was announced 2 times"));
  }
}

TEST(StaticGraphErrorsTest, AParameterThatWasNotUsedAtAllIsAnErrorOnAllRanks) {
  for (const absl::Status& status : WithChangedGraph({1, 3, 1, 1, 2})) {
    EXPECT_THAT(std::string(status.message()), HasSubstr("\"p2\" (2) was announced 1 times"));
  }
}

}  // namespace
}  // namespace evenkeel
