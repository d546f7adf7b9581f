#include "evenkeel/join/scope.h"

#include <algorithm>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "evenkeel/comm/base/fields.h"
#include "evenkeel/comm/collective.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/testing/tested_group.h"
#include "evenkeel/join/join.h"
#include "evenkeel/join/steps/step_control.h"
#include "evenkeel/join/testing/ticker.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

using internal::Ticker;
using testing::HasSubstr;

using Loop = std::function<absl::Status(Communicator&, JoinScope&, Ticker&)>;

absl::Status RunLoop(Communicator& comm, const Loop& loop, const JoinOptions& options = {}) {
  Ticker ticker(&comm);
  return RunJoined({&ticker}, options, [&](JoinScope& scope) { return loop(comm, scope, ticker); });
}

template <typename T>
TensorView One(T& value) {
  return TensorView(absl::MakeSpan(&value, 1));
}

absl::StatusOr<float> CountActive(JoinScope& scope) {
  float ones = 1;
  EK_RETURN_IF_ERROR(scope.AllReduce(One(ones), ReduceOp::kSum));
  return ones;
}

int StepsOf(int rank) { return rank == 0 ? 0 : (3 * rank) % 7; }
int ActiveIn(int step, int world) {
  int active = 0;
  for (int rank = 0; rank < world; ++rank) active += StepsOf(rank) > step;
  return active;
}

class ScopeTest : public testing::TestWithParam<int> {
 protected:
  void Expect(const std::function<absl::Status(Communicator&)>& body) {
    const absl::Status status = RunTestRanks(GetParam(), body);
    EXPECT_TRUE(status.ok()) << status;
  }
};

// The rank that goes on does not know yet, before a step, who is exhausted.
TEST_P(ScopeTest, DryRanksFollowWhereverTheLoopIssuesIt) {
  const int world = GetParam();
  enum Place { kBefore = 1, kInside = 2, kAfter = 4 };
  for (int places = 1; places < 8; ++places) {
    Expect([&](Communicator& comm) -> absl::Status {
      for (int epoch = 0; epoch < 3; ++epoch) {
        EK_RETURN_IF_ERROR(
            RunLoop(comm, [&](Communicator&, JoinScope& scope, Ticker& ticker) -> absl::Status {
              for (int step = 0; step < StepsOf(comm.rank()); ++step) {
                for (const Place place : {kBefore, kInside, kAfter}) {
                  if (place == kInside) EK_RETURN_IF_ERROR(ticker.Tick());
                  if ((places & place) == 0) continue;
                  EK_ASSIGN_OR_RETURN(const float active, CountActive(scope));
                  EXPECT_EQ(active, static_cast<float>(ActiveIn(step, world)))
                      << "step " << step << " place " << place;
                }
              }
              return absl::OkStatus();
            }));
      }
      return absl::OkStatus();
    });
  }
}

TEST_P(ScopeTest, ALoopNeedsNoStepToBeFollowed) {
  const int world = GetParam();
  Expect([&](Communicator& comm) {
    return RunLoop(comm, [&](Communicator&, JoinScope& scope, Ticker&) -> absl::Status {
      for (int call = 0; call < StepsOf(comm.rank()); ++call) {
        EK_ASSIGN_OR_RETURN(const float active, CountActive(scope));
        EXPECT_EQ(active, static_cast<float>(ActiveIn(call, world)));
      }
      return absl::OkStatus();
    });
  });
}

// Only active ranks know the next call.
TEST_P(ScopeTest, TheSequenceMayDependOnData) {
  const int world = GetParam();
  for (int seed = 0; seed < 10; ++seed) {
    std::vector<int64_t> totals(world);
    Expect([&](Communicator& comm) -> absl::Status {
      auto steps_of = [&](int rank) { return (7 * rank + 3 * seed + rank * seed) % 9; };
      int64_t total = 0;
      EK_RETURN_IF_ERROR(
          RunLoop(comm, [&](Communicator&, JoinScope& scope, Ticker& ticker) -> absl::Status {
            for (int step = 0; step < steps_of(comm.rank()); ++step) {
              uint64_t data = StableHash(StableHash(seed, step), uint64_t{0});
              for (; data % 5 != 0; data /= 5) {
                switch (data % 5) {
                  case 1:
                    EK_RETURN_IF_ERROR(ticker.Tick());  // Another step.
                    break;
                  case 2:
                    EK_RETURN_IF_ERROR(scope.Barrier());
                    break;
                  case 3: {
                    int64_t sum = comm.rank() + 1;
                    EK_RETURN_IF_ERROR(scope.AllReduce(One(sum), ReduceOp::kSum));
                    int64_t expected = 0;
                    for (int rank = 0; rank < world; ++rank)
                      expected += steps_of(rank) > step ? rank + 1 : 0;
                    EXPECT_EQ(sum, expected) << "seed " << seed << " step " << step;
                    total += sum;
                    break;
                  }
                  default: {
                    std::vector<int32_t> parts(world, -1);
                    int32_t mine = comm.rank() + 10;
                    EK_RETURN_IF_ERROR(scope.AllGather(One(mine), absl::MakeSpan(parts)));
                    for (int rank = 0; rank < world; ++rank) {
                      EXPECT_EQ(parts[rank], steps_of(rank) > step ? rank + 10 : 0)
                          << "seed " << seed;
                    }
                  }
                }
              }
            }
            return absl::OkStatus();
          }));
      totals[comm.rank()] = total;
      return absl::OkStatus();
    });
  }
}

TEST_P(ScopeTest, DryRanksContributeTheIdentity) {
  const int world = GetParam();
  Expect([&](Communicator& comm) {
    return RunLoop(comm, [&](Communicator&, JoinScope& scope, Ticker& ticker) -> absl::Status {
      if (comm.rank() != world - 1) return absl::OkStatus();
      EK_RETURN_IF_ERROR(ticker.Tick());
      for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kAverage, ReduceOp::kMin, ReduceOp::kMax,
                                ReduceOp::kProduct}) {
        double value = -3.5;
        EK_RETURN_IF_ERROR(scope.AllReduce(One(value), op));
        EXPECT_EQ(value, -3.5) << static_cast<int>(op);
        std::vector<float> in(world, 7.0f), out = {0};
        EK_RETURN_IF_ERROR(scope.ReduceScatter(absl::MakeSpan(in), absl::MakeSpan(out), op));
        EXPECT_EQ(out[0], 7.0f) << static_cast<int>(op);
        if (op == ReduceOp::kAverage) continue;
        int64_t whole = -9;
        EK_RETURN_IF_ERROR(scope.Reduce(One(whole), op, comm.rank()));
        EXPECT_EQ(whole, -9) << static_cast<int>(op);
      }
      int32_t bits = 5;
      EK_RETURN_IF_ERROR(scope.AllReduce(One(bits), ReduceOp::kBitOr));
      EXPECT_EQ(bits, 5);
      return absl::OkStatus();
    });
  });
}

TEST_P(ScopeTest, AnAllToAllHasZerosFromExhaustedRanks) {
  const int world = GetParam();
  const auto loop = [&](Communicator& comm, JoinScope& scope, Ticker& ticker) -> absl::Status {
    const auto element = [&](int from, int index, int step) {
      return 1000 * from + 100 * step + index + 1;
    };
    for (int step = 0; step < StepsOf(comm.rank()); ++step) {
      std::vector<int32_t> sent(2 * world), received(2 * world, -1), expected(2 * world);
      for (int i = 0; i < 2 * world; ++i) {
        sent[i] = element(comm.rank(), i, step);
        expected[i] = StepsOf(i / 2) > step ? element(i / 2, 2 * comm.rank() + i % 2, step) : 0;
      }
      std::vector<int32_t> before(2 * world, 7);  // An exhausted rank's memory must keep these.
      EK_RETURN_IF_ERROR(scope.AllReduce(absl::MakeSpan(before), ReduceOp::kSum));
      EK_RETURN_IF_ERROR(scope.AllToAll(absl::MakeSpan(sent), absl::MakeSpan(received)));
      EXPECT_EQ(received, expected) << "rank " << comm.rank() << " step " << step;
      EK_RETURN_IF_ERROR(ticker.Tick());
    }
    return absl::OkStatus();
  };
  Expect([&](Communicator& comm) -> absl::Status {
    for (int epoch = 0; epoch < 2; ++epoch) {
      EK_RETURN_IF_ERROR(RunLoop(comm, loop));
    }
    return absl::OkStatus();
  });
}

TEST_P(ScopeTest, AnExhaustedRankCanGiveAndTakeItsPartsOfAnAllToAll) {
  const int world = GetParam();
  Expect([&](Communicator& comm) -> absl::Status {
    std::vector<float> given(world, static_cast<float>(comm.rank() + 1)), taken(world, -1);
    EK_RETURN_IF_ERROR(RunLoop(comm, [&](Communicator&, JoinScope& scope, Ticker&) -> absl::Status {
      scope.Own("given", absl::MakeSpan(given));
      scope.Own("taken", absl::MakeSpan(taken));
      for (int step = 0; step <= comm.rank(); ++step) {
        std::vector<float> sent(world, static_cast<float>(10 * comm.rank() + step)),
            received(world);
        EK_RETURN_IF_ERROR(scope.AllToAll(absl::MakeSpan(given), absl::MakeSpan(received),
                                          {.joined = Contribution::kOwned, .tensor = "given"}));
        for (int rank = 0; rank < world; ++rank)
          EXPECT_EQ(received[rank], static_cast<float>(rank + 1));
        EK_RETURN_IF_ERROR(scope.AllToAll(absl::MakeSpan(sent), absl::MakeSpan(received),
                                          {.joined = Contribution::kReceive, .tensor = "taken"}));
        taken = received;
      }
      return absl::OkStatus();
    }));
    for (int rank = 0; rank < world; ++rank) {  // In the last step only the last rank has inputs.
      EXPECT_EQ(taken[rank], rank == world - 1 ? static_cast<float>(10 * rank + world - 1) : 0.0f);
    }
    return absl::OkStatus();
  });
}

TEST_P(ScopeTest, AnAverageIsOverThoseWhoContribute) {
  const int world = GetParam();
  Expect([&](Communicator& comm) {
    return RunLoop(comm, [&](Communicator&, JoinScope& scope, Ticker& ticker) -> absl::Status {
      for (int step = 0; step <= comm.rank(); ++step) {
        EK_RETURN_IF_ERROR(ticker.Tick());
        double value = comm.rank();
        EK_RETURN_IF_ERROR(scope.AllReduce(One(value), ReduceOp::kAverage));
        EXPECT_DOUBLE_EQ(value, (step + world - 1) / 2.0);  // Average of ranks from `step` on.
      }
      return absl::OkStatus();
    });
  });
}

TEST_P(ScopeTest, TheHighestActiveRankCanBroadcast) {
  const int world = GetParam();
  Expect([&](Communicator& comm) -> absl::Status {
    for (int epoch = 0; epoch < 2;
         ++epoch) {  // In the next one it is active again before its first step.
      EK_RETURN_IF_ERROR(
          RunLoop(comm, [&](Communicator&, JoinScope& scope, Ticker& ticker) -> absl::Status {
            for (int step = 0; step < world - comm.rank();
                 ++step) {  // The highest rank is the first to become exhausted.
              float value = static_cast<float>(comm.rank());
              EK_RETURN_IF_ERROR(scope.Broadcast(One(value), kHighestActive));
              EXPECT_EQ(value, static_cast<float>(world - 1 - step));
              EK_RETURN_IF_ERROR(ticker.Tick());
            }
            return absl::OkStatus();
          }));
    }
    return absl::OkStatus();
  });
}

TEST_P(ScopeTest, ADryRankCanGiveAndTakeWhatItOwns) {
  const int world = GetParam();
  Expect([&](Communicator& comm) -> absl::Status {
    float shard = 100.0f + static_cast<float>(comm.rank()), received = -1;
    EK_RETURN_IF_ERROR(
        RunLoop(comm, [&](Communicator&, JoinScope& scope, Ticker& ticker) -> absl::Status {
          scope.Own("shard", One(shard));
          scope.Own("received", One(received));
          for (int step = 0; step <= comm.rank(); ++step) {
            std::vector<float> all(world);
            EK_RETURN_IF_ERROR(
                scope.AllGather(One(shard), absl::MakeSpan(all),
                                {.joined = Contribution::kOwned, .tensor = "shard"}));
            for (int rank = 0; rank < world; ++rank)
              EXPECT_EQ(all[rank], 100.0f + static_cast<float>(rank));
            EK_RETURN_IF_ERROR(ticker.Tick());
            received = static_cast<float>(10 * step + 1);
            EK_RETURN_IF_ERROR(
                scope.Broadcast(One(received), world - 1,
                                {.joined = Contribution::kReceive, .tensor = "received"}));
          }
          return absl::OkStatus();
        }));
    EXPECT_EQ(received, static_cast<float>(10 * (world - 1) + 1)) << "rank " << comm.rank();
    return absl::OkStatus();
  });
}

TEST_P(ScopeTest, ARootThatRanDryIsASentenceOnAllRanks) {
  const int world = GetParam();
  if (world == 1) GTEST_SKIP() << "no rank is exhausted before the others";
  for (const bool reduces : {false, true}) {
    std::vector<absl::Status> results(world);
    const absl::Status status = RunTestRanks(world, [&](Communicator& comm) -> absl::Status {
      return results[comm.rank()] =
                 RunLoop(comm, [&](Communicator&, JoinScope& scope, Ticker&) -> absl::Status {
                   float value = 1;
                   if (comm.rank() == 0) return absl::OkStatus();
                   return reduces ? scope.Reduce(One(value), ReduceOp::kSum, 0)
                                  : scope.Broadcast(One(value), 0);
                 });
    });
    EXPECT_FALSE(status.ok());
    for (const absl::Status& result : results) {
      EXPECT_THAT(std::string(result.message()),
                  HasSubstr("its root, rank 0, has no inputs any more"))
          << result;
    }
  }
}

TEST_P(ScopeTest, AMissingTensorIsASentenceOnAllRanks) {
  const int world = GetParam();
  if (world == 1) GTEST_SKIP() << "no rank is exhausted before the others";
  std::vector<absl::Status> results(world);
  const absl::Status status = RunTestRanks(world, [&](Communicator& comm) -> absl::Status {
    return results[comm.rank()] =
               RunLoop(comm, [&](Communicator&, JoinScope& scope, Ticker&) -> absl::Status {
                 float value = 1;
                 if (comm.rank() == 0) return absl::OkStatus();
                 return scope.AllReduce(One(value), ReduceOp::kSum,
                                        {.joined = Contribution::kOwned, .tensor = "ema"});
               });
  });
  EXPECT_FALSE(status.ok());
  for (const absl::Status& result : results) {
    EXPECT_THAT(std::string(result.message()), HasSubstr("owns no tensor \"ema\"")) << result;
  }
}

TEST_P(ScopeTest, AWrongCallIsRefusedAndTheLoopGoesOn) {
  Expect([&](Communicator& comm) {
    return RunLoop(comm, [&](Communicator&, JoinScope& scope, Ticker&) -> absl::Status {
      float value = 1;
      EXPECT_EQ(scope.Broadcast(One(value), comm.world_size()).code(),
                absl::StatusCode::kInvalidArgument);
      EXPECT_EQ(scope.AllReduce(One(value), ReduceOp::kBitOr).code(),
                absl::StatusCode::kInvalidArgument);
      EXPECT_EQ(scope.AllReduce(One(value), ReduceOp::kSum, {.tensor = "x"}).code(),
                absl::StatusCode::kInvalidArgument);
      int32_t whole = 1;
      EXPECT_EQ(scope.AllReduce(One(whole), ReduceOp::kAverage).code(),
                absl::StatusCode::kUnimplemented);
      EK_ASSIGN_OR_RETURN(const float sum, CountActive(scope));
      EXPECT_EQ(sum, static_cast<float>(comm.world_size()));
      return absl::OkStatus();
    });
  });
}

TEST_P(ScopeTest, CostsNoMessageWhileAllRanksHaveInputs) {
  Expect([&](Communicator& comm) -> absl::Status {
    auto sent_with = [&](int calls) -> absl::StatusOr<int64_t> {
      int64_t sent = 0;
      EK_RETURN_IF_ERROR(
          RunLoop(comm, [&](Communicator&, JoinScope& scope, Ticker& ticker) -> absl::Status {
            EK_RETURN_IF_ERROR(ticker.Tick());
            EK_RETURN_IF_ERROR(StepControl::Of(comm).current()->Wait().status());
            const int64_t before = comm.control().link().Counters().messages_sent;
            for (int i = 0; i < calls; ++i) EK_RETURN_IF_ERROR(CountActive(scope).status());
            sent = comm.control().link().Counters().messages_sent - before;
            return scope.Barrier();
          }));
      return sent;
    };
    EK_ASSIGN_OR_RETURN(const int64_t sent, sent_with(50));
    EXPECT_EQ(sent, 0);
    return absl::OkStatus();
  });
}

TEST_P(ScopeTest, WorksWhereNobodyIsFollowed) {
  Expect([&](Communicator& comm) {
    return RunLoop(comm,
                   [&](Communicator&, JoinScope& scope, Ticker&) -> absl::Status {
                     EK_ASSIGN_OR_RETURN(const float sum, CountActive(scope));
                     EXPECT_EQ(sum, static_cast<float>(comm.world_size()));
                     return absl::OkStatus();
                   },
                   {.enable = false});
  });
}

TEST_P(ScopeTest, KnowsWhoIsActive) {
  const int world = GetParam();
  Expect([&](Communicator& comm) {
    return RunLoop(comm, [&](Communicator&, JoinScope& scope, Ticker& ticker) -> absl::Status {
      EXPECT_EQ(static_cast<int>(scope.active_ranks().size()), world);
      for (int step = 0; step <= comm.rank(); ++step) {
        EK_RETURN_IF_ERROR(ticker.Tick());
        EK_RETURN_IF_ERROR(StepControl::Of(comm).current()->Wait().status());
        EXPECT_EQ(static_cast<int>(scope.active_ranks().size()), world - step);
        EXPECT_EQ(scope.active_ranks()[0], step);
      }
      return absl::OkStatus();
    });
  });
}

INSTANTIATE_TEST_SUITE_P(Worlds, ScopeTest, testing::Values(1, 2, 3, 5));

// Over some backends a broadcast's root is done before the others have begun.
TEST(ScopeCallsTest, DryRanksFollowTheLastCallsToo) {
  const absl::Status status = RunTestRanks(3, [](Communicator& comm) -> absl::Status {
    float received = 0;
    for (int epoch = 0; epoch < 20; ++epoch) {
      EK_RETURN_IF_ERROR(
          RunLoop(comm, [&](Communicator&, JoinScope& scope, Ticker&) -> absl::Status {
            scope.Own("received", One(received));
            if (comm.rank() < 2) return absl::OkStatus();
            received = static_cast<float>(epoch + 1);
            return scope.Broadcast(One(received), 2,
                                   {.joined = Contribution::kReceive, .tensor = "received"});
          }));
      EXPECT_EQ(received, static_cast<float>(epoch + 1));
    }
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

// The exhausted rank waits for the next call rather than for the step, and there may be many calls:
// an evaluation, for example.
TEST(ScopeCallsTest, ADryRanksPatienceBeginsAnewWithEachCall) {
  const auto loop = [](Communicator& comm, JoinScope& scope, Ticker& ticker) -> absl::Status {
    if (comm.rank() == 0) return absl::OkStatus();
    for (int i = 0; i < 12; ++i) {
      EK_RETURN_IF_ERROR(CountActive(scope).status());
      absl::SleepFor(absl::Milliseconds(500));
    }
    return ticker.Tick();
  };
  const absl::Status status = RunTestRanks(
      2, [&](Communicator& comm) { return RunLoop(comm, loop); },
      CommunicatorOptions{.timeout = absl::Seconds(3)});
  EXPECT_TRUE(status.ok()) << status;
}

// A call as a rank of another program could send it.
struct SentCall {
  int64_t count = 0;

  static void VisitFields(auto& self, auto& visit) {
    auto kind = CollectiveKind::kAllGather;
    auto dtype = DType::kFloat64;
    auto op = ReduceOp::kSum;
    auto joined = Contribution::kIdentity;
    int32_t root = -1;
    std::string tensor;
    visit(visit.UpTo(kind, kind), visit.UpTo(dtype, dtype), self.count, visit.UpTo(op, op), root,
          visit.UpTo(joined, joined), tensor);
  }
};

TEST(ScopeCallsTest, ACallOfTooManyElementsIsRefused) {
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  for (const int64_t count : {kMost, kMost / 16 + 1, int64_t{-1}}) {
    const absl::Status status = RunTestRanks(2, [&](Communicator& comm) {
      return RunLoop(comm, [&](Communicator&, JoinScope&, Ticker& ticker) -> absl::Status {
        if (comm.rank() == 0) return absl::OkStatus();
        StepControl::Of(comm).AnnounceCall(internal::ToBytes(SentCall{count}));
        return ticker.Tick();
      });
    });
    EXPECT_THAT(std::string(status.message()),
                HasSubstr("a call of the join scope: value out of range"))
        << count;
  }
}

}  // namespace
}  // namespace evenkeel
