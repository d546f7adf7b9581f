// Failures in a group over NCCL, and their errors on its ranks: with NCCL and its devices
// simulated.

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "evenkeel/comm/collective.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/device/simulated.h"
#include "evenkeel/comm/memory.h"
#include "evenkeel/comm/nccl/group.h"
#include "evenkeel/comm/testing/simulated_nccl.h"
#include "evenkeel/comm/testing/simulated_nccl_group.h"
#include "evenkeel/comm/types.h"
#include "evenkeel/comm/work.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel::internal {
namespace {

using ::testing::HasSubstr;
using Ranks = std::vector<absl::StatusOr<std::unique_ptr<Communicator>>>;

std::string TextOf(const absl::Status& status) { return std::string(status.message()); }

// A barrier that all have come out of when the first one goes on.
void Meet(Communicator& comm) {
  EXPECT_TRUE(comm.Barrier().ok());
  EXPECT_TRUE(comm.AgreeAny(true).ok());
}

constexpr absl::Duration kPatience = absl::Minutes(1);  // The tests' longest wait.

void AwaitEnd(const Communicator& comm) {
  const absl::Time deadline = absl::Now() + kPatience;
  while (comm.status().ok() && absl::Now() < deadline) absl::SleepFor(absl::Milliseconds(1));
  EXPECT_FALSE(comm.status().ok()) << "rank " << comm.rank() << " has heard of no end";
}

class NcclFailureTest : public testing::Test {
 protected:
  // Each rank in a thread of its own; nobody finalizes or aborts by itself.
  void Run(int world_size, const std::function<void(Communicator&)>& body,
           const NcclGroupOptions& options = {}) {
    Ranks ranks = ConnectSimulatedNccl(devices_, nccl_, world_size, options);
    std::vector<std::thread> threads;
    for (auto& rank : ranks) {
      ASSERT_TRUE(rank.ok()) << rank.status();
      threads.emplace_back([&body, comm = rank->get()] { body(*comm); });
    }
    for (std::thread& thread : threads) thread.join();
  }

  static TensorView ViewOf(Communicator& comm, const Memory& memory) {
    return TensorView(memory.data.get(), memory.bytes / 4, DType::kFloat32, comm.device());
  }
  static Memory Buffer(Communicator& comm, int64_t bytes = 400) {
    absl::StatusOr<Memory> memory = comm.runtime()->Allocate(comm.device(), bytes);
    EXPECT_TRUE(memory.ok()) << memory.status();
    return *std::move(memory);
  }

  SimulatedDevices devices_{{.count = 4}};
  SimulatedNccl nccl_{devices_};
};

TEST_F(NcclFailureTest, AnErrorThatComesByItselfReachesAllRanksWithItsRank) {
  Run(3, [&](Communicator& comm) {
    Meet(comm);
    const Memory memory = Buffer(comm);
    Work work;
    // Rank 0 never comes, so nothing can end by itself.
    if (comm.rank() == 1)
      nccl_.SetState(1, {NcclCode::kRemoteError, "connection closed by remote peer"});
    if (comm.rank() != 0) work = comm.user().AllReduce(ViewOf(comm, memory), ReduceOp::kSum);
    AwaitEnd(comm);
    const absl::Status ended = comm.rank() == 0 ? comm.status() : work.Wait();
    EXPECT_EQ(ended.code(), absl::StatusCode::kUnavailable) << ended;
    EXPECT_THAT(TextOf(ended), HasSubstr("rank 1: nccl: "));
    EXPECT_THAT(TextOf(ended), HasSubstr("connection closed by remote peer"));
  });
}

TEST_F(NcclFailureTest, AnErrorWhileNothingIsInFlightReachesAllRanksToo) {
  Run(3, [&](Communicator& comm) {
    Meet(comm);
    if (comm.rank() == 1)
      nccl_.SetState(1, {NcclCode::kRemoteError, "connection closed by remote peer"});
    AwaitEnd(comm);
    EXPECT_THAT(TextOf(comm.status()), HasSubstr("rank 1: nccl: "));
    EXPECT_THAT(TextOf(comm.status()), HasSubstr("connection closed by remote peer"));
  });
}

TEST_F(NcclFailureTest, EveryCallsFailureEndsTheGroupWithItsWords) {
  for (const char* call : {"GroupStart", "Enqueue", "GroupEnd", "MakeScaledSum", "DropReduction"}) {
    SCOPED_TRACE(call);
    Run(2, [&](Communicator& comm) {
      Meet(comm);
      const Memory memory = Buffer(comm);
      if (comm.rank() == 1)
        nccl_.FailNext(1, call, {NcclCode::kInternalError, "internal check failed"});
      const Work work =
          comm.user().AllReduce(ViewOf(comm, memory), ReduceOp::kSum, {.scale = 0.25});
      (void)work.Wait();
      AwaitEnd(comm);
      EXPECT_THAT(TextOf(comm.status()), HasSubstr("rank 1: nccl: "));
      EXPECT_THAT(TextOf(comm.status()), HasSubstr("internal check failed"));
    });
  }
}

TEST_F(NcclFailureTest, AFailureOfTheDeviceEndsTheGroup) {
  Run(2, [&](Communicator& comm) {
    Meet(comm);
    const Memory memory = Buffer(comm);
    EXPECT_TRUE(comm.AgreeAny(true).ok());
    if (comm.rank() == 0)
      devices_.FailNext("IsDone", absl::InternalError("an illegal memory access"));
    (void)comm.user().AllReduce(ViewOf(comm, memory), ReduceOp::kSum).Wait();
    AwaitEnd(comm);
    EXPECT_THAT(TextOf(comm.status()), HasSubstr("an illegal memory access"));
  });
  devices_.FailNext("IsDone", absl::OkStatus());
}

TEST_F(NcclFailureTest, DifferentCollectivesOfEqualSizeAreFoundBeforeTheyMeet) {
  Run(3, [&](Communicator& comm) {
    Meet(comm);
    const Memory memory = Buffer(comm);
    const TensorView view = ViewOf(comm, memory);
    const Work work = comm.rank() == 1 ? comm.user().AllReduce(view, ReduceOp::kMax)
                                       : comm.user().AllReduce(view, ReduceOp::kSum);
    const absl::Status ended = work.Wait();
    EXPECT_EQ(ended.code(), absl::StatusCode::kFailedPrecondition) << ended;
    EXPECT_THAT(TextOf(ended), HasSubstr("rank 1 is at #1 all_reduce (user) float32[100] max"));
    EXPECT_THAT(TextOf(ended), HasSubstr("the ranks disagree"));
  });
  EXPECT_EQ(nccl_.garbage(), 0);
  EXPECT_EQ(nccl_.kernels(), 3);  // The barrier's.
}

TEST_F(NcclFailureTest, DifferentScalesAreFoundAsWell) {
  Run(2, [&](Communicator& comm) {
    const Memory memory = Buffer(comm);
    const absl::Status ended =
        comm.user()
            .AllReduce(ViewOf(comm, memory), ReduceOp::kSum, {.scale = 1.0 + comm.rank()})
            .Wait();
    EXPECT_THAT(TextOf(ended), HasSubstr("float32[100] sum, scale 2"));
    EXPECT_THAT(TextOf(ended), HasSubstr("the ranks disagree"));
  });
}

TEST_F(NcclFailureTest, ARankThatNeverComesEndsTheOthersAtTheDeadlineAlsoInOrderBefore) {
  Run(2, [&](Communicator& comm) {
    Meet(comm);
    if (comm.rank() == 0) {
      AwaitEnd(comm);
      return;
    }
    const Memory memory = Buffer(comm);
    const Work work = comm.user().AllReduce(ViewOf(comm, memory), ReduceOp::kSum,
                                            {.timeout = absl::Milliseconds(200)});
    absl::StatusOr<Stream> stream = comm.runtime()->CreateStream(comm.device());
    ASSERT_TRUE(stream.ok());
    EXPECT_FALSE(work.OrderBefore(stream->ref()).ok());
    EXPECT_EQ(work.Wait().code(), absl::StatusCode::kDeadlineExceeded) << work.Wait();
    EXPECT_THAT(TextOf(work.Wait()), HasSubstr("rank 1 waited"));
  });
}

// Rank 0's stream is behind work that ends only when the test says so.
TEST_F(NcclFailureTest, ALaunchedCollectiveMissesItsDeadlineToo) {
  absl::Notification go_on;
  Run(2, [&](Communicator& comm) {
    Meet(comm);
    const Memory memory = Buffer(comm);
    absl::StatusOr<Stream> stream = comm.runtime()->CreateStream(comm.device());
    ASSERT_TRUE(stream.ok());
    if (comm.rank() == 0) {
      ASSERT_TRUE(
          devices_
              .Put(stream->ref(), [&] { (void)go_on.WaitForNotificationWithTimeout(kPatience); })
              .ok());
    }
    const Work work =
        comm.user().AllReduce(ViewOf(comm, memory), ReduceOp::kSum,
                              {.after = stream->ref(), .timeout = absl::Milliseconds(200)});
    if (comm.rank() == 1) {
      EXPECT_EQ(work.Wait().code(), absl::StatusCode::kDeadlineExceeded) << work.Wait();
      go_on.Notify();
    }
    EXPECT_FALSE(work.Wait().ok());
  });
}

TEST_F(NcclFailureTest, AbortFromAnotherThreadEndsKernelsThatWait) {
  const absl::Time start = absl::Now();
  Run(2, [&](Communicator& comm) {
    Meet(comm);
    auto memory = std::make_unique<Memory>(Buffer(comm));
    absl::StatusOr<Stream> stream = comm.runtime()->CreateStream(comm.device());
    ASSERT_TRUE(stream.ok());
    absl::Notification go_on;
    if (comm.rank() == 0) {
      ASSERT_TRUE(
          devices_
              .Put(stream->ref(), [&] { (void)go_on.WaitForNotificationWithTimeout(kPatience); })
              .ok());
    }
    const Work work =
        comm.user().AllReduce(ViewOf(comm, *memory), ReduceOp::kSum, {.after = stream->ref()});
    absl::StatusOr<Stream> consumer = comm.runtime()->CreateStream(comm.device());
    EXPECT_TRUE(work.OrderBefore(consumer->ref()).ok());
    EXPECT_TRUE(comm.AgreeAny(true).ok());
    std::thread aborter([&] {
      if (comm.rank() == 1) return comm.Abort(absl::CancelledError("had enough"));
      // The peers hear of an abort before NCCL does: until then the kernels may still meet.
      const absl::Time deadline = absl::Now() + kPatience;
      while (nccl_.communicators() > 0 && absl::Now() < deadline)
        absl::SleepFor(absl::Milliseconds(1));
      EXPECT_EQ(nccl_.communicators(), 0);
      go_on.Notify();
    });
    EXPECT_THAT(TextOf(work.Wait()), HasSubstr("had enough"));
    memory.reset();  // Nothing touches it any more.
    aborter.join();
    // Who waits on a stream is set free.
    EXPECT_TRUE(comm.runtime()->Synchronize(consumer->ref(), absl::Now() + absl::Seconds(10)).ok());
  });
  EXPECT_LT(absl::Now() - start, absl::Seconds(20));
}

TEST_F(NcclFailureTest, AbortComesIntoACallThatHangsAndNoOtherCallFollows) {
  const absl::Time start = absl::Now();
  for (const char* call : {"MakeScaledSum", "Enqueue", "GroupEnd"}) {
    SCOPED_TRACE(call);
    Run(2,
        [&](Communicator& comm) {
          Meet(comm);
          const Memory memory = Buffer(comm);
          if (comm.rank() == 1) nccl_.HangNext(1, call);
          const Work work =
              comm.user().AllReduce(ViewOf(comm, memory), ReduceOp::kSum, {.scale = 0.25});
          if (comm.rank() == 1) {
            while (nccl_.hanging() == 0 && absl::Now() < start + kPatience)
              absl::SleepFor(absl::Milliseconds(1));
            comm.Abort(absl::CancelledError("had enough"));
          }
          EXPECT_THAT(TextOf(work.Wait()), HasSubstr("had enough"));
        },
        {.abort_patience = absl::Seconds(1)});
  }
  EXPECT_THAT(nccl_.mistakes(), testing::IsEmpty());
  EXPECT_LT(absl::Now() - start, absl::Seconds(30));
}

TEST_F(NcclFailureTest, AnAbortThatHangsIsLeftBehindWithASentence) {
  absl::Notification go_on;
  Run(2,
      [&](Communicator& comm) {
        Meet(comm);
        const Memory memory = Buffer(comm);
        absl::StatusOr<Stream> stream = comm.runtime()->CreateStream(comm.device());
        ASSERT_TRUE(stream.ok());
        if (comm.rank() == 0) {
          ASSERT_TRUE(devices_
                          .Put(stream->ref(),
                               [&] { (void)go_on.WaitForNotificationWithTimeout(kPatience); })
                          .ok());
        }
        const Work work =
            comm.user().AllReduce(ViewOf(comm, memory), ReduceOp::kSum, {.after = stream->ref()});
        EXPECT_TRUE(work.OrderBefore(stream->ref()).ok());  // It is launched,
        nccl_.HangNext(comm.rank(), "Abort");
        EXPECT_TRUE(comm.AgreeAny(true).ok());  // on both.
        if (comm.rank() == 1) {
          absl::StatusOr<Memory> registered = comm.Allocate(int64_t{1} << 20);
          ASSERT_TRUE(registered.ok()) << registered.status();
          EXPECT_EQ(nccl_.allocated(), 1);
          comm.Abort(absl::CancelledError("had enough"));
          *registered = Memory();
          EXPECT_EQ(nccl_.allocated(), 1) << "NCCL may still use it";
        }
        const absl::Status ended = work.Wait();
        EXPECT_THAT(TextOf(ended), HasSubstr("had enough"));
        EXPECT_THAT(TextOf(ended), HasSubstr("its buffers may still be in use"));
        EXPECT_THAT(TextOf(ended), HasSubstr("ncclCommAbort has not returned within 200ms"));
        if (comm.rank() == 0) {
          EXPECT_THAT(TextOf(ended),
                      HasSubstr("the stream of cuda:0 is still not empty 200ms after the abort"));
          go_on.Notify();
          EXPECT_TRUE(
              comm.runtime()->Synchronize(stream->ref(), absl::Now() + absl::Seconds(10)).ok());
        }
      },
      {.abort_patience = absl::Milliseconds(200)});
  nccl_.Release();
}

// The stream is behind work that ends only when the test says so; nothing of the group waits for
// it.
TEST_F(NcclFailureTest, WhatTheStreamMayStillUseAfterAnAbortIsGivenUpInsteadOfWaitedFor) {
  constexpr int64_t kBytes = 4000;
  auto go_on = std::make_shared<absl::Notification>();
  std::thread releases([go_on] {
    if (!go_on->WaitForNotificationWithTimeout(kPatience)) go_on->Notify();
  });
  {
    Ranks ranks = ConnectSimulatedNccl(devices_, nccl_, 1, {.abort_patience = absl::Seconds(1)});
    ASSERT_TRUE(ranks[0].ok()) << ranks[0].status();
    std::unique_ptr<Communicator> comm = *std::move(ranks[0]);
    const Device device = comm->device();
    absl::StatusOr<Stream> stream = comm->runtime()->CreateStream(device);
    absl::StatusOr<Stream> other = comm->runtime()->CreateStream(device);
    ASSERT_TRUE(stream.ok() && other.ok());
    ASSERT_TRUE(
        devices_
            .Put(stream->ref(), [go_on] { (void)go_on->WaitForNotificationWithTimeout(kPatience); })
            .ok());
    absl::StatusOr<Memory> in = comm->Allocate(kBytes);
    absl::StatusOr<Memory> out = comm->Allocate(int64_t{2} << 20);
    ASSERT_TRUE(in.ok() && out.ok());
    // In two parts, so that it also goes through memory of the group's own.
    const TensorView whole(out->data.get(), kBytes / 4, DType::kFloat32, device);
    const Collective what{
        .kind = CollectiveKind::kAllGather, .dtype = DType::kFloat32, .count = kBytes / 4};
    const Work work = comm->user().Issue(what, {ViewOf(*comm, *in)},
                                         {whole.Slice(0, 1), whole.Slice(1, kBytes / 4 - 1)},
                                         {.after = stream->ref()});
    EXPECT_TRUE(work.OrderBefore(other->ref()).ok());  // It is launched.
    comm->Abort(absl::CancelledError("had enough"));
    EXPECT_THAT(TextOf(work.Wait()), HasSubstr("is still not empty 1s after the abort"));
    EXPECT_THAT(TextOf(work.Wait()), HasSubstr("never freed"));
    comm.reset();
    *in = Memory();
    *out = Memory();
    EXPECT_EQ(nccl_.allocated(), 1);
    EXPECT_GE(devices_.held_bytes(device), 2 * kBytes + (int64_t{2} << 20));
    EXPECT_FALSE(go_on->HasBeenNotified()) << "something has waited";
    if (!go_on->HasBeenNotified()) go_on->Notify();
    EXPECT_TRUE(devices_.Synchronize(stream->ref(), absl::Now() + kPatience).ok());
  }
  releases.join();
}

TEST_F(NcclFailureTest, SurvivorsShrinkAndGoOn) {
  Ranks ranks = ConnectSimulatedNccl(devices_, nccl_, 3, {});
  std::vector<std::thread> threads;
  for (auto& rank : ranks) {
    ASSERT_TRUE(rank.ok()) << rank.status();
    threads.emplace_back([comm = *std::move(rank)]() mutable {
      Meet(*comm);
      if (comm->rank() == 1) return comm.reset();
      const Memory memory = Buffer(*comm);
      EXPECT_FALSE(comm->user().AllReduce(ViewOf(*comm, memory), ReduceOp::kSum).Wait().ok());
      absl::StatusOr<std::unique_ptr<Communicator>> next = comm->Shrink();
      ASSERT_TRUE(next.ok()) << next.status();
      EXPECT_EQ((*next)->world_size(), 2);
      EXPECT_EQ((*next)->members(), (std::vector<int>{0, 2}));
      EXPECT_EQ((*next)->device(), comm->device());
      comm.reset();
      EXPECT_TRUE((*next)->user().AllReduce(ViewOf(**next, memory), ReduceOp::kSum).Wait().ok());
      EXPECT_TRUE((*next)->Finalize().ok());
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
}  // namespace evenkeel::internal
