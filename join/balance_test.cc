#include "evenkeel/join/balance.h"

#include <algorithm>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <numeric>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "evenkeel/comm/failure_info.h"
#include "evenkeel/comm/local/backend.h"
#include "evenkeel/comm/local/link.h"
#include "evenkeel/comm/local/run_group.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/testing/tested_group.h"
#include "evenkeel/join/join.h"
#include "evenkeel/join/steps/step_control.h"
#include "evenkeel/join/straggler.h"
#include "evenkeel/join/testing/ticker.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

using testing::Each;
using testing::ElementsAre;
using testing::HasSubstr;

// Computes samples, which takes a time for each of them, and reduces what the ranks have computed:
// the number of times that each sample of the set was part of a reduction.
class Model : public Joinable, public StepParticipant {
 public:
  Model(Communicator* comm, int64_t samples)
      : Joinable(comm, "model"),
        steps_(StepControl::Of(*comm)),
        channel_(*comm->OpenChannel(join_name())),
        mine_(samples),
        total(samples) {
    steps_.Register(this);
  }
  ~Model() override { steps_.Unregister(this); }

  absl::Status Step(const Share& share, bool sync, absl::Duration per_sample) {
    sync_ = sync;
    EK_ASSIGN_OR_RETURN(const auto ticket, Notify());
    steps_.phases().Enter(StepPhase::kForward);
    const absl::Duration took = per_sample * share.count;
    if (took > absl::ZeroDuration()) absl::SleepFor(took);
    for (int64_t i = share.first; i < share.first + share.count; ++i) ++mine_[i];
    if (!std::exchange(sync_, true)) return absl::OkStatus();
    EK_RETURN_IF_ERROR(ticket->Wait().status());
    EK_RETURN_IF_ERROR(Reduce());
    steps_.phases().EndReduction();
    return absl::OkStatus();
  }

  absl::StatusOr<std::unique_ptr<JoinHook>> MakeJoinHook(const JoinOptions&) override {
    return std::make_unique<Hook>(this);
  }
  JoinPhase join_phase() const override { return JoinPhase::kGradients; }
  const std::string& participant_name() const override { return join_name(); }
  absl::StatusOr<ParticipantState> PrepareStep() override { return CurrentState(); }
  ParticipantState CurrentState() const override { return {.sync = sync_}; }
  std::string ExportState() const override { return ""; }
  absl::Status ImportState(absl::string_view) override { return absl::OkStatus(); }

 private:
  class Hook : public JoinHook {
   public:
    explicit Hook(Model* owner) : owner_(owner) {}
    absl::Status MainHook(const StepAnswer& answer) override {
      return answer.reduces() ? owner_->Reduce() : absl::OkStatus();
    }

   private:
    Model* const owner_;
  };

  absl::Status Reduce() {
    EK_RETURN_IF_ERROR(channel_->AllReduce(absl::MakeSpan(mine_), ReduceOp::kSum).Wait());
    for (size_t i = 0; i < mine_.size(); ++i) total[i] += std::exchange(mine_[i], 0);
    return absl::OkStatus();
  }

  StepControl& steps_;
  Channel* const channel_;
  bool sync_ = true;
  std::vector<int64_t> mine_;

 public:
  std::vector<int64_t> total;
};

struct Training {
  BalanceOptions balance;
  int64_t samples = 0;  // In each epoch.
  int epochs = 1;
  int accumulated = 1;        // Batches of a reduction.
  absl::Duration most_delay;  // A random one before each Next(), and after it.
  int evaluated_every = 0;    // Batches; 0: never.
  std::function<absl::Duration(int rank, int64_t batch)> per_sample = nullptr;
};

const JoinOptions kBySamples = {.divide_by = DivideBy::kSamples};

// The observations of one rank.
struct Seen {
  std::vector<std::vector<int64_t>> shares;  // By step.
  std::vector<ShareChange> changes;
  std::vector<int64_t> total;
  std::vector<int64_t> sizes;
  std::vector<std::string> news;
  std::optional<StragglerReport> report;
};

absl::Status Train(Communicator& comm, const Training& run, Seen& seen) {
  std::mt19937 random(comm.rank());
  const auto delay = [&] {
    if (run.most_delay > absl::ZeroDuration())
      absl::SleepFor(run.most_delay * std::uniform_real_distribution<>(0, 1)(random));
  };
  BalanceOptions options = run.balance;
  options.on_change = [&](const ShareChange& change) {
    seen.changes.push_back(change);
    return absl::OkStatus();
  };
  EK_ASSIGN_OR_RETURN(const std::unique_ptr<Balance> balance, Balance::Create(&comm, options));
  seen.sizes = balance->sizes();
  Model model(&comm, run.samples);
  const auto loop = [&](JoinScope& scope) -> absl::Status {
    int64_t batch = 0;
    for (int64_t first = 0; first < run.samples; first += options.batch, ++batch) {
      delay();
      EK_ASSIGN_OR_RETURN(const Share mine,
                          balance->Next(first, std::min(options.batch, run.samples - first)));
      seen.shares.push_back(balance->shares());
      if (std::string news = balance->News(); !news.empty()) seen.news.push_back(std::move(news));
      if (mine.count == 0) break;
      delay();
      EK_RETURN_IF_ERROR(scope.AddSamples(mine.count));
      if (run.evaluated_every > 0 && batch % run.evaluated_every == 0 && comm.rank() == 1)
        StepControl::Of(comm).Request(StepRequests::kEvaluate);
      const bool is_last = first + options.batch >= run.samples;
      EK_RETURN_IF_ERROR(
          model.Step(mine, is_last || (batch + 1) % run.accumulated == 0,
                     run.per_sample ? run.per_sample(comm.rank(), batch) : absl::ZeroDuration()));
    }
    return absl::OkStatus();
  };
  for (int epoch = 0; epoch < run.epochs; ++epoch)
    EK_RETURN_IF_ERROR(RunJoined({&model}, kBySamples, loop));
  seen.total = model.total;
  seen.report = StragglersOf(comm);
  return absl::OkStatus();
}

// Checks that all ranks have decided the same, and computed each sample once in each epoch.
void Check(const Training& run, const std::vector<Seen>& ranks) {
  for (const Seen& seen : ranks) {
    EXPECT_EQ(seen.shares, ranks[0].shares);
    EXPECT_EQ(seen.changes, ranks[0].changes);
    EXPECT_EQ(seen.news, ranks[0].news);
    EXPECT_THAT(seen.total, Each(run.epochs));
    for (const std::vector<int64_t>& shares : seen.shares)
      EXPECT_EQ(std::accumulate(shares.begin(), shares.end(), int64_t{0}), run.balance.batch);
  }
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    const std::vector<int64_t>& sizes = ranks[rank].sizes;
    EXPECT_LE(sizes.size(), 16u);
    for (const std::vector<int64_t>& shares : ranks[rank].shares)
      EXPECT_THAT(sizes, testing::Contains(shares[rank]));
  }
}

std::vector<Seen> RunOnRanks(int world, const Training& run) {
  std::vector<Seen> ranks(world);
  const absl::Status status =
      RunTestRanks(world, [&](Communicator& comm) { return Train(comm, run, ranks[comm.rank()]); });
  EXPECT_TRUE(status.ok()) << status;
  Check(run, ranks);
  return ranks;
}

// A link whose messages arrive after random times, in their order.
class DelayedLink : public ControlLink {
 public:
  DelayedLink(std::unique_ptr<ControlLink> link, int seed)
      : link_(std::move(link)), random_(seed) {}
  void Start(std::function<void(ToRank)> receive, std::function<void(absl::Status)> lost) override {
    link_->Start(
        [this, receive = std::move(receive)](ToRank message) {
          if (random_() % 4 == 0) absl::SleepFor(absl::Microseconds(random_() % 2000));
          receive(std::move(message));
        },
        std::move(lost));
  }
  void Send(ToHub message) override { link_->Send(std::move(message)); }
  absl::StatusOr<std::unique_ptr<ControlLink>> Open(absl::string_view, int, int, absl::Duration,
                                                    const Origin&) override {
    return absl::UnimplementedError("another group");
  }
  std::string Key(absl::string_view purpose) const override { return link_->Key(purpose); }
  ControlCounters Counters() const override { return link_->Counters(); }
  void Stop() override { link_->Stop(); }

 private:
  const std::unique_ptr<ControlLink> link_;
  std::mt19937 random_;  // For the link's thread.
};

void RunDelayed(int world, absl::FunctionRef<absl::Status(Communicator&)> body) {
  std::vector<std::unique_ptr<ControlLink>> links = internal::CreateLocalLinks(world);
  std::vector<std::unique_ptr<Backend>> backends = internal::CreateLocalBackends(world);
  std::vector<std::unique_ptr<Communicator>> group;
  for (int rank = 0; rank < world; ++rank) {
    group.push_back(std::make_unique<Communicator>(
        std::move(backends[rank]),
        std::make_unique<ControlChannel>(
            rank, world, std::make_unique<DelayedLink>(std::move(links[rank]), rank)),
        CommunicatorOptions(), "world"));
  }
  const absl::Status status = internal::RunGroup(group, body);
  EXPECT_TRUE(status.ok()) << status;
}

// Shares that change at each of so many reductions.
std::vector<ShareChange> ManyChanges(int world, int reductions) {
  std::vector<ShareChange> changes;
  for (int i = 0; i < reductions; ++i) {
    ShareChange& change =
        changes.emplace_back(ShareChange{.reduction = i, .shares = std::vector<int64_t>(world, 8)});
    change.shares[0] += world > 1 ? i % 7 : 0;
    change.shares[world - 1] -= world > 1 ? i % 7 : 0;
  }
  return changes;
}

class BalanceTest : public testing::TestWithParam<int> {};

TEST_P(BalanceTest, ASlowRankGetsFewerSamples) {
  const int world = GetParam();
  const Training run{
      .balance = {.batch = 32 * world},
      .samples = 150 * 32 * world,
      .per_sample = [](int rank, int64_t) { return absl::Microseconds(rank == 0 ? 300 : 100); }};
  const std::vector<Seen> ranks = RunOnRanks(world, run);
  ASSERT_FALSE(ranks[0].changes.empty());
  EXPECT_EQ(ranks[0].changes[0], (ShareChange{.shares = std::vector<int64_t>(world, 32)}));
  EXPECT_EQ(ranks[0].sizes.front(), 4);
  EXPECT_EQ(ranks[0].sizes.back(), 64);
  const std::vector<int64_t>& last = ranks[0].shares.back();
  if (world == 1) {
    EXPECT_THAT(last, ElementsAre(32));
    EXPECT_EQ(ranks[0].changes.size(), 1u);
    return;
  }
  // At equal times a share is 32 * world / (world - 1 + 1 / 3) / 3: 16 for two ranks, 12 for five.
  EXPECT_LE(last[0], 24);
  EXPECT_GE(*std::max_element(last.begin() + 1, last.end()), 36);
  ASSERT_FALSE(ranks[0].news.empty());
  EXPECT_THAT(ranks[0].news[0], testing::StartsWith("ranks compute "));
  EXPECT_THAT(ranks[0].news[0], HasSubstr(absl::StrCat(" of ", 32 * world, " samples (32,32")));
  EXPECT_LT(ranks[0].report->ranks[0].samples, ranks[0].report->ranks[1].samples);
  EXPECT_THAT(ranks[0].report->Table(), HasSubstr("   samples\n"));
}

// The answers of steps that accumulate arrive before or after Next().
TEST_P(BalanceTest, RanksDecideTheSameWhateverTheDelays) {
  const int world = GetParam();
  const Training run{.balance = {.batch = 8 * world},
                     .samples = 400 * 8 * world + 1,
                     .accumulated = 3,
                     .most_delay = absl::Milliseconds(1),
                     .per_sample = [](int rank, int64_t batch) {
                       const bool is_slow = rank == (batch < 200 ? 0 : 1);
                       return absl::Microseconds(is_slow ? 400 : 100);
                     }};
  // On a busy machine the sleeps may be too uneven for a decision: then it has another run.
  size_t changes = 0;
  for (int attempt = 0; attempt < 4 && changes <= (world > 1 ? 1u : 0u); ++attempt) {
    std::vector<Seen> ranks(world);
    RunDelayed(world, [&](Communicator& comm) { return Train(comm, run, ranks[comm.rank()]); });
    Check(run, ranks);
    const std::vector<std::vector<int64_t>>& shares = ranks[0].shares;
    ASSERT_EQ(shares.size(), 401u);
    for (size_t step = 0; step < shares.size(); ++step) {
      if (step % 3 != 0) {
        EXPECT_EQ(shares[step], shares[step - 1]) << step;
      }
    }
    changes = ranks[0].changes.size();
  }
  EXPECT_GT(changes, world > 1 ? 1u : 0u);
}

TEST_P(BalanceTest, ReductionsAreCountedTheSameWhateverTheDelays) {
  const int world = GetParam();
  const Training run{
      .balance = {.batch = 8 * world, .quantum = 1, .repeat = ManyChanges(world, 40)},
      .samples = 61 * 8 * world,
      .epochs = 2,
      .accumulated = 3,
      .most_delay = absl::Milliseconds(1)};
  std::vector<Seen> ranks(world);
  RunDelayed(world, [&](Communicator& comm) { return Train(comm, run, ranks[comm.rank()]); });
  Check(run, ranks);
  for (size_t step = 0; step < ranks[0].shares.size(); ++step) {
    const size_t reductions = step / 61 * 21 + step % 61 / 3;
    EXPECT_EQ(ranks[0].shares[step], run.balance.repeat[std::min<size_t>(reductions, 39)].shares)
        << step;
  }
}

// The others are a step behind or ahead: each decision waits for the answer of the step before.
TEST_P(BalanceTest, StepsThatDoNotWaitAreReductions) {
  const int world = GetParam();
  const std::vector<ShareChange> changes = ManyChanges(world, 40);
  RunDelayed(world, [&](Communicator& comm) -> absl::Status {
    EK_ASSIGN_OR_RETURN(
        const auto balance,
        Balance::Create(&comm, {.batch = 8 * world, .quantum = 1, .repeat = changes}));
    internal::Ticker ticker(&comm);
    return RunJoined({&ticker}, kBySamples, [&](JoinScope& scope) -> absl::Status {
      for (int step = 0; step < 40; ++step) {
        EK_ASSIGN_OR_RETURN(const Share mine, balance->Next(step, 8 * world));
        EXPECT_EQ(balance->shares(), changes[step].shares) << step;
        EK_RETURN_IF_ERROR(scope.AddSamples(mine.count));
        EK_RETURN_IF_ERROR(ticker.Tick());
      }
      return absl::OkStatus();
    });
  });
}

TEST_P(BalanceTest, EachSampleIsComputedOnceAlsoInAShortBatch) {
  for (const int64_t rest : {0, 1, 7}) {
    SCOPED_TRACE(rest);
    RunOnRanks(GetParam(), {.balance = {.batch = 10 * GetParam() + 1},
                            .samples = 5 * (10 * GetParam() + 1) + rest,
                            .epochs = 4});
  }
}

TEST_P(BalanceTest, RepeatsTheChangesOfAnotherRun) {
  const int world = GetParam();
  const std::vector<int64_t> even(world, 8);
  std::vector<int64_t> other = even;
  other[0] += world > 1 ? 2 : 0;
  other[world - 1] -= world > 1 ? 2 : 0;
  Training run{
      .balance = {.batch = 8 * world, .quantum = 2, .repeat = {{0, even}, {7, other}, {20, even}}},
      .samples = 30 * 8 * world};
  const std::vector<Seen> ranks = RunOnRanks(world, run);
  for (int step = 0; step < 30; ++step)
    EXPECT_EQ(ranks[0].shares[step], step < 7 || step >= 20 ? even : other) << step;
  if (world > 1) {
    EXPECT_EQ(ranks[0].changes, run.balance.repeat);
  }
  run.balance.repeat = ranks[0].changes;
  EXPECT_EQ(RunOnRanks(world, run)[0].shares, ranks[0].shares);
}

// Steps that no reduction ends are forgotten in part.
TEST_P(BalanceTest, AReductionMayHaveAThousandSteps) {
  const int world = GetParam();
  const Training run{.balance = {.batch = 8 * world, .quantum = 1, .repeat = ManyChanges(world, 3)},
                     .samples = 2500 * 8 * world,
                     .accumulated = 1100};
  const std::vector<Seen> ranks = RunOnRanks(world, run);
  for (size_t step = 0; step < 2500; ++step)
    EXPECT_EQ(ranks[0].shares[step], run.balance.repeat[step / 1100].shares) << step;
}

// All ranks have begun steps whose answers arrive later, which this object does not count.
TEST_P(BalanceTest, CountsReductionsFromItsMakingOn) {
  const int world = GetParam();
  const std::vector<ShareChange> changes = ManyChanges(world, 10);
  RunDelayed(world, [&](Communicator& comm) -> absl::Status {
    internal::Ticker ticker(&comm);
    for (int step = 0; step < 7; ++step) EK_RETURN_IF_ERROR(ticker.Tick());
    std::vector<ShareChange> seen;
    EK_ASSIGN_OR_RETURN(const auto balance,
                        Balance::Create(&comm, {.batch = 8 * world,
                                                .quantum = 1,
                                                .repeat = changes,
                                                .on_change = [&](const ShareChange& change) {
                                                  seen.push_back(change);
                                                  return absl::OkStatus();
                                                }}));
    EK_RETURN_IF_ERROR(RunJoined({&ticker}, kBySamples, [&](JoinScope& scope) -> absl::Status {
      for (int step = 0; step < 10; ++step) {
        EK_ASSIGN_OR_RETURN(const Share mine, balance->Next(step, 8 * world));
        EK_RETURN_IF_ERROR(scope.AddSamples(mine.count));
        EK_RETURN_IF_ERROR(ticker.Tick());
      }
      return absl::OkStatus();
    }));
    if (world > 1) {
      EXPECT_EQ(seen.size(), 10u);
      for (int step = 0; step < 7; ++step) EXPECT_EQ(seen[step], changes[step]) << step;
    }
    return absl::OkStatus();
  });
}

INSTANTIATE_TEST_SUITE_P(Worlds, BalanceTest, testing::Values(1, 2, 3, 5));

TEST(BalanceRepeatTest, SharesAreEvenBeforeTheFirstChange) {
  const std::vector<int64_t> even = {8, 8}, other = {10, 6};
  const Training run{.balance = {.batch = 16, .quantum = 2, .repeat = {{25, other}}},
                     .samples = 30 * 16,
                     .per_sample = [](int rank, int64_t) {
                       return absl::Milliseconds(rank == 0 ? 5 : 1);  // Moved after 14 steps.
                     }};
  const std::vector<Seen> ranks = RunOnRanks(2, run);
  EXPECT_THAT(ranks[0].changes, ElementsAre(ShareChange{0, even}, ShareChange{25, other}));
}

// Its times are those of the next step, or of the one after it.
TEST(BalanceEvaluationTest, AnIntervalWithAnEvaluationMovesNoSamples) {
  Training run{.balance = {.batch = 16},
               .samples = 400 * 16,
               .evaluated_every = 4,
               .per_sample = [](int rank, int64_t batch) {
                 return absl::Microseconds(rank == 0 && batch % 4 == 1 ? 5000 : 500);
               }};
  const std::vector<Seen> ranks = RunOnRanks(2, run);
  for (const std::vector<int64_t>& shares : ranks[0].shares) EXPECT_GT(shares[0], 5);
  run.evaluated_every = 0;
  EXPECT_LE(RunOnRanks(2, run)[0].shares.back()[0], 5) << "without a request";
}

// A step of one of three ranks, whose share of 12 samples is 4.
using Loop = std::function<absl::Status(int rank, Balance&, Model&, JoinScope&)>;
struct Case {
  std::string name;
  Loop loop;
  std::string message;
  std::vector<int> ranks;
};

absl::Status StepOf(Balance& balance, Model& model, JoinScope& scope, int64_t first,
                    int64_t samples, int64_t more = 0) {
  EK_ASSIGN_OR_RETURN(const Share mine, balance.Next(first, samples));
  EK_RETURN_IF_ERROR(scope.AddSamples(mine.count + more));
  return model.Step({}, true, absl::ZeroDuration());
}

absl::Status AddedWithoutAStep(JoinScope& scope, const absl::Status& before) {
  EK_RETURN_IF_ERROR(before);
  return scope.AddSamples(5);
}

const Case kCases[] = {
    {"AnotherPlace",
     [](int rank, Balance& balance, Model& model, JoinScope& scope) {
       return StepOf(balance, model, scope, rank == 1 ? 12 : 0, 12);
     },
     "before each step): ranks 0,2: 12 samples from 0 on as 4,4,4; rank 1: 12 samples from 12 on "
     "as 4,4,4",
     {1}},
    {"AnotherSize",
     [](int rank, Balance& balance, Model& model, JoinScope& scope) {
       return StepOf(balance, model, scope, 0, rank == 0 ? 6 : 12);
     },
     "before each step): rank 0: 6 samples from 0 on as 2,2,2; ranks 1,2: 12 samples from 0 on as "
     "4,4,4",
     {0}},
    {"NoShare",
     [](int rank, Balance& balance, Model& model, JoinScope& scope) {
       if (rank != 1) return StepOf(balance, model, scope, 0, 12);
       EK_RETURN_IF_ERROR(scope.AddSamples(4));
       return model.Step({}, true, absl::ZeroDuration());
     },
     "before each step): ranks 0,2: 12 samples from 0 on as 4,4,4; rank 1: none",
     {1}},
    {"OtherSamples",
     [](int rank, Balance& balance, Model& model, JoinScope& scope) {
       return StepOf(balance, model, scope, 0, 12, rank == 1 ? 1 : 0);
     },
     "step 1: rank 1 has 5 samples where its share is 4 of 12: pass the count of Balance::Next() "
     "to JoinScope::AddSamples()",
     {1}},
    {"OtherSamplesOnTwoRanks",
     [](int rank, Balance& balance, Model& model, JoinScope& scope) {
       return StepOf(balance, model, scope, 0, 12, rank == 1 ? 0 : 2);
     },
     "step 1: rank 0 has 6 samples where its share is 4 of 12: pass the count of Balance::Next() "
     "to JoinScope::AddSamples(); ranks 0,2 do not take their shares",
     {0, 2}},
    {"NoSamples",
     [](int rank, Balance& balance, Model& model, JoinScope& scope) -> absl::Status {
       if (rank != 2) return StepOf(balance, model, scope, 0, 12);
       EK_RETURN_IF_ERROR(balance.Next(0, 12).status());
       return model.Step({}, true, absl::ZeroDuration());
     },
     "step 1: rank 2 has no number of samples where its share is 4 of 12",
     {2}},
    {"ExhaustedWithShare",
     [](int rank, Balance& balance, Model& model, JoinScope& scope) -> absl::Status {
       if (rank != 0) return StepOf(balance, model, scope, 0, 12);
       return absl::OkStatus();
     },
     "step 1: rank 0 has no more input, but its share is 4 of 12",
     {0}},
    {"ExhaustedAfterNext",
     [](int rank, Balance& balance, Model& model, JoinScope& scope) -> absl::Status {
       if (rank != 0) return StepOf(balance, model, scope, 0, 12);
       return balance.Next(0, 12).status();
     },
     "step 1: rank 0 has no more input, but its share is 4 of 12",
     {0}},
    // The rank that shadows the others has made no division that it could compare.
    {"ExhaustedAndOtherSamples",
     [](int rank, Balance& balance, Model& model, JoinScope& scope) -> absl::Status {
       EK_ASSIGN_OR_RETURN(const Share mine, balance.Next(0, 2));
       if (mine.count == 0) return absl::OkStatus();
       EK_RETURN_IF_ERROR(scope.AddSamples(mine.count));
       EK_RETURN_IF_ERROR(model.Step({}, true, absl::ZeroDuration()));
       return StepOf(balance, model, scope, 2, 2, rank == 1 ? 3 : 0);
     },
     "step 2: rank 1 has 4 samples where its share is 1 of 2",
     {1}},
    // The samples of rank 2 would be lost: two ranks have a part, and two take the step.
    {"ActiveWithoutShareForAnother",
     [](int rank, Balance& balance, Model& model, JoinScope& scope) -> absl::Status {
       if (rank == 2) return absl::OkStatus();
       return StepOf(balance, model, scope, 0, 2);
     },
     "step 1: rank 0 takes the step, but its share is 0 of 2: end the loop where the count of "
     "Balance::Next() is 0; ranks 0,2 do not take their shares",
     {0, 2}},
    {"ExhaustedWithSamplesAfterNext",
     [](int rank, Balance& balance, Model& model, JoinScope& scope) -> absl::Status {
       return rank == 0 ? AddedWithoutAStep(scope, balance.Next(0, 2).status())
                        : StepOf(balance, model, scope, 0, 2);
     },
     "step 1: rank 0 has 5 samples where its share is 0 of 2: pass the count",
     {0}},
    {"ExhaustedWithSamples",
     [](int rank, Balance& balance, Model& model, JoinScope& scope) -> absl::Status {
       return rank == 0 ? AddedWithoutAStep(scope, absl::OkStatus())
                        : StepOf(balance, model, scope, 0, 2);
     },
     "step 1: rank 0 has 5 samples where its share is 0 of 2: pass the count",
     {0}},
    {"ActiveWithoutShare",
     [](int, Balance& balance, Model& model, JoinScope& scope) {
       return StepOf(balance, model, scope, 0, 2);
     },
     "takes the step, but its share is 0 of 2: end the loop",
     {-1}},
};

TEST(BalanceErrorTest, EachRankNamesTheRanksAndTheirValues) {
  for (const Case& test : kCases) {
    SCOPED_TRACE(test.name);
    std::vector<absl::Status> results(3);
    const absl::Status status = RunTestRanks(3, [&](Communicator& comm) -> absl::Status {
      EK_ASSIGN_OR_RETURN(const auto balance, Balance::Create(&comm, {.batch = 12}));
      Model model(&comm, 0);
      absl::Status& result = results[comm.rank()];
      result = RunJoined({&model}, kBySamples, [&](JoinScope& scope) {
        return test.loop(comm.rank(), *balance, model, scope);
      });
      return result;
    });
    EXPECT_FALSE(status.ok());
    for (const absl::Status& result : results) {
      EXPECT_TRUE(absl::IsFailedPrecondition(result)) << result;
      EXPECT_THAT(std::string(result.message()), HasSubstr(test.message));
      const std::optional<FailureInfo> info = FailureInfoOf(result);
      ASSERT_TRUE(info.has_value());
      EXPECT_EQ(info->kind, FailureKind::kDisagreement);
      if (test.ranks[0] >= 0) {
        EXPECT_EQ(info->ranks, test.ranks);
      }
    }
  }
}

// There is no other rank whose record would differ.
TEST(BalanceErrorTest, ASingleRankMustTakeTheWholeBatch) {
  const absl::Status status = RunTestRanks(1, [&](Communicator& comm) -> absl::Status {
    EK_ASSIGN_OR_RETURN(const auto balance, Balance::Create(&comm, {.batch = 12}));
    Model model(&comm, 0);
    return RunJoined({&model}, kBySamples,
                     [&](JoinScope& scope) { return StepOf(*balance, model, scope, 0, 12, 1); });
  });
  EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("rank 0 has 13 samples where its share is "
                                                       "12 of 12"));
}

TEST(BalanceErrorTest, NextRefusesWhatItCannotDivide) {
  const absl::Status status = RunTestRanks(2, [&](Communicator& comm) -> absl::Status {
    EK_ASSIGN_OR_RETURN(const auto balance, Balance::Create(&comm, {.batch = 12}));
    for (const int64_t samples : {0, 13})
      EXPECT_TRUE(absl::IsInvalidArgument(balance->Next(0, samples).status())) << samples;
    Model model(&comm, 0);
    EK_RETURN_IF_ERROR(RunJoined({&model}, {.enable = false}, [&](JoinScope&) -> absl::Status {
      EXPECT_THAT(std::string(balance->Next(0, 12).status().message()),
                  HasSubstr("JoinOptions::enable"));
      return absl::OkStatus();
    }));
    constexpr char kWeights[] = "run the steps in RunJoined() with JoinOptions::divide_by";
    EXPECT_THAT(std::string(balance->Next(0, 12).status().message()), HasSubstr(kWeights));
    for (const DivideBy other : {DivideBy::kInitialWorldSize, DivideBy::kActiveRanks}) {
      EK_RETURN_IF_ERROR(RunJoined({&model}, {.divide_by = other}, [&](JoinScope&) -> absl::Status {
        const absl::Status status = balance->Next(0, 12).status();
        EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
        EXPECT_THAT(std::string(status.message()), HasSubstr(kWeights));
        return absl::OkStatus();
      }));
    }
    EK_RETURN_IF_ERROR(RunJoined({&model}, kBySamples, [&](JoinScope& scope) -> absl::Status {
      EK_RETURN_IF_ERROR(StepOf(*balance, model, scope, 0, 12));
      EXPECT_TRUE(balance->Next(12, 12).ok());
      const absl::Status again = balance->Next(24, 12).status();
      EXPECT_TRUE(absl::IsFailedPrecondition(again));
      EXPECT_EQ(std::string(again.message()),
                "Balance::Next() for the batch from sample 24: the share of the batch from sample "
                "12 was not used: call it once before each step");
      return absl::OkStatus();  // No rank uses it.
    }));
    return RunJoined({&model}, kBySamples, [&](JoinScope&) {
      return Annotate(balance->Next(36, 12).status(), "a loop drops what it has not used");
    });
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(BalanceErrorTest, AnErrorOfOnChangeIsThatOfNext) {
  const absl::Status status = RunTestRanks(1, [&](Communicator& comm) -> absl::Status {
    EK_ASSIGN_OR_RETURN(const auto balance,
                        Balance::Create(&comm, {.batch = 12, .on_change = [](const ShareChange&) {
                                                  return absl::DataLossError("the disk is full");
                                                }}));
    internal::Ticker ticker(&comm);
    return RunJoined({&ticker}, kBySamples, [&](JoinScope&) {
      EXPECT_EQ(balance->Next(0, 12).status(), absl::DataLossError("the disk is full"));
      return absl::OkStatus();
    });
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(BalanceErrorTest, CreateRefusesOptionsOnAllRanks) {
  struct Refused {
    BalanceOptions options;  // Rank 1 has them.
    std::string message;
  };
  constexpr int64_t kHuge = std::numeric_limits<int64_t>::max();
  const Refused kRefused[] = {
      {{.batch = 14}, "batch: rank 0 has 12; rank 1 has 14: the ranks disagree"},
      {{.batch = 12, .quantum = 3}, "quantum: rank 0 has 0; rank 1 has 3"},
      {{.batch = 12, .repeat = {{0, {6, 6}}}}, "the number of changes to repeat: rank 0 has 0"},
      {{.batch = -1}, "batch (-1) must be at least 1"},
      {{.batch = 12, .most = -1}, "most (-1)"},
      {{.batch = kHuge}, "all of them below 2^31"},
      {{.batch = 12, .quantum = kHuge}, "all of them below 2^31"},
      {{.batch = 12, .least = kHuge}, "all of them below 2^31"},
      {{.batch = 12, .most = kHuge}, "all of them below 2^31"},
      {{.batch = 12, .least = 7}, "rank 1 has shares from 7 to 12 samples; they have to be at "},
      {{.batch = 12, .most = 5}, "rank 1 has shares from 1 to 5 samples; they have to be at "},
      {{.batch = 12, .most = 60},
       "rank 1 has 55 sizes of shares from 6 to 60 samples, but at most "},
  };
  for (const Refused& test : kRefused) {
    SCOPED_TRACE(test.message);
    std::vector<absl::Status> results(2);
    const absl::Status status = RunTestRanks(2, [&](Communicator& comm) {
      results[comm.rank()] =
          Balance::Create(&comm, comm.rank() == 1 ? test.options : BalanceOptions{.batch = 12})
              .status();
      // The group remains usable.
      return Balance::Create(&comm, {.batch = 12}).status();
    });
    EXPECT_TRUE(status.ok()) << status;
    for (const absl::Status& result : results) {
      EXPECT_TRUE(absl::IsInvalidArgument(result)) << result;
      EXPECT_THAT(std::string(result.message()), HasSubstr("Balance::Create(): "));
      EXPECT_THAT(std::string(result.message()), HasSubstr(test.message));
    }
  }
}

TEST(BalanceErrorTest, CreateRefusesChangesThatCannotBeRepeated) {
  const std::pair<std::vector<ShareChange>, std::string> kRepeats[] = {
      {{{0, {6, 6}}, {5, {8, 4}}, {5, {6, 6}}}, "6,6 after 5 reductions, does not come after"},
      {{{-1, {6, 6}}}, "does not come after"},
      {{{3, {6, 7}}}, "6,7 after 3 reductions, does not divide 12 samples between 2 ranks"},
      {{{3, {4, 4, 4}}}, "does not divide 12 samples between 2 ranks"},
      {{{3, {7, 5}}}, "7,5 after 3 reductions: rank 0 can have 2,4,6,8,10,12 samples"},
  };
  for (const auto& [repeat, message] : kRepeats) {
    SCOPED_TRACE(message);
    const absl::Status status =
        RunTestRanks(2, [&, &repeat = repeat, &message = message](Communicator& comm) {
          const absl::Status result =
              Balance::Create(&comm, {.batch = 12, .quantum = 2, .repeat = repeat}).status();
          EXPECT_TRUE(absl::IsInvalidArgument(result)) << result;
          EXPECT_THAT(std::string(result.message()), HasSubstr(message));
          return absl::OkStatus();
        });
    EXPECT_TRUE(status.ok()) << status;
  }
}

TEST(BalanceErrorTest, AGroupHasOneAtATime) {
  const absl::Status status = RunTestRanks(2, [](Communicator& comm) -> absl::Status {
    {
      EK_ASSIGN_OR_RETURN(const auto balance, Balance::Create(&comm, {.batch = 12}));
      const absl::Status second = Balance::Create(&comm, {.batch = 12}).status();
      EXPECT_TRUE(absl::IsFailedPrecondition(second)) << second;
      EXPECT_THAT(std::string(second.message()), HasSubstr("has a Balance already"));
    }
    return Balance::Create(&comm, {.batch = 12}).status();
  });
  EXPECT_TRUE(status.ok()) << status;
}

// After Recover() the group before is destroyed; programs keep what they made for it a little
// longer.
TEST(BalanceErrorTest, MayBeDestroyedAfterItsGroup) {
  std::vector<std::unique_ptr<Balance>> kept(2);
  std::vector<std::weak_ptr<const void>> groups(2);
  const absl::Status status = RunTestRanks(2, [&](Communicator& comm) -> absl::Status {
    groups[comm.rank()] = StepControl::Of(comm).lifetime();
    EK_ASSIGN_OR_RETURN(kept[comm.rank()], Balance::Create(&comm, {.batch = 12}));
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
  for (const std::weak_ptr<const void>& group : groups) EXPECT_TRUE(group.expired());
  kept.clear();
}

TEST(BalanceOptionsTest, DefaultsLeaveSixteenSizesAtMost) {
  struct Sizes {
    BalanceOptions options;
    int64_t least, most;
    size_t count;
  };
  const Sizes kSizes[] = {
      {{.batch = 64}, 4, 64, 16},
      {{.batch = 30}, 8, 23, 16},
      {{.batch = 12}, 1, 12, 12},
      {{.batch = 12, .quantum = 10}, 6, 6, 1},
      {{.batch = 100, .least = 20}, 20, 98, 14},
      {{.batch = 200, .quantum = 4, .least = 80}, 80, 140, 16},
      {{.batch = 200, .quantum = 4, .most = 120}, 60, 120, 16},
  };
  for (const Sizes& test : kSizes) {
    SCOPED_TRACE(absl::StrCat(test.options.batch, " ", test.options.least));
    const absl::Status status = RunTestRanks(2, [&](Communicator& comm) -> absl::Status {
      EK_ASSIGN_OR_RETURN(const auto balance, Balance::Create(&comm, test.options));
      const std::vector<int64_t> sizes = balance->sizes();
      EXPECT_EQ(sizes.front(), test.least);
      EXPECT_EQ(sizes.back(), test.most);
      EXPECT_EQ(sizes.size(), test.count);
      return absl::OkStatus();
    });
    EXPECT_TRUE(status.ok()) << status;
  }
}

}  // namespace
}  // namespace evenkeel
