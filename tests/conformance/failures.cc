// Ranks that abort, leave, come too late or are destroyed: everybody else learns of it, soon, and
// with a name.

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/blocking_counter.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/failure_info.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/types.h"
#include "evenkeel/comm/work.h"
#include "evenkeel/tests/conformance/placed.h"
#include "evenkeel/tests/conformance/tested_backend.h"
#include "evenkeel/tests/conformance/world_test.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

class FailureTest : public WorldTest {};  // World size, at least 2.

// `ranks`: the causes, where every backend can tell them.
void ExpectFailure(const absl::Status& ended, FailureKind kind, const std::vector<int>& ranks) {
  const std::optional<FailureInfo> info = FailureInfoOf(ended);
  ASSERT_TRUE(info.has_value()) << ended;
  EXPECT_EQ(ToString(info->kind), ToString(kind)) << ended;
  if (!ranks.empty()) {
    EXPECT_EQ(info->ranks, ranks) << ended;
  }
}

// All-reduces until that fails.
absl::Status WorkUntilFailure(Communicator& comm, int64_t elements) {
  std::vector<float> data(elements, 1.0f);
  EK_ASSIGN_OR_RETURN(Placed<float> placed, Place(comm, data));
  while (true) EK_RETURN_IF_ERROR(comm.AllReduce(placed.view(), ReduceOp::kMax));
}

// As RunTested(), but each rank's communicator belongs to its body; no rank aborts or finalizes by
// itself.
void RunAndOwn(int world_size, const CommunicatorOptions& options,
               const std::function<void(std::unique_ptr<Communicator>)>& body) {
  absl::StatusOr<Group> group = Tested().create(world_size, options);
  ASSERT_TRUE(group.ok()) << group.status();
  std::vector<std::thread> ranks;
  for (std::unique_ptr<Communicator>& comm : *group) {
    ranks.emplace_back([&body, comm = std::move(comm)]() mutable { body(std::move(comm)); });
  }
  for (std::thread& rank : ranks) rank.join();
}

TEST_P(FailureTest, AbortFromAnotherThreadEndsWhatIsInFlightEverywhere) {
  for (int64_t elements : {10, 1 << 20}) {
    const int last = GetParam() - 1;
    absl::Time aborted_at;
    absl::Notification aborted;
    absl::Status status = RunTested(GetParam(), [&](Communicator& comm) -> absl::Status {
      EK_RETURN_IF_ERROR(comm.Barrier());
      std::thread aborter;
      if (comm.rank() == last) {
        aborter = std::thread([&] {
          aborted_at = absl::Now();
          comm.Abort(absl::CancelledError("had enough"));
          aborted.Notify();
        });
      }
      const absl::Status ended = WorkUntilFailure(comm, elements);
      if (aborter.joinable()) aborter.join();
      aborted.WaitForNotification();
      EXPECT_LT(absl::Now() - aborted_at, kAtOnce);
      EXPECT_TRUE(absl::StrContains(ended.message(), "had enough")) << ended;
      if (comm.rank() != last) {
        EXPECT_EQ(ended.code(), absl::StatusCode::kUnavailable) << ended;
        EXPECT_TRUE(absl::StrContains(ended.message(), absl::StrCat("rank ", last))) << ended;
      }
      ExpectFailure(ended, FailureKind::kRankFailed, {last});
      EXPECT_EQ(comm.Barrier(), comm.status());
      EXPECT_EQ(comm.status().message(), ended.message());
      return ended;
    });
    EXPECT_FALSE(status.ok());
  }
}

// A rank that never comes, while the others have operations in flight on two channels.
TEST_P(FailureTest, AbortEndsOperationsThatWaitForAPeer) {
  absl::Status status = RunTested(GetParam(), [](Communicator& comm) -> absl::Status {
    EK_ASSIGN_OR_RETURN(Channel * other, comm.OpenChannel("other"));
    if (comm.rank() == 0) {
      EK_RETURN_IF_ERROR(comm.Barrier());
      comm.Abort(absl::AbortedError("no more"));
      return comm.status();
    }
    std::vector<float> data(1000), more(1000);
    EK_ASSIGN_OR_RETURN(Placed<float> placed, Place(comm, data));
    EK_ASSIGN_OR_RETURN(Placed<float> placed_more, Place(comm, more));
    EK_RETURN_IF_ERROR(comm.Barrier());
    Work first = comm.user().AllReduce(placed.view(), ReduceOp::kSum);
    Work second = comm.user().Barrier();
    Work third = other->AllReduce(placed_more.view(), ReduceOp::kSum);
    for (const Work& work : {third, second, first}) {
      EXPECT_TRUE(absl::StrContains(work.Wait().message(), "no more")) << work.Wait();
      EXPECT_TRUE(work.IsDone());
      EXPECT_EQ(work.Wait(), work.Wait());
    }
    return first.Wait();
  });
  EXPECT_TRUE(absl::StrContains(status.message(), "no more")) << status;
}

TEST_P(FailureTest, ARankThatLeavesWithoutFinalizeIsLost) {
  const int lost = GetParam() / 2;
  absl::Time left_at;
  absl::BlockingCounter others_started(GetParam() - 1);
  RunAndOwn(GetParam(), {.timeout = kPatience}, [&](std::unique_ptr<Communicator> comm) {
    const absl::Status started = comm->Barrier();
    EXPECT_TRUE(started.ok()) << started;
    if (comm->rank() == lost) {
      others_started.Wait();
      left_at = absl::Now();
      comm.reset();
      return;
    }
    others_started.DecrementCount();
    const absl::Status ended = WorkUntilFailure(*comm, 1000);
    EXPECT_EQ(ended.code(), absl::StatusCode::kUnavailable) << ended;
    EXPECT_TRUE(absl::StrContains(ended.message(), absl::StrCat("rank ", lost))) << ended;
    ExpectFailure(ended, FailureKind::kRankLost, {lost});
    EXPECT_LT(absl::Now() - left_at, kAtOnce);
  });
}

TEST_P(FailureTest, DestructionEndsWhatIsInFlight) {
  RunAndOwn(GetParam(), {.timeout = kPatience}, [](std::unique_ptr<Communicator> comm) {
    const int rank = comm->rank();
    auto data = std::make_unique<std::vector<float>>(100000, 1.0f);
    absl::StatusOr<Placed<float>> placed = Place(*comm, *data);
    ASSERT_TRUE(placed.ok()) << placed.status();
    Work work;
    // Rank 0 never comes; the others destroy what waits for it.
    if (rank != 0) work = comm->user().AllReduce(placed->view(), ReduceOp::kSum);
    comm.reset();
    placed = absl::CancelledError();
    data.reset();
    EXPECT_TRUE(work.IsDone());
    EXPECT_TRUE(rank == 0 || !work.Wait().ok());
  });
}

TEST_P(FailureTest, AnExpiredDeadlineEndsTheGroup) {
  const absl::Time start = absl::Now();
  absl::Status status = RunTested(GetParam(), [](Communicator& comm) -> absl::Status {
    EK_RETURN_IF_ERROR(comm.Barrier());
    if (comm.rank() == 0) {  // Comes too late.
      while (comm.status().ok()) absl::SleepFor(absl::Milliseconds(5));
      return comm.Barrier();
    }
    const absl::Status ended = comm.user().Barrier({.timeout = absl::Milliseconds(200)}).Wait();
    EXPECT_FALSE(ended.ok());
    EXPECT_FALSE(comm.status().ok());
    ExpectFailure(ended, FailureKind::kDeadline, {});
    return ended;
  });
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded) << status;
  EXPECT_LT(absl::Now() - start, kAtOnce);
}

TEST_P(FailureTest, FinalizeIsTheCleanLeave) {
  RunAndOwn(GetParam(), {.timeout = kPatience}, [](std::unique_ptr<Communicator> comm) {
    EXPECT_TRUE(comm->Barrier().ok());
    const absl::Status left = comm->Finalize();
    EXPECT_TRUE(left.ok()) << left;
    EXPECT_FALSE(comm->Barrier().ok());
  });
}

TEST_P(FailureTest, FinalizeAtDifferentPositionsFailsOnEveryRank) {
  const absl::Time start = absl::Now();
  RunAndOwn(GetParam(), {.timeout = kPatience}, [](std::unique_ptr<Communicator> comm) {
    // Started only: rank 0 will never come to it.
    Work work;
    if (comm->rank() != 0) work = comm->user().Barrier();
    const absl::Status left = comm->Finalize();
    EXPECT_FALSE(left.ok());
    EXPECT_EQ(left.code(), absl::StatusCode::kFailedPrecondition) << left;
    EXPECT_TRUE(absl::StrContains(left.message(), "rank")) << left;
    ExpectFailure(left, FailureKind::kDisagreement, {});
    EXPECT_TRUE(comm->rank() == 0 || !work.Wait().ok());
  });
  EXPECT_LT(absl::Now() - start, kAtOnce);
}

// One rank is done, the others still expect it: nobody waits until the deadline.
TEST_P(FailureTest, AnOperationThatAFinalizedRankWillNeverJoinFailsAtOnce) {
  const absl::Time start = absl::Now();
  absl::Status status = RunTested(GetParam(), [](Communicator& comm) -> absl::Status {
    EK_RETURN_IF_ERROR(comm.Barrier());
    if (comm.rank() == 0) return absl::OkStatus();  // RunTested finalizes.
    const absl::Status ended = comm.Barrier();
    EXPECT_FALSE(ended.ok());
    EXPECT_TRUE(absl::StrContains(ended.message(), "rank 0 has left the group")) << ended;
    return ended;
  });
  EXPECT_FALSE(status.ok());
  EXPECT_LT(absl::Now() - start, kAtOnce);
}

TEST_P(FailureTest, FinalizeWithARankThatNeverComesMissesItsDeadline) {
  RunAndOwn(GetParam(), {.timeout = kPatience}, [](std::unique_ptr<Communicator> comm) {
    if (comm->rank() == 0) {
      while (comm->status().ok()) absl::SleepFor(absl::Milliseconds(5));
      EXPECT_FALSE(comm->Finalize().ok());
      return;
    }
    const absl::Status left = comm->Finalize(absl::Milliseconds(200));
    EXPECT_FALSE(left.ok());
    EXPECT_TRUE(absl::StrContains(left.message(), "rank")) << left;
  });
}

TEST_P(FailureTest, CallbacksAreToldOfTheFailureOnce) {
  absl::Status status = RunTested(GetParam(), [](Communicator& comm) -> absl::Status {
    std::vector<float> data(10);
    EK_ASSIGN_OR_RETURN(Placed<float> placed, Place(comm, data));
    EK_RETURN_IF_ERROR(comm.Barrier());
    if (comm.rank() == 0) return absl::CancelledError("had enough");
    struct Seen {
      absl::Mutex mutex;
      std::vector<absl::Status> statuses ABSL_GUARDED_BY(mutex);
    };
    auto seen = std::make_shared<Seen>();
    Work work = comm.user().AllReduce(placed.view(), ReduceOp::kSum);
    work.OnDone([seen](const absl::Status& status) {
      absl::MutexLock lock(&seen->mutex);
      seen->statuses.push_back(status);
    });
    const absl::Status ended = work.Wait();
    absl::Mutex& mutex = seen->mutex;
    const auto told = [&]() ABSL_NO_THREAD_SAFETY_ANALYSIS { return !seen->statuses.empty(); };
    absl::MutexLock lock(&mutex);
    mutex.Await(absl::Condition(&told));
    EXPECT_EQ(seen->statuses, std::vector<absl::Status>{ended});
    return ended;
  });
  EXPECT_TRUE(absl::StrContains(status.message(), "had enough")) << status;
}

// Ranks leave as soon as their own part has ended, the others may still be busy with theirs.
TEST_P(FailureTest, ARankMayLeaveBeforeTheOthers) {
  for (int round = 0; round < 8; ++round) {
    RunAndOwn(GetParam(), {.timeout = kPatience}, [&](std::unique_ptr<Communicator> comm) {
      const int64_t elements = round % 2 == 0 ? 100 : 1 << 20;
      std::vector<float> data(elements, 1.0f);
      absl::StatusOr<Placed<float>> placed = Place(*comm, data);
      ASSERT_TRUE(placed.ok()) << placed.status();
      const absl::Status reduced = comm->AllReduce(placed->view(), ReduceOp::kSum);
      EXPECT_TRUE(reduced.ok()) << reduced;
      ASSERT_TRUE(placed->Fetch().ok());
      EXPECT_EQ(data.back(), comm->world_size());
      const absl::Status left = comm->Leave();
      EXPECT_TRUE(left.ok()) << left;
    });
  }
}

TEST_P(FailureTest, ARankThatHasLeftIsNamedToThoseThatNeedIt) {
  const int gone = GetParam() - 1;
  RunAndOwn(GetParam(), {.timeout = kPatience}, [&](std::unique_ptr<Communicator> comm) {
    absl::Status ended = comm->Barrier();
    if (comm->rank() == gone) {
      EXPECT_TRUE(ended.ok()) << ended;
      EXPECT_TRUE(comm->Leave().ok());
      return;
    }
    // The error of a faster rank may reach this one in its barrier.
    if (ended.ok()) ended = WorkUntilFailure(*comm, 1000);
    EXPECT_EQ(ended.code(), absl::StatusCode::kFailedPrecondition) << ended;
    EXPECT_TRUE(absl::StrContains(ended.message(), absl::StrCat("rank ", gone))) << ended;
    ExpectFailure(ended, FailureKind::kDisagreement, {gone});
    EXPECT_GE(FailureInfoOf(ended)->position, 1) << ended;
    EXPECT_FALSE(FailureInfoOf(ended)->operation.empty()) << ended;
  });
}

INSTANTIATE_TEST_SUITE_P(WorldSize, FailureTest, testing::ValuesIn(WorldSizes(2)),
                         testing::PrintToStringParamName());

}  // namespace
}  // namespace evenkeel
