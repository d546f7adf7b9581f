#include "evenkeel/comm/local/local.h"

#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/blocking_counter.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/control/control.h"
#include "evenkeel/comm/failure_info.h"
#include "evenkeel/comm/local/link.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/testing/few_threads.h"
#include "evenkeel/comm/types.h"
#include "evenkeel/comm/work.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::StartsWith;

TEST(CreateLocalGroupTest, RefusesAGroupOfNobody) {
  EXPECT_EQ(CreateLocalGroup(0).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(CreateLocalGroup(-1).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(RunRanksTest, SumsOverRanks) {
  absl::Status status = RunRanks(4, [](Communicator& comm) -> absl::Status {
    std::vector<float> data(5, comm.rank());
    EK_RETURN_IF_ERROR(comm.AllReduce(absl::MakeSpan(data), ReduceOp::kSum));
    EXPECT_THAT(data, Each(6.0f)) << "rank " << comm.rank();
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(RunRanksTest, NamesTheRankThatFailedFirstAndFreesTheOthers) {
  absl::Status status = RunRanks(3, [](Communicator& comm) -> absl::Status {
    if (comm.rank() == 1) return absl::DataLossError("no more data");
    absl::Status barrier = comm.Barrier();
    EXPECT_THAT(std::string(barrier.message()), HasSubstr("no more data"));
    return barrier;
  });
  EXPECT_EQ(status, absl::DataLossError("rank 1: no more data"));
}

TEST(RunRanksTest, AThreadThatCannotStartIsAnErrorOfTheGroup) {
  const auto run = [] {
    return RunRanks(3, [](Communicator& comm) { return comm.Barrier(); },
                    {.timeout = absl::Minutes(1)});
  };
  const int threads = ThreadsNeeded(run, [](int threads, const absl::Status& status) {
    EXPECT_THAT(std::string(status.message()), HasSubstr("cannot start a thread for"))
        << threads << " threads";
  });
  EXPECT_GT(threads, 3 * 3);
  EXPECT_LT(threads, kMostThreads);
}

// The links of a star, and of a tree, whose edges have a thread as well.
TEST(LocalLinkTest, TheOtherRanksLearnThatItsThreadCannotStart) {
  const struct { int fanout, threads; } cases[] = {{2, 0}, {1, 0}, {1, 1}};
  for (const auto& [fanout, threads] : cases) {
    SCOPED_TRACE(absl::StrCat("fanout ", fanout, ", ", threads, " threads"));
    std::vector<std::unique_ptr<ControlLink>> links = internal::CreateLocalLinks(2, fanout);
    ControlChannel other(0, 2, std::move(links[0]));
    absl::Notification failed;
    std::string why;
    other.SetHandlers(
        [&](int rank, const absl::Status& status) {
          EXPECT_EQ(rank, 1);
          why = std::string(status.message());
          failed.Notify();
        },
        [](int, absl::string_view, absl::string_view) {});
    LetThreadsStart(threads);
    const ControlChannel without(1, 2, std::move(links[1]));
    LetThreadsStart(-1);
    ASSERT_TRUE(failed.WaitForNotificationWithTimeout(absl::Seconds(10)));
    EXPECT_THAT(why, HasSubstr("cannot start a thread for the messages of ranks in this process"));
  }
}

TEST(RunRanksTest, TurnsAnExceptionIntoAStatus) {
  absl::Status status = RunRanks(2, [](Communicator& comm) -> absl::Status {
    if (comm.rank() == 0) throw std::runtime_error("a bad day");
    return comm.Barrier();
  });
  EXPECT_EQ(status, absl::InternalError("rank 0: exception: a bad day"));
}

TEST(RunRanksTest, FinalizesRanksThatReturn) {
  absl::Status status = RunRanks(2, [](Communicator& comm) -> absl::Status {
    return comm.rank() == 0 ? comm.Barrier() : absl::OkStatus();
  });
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
}

TEST(LocalGroupTest, ADisagreementSaysWhoIsWhereOnEveryRank) {
  absl::BlockingCounter in_flight(3);
  absl::Status status = RunRanks(4, [&](Communicator& comm) -> absl::Status {
    std::vector<float> data(10, 1.0f);
    for (int i = 0; i < 3; ++i)
      EK_RETURN_IF_ERROR(comm.AllReduce(absl::MakeSpan(data), ReduceOp::kSum));
    absl::Status ended;
    if (comm.rank() == 1) {
      in_flight.Wait();
      ended = comm.Barrier();
    } else {
      Work work = comm.user().AllReduce(absl::MakeSpan(data), ReduceOp::kSum,
                                        {.role = Role::kBucket, .index = 2, .index_count = 5});
      in_flight.DecrementCount();
      ended = work.Wait();
    }
    EXPECT_TRUE(absl::IsFailedPrecondition(ended)) << ended;
    EXPECT_EQ(ended.message(),
              "rank 1 is at #3 barrier (user); ranks 0,2,3 are at #3 all_reduce bucket 2/5 "
              "float32[10] sum: the ranks disagree");
    EXPECT_EQ(FailureInfoOf(ended), (FailureInfo{.kind = FailureKind::kDisagreement,
                                                 .ranks = {1},
                                                 .operation = "barrier (user)",
                                                 .position = 3}));
    EXPECT_FALSE(comm.user().Barrier().Wait().ok());
    return ended;
  });
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
}

// Whatever its code: the rank that aborts is the cause.
TEST(LocalGroupTest, ARankThatAbortsIsNamedToThePeers) {
  for (const absl::Status& why :
       {absl::FailedPreconditionError("no file"), absl::DeadlineExceededError("too slow"),
        absl::InternalError("a bug")}) {
    RunRanks(3, [&](Communicator& comm) -> absl::Status {
      if (comm.rank() == 1) comm.Abort(why);
      const absl::Status ended = comm.Barrier();
      FailureInfo expected{.ranks = {1}};
      // The rank that aborts issues nothing any more; the others may have been in their barrier.
      if (FailureInfoOf(ended)->position == 0) {
        EXPECT_NE(comm.rank(), 1);
        expected.operation = "barrier (user)";
        expected.position = 0;
      }
      EXPECT_EQ(FailureInfoOf(ended), expected) << ended;
      return ended;
    }).IgnoreError();
  }
}

TEST(LocalGroupTest, DifferentPartsOfEqualSizeDisagree) {
  absl::Status status = RunRanks(2, [](Communicator& comm) -> absl::Status {
    std::vector<float> data(10);
    const TensorView whole{absl::MakeSpan(data)};
    const int64_t cut = comm.rank() == 0 ? 4 : 5;
    return comm.user()
        .AllReduce({whole.Slice(0, cut), whole.Slice(cut, 10 - cut)}, ReduceOp::kSum)
        .Wait();
  });
  EXPECT_THAT(std::string(status.message()),
              HasSubstr("rank 0 is at #0 all_reduce (user) float32[10] sum in parts 4+6"));
}

TEST(LocalGroupTest, DifferentScalesDisagree) {
  absl::Status status = RunRanks(2, [](Communicator& comm) -> absl::Status {
    std::vector<float> data(10);
    return comm.user()
        .AllReduce(absl::MakeSpan(data), ReduceOp::kSum, {.scale = 1.0 + comm.rank()})
        .Wait();
  });
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("scale 2"));
}

// Large enough for several slices; the element order of addition must not show.
TEST(LocalGroupTest, ResultsDoNotDependOnTheCut) {
  constexpr int kCount = 1 << 20;
  constexpr int kRanks = 3;
  const auto value = [](int rank, int i) {
    return 1.0f / static_cast<float>(1 + (i * 7 + rank * 13) % 1000);
  };
  absl::Status status = RunRanks(kRanks, [&](Communicator& comm) -> absl::Status {
    std::vector<float> whole(kCount);
    for (int i = 0; i < kCount; ++i) whole[i] = value(comm.rank(), i);
    std::vector<float> cut = whole;
    EK_RETURN_IF_ERROR(comm.AllReduce(absl::MakeSpan(whole), ReduceOp::kSum));
    const TensorView view{absl::MakeSpan(cut)};
    EK_RETURN_IF_ERROR(
        comm.user()
            .AllReduce({view.Slice(0, 1), view.Slice(1, 0), view.Slice(1, kCount - 1)},
                       ReduceOp::kSum)
            .Wait());
    for (int i = 0; i < kCount; ++i) {
      float sum = value(0, i);
      for (int rank = 1; rank < kRanks; ++rank) sum += value(rank, i);
      if (whole[i] != sum || cut[i] != sum) return absl::DataLossError(absl::StrCat("element ", i));
    }
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

// A small operation on the end of what a large one, in several slices, may not be done with.
TEST(LocalGroupTest, ChainsOperationsOfAChannelOnOneBuffer) {
  absl::Status status = RunRanks(3, [](Communicator& comm) -> absl::Status {
    std::vector<int64_t> data(200000, 1);
    const TensorView whole{absl::MakeSpan(data)};
    const TensorView tail = whole.Slice(199990, 10);
    std::vector<Work> works;
    for (int i = 0; i < 5; ++i) {
      works.push_back(comm.user().AllReduce(whole, ReduceOp::kSum));
      works.push_back(comm.user().AllReduce(tail, ReduceOp::kMax));
      works.push_back(comm.user().AllReduce(tail, ReduceOp::kSum));
    }
    EK_RETURN_IF_ERROR(works.back().Wait());
    for (const Work& work : works) EXPECT_TRUE(work.IsDone());
    EXPECT_EQ(data[0], 243);                       // 3^5
    EXPECT_THAT(tail.as<int64_t>(), Each(59049));  // 3^10
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

// The output overlaps the input in a way that would destroy what is still to be read.
TEST(LocalGroupTest, AllowsOutputsThatOverlapTheirInputs) {
  absl::Status status = RunRanks(2, [](Communicator& comm) -> absl::Status {
    const int rank = comm.rank();
    Channel& user = comm.user();
    std::vector<int32_t> exchanged = {10 * rank, 10 * rank + 1};
    EK_RETURN_IF_ERROR(user.AllToAll(absl::MakeSpan(exchanged), absl::MakeSpan(exchanged)).Wait());
    EXPECT_EQ(exchanged, (std::vector<int32_t>{rank, 10 + rank}));

    std::vector<int32_t> gathered = {-1, 10 * rank, 10 * rank + 1, -1};
    const TensorView all{absl::MakeSpan(gathered)};
    EK_RETURN_IF_ERROR(user.AllGather(all.Slice(1, 2), all).Wait());
    EXPECT_EQ(gathered, (std::vector<int32_t>{0, 1, 10, 11}));

    std::vector<int32_t> scattered = {1, 2, 3, 4};
    const TensorView parts{absl::MakeSpan(scattered)};
    EK_RETURN_IF_ERROR(user.ReduceScatter(parts, parts.Slice(1, 2), ReduceOp::kSum).Wait());
    EXPECT_EQ(scattered[1], rank == 0 ? 2 : 6);
    EXPECT_EQ(scattered[2], rank == 0 ? 4 : 8);
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(LocalGroupTest, ACallbackMayIssueTheNextOperation) {
  constexpr int kRounds = 200;
  absl::Status status = RunRanks(3, [](Communicator& comm) -> absl::Status {
    std::vector<int32_t> data(8, comm.rank());
    absl::Notification done;
    std::function<void(int)> round = [&](int i) {
      if (i == kRounds) return done.Notify();
      comm.user()
          .AllReduce(absl::MakeSpan(data), ReduceOp::kMax)
          .OnDone([&round, i](const absl::Status&) { round(i + 1); });
    };
    round(0);
    done.WaitForNotification();
    EXPECT_THAT(data, Each(2));
    return comm.Barrier();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(LocalGroupTest, AbortInACallbackEndsTheGroup) {
  absl::Status status = RunRanks(3, [](Communicator& comm) -> absl::Status {
    std::vector<float> small(8), large(1 << 20);
    comm.user().AllReduce(absl::MakeSpan(small), ReduceOp::kSum).OnDone([&](const absl::Status&) {
      if (comm.rank() == 1) comm.Abort(absl::CancelledError("enough"));
    });
    absl::Status ended;
    while (ended.ok()) ended = comm.AllReduce(absl::MakeSpan(large), ReduceOp::kSum);
    EXPECT_THAT(std::string(ended.message()), HasSubstr("enough"));
    return ended;
  });
  EXPECT_THAT(std::string(status.message()), HasSubstr("enough"));
}

// Every rank frees its buffers right after the failure: a write that comes later is seen by the
// sanitizers.
TEST(LocalGroupTest, NoBufferIsTouchedAfterAbort) {
  for (int round = 0; round < 20; ++round) {
    absl::BlockingCounter started(3);
    absl::Status status = RunRanks(3, [&](Communicator& comm) -> absl::Status {
      auto data = std::make_unique<std::vector<float>>(1 << 20, 1.0f);
      Work work = comm.user().AllReduce(absl::MakeSpan(*data), ReduceOp::kSum);
      started.DecrementCount();
      if (comm.rank() == 2) {
        started.Wait();
        comm.Abort(absl::CancelledError("enough"));
      }
      absl::Status ended = work.Wait();
      data.reset();
      return ended.ok() ? comm.Barrier() : ended;
    });
    EXPECT_THAT(std::string(status.message()), HasSubstr("enough"));
  }
}

TEST(LocalGroupTest, ADestroyedCommunicatorIsALostRank) {
  absl::StatusOr<std::vector<std::unique_ptr<Communicator>>> group = CreateLocalGroup(2);
  ASSERT_TRUE(group.ok()) << group.status();
  std::vector<float> data(100);
  Work in_flight = (*group)[0]->user().AllReduce(absl::MakeSpan(data), ReduceOp::kSum);
  (*group)[1].reset();
  absl::Status ended = in_flight.Wait();
  EXPECT_EQ(ended.code(), absl::StatusCode::kUnavailable) << ended;
  EXPECT_THAT(std::string(ended.message()), StartsWith("rank 1 of 2 is lost"));
}

TEST(LocalGroupTest, AMissedDeadlineEndsTheGroup) {
  absl::Status status = RunRanks(2, [](Communicator& comm) -> absl::Status {
    if (comm.rank() == 0) return comm.user().Barrier({.timeout = absl::Milliseconds(50)}).Wait();
    while (comm.status().ok()) absl::SleepFor(absl::Milliseconds(1));
    EXPECT_EQ(comm.status().code(), absl::StatusCode::kDeadlineExceeded) << comm.status();
    return comm.status();
  });
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded) << status;
}

}  // namespace
}  // namespace evenkeel
