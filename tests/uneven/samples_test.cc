// Gradients that are sums over samples, divided by all ranks' samples: N ranks with batches of any
// sizes, also none, with accumulation, and with ranks that become exhausted, train like one process
// that has all samples of a step at once.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "absl/types/span.h"
#include "evenkeel/bucket/data_parallel.h"
#include "evenkeel/bucket/parameter_set.h"
#include "evenkeel/comm/failure_info.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/testing/tested_group.h"
#include "evenkeel/join/join.h"
#include "evenkeel/zero_optim/optimizer.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

using testing::HasSubstr;

constexpr int kWidth = 5;
constexpr double kRate = 0.05, kMomentum = 0.9;
// Weights stay below 4; each of at most 12 updates sums up to 60 terms below 10 in another order:
// 12 * 60 * 10 * 2^-53, which momentum amplifies by less than 10.
constexpr double kTolerance = 1e-12;

struct Weights {
  std::vector<double> w = std::vector<double>(kWidth, 0.25);
  std::vector<double> b = {0.5};
};

// In [-1, 1), the same everywhere.
double Noise(int a, int b, int c, int d) {
  return std::sin(1.0 + 12.9898 * a + 78.233 * b + 37.719 * c + 4.581 * d);
}

int StepsOf(int rank, int world) { return rank == world - 1 ? 9 : (4 * rank + 1) % 8; }
int SamplesOf(int rank, int step) { return (3 * rank + 2 * step + 1) % 5; }  // Also none.

// Adds the gradients of 0.5 (x w + b - y)^2 over a batch, not divided by anything.
void AddGradients(const Weights& at, int rank, int step, Weights& sum) {
  for (int s = 0; s < SamplesOf(rank, step); ++s) {
    double error = at.b[0] - Noise(rank, step, s, kWidth);
    for (int j = 0; j < kWidth; ++j) error += Noise(rank, step, s, j) * at.w[j];
    for (int j = 0; j < kWidth; ++j) sum.w[j] += error * Noise(rank, step, s, j);
    sum.b[0] += error;
  }
}

bool Syncs(int accumulated, int step) { return step % accumulated == accumulated - 1; }

Weights TrainAlone(int world, int accumulated) {
  Weights weights, velocity{std::vector<double>(kWidth, 0.0), {0.0}};
  Weights sum{std::vector<double>(kWidth, 0.0), {0.0}};
  int64_t samples = 0;
  for (int step = 0; step < 9; ++step) {
    for (int rank = 0; rank < world; ++rank) {
      if (step >= StepsOf(rank, world)) continue;
      AddGradients(weights, rank, step, sum);
      samples += SamplesOf(rank, step);
    }
    if (!Syncs(accumulated, step)) continue;
    auto update = [&](std::vector<double>& value, std::vector<double>& moment,
                      std::vector<double>& gradient) {
      for (size_t j = 0; j < value.size(); ++j) {
        moment[j] = kMomentum * moment[j] +
                    (samples > 0 ? gradient[j] / static_cast<double>(samples) : 0.0);
        value[j] -= kRate * moment[j];
        gradient[j] = 0;
      }
    };
    update(weights.w, velocity.w, sum.w);
    update(weights.b, velocity.b, sum.b);
    samples = 0;
  }
  return weights;
}

enum class Kind { kUnsharded, kSharded, kShardedAlone };

absl::StatusOr<Weights> Train(Communicator& comm, Kind kind, int accumulated) {
  Weights weights, gradients;
  ParameterSet params;
  params.Add("w", absl::MakeSpan(weights.w), absl::MakeSpan(gradients.w));
  params.Add("b", absl::MakeSpan(weights.b), absl::MakeSpan(gradients.b));
  const Sgd rule{.learning_rate = kRate, .momentum = kMomentum};
  std::unique_ptr<DataParallel> ddp;
  std::vector<Joinable*> list;
  if (kind != Kind::kShardedAlone) {
    EK_ASSIGN_OR_RETURN(ddp, DataParallel::Create(&comm, &params, {}));
    list.push_back(ddp.get());
  }
  OptimizerOptions options;
  if (kind != Kind::kUnsharded) options.placement = WholeTensors{};
  EK_ASSIGN_OR_RETURN(auto optimizer, Optimizer::Create(comm, params, rule, options));
  list.push_back(optimizer.get());
  EK_RETURN_IF_ERROR(
      RunJoined(list, {.divide_by = DivideBy::kSamples}, [&](JoinScope& scope) -> absl::Status {
        for (int step = 0; step < StepsOf(comm.rank(), comm.world_size()); ++step) {
          const bool syncs = Syncs(accumulated, step);
          if (step % accumulated == 0) params.ClearGradients();
          EK_RETURN_IF_ERROR(scope.AddSamples(SamplesOf(comm.rank(), step)));
          if (ddp != nullptr)
            EK_RETURN_IF_ERROR(ddp->BeginStep(syncs ? StepMode::kSync : StepMode::kAccumulate));
          Weights sum{std::vector<double>(kWidth, 0.0), {0.0}};
          AddGradients(weights, comm.rank(), step, sum);
          for (int p = 0; p < 2; ++p) {
            const std::vector<double>& own = p == 0 ? sum.w : sum.b;
            double* grad = static_cast<double*>(params[p].grad.data);
            const bool adds = params.grad_state(p) != GradState::kNone;
            for (size_t j = 0; j < own.size(); ++j) grad[j] = adds ? grad[j] + own[j] : own[j];
            params.SetGradState(p, GradState::kLocal);
            if (ddp != nullptr) EK_RETURN_IF_ERROR(ddp->GradientReady(p));
          }
          if (ddp != nullptr) EK_RETURN_IF_ERROR(ddp->FinishStep());
          if (!syncs) continue;
          EK_RETURN_IF_ERROR(optimizer->Step());
        }
        return absl::OkStatus();
      }));
  return weights;
}

double Farthest(const std::vector<double>& a, const std::vector<double>& b) {
  double farthest = 0;
  for (size_t j = 0; j < a.size(); ++j) farthest = std::max(farthest, std::abs(a[j] - b[j]));
  return farthest;
}

std::string NameOf(const testing::TestParamInfo<std::tuple<int, Kind, int>>& info) {
  const char* const kinds[] = {"unsharded", "sharded", "sharded_alone"};
  return absl::StrCat("world", std::get<0>(info.param), "_",
                      kinds[static_cast<int>(std::get<1>(info.param))], "_every",
                      std::get<2>(info.param));
}

class SamplesTest : public testing::TestWithParam<std::tuple<int, Kind, int>> {};

TEST_P(SamplesTest, EverySampleWeighsTheSameWhoeverHasIt) {
  const auto [world, kind, accumulated] = GetParam();
  const Weights alone = TrainAlone(world, accumulated);
  const absl::Status status = RunTestRanks(
      world, [&, kind = kind, accumulated = accumulated](Communicator& comm) -> absl::Status {
        EK_ASSIGN_OR_RETURN(const Weights mine, Train(comm, kind, accumulated));
        EXPECT_LE(Farthest(mine.w, alone.w), kTolerance) << "rank " << comm.rank();
        EXPECT_LE(Farthest(mine.b, alone.b), kTolerance) << "rank " << comm.rank();
        return absl::OkStatus();
      });
  EXPECT_TRUE(status.ok()) << status;
}

INSTANTIATE_TEST_SUITE_P(Worlds, SamplesTest,
                         testing::Combine(testing::Values(1, 2, 3, 5),
                                          testing::Values(Kind::kUnsharded, Kind::kSharded,
                                                          Kind::kShardedAlone),
                                          testing::Values(1, 3)),
                         NameOf);

// Backward passes that one loop accumulates and a later one reduces, or drops. Each sample has the
// gradient 1, so each update subtracts 1 if exactly the samples in the gradients are counted.
struct Carried {
  std::string name;
  // By loop, and by rank modulo their number: `a` accumulates a batch, `s` reduces one and updates,
  // `c` clears the gradients, `C` before the loop.
  std::vector<std::vector<std::string>> loops;
  int updates = 1;
};

const Carried kCarried[] = {
    {"OverTheEndOfALoop", {{"aa"}, {"s"}}},
    {"OverTwoEnds", {{"a"}, {"aa"}, {"s"}}},
    {"ByOneRank", {{"aa", "a", ""}, {"s"}}},
    {"ByARankWithoutInputsLater", {{"aa"}, {"as", "", "as"}}},
    {"ByARankThatEndsFirst", {{"aaas", "a", "aa"}}},
    {"ClearedBetweenTheLoops", {{"aa"}, {"Cs"}}},
    {"ClearedAfterTheLoop", {{"aa"}, {"cs"}}},
    {"ClearedInTheLoop", {{"aacs"}}},
    {"ClearedByItsState", {{"aans"}}},
    {"ClearedAtTheEnd", {{"aas", "aac"}, {"as"}}, 2},
    {"ClearedBeforeItsEnd", {{"aca"}, {"s"}}},
    {"ClearedByOneRank", {{"aa"}, {"cas", "as"}}},
    {"AndAgain", {{"a"}, {"sa"}, {"sas"}}, 3},
};

// Several steps in a loop of a model of one weight.
struct OneWeight {
  double weight = 0, gradient = 0;
  ParameterSet params;
  std::unique_ptr<DataParallel> ddp;
  std::unique_ptr<Optimizer> optimizer;

  absl::Status Create(Communicator& comm, Placement placement, bool has_reducer) {
    params.Add("w", absl::MakeSpan(&weight, 1), absl::MakeSpan(&gradient, 1));
    const Sgd rule{.learning_rate = 1};
    if (!has_reducer) {
      EK_ASSIGN_OR_RETURN(optimizer,
                          Optimizer::Create(comm, params, rule, {.placement = placement}));
      return absl::OkStatus();
    }
    EK_ASSIGN_OR_RETURN(ddp, DataParallel::Create(&comm, &params, {}));
    EK_ASSIGN_OR_RETURN(optimizer, Optimizer::Create(*ddp, rule, {.placement = placement}));
    return absl::OkStatus();
  }
  std::vector<Joinable*> list() {
    return ddp == nullptr ? std::vector<Joinable*>{optimizer.get()}
                          : std::vector<Joinable*>{ddp.get(), optimizer.get()};
  }
  absl::Status Backward(JoinScope& scope, int samples, StepMode mode) {
    EK_RETURN_IF_ERROR(scope.AddSamples(samples));
    if (ddp != nullptr) EK_RETURN_IF_ERROR(ddp->BeginStep(mode));
    double& sum = *static_cast<double*>(params[0].grad.data);
    sum = (params.grad_state(0) == GradState::kNone ? 0 : sum) + samples;
    params.SetGradState(0, GradState::kLocal);
    if (ddp == nullptr) return absl::OkStatus();
    EK_RETURN_IF_ERROR(ddp->GradientReady(0));
    return ddp->FinishStep();
  }
  absl::Status Do(char action, JoinScope& scope, int samples) {
    if (action == 'c') {
      params.ClearGradients();
      return absl::OkStatus();
    }
    if (action == 'n') {
      params.SetGradState(0, GradState::kNone);
      return absl::OkStatus();
    }
    EK_RETURN_IF_ERROR(
        Backward(scope, samples, action == 's' ? StepMode::kSync : StepMode::kAccumulate));
    if (action == 'a') return absl::OkStatus();
    EK_RETURN_IF_ERROR(optimizer->Step());
    params.ClearGradients();
    return absl::OkStatus();
  }
};

class CarriedSamplesTest : public testing::TestWithParam<Carried> {};

TEST_P(CarriedSamplesTest, CountIfTheirGradientsDo) {
  const Carried& what = GetParam();
  for (const int world : {1, 2, 3}) {
    for (const auto& [placement, has_reducer] :
         std::vector<std::pair<Placement, bool>>{{Replicated{}, true},
                                                 {Replicated{.update_in_backward = true}, true},
                                                 {WholeTensors{}, true},
                                                 {WholeTensors{}, false},
                                                 {Slices{}, true}}) {
      SCOPED_TRACE(absl::StrCat(world, " ranks, placement ", placement.index(), " ", has_reducer));
      const bool updates_early = placement == Placement(Replicated{.update_in_backward = true});
      bool clears = false;
      const auto run = [&, &placement = placement,
                        has_reducer = has_reducer](Communicator& comm) -> absl::Status {
        OneWeight model;
        EK_RETURN_IF_ERROR(model.Create(comm, placement, has_reducer));
        int samples = comm.rank();
        const auto train = [&](JoinScope& scope, const std::string& actions) -> absl::Status {
          for (const char action : actions) {
            samples = samples % 4 + 1;
            EK_RETURN_IF_ERROR(updates_early && action == 's'
                                   ? model.Backward(scope, samples, StepMode::kSync)
                                   : model.Do(action, scope, samples));
          }
          return absl::OkStatus();
        };
        for (const std::vector<std::string>& by_rank : what.loops) {
          for (int rank = 0; rank < world && comm.rank() == 0; ++rank)
            clears =
                clears || by_rank[rank % by_rank.size()].find_first_of("cn") != std::string::npos;
          absl::string_view actions = by_rank[comm.rank() % by_rank.size()];
          if (absl::ConsumePrefix(&actions, "C")) model.params.ClearGradients();
          EK_RETURN_IF_ERROR(
              RunJoined(model.list(), {.divide_by = DivideBy::kSamples},
                        [&](JoinScope& scope) { return train(scope, std::string(actions)); }));
        }
        EXPECT_NEAR(model.weight, -what.updates, 1e-12) << "rank " << comm.rank();
        return absl::OkStatus();
      };
      const absl::Status status = RunTestRanks(world, run);
      if (clears && !has_reducer) {  // No record has the dropped samples.
        EXPECT_THAT(std::string(status.message()), HasSubstr("were cleared in the loop"));
      } else {
        EXPECT_TRUE(status.ok()) << status;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Programs, CarriedSamplesTest, testing::ValuesIn(kCarried),
                         [](const auto& info) { return info.param.name; });

TEST(SamplesTest, OfModelsThatAreTrainedInTurnsEachHasItsOwn) {
  const absl::Status status = RunTestRanks(2, [](Communicator& comm) -> absl::Status {
    OneWeight first, second;
    EK_RETURN_IF_ERROR(first.Create(comm, Replicated{}, true));
    EK_RETURN_IF_ERROR(second.Create(comm, WholeTensors{}, true));
    std::vector<Joinable*> list = first.list();
    list.insert(list.end(), {second.ddp.get(), second.optimizer.get()});
    EK_RETURN_IF_ERROR(
        RunJoined(list, {.divide_by = DivideBy::kSamples}, [&](JoinScope& scope) -> absl::Status {
          for (int step = 0; step < 2 + comm.rank(); ++step) {
            EK_RETURN_IF_ERROR(first.Do('a', scope, 2 + comm.rank()));
            EK_RETURN_IF_ERROR(second.Do('s', scope, 5));  // In the middle of the first's step.
            EK_RETURN_IF_ERROR(first.Do('s', scope, 1));
          }
          return absl::OkStatus();
        }));
    EXPECT_NEAR(first.weight, -3, 1e-12) << "rank " << comm.rank();
    EXPECT_NEAR(second.weight, -3, 1e-12) << "rank " << comm.rank();
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(SamplesErrorTest, GradientsOfStepsWithoutANumberAreRefused) {
  const absl::Status status = RunTestRanks(2, [](Communicator& comm) -> absl::Status {
    OneWeight model;
    EK_RETURN_IF_ERROR(model.Create(comm, Replicated{}, true));
    EK_RETURN_IF_ERROR(RunJoined(model.list(), {}, [&](JoinScope&) -> absl::Status {
      EK_RETURN_IF_ERROR(model.ddp->BeginStep(StepMode::kAccumulate));
      model.gradient = 1;
      model.params.SetGradState(0, GradState::kLocal);
      EK_RETURN_IF_ERROR(model.ddp->GradientReady(0));
      return model.ddp->FinishStep();
    }));
    return RunJoined(model.list(), {.divide_by = DivideBy::kSamples},
                     [&](JoinScope& scope) { return model.Do('s', scope, 3); });
  });
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("accumulated without a number of samples"));
}

TEST(SamplesErrorTest, AGroupWithoutASampleHasZerosAndNoNan) {
  const absl::Status status = RunTestRanks(2, [](Communicator& comm) -> absl::Status {
    std::vector<double> weights = {1.0}, gradients = {0.0};
    ParameterSet params;
    params.Add("w", absl::MakeSpan(weights), absl::MakeSpan(gradients));
    EK_ASSIGN_OR_RETURN(const auto ddp, DataParallel::Create(&comm, &params, {}));
    return RunJoined({ddp.get()}, {.divide_by = DivideBy::kSamples},
                     [&](JoinScope& scope) -> absl::Status {
                       EK_RETURN_IF_ERROR(scope.AddSamples(0));
                       EK_RETURN_IF_ERROR(ddp->BeginStep());
                       params.SetGradState(0, GradState::kLocal);
                       EK_RETURN_IF_ERROR(ddp->GradientReady(0));
                       EK_RETURN_IF_ERROR(ddp->FinishStep());
                       EXPECT_EQ(gradients[0], 0.0);
                       return absl::OkStatus();
                     });
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(SamplesErrorTest, WhoDoesNotSayHowManyIsNamedOnAllRanks) {
  std::vector<absl::Status> results(3);
  const absl::Status status = RunTestRanks(3, [&](Communicator& comm) -> absl::Status {
    std::vector<double> weights = {1.0}, gradients = {0.0};
    ParameterSet params;
    params.Add("w", absl::MakeSpan(weights), absl::MakeSpan(gradients));
    EK_ASSIGN_OR_RETURN(const auto ddp, DataParallel::Create(&comm, &params, {}));
    return results[comm.rank()] = RunJoined({ddp.get()}, {.divide_by = DivideBy::kSamples},
                                            [&](JoinScope& scope) -> absl::Status {
                                              EXPECT_EQ(scope.AddSamples(-2).code(),
                                                        absl::StatusCode::kInvalidArgument);
                                              if (comm.rank() != 1)
                                                EK_RETURN_IF_ERROR(scope.AddSamples(4));
                                              EK_RETURN_IF_ERROR(ddp->BeginStep());
                                              params.SetGradState(0, GradState::kLocal);
                                              EK_RETURN_IF_ERROR(ddp->GradientReady(0));
                                              return ddp->FinishStep();
                                            });
  });
  EXPECT_FALSE(status.ok());
  for (const absl::Status& result : results) {
    EXPECT_THAT(std::string(result.message()), HasSubstr("rank 1 passed no number"));
    EXPECT_EQ(FailureInfoOf(result), (FailureInfo{.ranks = {1}, .step = 1}));
  }
}

}  // namespace
}  // namespace evenkeel
