#include "evenkeel/bucket/layers/sync_batch_norm.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/testing/tested_group.h"
#include "evenkeel/join/join.h"
#include "evenkeel/join/joinable.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

using testing::HasSubstr;

constexpr int64_t kChannels = 3, kSpatial = 4;
constexpr int64_t kSample = kChannels * kSpatial;
// Sums of less than 200 terms below 8, in another order, divided by a deviation above 0.3; running
// statistics and outputs stay below 16: 200 * 16 * 2^-53 / 0.3 is 1.2e-12.
constexpr double kTolerance = 2e-12;

// The values do not centre around zero, so that a careless variance would lose digits.
double Value(int what, int rank, int step, int64_t i) {
  return 3.0 +
         std::sin(0.7 * what + 12.9898 * rank + 78.233 * step + 0.317 * static_cast<double>(i));
}
int StepsOf(int rank, int world) { return rank == 0 && world > 1 ? 0 : 1 + (2 * rank) % 5; }
int64_t SamplesOf(int rank, int step) {
  return (rank + 2 * step) % 4 + (rank == 1 ? 0 : 1);
}  // Sometimes none.

struct Batch {
  std::vector<double> input, grad_output, output, grad_input;
  int64_t samples = 0;

  void Add(int rank, int step) {
    const int64_t more = SamplesOf(rank, step);
    samples += more;
    for (int64_t i = 0; i < more * kSample; ++i) {
      input.push_back(Value(0, rank, step, i));
      grad_output.push_back(Value(1, rank, step, i) - 3.0);
    }
    output.resize(input.size());
    grad_input.resize(input.size());
  }
};

struct State {
  std::vector<double> gamma = {1.5, -0.5, 2.0}, beta = {0.1, 0.2, -0.3};
  std::vector<double> mean = std::vector<double>(kChannels),
                      variance = std::vector<double>(kChannels, 1.0);
  std::vector<double> grad_gamma = std::vector<double>(kChannels),
                      grad_beta = std::vector<double>(kChannels);
};

absl::Status Compute(JoinScope& scope, SyncBatchNorm& norm, State& state, Batch& batch) {
  EK_RETURN_IF_ERROR(norm.Forward(
      scope, {.samples = batch.samples, .spatial = kSpatial}, absl::MakeSpan(batch.input),
      {absl::MakeSpan(state.gamma), absl::MakeSpan(state.beta)},
      {absl::MakeSpan(state.mean), absl::MakeSpan(state.variance)}, absl::MakeSpan(batch.output)));
  return norm.Backward(scope, absl::MakeSpan(batch.grad_output), absl::MakeSpan(state.gamma),
                       {absl::MakeSpan(batch.grad_input), absl::MakeSpan(state.grad_gamma),
                        absl::MakeSpan(state.grad_beta)});
}

class Ticker : public Joinable {
 public:
  explicit Ticker(Communicator* comm) : Joinable(comm, "ticker") {}
  absl::Status Tick() { return Notify().status(); }
  absl::StatusOr<std::unique_ptr<JoinHook>> MakeJoinHook(const JoinOptions&) override {
    return std::make_unique<JoinHook>();
  }
};

// One process, with the batches of all ranks one after the other.
struct Alone {
  std::vector<Batch> steps;
  std::vector<State> states;  // After each.
};

Alone TrainAlone(int world) {
  Alone alone;
  int steps = 0;
  for (int rank = 0; rank < world; ++rank) steps = std::max(steps, StepsOf(rank, world));
  const absl::Status status = RunTestRanks(1, [&](Communicator& comm) -> absl::Status {
    JoinScope scope(&comm, /*is_followed=*/false);
    SyncBatchNorm norm({.channels = kChannels});
    State state;
    for (int step = 0; step < steps; ++step) {
      Batch batch;
      for (int rank = 0; rank < world; ++rank) {
        if (step < StepsOf(rank, world)) batch.Add(rank, step);
      }
      EK_RETURN_IF_ERROR(Compute(scope, norm, state, batch));
      alone.steps.push_back(batch);
      alone.states.push_back(state);
    }
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
  return alone;
}

void ExpectClose(absl::Span<const double> mine, absl::Span<const double> expected) {
  ASSERT_EQ(mine.size(), expected.size());
  for (size_t i = 0; i < mine.size(); ++i) EXPECT_NEAR(mine[i], expected[i], kTolerance) << i;
}

class SyncBatchNormTest : public testing::TestWithParam<int> {};

TEST_P(SyncBatchNormTest, UnevenRanksComputeWhatOneProcessDoes) {
  const int world = GetParam();
  const Alone alone = TrainAlone(world);
  std::vector<std::vector<State>> states(alone.steps.size(), std::vector<State>(world));
  const absl::Status status = RunTestRanks(world, [&](Communicator& comm) -> absl::Status {
    Ticker ticker(&comm);
    SyncBatchNorm norm({.channels = kChannels});
    State state;
    return RunJoined({&ticker}, {}, [&](JoinScope& scope) -> absl::Status {
      for (int step = 0; step < StepsOf(comm.rank(), world); ++step) {
        Batch batch;
        batch.Add(comm.rank(), step);
        EK_RETURN_IF_ERROR(Compute(scope, norm, state,
                                   batch));  // Before the step: nobody knows yet who takes part.
        EK_RETURN_IF_ERROR(ticker.Tick());
        int64_t first = 0;
        for (int rank = 0; rank < comm.rank(); ++rank) {
          if (step < StepsOf(rank, world)) first += SamplesOf(rank, step) * kSample;
        }
        const Batch& whole = alone.steps[step];
        ExpectClose(batch.output,
                    absl::MakeConstSpan(whole.output).subspan(first, batch.output.size()));
        ExpectClose(batch.grad_input,
                    absl::MakeConstSpan(whole.grad_input).subspan(first, batch.output.size()));
        ExpectClose(state.mean, alone.states[step].mean);
        ExpectClose(state.variance, alone.states[step].variance);
        states[step][comm.rank()] = state;
      }
      return absl::OkStatus();
    });
  });
  EXPECT_TRUE(status.ok()) << status;
  for (size_t step = 0; step < alone.steps.size(); ++step) {
    State sum;
    for (int rank = 0; rank < world; ++rank) {
      if (static_cast<int>(step) >= StepsOf(rank, world)) continue;
      for (int64_t c = 0; c < kChannels; ++c) {
        sum.grad_gamma[c] += states[step][rank].grad_gamma[c];
        sum.grad_beta[c] += states[step][rank].grad_beta[c];
      }
    }
    ExpectClose(sum.grad_gamma, alone.states[step].grad_gamma);
    ExpectClose(sum.grad_beta, alone.states[step].grad_beta);
  }
}

INSTANTIATE_TEST_SUITE_P(Worlds, SyncBatchNormTest, testing::Values(1, 2, 3, 5));

// The gradient of the sum of squares of the outputs, against differences.
TEST(SyncBatchNormTest, BackwardIsTheGradient) {
  const absl::Status status = RunTestRanks(1, [](Communicator& comm) -> absl::Status {
    JoinScope scope(&comm, /*is_followed=*/false);
    SyncBatchNorm norm({.channels = kChannels});
    auto loss = [&](const Batch& at) -> absl::StatusOr<double> {
      Batch batch = at;
      State state;
      EK_RETURN_IF_ERROR(Compute(scope, norm, state, batch));
      double sum = 0;
      for (size_t i = 0; i < batch.output.size(); ++i)
        sum += batch.output[i] * batch.grad_output[i];
      return sum;
    };
    Batch batch;
    batch.Add(0, 1);
    State state;
    EK_RETURN_IF_ERROR(Compute(scope, norm, state, batch));
    for (size_t i = 0; i < batch.input.size(); i += 5) {
      constexpr double kStep = 1e-5;
      Batch above = batch, below = batch;
      above.input[i] += kStep;
      below.input[i] -= kStep;
      EK_ASSIGN_OR_RETURN(const double high, loss(above));
      EK_ASSIGN_OR_RETURN(const double low, loss(below));
      EXPECT_NEAR(batch.grad_input[i], (high - low) / (2 * kStep), 1e-7) << i;
    }
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(SyncBatchNormTest, RefusesWhatItCanNotDo) {
  const absl::Status status = RunTestRanks(1, [](Communicator& comm) -> absl::Status {
    JoinScope scope(&comm, /*is_followed=*/false);
    SyncBatchNorm norm({.channels = kChannels});
    State state;
    Batch none;
    const absl::Status empty = Compute(scope, norm, state, none);
    EXPECT_TRUE(empty.ok()) << "as in other frameworks: " << empty;
    EXPECT_THAT(state.variance, testing::Each(1.0));
    Batch batch;
    batch.Add(0, 0);
    batch.output.pop_back();
    const absl::Status shape = Compute(scope, norm, state, batch);
    EXPECT_EQ(shape.code(), absl::StatusCode::kInvalidArgument) << shape;
    EXPECT_EQ(norm.Backward(scope, {}, {}, {}).code(), absl::StatusCode::kFailedPrecondition);
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

}  // namespace
}  // namespace evenkeel
