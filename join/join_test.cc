#include "evenkeel/join/join.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "absl/types/span.h"
#include "evenkeel/comm/base/fields.h"
#include "evenkeel/comm/failure_info.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/testing/tested_group.h"
#include "evenkeel/join/action_hook.h"
#include "evenkeel/join/steps/step_control.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

// Adds up, over the ranks, a one from each rank that is active; an exhausted rank adds nothing but
// sees the sum too.
class Counter : public Joinable {
 public:
  explicit Counter(Communicator* comm, JoinPhase phase = JoinPhase::kDefault)
      : Joinable(comm, "counter"), phase_(phase), channel_(*comm->OpenChannel(join_name())) {}

  absl::Status Count() {
    EK_RETURN_IF_ERROR(Notify().status());
    return Add(1.0f);
  }
  // Begins a step and waits for nobody.
  absl::Status Touch() { return Notify().status(); }

  absl::StatusOr<std::unique_ptr<JoinHook>> MakeJoinHook(const JoinOptions& options) override {
    argument = options.hook_args.contains("argument") ? options.hook_args.at("argument") : "";
    return std::make_unique<Hook>(this);
  }
  JoinPhase join_phase() const override { return phase_; }

  bool only_touches = false;
  bool counts_at_end = false;
  float total = 0;
  int shadowed = 0;
  int post_hooks = 0;
  int last_joiner = 0;
  std::string argument;
  std::vector<std::string> actions;
  std::vector<std::string>* log = nullptr;  // Names of Joinables in the order of their main hooks.

 private:
  class Hook : public JoinHook {
   public:
    explicit Hook(Counter* owner) : owner_(owner) {}
    absl::Status MainHook(const StepAnswer&) override {
      ++owner_->shadowed;
      if (owner_->only_touches) return absl::OkStatus();
      if (owner_->log != nullptr) owner_->log->push_back(owner_->join_name());
      return owner_->Add(0.0f);
    }
    absl::Status OnAction(const StepAnswer&, absl::string_view payload) override {
      owner_->actions.emplace_back(payload);
      return absl::OkStatus();
    }
    absl::Status PostHook(bool is_last_joiner) override {
      ++owner_->post_hooks;
      owner_->last_joiner += is_last_joiner;
      return owner_->counts_at_end ? owner_->Add(1.0f) : absl::OkStatus();
    }

   private:
    Counter* const owner_;
  };

  absl::Status Add(float one) {
    EK_RETURN_IF_ERROR(
        channel_->AllReduce(TensorView(&one, 1, DType::kFloat32), ReduceOp::kSum).Wait());
    total += one;
    return absl::OkStatus();
  }

  const JoinPhase phase_;
  Channel* const channel_;
};

absl::Status CountTo(Counter& counter, int steps) {
  for (int i = 0; i < steps; ++i) EK_RETURN_IF_ERROR(counter.Count());
  return absl::OkStatus();
}

class JoinTest : public testing::TestWithParam<int> {};

// Every step of the longest rank is counted by those that are active in it, on all ranks alike.
TEST_P(JoinTest, MainHooksShadowEveryStep) {
  const int world = GetParam();
  absl::Status status = RunTestRanks(world, [&](Communicator& comm) -> absl::Status {
    Counter counter(&comm);
    const int steps = 2 * comm.rank() + 1;
    EK_RETURN_IF_ERROR(RunJoined(
        {&counter}, {}, [&](JoinScope&) -> absl::Status { return CountTo(counter, steps); }));
    float expected = 0;
    for (int r = 0; r < world; ++r) expected += 2 * r + 1;
    EXPECT_EQ(counter.total, expected) << "rank " << comm.rank();
    EXPECT_EQ(counter.shadowed, 2 * (world - 1 - comm.rank()));
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST_P(JoinTest, PostHooksRunOnceAndNameTheLastJoiners) {
  const int world = GetParam();
  absl::Status status = RunTestRanks(world, [&](Communicator& comm) -> absl::Status {
    Counter counter(&comm);
    const int steps = comm.rank() % 2 == 0 ? 3 : 1;  // Ranks 0, 2, 4, ... finish together.
    EK_RETURN_IF_ERROR(RunJoined(
        {&counter}, {}, [&](JoinScope&) -> absl::Status { return CountTo(counter, steps); }));
    EXPECT_EQ(counter.post_hooks, 1);
    EXPECT_EQ(counter.last_joiner, comm.rank() % 2 == 0 ? 1 : 0) << "rank " << comm.rank();
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST_P(JoinTest, ARankWithoutInputsTakesPart) {
  const int world = GetParam();
  absl::Status status = RunTestRanks(world, [&](Communicator& comm) -> absl::Status {
    Counter counter(&comm);
    EK_RETURN_IF_ERROR(RunJoined({&counter}, {}, [&](JoinScope&) -> absl::Status {
      return CountTo(counter, comm.rank() == 0 ? 0 : 4);
    }));
    EXPECT_EQ(counter.total, 4.0f * (world - 1));
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST_P(JoinTest, SeveralJoinablesShareTheStep) {
  const int world = GetParam();
  absl::Status status = RunTestRanks(world, [&](Communicator& comm) -> absl::Status {
    Counter a(&comm), b(&comm, JoinPhase::kOptimizer), c(&comm, JoinPhase::kGradients);
    std::vector<std::string> log;
    a.log = b.log = c.log = &log;
    const int64_t before = StepControl::Of(comm).records_sent();
    EK_RETURN_IF_ERROR(RunJoined({&a, &b, &c}, {}, [&](JoinScope&) -> absl::Status {
      for (int i = 0; i < comm.rank() + 1; ++i) {
        EK_RETURN_IF_ERROR(c.Count());
        EK_RETURN_IF_ERROR(a.Count());
        EK_RETURN_IF_ERROR(b.Count());
      }
      return absl::OkStatus();
    }));
    const float expected = world * (world + 1) / 2;
    EXPECT_EQ(a.total, expected);
    EXPECT_EQ(b.total, expected);
    EXPECT_EQ(c.total, expected);
    // One record per step, and the one with which all learn that nobody is active.
    EXPECT_EQ(StepControl::Of(comm).records_sent() - before, world + 1);
    // Gradients first, optimizers last, whatever the order of the list.
    for (size_t i = 0; i + 2 < log.size(); i += 3) {
      EXPECT_THAT(std::vector<std::string>(log.begin() + i, log.begin() + i + 3),
                  ElementsAre(c.join_name(), a.join_name(), b.join_name()));
    }
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST_P(JoinTest, AddsNoCollectiveToTheDataPlane) {
  absl::Status status = RunTestRanks(GetParam(), [&](Communicator& comm) -> absl::Status {
    Counter counter(&comm);
    EK_RETURN_IF_ERROR(
        RunJoined({&counter}, {}, [&](JoinScope&) -> absl::Status { return CountTo(counter, 3); }));
    EXPECT_EQ((*comm.OpenChannel(counter.join_name()))->position(), 3);
    EXPECT_EQ(comm.user().position(), 0);
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST_P(JoinTest, DisabledSendsNothing) {
  absl::Status status = RunTestRanks(GetParam(), [&](Communicator& comm) -> absl::Status {
    Counter counter(&comm);
    EK_RETURN_IF_ERROR(RunJoined({&counter}, {.enable = false},
                                 [&](JoinScope&) -> absl::Status { return CountTo(counter, 3); }));
    EXPECT_EQ(counter.total, 3.0f * comm.world_size());
    EXPECT_EQ(StepControl::Of(comm).records_sent(), 0);
    EXPECT_EQ(counter.post_hooks, 0);
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST_P(JoinTest, EarlyTerminationStopsAllRanksInTheSameStep) {
  const int world = GetParam();
  absl::Status status = RunTestRanks(world, [&](Communicator& comm) -> absl::Status {
    Counter counter(&comm);
    auto loop = [&](JoinScope&) -> absl::Status { return CountTo(counter, comm.rank() + 2); };
    for (int epoch = 0; epoch < 2; ++epoch) {  // The group goes on afterwards.
      counter.total = 0;
      absl::Status stopped = RunJoined({&counter}, {.throw_on_early_termination = true}, loop);
      EXPECT_EQ(counter.total, 2.0f * world);
      EXPECT_EQ(counter.post_hooks, epoch + 1);
      if (world == 1) {
        EXPECT_TRUE(stopped.ok()) << stopped;  // Nobody stopped early.
      } else if (comm.rank() == 0) {
        EXPECT_EQ(stopped.code(), absl::StatusCode::kOutOfRange) << stopped;
        EXPECT_THAT(std::string(stopped.message()), HasSubstr("rank 0 has exhausted all inputs"));
      } else {
        EXPECT_EQ(stopped.code(), absl::StatusCode::kOutOfRange) << stopped;
        EXPECT_THAT(std::string(stopped.message()),
                    HasSubstr("at least one rank has exhausted its inputs"));
      }
    }
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

// Rank r has r + 1 inputs: in step s the ranks from s on are active.
TEST_P(JoinTest, AllRanksStopTogetherBelowSoManyActiveOnes) {
  const int world = GetParam();
  for (int least = 1; least <= world; ++least) {
    absl::Status status = RunTestRanks(world, [&](Communicator& comm) -> absl::Status {
      Counter counter(&comm);
      std::vector<int64_t> exhausted_after;
      for (int epoch = 0; epoch < 2; ++epoch) {  // The group goes on afterwards.
        counter.total = 0;
        counter.last_joiner = 0;
        absl::Status stopped = RunJoined(
            {&counter},
            {.min_active_ranks = least,
             .on_exhausted = [&](int64_t steps) { exhausted_after.push_back(steps); }},
            [&](JoinScope&) -> absl::Status { return CountTo(counter, comm.rank() + 1); });
        const int steps = world - least + 1;  // That are done.
        float total = 0;
        for (int step = 0; step < steps; ++step) total += static_cast<float>(world - step);
        EXPECT_EQ(counter.total, total) << "rank " << comm.rank();
        if (least == 1) {
          EXPECT_TRUE(stopped.ok()) << stopped;
          continue;
        }
        EXPECT_EQ(stopped.code(), absl::StatusCode::kOutOfRange) << stopped;
        if (least < world) {
          EXPECT_EQ(counter.last_joiner, comm.rank() >= steps) << "they end as after a whole loop";
          EXPECT_THAT(std::string(stopped.message()),
                      HasSubstr(absl::StrCat("only ", least - 1, " of ", world, " ranks have")));
        }
        EXPECT_THAT(std::string(stopped.message()), HasSubstr("all ranks stop before step"));
      }
      // Once per loop on each rank that followed others for a while.
      const bool shadows = comm.rank() + 1 < world - least + 1;
      EXPECT_EQ(exhausted_after, std::vector<int64_t>(shadows ? 2 : 0, comm.rank() + 1))
          << "rank " << comm.rank();
      return absl::OkStatus();
    });
    EXPECT_TRUE(status.ok()) << status;
  }
}

TEST_P(JoinTest, AnImpossibleNumberOfActiveRanksIsRefused) {
  absl::Status status = RunTestRanks(GetParam(), [&](Communicator& comm) -> absl::Status {
    Counter counter(&comm);
    for (int least : {0, comm.world_size() + 1}) {
      EXPECT_EQ(RunJoined({&counter}, {.min_active_ranks = least},
                          [](JoinScope&) { return absl::OkStatus(); })
                    .code(),
                absl::StatusCode::kInvalidArgument);
    }
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST_P(JoinTest, EvenInputsDoNotStopEarly) {
  absl::Status status = RunTestRanks(GetParam(), [&](Communicator& comm) -> absl::Status {
    Counter counter(&comm);
    return RunJoined({&counter}, {.throw_on_early_termination = true},
                     [&](JoinScope&) -> absl::Status { return CountTo(counter, 3); });
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST_P(JoinTest, AFailingLoopIsToldToAllRanks) {
  const int world = GetParam();
  std::vector<absl::Status> results(world);
  absl::Status status = RunTestRanks(world, [&](Communicator& comm) -> absl::Status {
    Counter counter(&comm);
    results[comm.rank()] = RunJoined({&counter}, {}, [&](JoinScope&) -> absl::Status {
      EK_RETURN_IF_ERROR(CountTo(counter, 2));
      if (comm.rank() == world - 1) return absl::DataLossError("the disk is on fire");
      return CountTo(counter, 5);
    });
    return results[comm.rank()];
  });
  EXPECT_EQ(results[world - 1], absl::DataLossError("the disk is on fire"));
  for (int r = 0; r < world - 1; ++r) {
    EXPECT_EQ(results[r].code(), absl::StatusCode::kUnavailable) << results[r];
    EXPECT_EQ(
        results[r].message(),
        absl::StrCat("rank ", world - 1, " failed in step 2 of its loop: the disk is on fire"));
  }
  EXPECT_FALSE(status.ok());
}

TEST_P(JoinTest, ActionsOfTheLowestActiveRankReachDryRanksOnly) {
  const int world = GetParam();
  absl::Status status = RunTestRanks(world, [&](Communicator& comm) -> absl::Status {
    Counter counter(&comm);
    const int steps =
        comm.rank() == world - 1 ? 3 : 1;  // Only the last rank is active in steps 1 and 2.
    EK_RETURN_IF_ERROR(RunJoined({&counter}, {}, [&](JoinScope& scope) -> absl::Status {
      for (int i = 0; i < steps; ++i) {
        EK_RETURN_IF_ERROR(counter.Count());
        EK_RETURN_IF_ERROR(StepControl::Of(scope.communicator())
                               .Announce(counter.join_name(), absl::StrCat("lr ", i)));
      }
      return absl::OkStatus();
    }));
    if (comm.rank() == world - 1) {
      EXPECT_TRUE(counter.actions.empty());
    } else {
      EXPECT_THAT(counter.actions, ElementsAre("lr 1", "lr 2"));
    }
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

// The active rank is steps ahead, so answers, announcements and ends of steps race on its side.
TEST_P(JoinTest, ActionsComeBeforeTheEndOfTheirStep) {
  const int world = GetParam();
  absl::Status status = RunTestRanks(world, [&](Communicator& comm) -> absl::Status {
    Counter counter(&comm);
    counter.only_touches = true;
    const int steps = comm.rank() == 0 ? 300 : 0;
    EK_RETURN_IF_ERROR(RunJoined({&counter}, {}, [&](JoinScope& scope) -> absl::Status {
      for (int i = 0; i < steps; ++i) {
        EK_RETURN_IF_ERROR(counter.Touch());
        EK_RETURN_IF_ERROR(
            StepControl::Of(scope.communicator()).Announce(counter.join_name(), absl::StrCat(i)));
      }
      return absl::OkStatus();
    }));
    if (comm.rank() > 0) {
      EXPECT_EQ(counter.shadowed, 300);
      EXPECT_EQ(counter.actions.size(), 300u);
      for (size_t i = 0; i < counter.actions.size(); ++i)
        EXPECT_EQ(counter.actions[i], absl::StrCat(i));
    }
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST_P(JoinTest, EveryJoinableIsAsBeforeAfterwards) {
  absl::Status status = RunTestRanks(GetParam(), [&](Communicator& comm) -> absl::Status {
    Counter counter(&comm);
    EK_RETURN_IF_ERROR(RunJoined(
        {&counter}, {.throw_on_early_termination = true, .divide_by = DivideBy::kActiveRanks},
        [&](JoinScope&) -> absl::Status {
          EXPECT_TRUE(counter.join_config().enable);
          EXPECT_EQ(counter.join_config().divisor.by(), DivideBy::kActiveRanks);
          return CountTo(counter, 1);
        }));
    EXPECT_FALSE(counter.join_config().enable);
    EXPECT_EQ(counter.join_config().min_active_ranks, 1);
    EXPECT_EQ(counter.join_config().divisor.by(), DivideBy::kInitialWorldSize);
    EXPECT_FALSE(counter.join_config().in_loop);
    return CountTo(counter, 2);  // Usable outside.
  });
  EXPECT_TRUE(status.ok()) << status;
}

INSTANTIATE_TEST_SUITE_P(Worlds, JoinTest, testing::Values(1, 2, 3, 5, 8));

// Exhausted ranks follow the order in which the lowest active rank uses the list, also where it
// skips one.
TEST_P(JoinTest, JoinablesMayBeUsedInAnyOrderAndNotInEveryStep) {
  const int world = GetParam();
  absl::Status status = RunTestRanks(world, [&](Communicator& comm) -> absl::Status {
    Counter a(&comm), b(&comm), c(&comm);
    EK_RETURN_IF_ERROR(RunJoined({&a, &b, &c}, {}, [&](JoinScope&) -> absl::Status {
      for (int i = 0; i < 2 + 3 * comm.rank(); ++i) {
        EK_RETURN_IF_ERROR(b.Count());
        if (i % 2 == 0) EK_RETURN_IF_ERROR(c.Count());
        EK_RETURN_IF_ERROR(a.Count());
      }
      return absl::OkStatus();
    }));
    float steps = 0, even = 0;
    for (int r = 0; r < world; ++r) {
      steps += 2 + 3 * r;
      even += (2 + 3 * r + 1) / 2;
    }
    EXPECT_EQ(a.total, steps);
    EXPECT_EQ(b.total, steps);
    EXPECT_EQ(c.total, even);
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST_P(JoinTest, TheOrderOfTheListsMayDiffer) {
  const int world = GetParam();
  absl::Status status = RunTestRanks(world, [&](Communicator& comm) -> absl::Status {
    Counter a(&comm), b(&comm);
    a.counts_at_end = b.counts_at_end = true;
    std::vector<Joinable*> list = {&a, &b};
    if (comm.rank() % 2 == 1) std::swap(list[0], list[1]);
    EK_RETURN_IF_ERROR(RunJoined(list, {}, [&](JoinScope&) { return CountTo(a, comm.rank()); }));
    EXPECT_EQ(b.total, world);
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(RunJoinedTest, AnOutOfRangeOfTheLoopsOwnIsAFailureLikeAnyOther) {
  std::vector<absl::Status> results(2);
  absl::Status status = RunTestRanks(2, [&](Communicator& comm) -> absl::Status {
    Counter counter(&comm);
    results[comm.rank()] = RunJoined(
        {&counter}, {.throw_on_early_termination = true}, [&](JoinScope&) -> absl::Status {
          EK_RETURN_IF_ERROR(counter.Count());
          if (comm.rank() == 1)
            return absl::OutOfRangeError("index 7 is beyond the end of the file");
          return CountTo(counter, 3);
        });
    return results[comm.rank()];
  });
  EXPECT_EQ(results[1].code(), absl::StatusCode::kOutOfRange);
  EXPECT_EQ(results[0].code(), absl::StatusCode::kUnavailable) << results[0];
  // The harness ends the group with a failed rank's error, too, but does not name the step.
  EXPECT_THAT(
      std::string(results[0].message()),
      HasSubstr("rank 1 failed in step 1 of its loop: index 7 is beyond the end of the file"));
}

TEST(RunJoinedTest, DifferentOptionsAreNamedOnAllRanks) {
  std::vector<absl::Status> results(2);
  (void)RunTestRanks(2, [&](Communicator& comm) -> absl::Status {
    Counter counter(&comm);
    results[comm.rank()] = RunJoined(
        {&counter},
        {.divide_by = comm.rank() == 0 ? DivideBy::kInitialWorldSize : DivideBy::kActiveRanks},
        [&](JoinScope&) -> absl::Status { return CountTo(counter, 2); });
    return results[comm.rank()];
  });
  for (const absl::Status& result : results) {
    EXPECT_THAT(std::string(result.message()),
                HasSubstr("different joins (objects or options): rank 0: "));
  }
}

TEST(RunJoinedTest, HooksGetTheirArguments) {
  absl::Status status = RunTestRanks(2, [&](Communicator& comm) -> absl::Status {
    Counter counter(&comm);
    EK_RETURN_IF_ERROR(
        RunJoined({&counter}, {.hook_args = {{"argument", "value"}}},
                  [&](JoinScope&) -> absl::Status { return CountTo(counter, comm.rank()); }));
    EXPECT_EQ(counter.argument, "value");
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(RunJoinedTest, WarnsOnceAboutSkewAndTellsWhenARankRunsDry) {
  absl::Mutex mutex;
  std::vector<std::string> warnings;
  std::vector<std::pair<int, int64_t>> exhausted;
  absl::Status status = RunTestRanks(3, [&](Communicator& comm) -> absl::Status {
    Counter counter(&comm);
    JoinOptions options;
    options.skew_warning_steps = 3;
    options.warn = [&](absl::string_view text) {
      absl::MutexLock lock(&mutex);
      warnings.emplace_back(text);
    };
    options.on_exhausted = [&, rank = comm.rank()](int64_t steps) {
      absl::MutexLock lock(&mutex);
      exhausted.emplace_back(rank, steps);
    };
    return RunJoined({&counter}, options, [&](JoinScope&) -> absl::Status {
      return CountTo(counter, comm.rank() == 0 ? 2 : comm.rank() == 1 ? 7 : 9);
    });
  });
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_THAT(warnings, ElementsAre(HasSubstr("rank 0 had inputs for 2 steps")));
  std::sort(exhausted.begin(), exhausted.end());
  EXPECT_THAT(exhausted, ElementsAre(std::pair<int, int64_t>(0, 2), std::pair<int, int64_t>(1, 7)));
}

TEST(RunJoinedTest, RefusesABadList) {
  auto first = CreateTestGroup(1), second = CreateTestGroup(1);
  ASSERT_TRUE(first.ok() && second.ok());
  Counter a((*first)[0].get()), other((*second)[0].get());
  auto never = [](JoinScope&) -> absl::Status { return absl::InternalError("the loop ran"); };
  auto message = [&](absl::Span<Joinable* const> list) {
    absl::Status status = RunJoined(list, {}, never);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    return std::string(status.message());
  };
  EXPECT_THAT(message({}), HasSubstr("at least one"));
  EXPECT_THAT(message({&a, nullptr}), HasSubstr("entry 1 is null"));
  EXPECT_THAT(message({&a, &other}), HasSubstr("different communicators"));
  EXPECT_THAT(message({&a, &a}), HasSubstr("more than once"));
}

TEST(RunJoinedTest, RefusesToRunInsideItself) {
  absl::Status status = RunTestRanks(1, [](Communicator& comm) -> absl::Status {
    Counter a(&comm), b(&comm);
    return RunJoined({&a}, {}, [&](JoinScope&) -> absl::Status {
      return RunJoined({&b}, {}, [](JoinScope&) -> absl::Status { return absl::OkStatus(); });
    });
  });
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
}

TEST(RunJoinedTest, NamesAJoinableThatIsMissingFromTheList) {
  absl::Status status = RunTestRanks(2, [](Communicator& comm) -> absl::Status {
    Counter listed(&comm), missing(&comm);
    return RunJoined({&listed}, {}, [&](JoinScope&) -> absl::Status {
      EK_RETURN_IF_ERROR(listed.Count());
      return missing.Count();
    });
  });
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("counter#1"));
}

// Without RunJoined() a rank that does one step more is a contradiction, and both learn it at once.
TEST(StepsTest, UnevenStepsWithoutJoinAreAnErrorOnAllRanks) {
  std::vector<absl::Status> results(2);
  absl::Status status = RunTestRanks(2, [&](Communicator& comm) -> absl::Status {
    Counter counter(&comm);
    absl::Status loop = CountTo(counter, 5 + comm.rank());
    results[comm.rank()] = loop.ok() ? comm.Finalize() : loop;
    return results[comm.rank()];
  });
  EXPECT_FALSE(status.ok());
  for (const absl::Status& result : results) {
    EXPECT_EQ(result.code(), absl::StatusCode::kFailedPrecondition) << result;
    EXPECT_THAT(std::string(result.message()), HasSubstr("disagree"));
  }
}

class FixedParticipant : public StepParticipant {
 public:
  explicit FixedParticipant(ParticipantState state) : state_(std::move(state)) {}
  const std::string& participant_name() const override { return name_; }
  absl::StatusOr<ParticipantState> PrepareStep() override { return state_; }
  ParticipantState CurrentState() const override { return state_; }
  std::string ExportState() const override { return ""; }
  absl::Status ImportState(absl::string_view) override { return absl::OkStatus(); }

 private:
  const std::string name_ = "part";
  const ParticipantState state_;
};

TEST(StepsTest, ActiveRanksThatDifferAreNamedWithWhatTheyDifferIn) {
  const std::pair<ParticipantState, std::string> kCases[] = {
      {{.sync = false}, "synchronising: ranks 0,2: synchronises; rank 1: accumulates"},
      {{.mask_hash = 7, .note = "frozen: a"},
       "the set of trained parameters: ranks 0,2: nothing frozen (mask 0); rank "
       "1: frozen: a (mask 7)"},
      {{.generation = 2}, "the plan generation: ranks 0,2: generation 0; rank 1: generation 2"},
      {{.schedule_hash = 9}, "the schedule: ranks 0,2: schedule 0; rank 1: schedule 9"},
  };
  for (const auto& [other, text] : kCases) {
    SCOPED_TRACE(text);
    std::vector<absl::Status> results(3);
    const absl::Status status = RunTestRanks(3, [&, &other = other](Communicator& comm) {
      FixedParticipant participant(comm.rank() == 1 ? other : ParticipantState());
      StepControl::Of(comm).Register(&participant);
      const auto ticket = StepControl::Of(comm).Enter("part", 0);
      absl::Status& result = results[comm.rank()] =
          ticket.ok() ? (*ticket)->Wait().status() : ticket.status();
      StepControl::Of(comm).Unregister(&participant);
      return result;
    });
    EXPECT_FALSE(status.ok());
    for (const absl::Status& result : results) {
      EXPECT_THAT(std::string(result.message()),
                  HasSubstr(absl::StrCat("the ranks disagree about ", text)));
      EXPECT_EQ(FailureInfoOf(result),
                (FailureInfo{.kind = FailureKind::kDisagreement, .ranks = {1}, .step = 1}));
    }
  }
}

// A rank that is far ahead waits: the answer of the 64th step before the one that it begins is
// there.
TEST(StepsTest, AnswersAreOutstandingOfSixtyFourStepsAtMost) {
  constexpr int kSteps = 300, kMost = 64;
  absl::Notification is_ahead;
  const absl::Status status = RunTestRanks(2, [&](Communicator& comm) -> absl::Status {
    if (comm.rank() == 1) is_ahead.WaitForNotification();
    std::vector<std::shared_ptr<StepTicket>> tickets;
    for (int step = 0; step < kSteps; ++step) {
      EK_ASSIGN_OR_RETURN(tickets.emplace_back(), StepControl::Of(comm).Enter("who", 0));
      EXPECT_TRUE(step < kMost || tickets[step - kMost]->IsAnswered()) << step;
      if (comm.rank() == 0 && step == kMost - 1) is_ahead.Notify();
    }
    return tickets.back()->Wait().status();
  });
  EXPECT_TRUE(status.ok()) << status;
}

// An announcement within a step must leave before the step's end, even when another thread sends
// the end.
TEST(StepsTest, AnswersAreToldInTheOrderInWhichTheyWereAskedFor) {
  auto group = CreateTestGroup(2);
  ASSERT_TRUE(group.ok()) << group.status();
  auto ticket = StepControl::Of(*(*group)[0]).Enter("who", 0);
  ASSERT_TRUE(ticket.ok()) << ticket.status();
  absl::Notification started, go, done;
  std::vector<std::string> order;
  (*ticket)->OnAnswer([&](const absl::StatusOr<StepAnswer>&) {
    started.Notify();
    go.WaitForNotification();
  });
  (*ticket)->OnAnswer([&](const absl::StatusOr<StepAnswer>&) { order.push_back("announced"); });
  ASSERT_TRUE(StepControl::Of(*(*group)[1]).Enter("who", 0).ok());
  started
      .WaitForNotification();  // The control thread is in the first callback; the answer is there.
  (*ticket)->OnAnswer([&](const absl::StatusOr<StepAnswer>&) {
    order.push_back("ended");
    done.Notify();
  });
  go.Notify();
  done.WaitForNotification();
  EXPECT_THAT(order, ElementsAre("announced", "ended"));
}

struct SaveAction {
  std::string folder;
  static void VisitFields(auto& self, auto& visit) { visit(self.folder); }
};
struct StopAction {};
using TestAction = std::variant<SaveAction, StopAction>;

TEST(ActionHookTest, PassesActionsOnAndRefusesOtherBytes) {
  std::vector<std::string> done;
  ActionHook<TestAction> hook([&](const StepAnswer&, const TestAction& action) {
    const auto* const save = std::get_if<SaveAction>(&action);
    done.push_back(save == nullptr ? "stop" : save->folder);
    return absl::OkStatus();
  });
  const StepAnswer step{.lowest_active = 2};
  EXPECT_TRUE(hook.OnAction(step, internal::ToBytes(TestAction(SaveAction{"here"}))).ok());
  EXPECT_TRUE(hook.OnAction(step, internal::ToBytes(TestAction(StopAction()))).ok());
  EXPECT_THAT(done, ElementsAre("here", "stop"));
  EXPECT_EQ(hook.OnAction(step, "").message(),
            "rank 2 sent an action that cannot be read (the action: bytes are missing): do the "
            "ranks run the same program?");
  for (const absl::string_view bytes : {"\2", "\1x", "x"})
    EXPECT_TRUE(absl::IsInvalidArgument(hook.OnAction(step, bytes))) << bytes;
  EXPECT_EQ(done.size(), 2u);
}

TEST(StepRecordTest, SurvivesTheWireAndRefusesEverythingElse) {
  StepRecord record{.joined = true,
                    .requests = 5,
                    .samples = 64,
                    .scope_hash = 77,
                    .participants = {{.generation = 2,
                                      .schedule_hash = 3,
                                      .mask_hash = 4,
                                      .sync = false,
                                      .note = "frozen: a"}}};
  const std::string bytes = record.Serialize();
  absl::StatusOr<StepRecord> parsed = StepRecord::Parse(bytes);
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  EXPECT_EQ(parsed->Serialize(), bytes);
  EXPECT_EQ(parsed->participants[0].note, "frozen: a");
  for (size_t size = 0; size < bytes.size(); ++size) {
    EXPECT_FALSE(StepRecord::Parse(bytes.substr(0, size)).ok()) << size;
  }
  EXPECT_FALSE(StepRecord::Parse(bytes + "x").ok());
}

}  // namespace
}  // namespace evenkeel
