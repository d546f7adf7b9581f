// Every pattern of 0 to 3 inputs per rank, at world sizes 2, 3 and 5: training always ends, and on
// all ranks weights and optimizer state are those that one process computes from the same sums, bit
// for bit. Two epochs each, the second with the pattern rotated by a rank, so that what the first
// left behind (stale moments, plans, flags) would show.

#include <algorithm>
#include <memory>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/types/span.h"
#include "evenkeel/bucket/data_parallel.h"
#include "evenkeel/bucket/testing/toy_model.h"
#include "evenkeel/comm/local/local.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/testing/tested_group.h"
#include "evenkeel/join/join.h"
#include "evenkeel/zero_optim/optimizer.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

const std::vector<int> kSizes = {3, 7, 1, 5, 2};
const std::vector<Bytes> kCaps = {Bytes{8}, Bytes{24}};
constexpr int kEpochs = 2;

enum class Optimizing { kUnsharded, kSharded, kShardedAlone };

struct Scenario {
  UpdateRule rule = Sgd{.learning_rate = 0.1, .momentum = 0.9};
  Optimizing optimizing = Optimizing::kUnsharded;
  bool buffers = false;
  bool views = false;
  bool freezing = false;  // p1 is frozen in the third step of an epoch; p3 is not trained before
                          // the second step of all.
  bool accumulating = false;  // The first step of an epoch does not synchronise.
  bool initial_divisor = true;
  bool optimizer_first = false;  // In RunJoined()'s list.
  int count_at = 0;  // Where in the step a user's collective is: 1 first, 2 in forward, 3 last.
  bool relative_rate = false;  // The learning rate is multiplied after each step, as schedulers do.
};

// Returns whether a step of an epoch synchronises, the same on every rank with an input for it.
bool Syncs(const Scenario& scenario, int step) { return !scenario.accumulating || step % 3 != 0; }

void SetTrainable(const Scenario& scenario, int epoch, int step, ParameterSet& params) {
  if (!scenario.freezing) return;
  params.SetTrainable("p1", step != 2);
  params.SetTrainable("p3", epoch > 0 || step >= 1);
}

std::string InputsText(const std::vector<int>& pattern) {
  return absl::StrCat("inputs ", absl::StrJoin(pattern, ","));
}

int InputsOf(const std::vector<int>& pattern, int rank, int epoch) {
  return pattern[(rank + epoch) % pattern.size()];
}

double LearningRate(int epoch, int step) { return 0.1 / (1 + epoch + 0.5 * step); }

// A user's own collective in the loop: adds up a one from each rank that has inputs.
class Counter : public Joinable {
 public:
  explicit Counter(Communicator* comm)
      : Joinable(comm, "counter"), channel_(*comm->OpenChannel(join_name())) {}
  absl::Status Count() {
    EK_RETURN_IF_ERROR(Notify().status());
    return Add(1.0f);
  }
  absl::StatusOr<std::unique_ptr<JoinHook>> MakeJoinHook(const JoinOptions&) override {
    return std::make_unique<Hook>(this);
  }
  float total = 0;

 private:
  struct Hook : JoinHook {
    explicit Hook(Counter* counter) : counter(counter) {}
    absl::Status MainHook(const StepAnswer&) override { return counter->Add(0.0f); }
    Counter* const counter;
  };
  absl::Status Add(float one) {
    EK_RETURN_IF_ERROR(
        channel_->AllReduce(TensorView(&one, 1, DType::kFloat32), ReduceOp::kSum).Wait());
    total += one;
    return absl::OkStatus();
  }
  Channel* const channel_;
};

// One step of an optimizer with what a program does around it.
absl::Status StepWithRate(const Scenario& scenario, int epoch, int step, Optimizer& optimizer) {
  if (!scenario.relative_rate)
    EK_RETURN_IF_ERROR(optimizer.SetLearningRate(LearningRate(epoch, step)));
  EK_RETURN_IF_ERROR(optimizer.Step());
  if (!scenario.relative_rate) return absl::OkStatus();
  return optimizer.SetLearningRate(0.5 * evenkeel::LearningRate(optimizer.groups()[0].rule));
}

struct Outcome {
  std::vector<std::vector<float>> values;
  std::vector<float> buffer;
  OptimizerState state;
};

// One process that holds a replica per rank, and adds gradients in rank order.
absl::StatusOr<Outcome> Simulate(const Scenario& scenario, const std::vector<int>& pattern,
                                 Communicator& single_rank) {
  const int world = static_cast<int>(pattern.size());
  ToyModel master(kSizes);
  EK_ASSIGN_OR_RETURN(auto optimizer,
                      Optimizer::Create(single_rank, master.params(), scenario.rule));
  std::vector<std::unique_ptr<ToyModel>> replicas;
  for (int r = 0; r < world; ++r) replicas.push_back(std::make_unique<ToyModel>(kSizes));
  auto nothing = [](int) -> absl::Status { return absl::OkStatus(); };

  bool last_synced = true;
  for (int epoch = 0; epoch < kEpochs; ++epoch) {
    std::vector<int> inputs;
    for (int r = 0; r < world; ++r) inputs.push_back(InputsOf(pattern, r, epoch));
    const int steps = *std::max_element(inputs.begin(), inputs.end());
    bool clear = true;
    int last_root = -1;
    for (int step = 0; step < steps; ++step) {
      int active = 0, root = -1;
      for (int r = 0; r < world; ++r) {
        if (inputs[r] <= step) continue;
        ++active;
        root = r;
      }
      last_root = root;
      SetTrainable(scenario, epoch, step, master.params());
      for (int r = 0; r < world; ++r) {
        if (scenario.buffers && last_synced) replicas[r]->buffer() = replicas[root]->buffer();
        replicas[r]->CopyValuesFrom(master);
        EK_RETURN_IF_ERROR(replicas[r]->params().SetTrainable(master.params().mask()));
        if (inputs[r] <= step) continue;
        if (clear) replicas[r]->params().ClearGradients();
        replicas[r]->Forward(r, 10 * epoch + step);
        EK_RETURN_IF_ERROR(replicas[r]->Backward(r, 10 * epoch + step, nothing));
      }
      clear = last_synced = Syncs(scenario, step);
      if (!last_synced) continue;
      const float scale = static_cast<float>(1.0 / (scenario.initial_divisor ? world : active));
      master.params().ClearGradients();
      for (int p = 0; p < master.params().size(); ++p) {
        if (!master.params().trainable(p)) continue;
        float* sum = static_cast<float*>(master.params()[p].grad.data);
        std::fill(sum, sum + kSizes[p], 0.0f);
        for (int r = 0; r < world; ++r) {
          if (replicas[r]->params().grad_state(p) != GradState::kLocal) continue;
          const std::vector<float> gradient = replicas[r]->Gradient(p);
          for (int j = 0; j < kSizes[p]; ++j) sum[j] += gradient[j];
        }
        for (int j = 0; j < kSizes[p]; ++j) sum[j] *= scale;
        master.params().SetGradState(p, GradState::kReduced);
      }
      for (auto& replica : replicas) replica->params().ClearGradients();
      EK_RETURN_IF_ERROR(StepWithRate(scenario, epoch, step, *optimizer));
    }
    const bool uneven = *std::min_element(inputs.begin(), inputs.end()) != steps;
    for (int r = 0; r < world; ++r) {
      replicas[r]->params().ClearGradients();
      if (scenario.buffers && uneven) replicas[r]->buffer() = replicas[last_root]->buffer();
    }
  }
  return Outcome{master.values(), replicas[0]->buffer(), optimizer->state()};
}

// A user's program on one rank.
absl::StatusOr<Outcome> Train(const Scenario& scenario, const std::vector<int>& pattern,
                              Communicator& comm) {
  ToyModel model(kSizes);
  ParameterSet& params = model.params();
  std::unique_ptr<DataParallel> ddp;
  if (scenario.optimizing != Optimizing::kShardedAlone) {
    EK_ASSIGN_OR_RETURN(
        ddp, DataParallel::Create(
                 &comm, &params, scenario.buffers ? model.buffers() : std::vector<TensorView>(),
                 {.reducer = {.caps = kCaps, .gradient_as_bucket_view = scenario.views}}));
  }
  if (scenario.freezing) params.SetTrainable("p3", false);  // Owned by nobody until it is trained.
  OptimizerOptions options;
  if (scenario.optimizing != Optimizing::kUnsharded) {
    options.placement = WholeTensors{.bucket_cap = Bytes{16}};
  }
  EK_ASSIGN_OR_RETURN(auto optimizer, Optimizer::Create(comm, params, scenario.rule, options));
  std::vector<Joinable*> list = {optimizer.get()};
  if (ddp != nullptr) list.insert(scenario.optimizer_first ? list.end() : list.begin(), ddp.get());

  Counter counter(&comm);
  if (scenario.count_at > 0) list.push_back(&counter);
  auto count_at = [&](int place) {
    return scenario.count_at == place ? counter.Count() : absl::OkStatus();
  };

  float counted = 0;
  for (int epoch = 0; epoch < kEpochs; ++epoch) {
    const int inputs = InputsOf(pattern, comm.rank(), epoch);
    for (size_t r = 0; r < pattern.size(); ++r)
      counted += InputsOf(pattern, static_cast<int>(r), epoch);
    EK_RETURN_IF_ERROR(RunJoined(
        list,
        {.divide_by =
             scenario.initial_divisor ? DivideBy::kInitialWorldSize : DivideBy::kActiveRanks},
        [&](JoinScope&) -> absl::Status {
          bool clear = true;
          for (int step = 0; step < inputs; ++step) {
            SetTrainable(scenario, epoch, step, params);
            if (clear) params.ClearGradients();
            const bool sync = clear = Syncs(scenario, step);
            EK_RETURN_IF_ERROR(count_at(1));
            if (ddp != nullptr)
              EK_RETURN_IF_ERROR(ddp->BeginStep(sync ? StepMode::kSync : StepMode::kAccumulate));
            EK_RETURN_IF_ERROR(count_at(2));
            model.Forward(comm.rank(), 10 * epoch + step);
            EK_RETURN_IF_ERROR(
                model.Backward(comm.rank(), 10 * epoch + step, [&](int param) -> absl::Status {
                  return ddp != nullptr ? ddp->GradientReady(param) : absl::OkStatus();
                }));
            if (ddp != nullptr) EK_RETURN_IF_ERROR(ddp->FinishStep());
            if (!sync) continue;
            EK_RETURN_IF_ERROR(StepWithRate(scenario, epoch, step, *optimizer));
            EK_RETURN_IF_ERROR(count_at(3));
          }
          return absl::OkStatus();
        }));
    params.ClearGradients();  // Unreduced gradients are dropped, as in a user's next epoch.
  }
  if (scenario.count_at > 0) {
    EXPECT_EQ(counter.total, counted) << "rank " << comm.rank();
  }
  Outcome outcome{model.values(), model.buffer(), {}};
  EK_ASSIGN_OR_RETURN(outcome.state, optimizer->Consolidate());
  return outcome;
}

// All patterns of 0 to 3 inputs of `world` ranks; `stride` > 1 takes every stride-th.
std::vector<std::vector<int>> Patterns(int world, int stride) {
  int count = 1;
  for (int r = 0; r < world; ++r) count *= 4;
  std::vector<std::vector<int>> patterns;
  for (int n = 0; n < count; n += stride) {
    std::vector<int> pattern;
    for (int r = 0, rest = n; r < world; ++r, rest /= 4) pattern.push_back(rest % 4);
    patterns.push_back(std::move(pattern));
  }
  return patterns;
}

// Trains each of `patterns` in one group, one after the other. Returns the final state of every
// rank of each.
absl::StatusOr<std::vector<std::vector<Outcome>>> TrainAll(
    const Scenario& scenario, absl::Span<const std::vector<int>> patterns) {
  const int world = static_cast<int>(patterns.front().size());
  std::vector<std::vector<Outcome>> outcomes(patterns.size(), std::vector<Outcome>(world));
  const auto train_each = [&](Communicator& comm) -> absl::Status {
    for (size_t i = 0; i < patterns.size(); ++i) {
      absl::StatusOr<Outcome> outcome = Train(scenario, patterns[i], comm);
      if (!outcome.ok()) return Annotate(outcome.status(), InputsText(patterns[i]));
      outcomes[i][comm.rank()] = *std::move(outcome);
    }
    return absl::OkStatus();
  };
  EK_RETURN_IF_ERROR(RunTestRanks(world, train_each, {.timeout = absl::Seconds(20)}));
  return outcomes;
}

bool BuffersAreShared(const Scenario& scenario, const std::vector<int>& pattern) {
  return scenario.buffers && *std::min_element(pattern.begin(), pattern.end()) !=
                                 *std::max_element(pattern.begin(), pattern.end());
}

// Where a backend adds in an order of its own, sums of three and more differ in the last bits.
// Weights here stay below 8 in magnitude and get at most 6 updates of at most 3 ulp of the sums,
// amplified by the momentum's 10: far below 1e-4. Adam divides by what may be small: 1e-3. All
// ranks still hold the same bits.
void ExpectNear(const Scenario& scenario, const Outcome& actual, const Outcome& expected) {
  const float bound = std::holds_alternative<AdamW>(scenario.rule) ? 1e-3f : 1e-4f;
  for (size_t p = 0; p < expected.values.size(); ++p) {
    EXPECT_THAT(actual.values[p],
                testing::Pointwise(testing::FloatNear(bound), expected.values[p]));
  }
}

void Check(const Scenario& scenario, const std::vector<int>& pattern,
           const std::vector<Outcome>& outcomes, Communicator& single_rank) {
  SCOPED_TRACE(InputsText(pattern));
  const absl::StatusOr<Outcome> alone = Simulate(scenario, pattern, single_rank);
  ASSERT_TRUE(alone.ok()) << alone.status();
  const bool is_exact = TheTestBackend().adds_in_rank_order;
  if (!is_exact) ExpectNear(scenario, outcomes[0], *alone);
  const Outcome& expected = is_exact ? *alone : outcomes[0];
  for (size_t r = 0; r < outcomes.size(); ++r) {
    EXPECT_EQ(outcomes[r].values, expected.values) << "rank " << r;
    EXPECT_TRUE(outcomes[r].state == expected.state) << "optimizer state of rank " << r;
    if (BuffersAreShared(scenario, pattern)) {
      EXPECT_EQ(outcomes[r].buffer, expected.buffer) << "rank " << r;
    }
  }
}

// A group costs as much as training some patterns, so these share one. The first pattern that fails
// ends it: the rest would only repeat it.
constexpr size_t kPatternsPerGroup = 16;

void CheckAll(const Scenario& scenario, int stride_of_five = 3) {
  const absl::StatusOr<TestGroup> single = CreateLocalGroup(1);
  ASSERT_TRUE(single.ok()) << single.status();
  const bool is_in_full = TheTestBackend().is_in_full;
  for (int world : {2, 3, 5}) {
    // A stride that is odd comes to all numbers of inputs of each rank.
    const int stride =
        world == 5 ? (is_in_full ? stride_of_five : 205) : (is_in_full ? 1 : 8 * world - 11);
    const std::vector<std::vector<int>> all = Patterns(world, stride);
    for (size_t first = 0; first < all.size(); first += kPatternsPerGroup) {
      const auto patterns = absl::MakeConstSpan(all).subspan(first, kPatternsPerGroup);
      const auto outcomes = TrainAll(scenario, patterns);
      ASSERT_TRUE(outcomes.ok()) << outcomes.status();
      for (size_t i = 0; i < patterns.size(); ++i) {
        Check(scenario, patterns[i], (*outcomes)[i], *(*single)[0]);
        if (testing::Test::HasFailure()) return;
      }
    }
  }
  EXPECT_EQ((*single)[0]->Finalize(), absl::OkStatus());
}

const UpdateRule kMomentum = Sgd{.learning_rate = 0.1, .momentum = 0.9, .weight_decay = 0.01};
const UpdateRule kAdamW = AdamW{.learning_rate = 0.1, .weight_decay = 0.1};

// World 5 has 1024 patterns: this one test takes all of them.
TEST(UnevenTest, EveryPatternWithMomentum) { CheckAll({.rule = kMomentum}, /*stride_of_five=*/1); }
TEST(UnevenTest, AdamW) { CheckAll({.rule = kAdamW}); }
TEST(UnevenTest, EffectiveDivisor) { CheckAll({.rule = kMomentum, .initial_divisor = false}); }
TEST(UnevenTest, Buffers) { CheckAll({.rule = kMomentum, .buffers = true}); }
TEST(UnevenTest, Views) { CheckAll({.rule = kMomentum, .views = true}); }
TEST(UnevenTest, Freezing) { CheckAll({.rule = kAdamW, .freezing = true}); }
TEST(UnevenTest, Accumulating) { CheckAll({.rule = kMomentum, .accumulating = true}); }
TEST(UnevenTest, Sharded) { CheckAll({.rule = kAdamW, .optimizing = Optimizing::kSharded}); }
TEST(UnevenTest, ShardedListedFirst) {
  CheckAll({.rule = kMomentum, .optimizing = Optimizing::kSharded, .optimizer_first = true});
}
TEST(UnevenTest, ShardedAlone) {
  CheckAll({.rule = kMomentum, .optimizing = Optimizing::kShardedAlone});
}
TEST(UnevenTest, ShardedAloneFreezing) {
  CheckAll({.rule = kAdamW, .optimizing = Optimizing::kShardedAlone, .freezing = true});
}
TEST(UnevenTest, RatesThatChangeAfterTheStep) {
  CheckAll({.rule = kMomentum, .relative_rate = true});
}
TEST(UnevenTest, ShardedRatesThatChangeAfterTheStep) {
  CheckAll({.rule = kAdamW, .optimizing = Optimizing::kSharded, .relative_rate = true});
}
TEST(UnevenTest, AUsersCollectiveAnywhereInTheStep) {
  for (int place : {1, 2, 3}) {
    SCOPED_TRACE(place);
    CheckAll({.rule = kMomentum, .buffers = true, .count_at = place}, /*stride_of_five=*/11);
    CheckAll({.rule = kMomentum,
              .optimizing = Optimizing::kSharded,
              .optimizer_first = true,
              .count_at = place},
             11);
  }
}
TEST(UnevenTest, EverythingUnsharded) {
  CheckAll({.rule = kAdamW,
            .buffers = true,
            .views = true,
            .freezing = true,
            .accumulating = true,
            .initial_divisor = false});
}
TEST(UnevenTest, EverythingSharded) {
  CheckAll({.rule = kAdamW,
            .optimizing = Optimizing::kSharded,
            .buffers = true,
            .views = true,
            .freezing = true,
            .accumulating = true,
            .optimizer_first = true});
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
            model.params().ClearGradients();
            EK_RETURN_IF_ERROR(ddp->BeginStep());
            EK_RETURN_IF_ERROR(model.Backward(
                comm.rank(), step, [&](int param) { return ddp->GradientReady(param); }));
            EK_RETURN_IF_ERROR(ddp->FinishStep());
            EK_RETURN_IF_ERROR(optimizer->Step());
          }
          return absl::OkStatus();
        });
    EXPECT_THAT(
        std::string(ended.message()),
        testing::HasSubstr(
            "\"p2\" is not equal on all ranks when step 2 of optimizer#0 begins: rank 1 has "
            "no more input"));
    return ended;
  });
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
}

}  // namespace
}  // namespace evenkeel
