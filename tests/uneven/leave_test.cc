// Ranks without inputs that leave the group and come back at the end of the loop: everything is as
// if they had shadowed, bit for bit where each element is added up in rank order.

#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "evenkeel/bucket/data_parallel.h"
#include "evenkeel/bucket/testing/toy_model.h"
#include "evenkeel/comm/failure_info.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/testing/tested_group.h"
#include "evenkeel/join/join.h"
#include "evenkeel/zero_optim/optimizer.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using Options = JoinOptions;

const std::vector<int> kSizes = {3, 7, 1, 5};

struct Case {
  std::string name;
  std::vector<std::vector<int>> inputs;  // By epoch and rank.
  int accumulated = 1;
  DivideBy divide_by = DivideBy::kInitialWorldSize;
  int min_active = 1;
  bool has_optimizer = true;  // In the list.
};

const Case kCases[] = {
    {"TwoRanks", {{2, 9}, {9, 2}, {0, 5}}},
    {"Even", {{4, 4, 4}}},
    {"OneAfterTheOther", {{1, 4, 7, 10, 13}, {13, 10, 7, 4, 1}}},
    {"TwoAtOnce", {{2, 2, 9}, {9, 2, 2}}},
    {"SomeNeverLeave", {{8, 2, 9}, {9, 8, 8}}},
    {"EmptyFromTheStart", {{0, 6, 0}, {0, 0, 7}}},
    {"Accumulating", {{2, 11, 5}, {7, 1, 13}}, 3},
    {"ByActiveRanks", {{2, 9, 5}}, 1, DivideBy::kActiveRanks},
    {"BySamples", {{2, 9, 5}, {8, 3, 1}}, 1, DivideBy::kSamples},
    {"BySamplesThatAreLeftOver", {{2, 3, 9, 4}, {9, 4, 2, 5}}, 1, DivideBy::kSamples},
    {"StopsEarly", {{2, 9, 20, 12}, {12, 2, 9, 20}}, 1, DivideBy::kInitialWorldSize, 2},
    {"OptimizerOfOnesOwn", {{2, 8, 5}}, 1, DivideBy::kInitialWorldSize, 1, false},
};

absl::Status TakeStep(ToyModel& model, DataParallel& ddp, int rank, int step) {
  model.params().ClearGradients();
  EK_RETURN_IF_ERROR(ddp.BeginStep());
  EK_RETURN_IF_ERROR(
      model.Backward(rank, step, [&](int param) { return ddp.GradientReady(param); }));
  return ddp.FinishStep();
}

struct Outcome {
  std::vector<std::vector<float>> weights;
  std::vector<float> buffer;
  std::vector<std::vector<float>> moments;
  std::vector<int64_t> steps;  // By parameter.
  int64_t steps_finished = 0;
  std::vector<absl::StatusCode> codes;  // By epoch.
  std::vector<float> counted;  // How many ranks issued the scope's calls, by step of this rank's.

  friend bool operator==(const Outcome&, const Outcome&) = default;
};

absl::StatusOr<Outcome> Train(Communicator& comm, const Case& what, int64_t leave_after) {
  ToyModel model(kSizes);
  ParameterSet& params = model.params();
  EK_ASSIGN_OR_RETURN(auto ddp, DataParallel::Create(&comm, &params, model.buffers(),
                                                     {.reducer = {.caps = {Bytes{8}, Bytes{24}}}}));
  EK_ASSIGN_OR_RETURN(auto optimizer, Optimizer::Create(comm, params, Adam{.learning_rate = 0.05}));
  std::vector<Joinable*> list = {ddp.get()};
  if (what.has_optimizer) list.push_back(optimizer.get());
  ddp->SetOptimizerState({});
  Outcome outcome;
  for (size_t epoch = 0; epoch < what.inputs.size(); ++epoch) {
    const int inputs = what.inputs[epoch][comm.rank()];
    JoinOptions options{.min_active_ranks = what.min_active,
                        .leave_after_shadow_steps = leave_after,
                        .divide_by = what.divide_by};
    const absl::Status status = RunJoined(list, options, [&](JoinScope& scope) -> absl::Status {
      for (int step = 0; step < inputs; ++step) {
        const int batch = static_cast<int>(100 * epoch) + step;
        const bool syncs = step % what.accumulated == what.accumulated - 1;
        if (step % what.accumulated == 0) params.ClearGradients();
        float one = 1;
        std::vector<float> ranks(comm.world_size(), -1);
        float mine = static_cast<float>(comm.rank() + 1);
        EK_RETURN_IF_ERROR(scope.AllReduce(TensorView(absl::MakeSpan(&one, 1)), ReduceOp::kSum));
        outcome.counted.push_back(one);
        EK_RETURN_IF_ERROR(scope.AddSamples(1 + comm.rank()));
        EK_RETURN_IF_ERROR(ddp->BeginStep(syncs ? StepMode::kSync : StepMode::kAccumulate));
        EK_RETURN_IF_ERROR(
            scope.AllGather(TensorView(absl::MakeSpan(&mine, 1)), absl::MakeSpan(ranks)));
        outcome.counted.insert(outcome.counted.end(), ranks.begin(), ranks.end());
        model.Forward(comm.rank(), batch);
        EK_RETURN_IF_ERROR(model.Backward(comm.rank(), batch,
                                          [&](int param) { return ddp->GradientReady(param); }));
        EK_RETURN_IF_ERROR(ddp->FinishStep());
        if (!syncs) continue;
        if (!what.has_optimizer) {
          for (int p = 0; p < params.size(); ++p) {
            float* value = static_cast<float*>(params[p].value.data);
            const float* grad = static_cast<const float*>(params[p].grad.data);
            for (int64_t j = 0; j < params[p].value.count; ++j) value[j] -= 0.1f * grad[j];
          }
          continue;
        }
        EK_RETURN_IF_ERROR(optimizer->Step());
      }
      return scope.AddSamples(
          3);  // Not begun with any more, and counted in the next step of the others.
    });
    if (!status.ok() && !absl::IsOutOfRange(status)) return status;
    outcome.codes.push_back(status.code());
    EXPECT_EQ(&ddp->communicator(), &comm) << "back home";
    params.ClearGradients();
  }
  outcome.weights = model.values();
  outcome.buffer = model.buffer();
  outcome.steps_finished = what.has_optimizer ? optimizer->steps_finished() : 0;
  const OptimizerState state = optimizer->state();
  for (const auto& [param, entry] : state.params) {
    outcome.steps.push_back(entry.step);
    for (const auto& [name, tensor] : entry.tensors) {
      const auto values = tensor.as<float>();
      outcome.moments.emplace_back(values.begin(), values.end());
    }
  }
  return outcome;
}

absl::StatusOr<std::vector<Outcome>> TrainAll(const Case& what, int64_t leave_after) {
  const int world = static_cast<int>(what.inputs[0].size());
  std::vector<Outcome> outcomes(world);
  EK_RETURN_IF_ERROR(RunTestRanks(world, [&](Communicator& comm) -> absl::Status {
    EK_ASSIGN_OR_RETURN(outcomes[comm.rank()], Train(comm, what, leave_after));
    return absl::OkStatus();
  }));
  return outcomes;
}

class LeaveTest : public testing::TestWithParam<Case> {};

TEST_P(LeaveTest, EndsAsIfTheyHadShadowed) {
  const Case& what = GetParam();
  const absl::StatusOr<std::vector<Outcome>> shadowing =
      TrainAll(what, JoinOptions().leave_after_shadow_steps);
  ASSERT_TRUE(shadowing.ok()) << shadowing.status();
  for (const int64_t leave_after : {1, 2, 4}) {
    if (!TheTestBackend().is_in_full && leave_after != 2) continue;
    SCOPED_TRACE(leave_after);
    const absl::StatusOr<std::vector<Outcome>> leaving = TrainAll(what, leave_after);
    ASSERT_TRUE(leaving.ok()) << leaving.status();
    for (const Outcome& outcome : *leaving) EXPECT_EQ(outcome.weights, (*leaving)[0].weights);
    if (!TheTestBackend().adds_in_rank_order) continue;  // A smaller group adds in another order.
    for (size_t rank = 0; rank < shadowing->size(); ++rank) {
      SCOPED_TRACE(rank);
      const Outcome &a = (*leaving)[rank], &b = (*shadowing)[rank];
      EXPECT_EQ(a.weights, b.weights);
      EXPECT_EQ(a.buffer, b.buffer);
      EXPECT_EQ(a.moments, b.moments);
      EXPECT_EQ(a.steps, b.steps);
      EXPECT_EQ(a.steps_finished, b.steps_finished);
      EXPECT_EQ(a.codes, b.codes);
      EXPECT_EQ(a.counted, b.counted);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Cases, LeaveTest, testing::ValuesIn(kCases),
                         [](const testing::TestParamInfo<Case>& info) { return info.param.name; });

TEST(LeaveErrorTest, AnErrorOfTheLoopReachesThoseWhoHaveLeft) {
  std::vector<absl::Status> results(3);
  const absl::Status status = RunTestRanks(3, [&](Communicator& comm) -> absl::Status {
    ToyModel model(kSizes);
    EK_ASSIGN_OR_RETURN(auto ddp, DataParallel::Create(&comm, &model.params(), {}));
    ddp->SetOptimizerState({});
    results[comm.rank()] =
        RunJoined({ddp.get()}, {.leave_after_shadow_steps = 1}, [&](JoinScope&) -> absl::Status {
          for (int step = 0; step < 5 * comm.rank(); ++step) {
            if (step == 4) return absl::DataLossError("the disk is on fire");
            EK_RETURN_IF_ERROR(TakeStep(model, *ddp, comm.rank(), step));
          }
          return absl::OkStatus();
        });
    EXPECT_FALSE(ddp->BeginStep().ok()) << "it can still be called";
    return results[comm.rank()];
  });
  EXPECT_FALSE(status.ok());
  EXPECT_EQ(results[0].code(), absl::StatusCode::kUnavailable) << results[0];
  EXPECT_THAT(std::string(results[0].message()), HasSubstr("the disk is on fire"));
  EXPECT_THAT(std::string(results[0].message()), HasSubstr("failed in step 4 of its loop"));
}

// Returns what the joined loops of three ranks return. Rank 0 has no input, and leaves; the others
// take four steps before their `end`.
std::vector<absl::Status> ResultsWhereRank0Leaves(
    const std::function<absl::Status(Communicator&, const std::function<absl::Status()>& step)>&
        end) {
  std::vector<absl::Status> results(3);
  RunTestRanks(3, [&](Communicator& comm) -> absl::Status {
    ToyModel model(kSizes);
    EK_ASSIGN_OR_RETURN(auto ddp, DataParallel::Create(&comm, &model.params(), {}));
    ddp->SetOptimizerState({});
    int steps = 0;
    const auto step = [&] { return TakeStep(model, *ddp, comm.rank(), steps++); };
    return results[comm.rank()] = RunJoined({ddp.get()}, {.leave_after_shadow_steps = 1},
                                            [&](JoinScope&) -> absl::Status {
                                              if (comm.rank() == 0) return absl::OkStatus();
                                              while (steps < 4) EK_RETURN_IF_ERROR(step());
                                              return end(comm, step);
                                            });
  }).IgnoreError();
  return results;
}

// Rank 1 is 0 in the group without rank 0, from which it learns who failed.
TEST(LeaveErrorTest, TheCauseIsARankOfTheGroupThatTheLoopBeganIn) {
  const std::vector<absl::Status> results = ResultsWhereRank0Leaves(
      [](Communicator& comm, const std::function<absl::Status()>& step) -> absl::Status {
        if (comm.rank() == 2) return absl::DataLossError("the disk is on fire");
        for (int more = 0; more < 5; ++more) EK_RETURN_IF_ERROR(step());
        return absl::OkStatus();
      });
  for (int rank : {0, 1}) {
    const auto info = FailureInfoOf(results[rank]);
    ASSERT_TRUE(info.has_value()) << results[rank];
    EXPECT_EQ(info->kind, FailureKind::kRankFailed) << results[rank];
    EXPECT_EQ(info->ranks, std::vector<int>{2}) << results[rank];
  }
}

// A loop may watch the group that it began in.
TEST(LeaveErrorTest, AnErrorOfTheFirstGroupThatTheLoopReturnsKeepsItsCause) {
  const std::vector<absl::Status> results =
      ResultsWhereRank0Leaves([](Communicator& comm, const std::function<absl::Status()>&) {
        if (comm.rank() == 2) comm.Abort(absl::DataLossError("the disk is on fire"));
        const absl::Time deadline = absl::Now() + absl::Seconds(30);
        while (comm.status().ok() && absl::Now() < deadline) absl::SleepFor(absl::Milliseconds(1));
        return Annotate(comm.status(), "my loop");
      });
  const auto info = FailureInfoOf(results[1]);
  ASSERT_TRUE(info.has_value()) << results[1];
  EXPECT_EQ(info->ranks, std::vector<int>{2}) << results[1];
}

TEST(LeaveErrorTest, AJoinableThatCanNotMoveItsStateRefuses) {
  const absl::Status status = RunTestRanks(2, [&](Communicator& comm) -> absl::Status {
    ToyModel model(kSizes);
    EK_ASSIGN_OR_RETURN(auto ddp, DataParallel::Create(&comm, &model.params(), {}));
    EK_ASSIGN_OR_RETURN(auto sharded, Optimizer::Create(comm, model.params(), Sgd{},
                                                        {.placement = WholeTensors{}}));
    const absl::Status refused =
        RunJoined({ddp.get(), sharded.get()}, {.leave_after_shadow_steps = 5},
                  [](JoinScope&) { return absl::OkStatus(); });
    EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument) << refused;
    EXPECT_THAT(std::string(refused.message()), HasSubstr(sharded->join_name()));
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

// Ranks without inputs take every step, so replicas differ only where something else has written
// weights.
TEST(ReplicasTest, WeightsThatHaveDriftedAreNamedInTheNextUnevenStep) {
  const absl::Status status = RunTestRanks(3, [&](Communicator& comm) -> absl::Status {
    ToyModel model(kSizes);
    EK_ASSIGN_OR_RETURN(auto ddp, DataParallel::Create(&comm, &model.params(), {}));
    EK_ASSIGN_OR_RETURN(auto optimizer, Optimizer::Create(comm, model.params(), Sgd{}));
    JoinOptions options;
    options.on_exhausted = [&](int64_t) {
      static_cast<float*>(model.params()[2].value.data)[0] += 1;
    };
    const absl::Status ended =
        RunJoined({ddp.get(), optimizer.get()}, options, [&](JoinScope&) -> absl::Status {
          for (int step = 0; step < (comm.rank() == 1 ? 1 : 3); ++step) {
            EK_RETURN_IF_ERROR(TakeStep(model, *ddp, comm.rank(), step));
            EK_RETURN_IF_ERROR(optimizer->Step());
          }
          return absl::OkStatus();
        });
    EXPECT_THAT(
        std::string(ended.message()),
        HasSubstr("\"p2\" is not equal on all ranks when step 2 of optimizer#0 begins: rank 1 has "
                  "no more input"));
    return ended;
  });
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
}

// The remaining cost of a rank that has left, for the others and for itself: nothing on the data
// plane, no control message but heartbeats.
TEST(LeaveCostTest, ARankThatHasLeftIssuesAndIsSentNothing) {
  const absl::Status status = RunTestRanks(3, [&](Communicator& comm) -> absl::Status {
    ToyModel model(kSizes);
    EK_ASSIGN_OR_RETURN(auto ddp, DataParallel::Create(&comm, &model.params(), {}));
    EK_ASSIGN_OR_RETURN(auto optimizer, Optimizer::Create(comm, model.params(), Sgd{}));
    int64_t messages = 0, collectives = 0;
    auto sent = [&] { return comm.control().link().Counters().messages_sent; };
    EK_RETURN_IF_ERROR(
        RunJoined({ddp.get(), optimizer.get()}, {.leave_after_shadow_steps = 2},
                  [&](JoinScope&) -> absl::Status {
                    for (int step = 0; step < (comm.rank() == 0 ? 1 : 30); ++step) {
                      if (step == 10) messages = sent();
                      if (step == 10)
                        collectives = (*comm.OpenChannel(ddp->join_name()))->position();
                      EK_RETURN_IF_ERROR(TakeStep(model, *ddp, comm.rank(), step));
                      EK_RETURN_IF_ERROR(optimizer->Step());
                    }
                    if (comm.rank() > 0) {
                      EXPECT_EQ(sent(), messages);
                      EXPECT_EQ((*comm.OpenChannel(ddp->join_name()))->position(), collectives);
                    }
                    return absl::OkStatus();
                  }));
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

}  // namespace
}  // namespace evenkeel
