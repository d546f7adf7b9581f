// Agreements between ranks over the control plane: levels of verification, equal order of
// operations, values of the user's.

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "evenkeel/comm/base/clock.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/control/control.h"
#include "evenkeel/comm/control/link.h"
#include "evenkeel/comm/local/run_group.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/testing/groups.h"
#include "evenkeel/comm/types.h"
#include "evenkeel/comm/verify.h"
#include "evenkeel/comm/work.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

using internal::RunRanksOver;
using internal::Transport;
using testing::AllOf;
using testing::Each;
using testing::HasSubstr;
using testing::StartsWith;

// Each rank's status, whatever the others'; a rank of a group that has failed is not aborted for
// it.
class Statuses {
 public:
  explicit Statuses(int world_size) : statuses_(world_size) {}
  absl::Status Note(const Communicator& comm, absl::Status status) {
    absl::MutexLock lock(&mutex_);
    statuses_[comm.rank()] = std::move(status);
    return absl::OkStatus();
  }
  const std::vector<absl::Status>& all() const { return statuses_; }

 private:
  absl::Mutex mutex_;
  std::vector<absl::Status> statuses_;
};

std::string Message(const absl::Status& status) { return std::string(status.message()); }

absl::Status AllReduceOnce(Communicator& comm) {
  std::vector<float> data(10, 1.0f);
  EK_RETURN_IF_ERROR(comm.AllReduce(absl::MakeSpan(data), ReduceOp::kSum));
  EXPECT_THAT(data, Each(static_cast<float>(comm.world_size())));
  return absl::OkStatus();
}

// Rank 1 broadcasts, the others reduce, as many bytes.
Work IssueDifferently(Communicator& comm, std::vector<float>& data) {
  return comm.rank() == 1 ? comm.user().Broadcast(absl::MakeSpan(data), 1)
                          : comm.user().AllReduce(absl::MakeSpan(data), ReduceOp::kSum);
}

// Waits, at most for half a minute, until the group has ended.
absl::Status EndOf(const Communicator& comm) {
  const absl::Time latest = SteadyNow() + absl::Seconds(30);
  while (comm.status().ok() && SteadyNow() < latest) absl::SleepFor(absl::Milliseconds(1));
  return comm.status();
}

class AgreementTest : public testing::TestWithParam<Transport> {};

TEST_P(AgreementTest, AgreeAnyIsTrueIfItIsOnOneRank) {
  const absl::Status status = RunRanksOver(GetParam(), 3, [](Communicator& comm) -> absl::Status {
    for (int who = -1; who < 3; ++who) {
      EK_ASSIGN_OR_RETURN(const bool any, comm.AgreeAny(comm.rank() == who));
      EXPECT_EQ(any, who >= 0) << "rank " << comm.rank();
    }
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST_P(AgreementTest, AMonitoredBarrierPassesWhenAllHaveCome) {
  absl::Mutex mutex;
  int arrived = 0;
  const absl::Status status = RunRanksOver(GetParam(), 3, [&](Communicator& comm) -> absl::Status {
    for (int round = 1; round <= 3; ++round) {
      {
        absl::MutexLock lock(&mutex);
        ++arrived;
      }
      EK_RETURN_IF_ERROR(comm.MonitoredBarrier(absl::Seconds(30)));
      {
        absl::MutexLock lock(&mutex);
        EXPECT_GE(arrived, 3 * round);
      }
      EK_RETURN_IF_ERROR(comm.Barrier());
    }
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST_P(AgreementTest, AMonitoredBarrierNamesAllWhoHaveNotCome) {
  Statuses seen(4);
  const absl::Time start = SteadyNow();
  RunRanksOver(GetParam(), 4, [&](Communicator& comm) {
    if (comm.rank() % 2 == 0)
      return seen.Note(comm, comm.MonitoredBarrier(absl::Milliseconds(300)));
    const absl::Status end = EndOf(comm);
    EXPECT_EQ(comm.MonitoredBarrier(absl::Seconds(30)), end) << "late";
    return seen.Note(comm, end);
  }).IgnoreError();
  EXPECT_GE(SteadyNow() - start, absl::Milliseconds(300));
  for (const absl::Status& status : seen.all()) {
    EXPECT_TRUE(absl::IsDeadlineExceeded(status)) << status;
    EXPECT_THAT(Message(status),
                AllOf(HasSubstr("waited 300ms in monitored_barrier"), HasSubstr("for ranks 1,3")));
  }
}

TEST_P(AgreementTest, TheLevelIsSetByAllRanksTogether) {
  const absl::Status status = RunRanksOver(GetParam(), 3, [](Communicator& comm) -> absl::Status {
    EXPECT_EQ(comm.verify_level(), VerifyLevel::kPositions);
    for (VerifyLevel level :
         {VerifyLevel::kEvery, VerifyLevel::kOff, VerifyLevel::kPositions, VerifyLevel::kEvery}) {
      EK_RETURN_IF_ERROR(comm.SetVerifyLevel(level));
      EXPECT_EQ(comm.verify_level(), level);
      EK_RETURN_IF_ERROR(AllReduceOnce(comm));
    }
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST_P(AgreementTest, DifferentLevelsAreRefusedWithAllRanksAndLevels) {
  Statuses seen(3);
  RunRanksOver(GetParam(), 3, [&](Communicator& comm) {
    const VerifyLevel level = comm.rank() == 1 ? VerifyLevel::kEvery : VerifyLevel::kOff;
    return seen.Note(comm, comm.SetVerifyLevel(level));
  }).IgnoreError();
  for (const absl::Status& status : seen.all()) {
    EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
    EXPECT_EQ(Message(status),
              "SetVerifyLevel: rank 1 sets every; ranks 0,2 set off: the ranks disagree");
  }
}

TEST_P(AgreementTest, TheLevelIsSetAtTheSamePositions) {
  Statuses seen(2);
  RunRanksOver(GetParam(), 2, [&](Communicator& comm) {
    std::vector<float> data(3);
    Work work;
    if (comm.rank() == 1) work = comm.user().AllReduce(absl::MakeSpan(data), ReduceOp::kSum);
    seen.Note(comm, comm.SetVerifyLevel(VerifyLevel::kEvery)).IgnoreError();
    return work.Wait();
  }).IgnoreError();
  for (const absl::Status& status : seen.all()) {
    EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
    EXPECT_THAT(Message(status), AllOf(StartsWith("SetVerifyLevel: channel \"user\""),
                                       HasSubstr("rank 0 ended after 0"),
                                       HasSubstr("rank 1 ended after 1 (all_reduce")));
  }
}

TEST_P(AgreementTest, EveryCollectiveIsComparedAndWorks) {
  const absl::Status status = RunRanksOver(
      GetParam(), 3,
      [](Communicator& comm) -> absl::Status {
        EXPECT_EQ(comm.verify_level(), VerifyLevel::kEvery);
        std::vector<std::vector<float>> data(20, std::vector<float>(100, 1.0f));
        std::vector<Work> works;
        for (std::vector<float>& one : data) {
          works.push_back(comm.user().AllReduce(absl::MakeSpan(one), ReduceOp::kAverage));
        }
        for (const Work& work : works) EK_RETURN_IF_ERROR(work.Wait());
        for (const std::vector<float>& one : data) EXPECT_THAT(one, Each(1.0f));
        // Pairs are not compared: rank 2 takes no part.
        std::vector<float> message(4, 7.0f);
        if (comm.rank() == 0)
          EK_RETURN_IF_ERROR(comm.user().Send(absl::MakeSpan(message), 1).Wait());
        if (comm.rank() == 1)
          EK_RETURN_IF_ERROR(comm.user().Recv(absl::MakeSpan(message), 0).Wait());
        return comm.Barrier();
      },
      {.verify = VerifyLevel::kEvery});
  EXPECT_TRUE(status.ok()) << status;
}

TEST_P(AgreementTest, EveryFindsADifferenceBeforeItsDataIsUsed) {
  Statuses seen(3);
  const absl::Time start = SteadyNow();
  RunRanksOver(GetParam(), 3,
               [&](Communicator& comm) -> absl::Status {
                 EK_RETURN_IF_ERROR(comm.Barrier());
                 std::vector<float> data(10, 1.0f);
                 return seen.Note(comm, IssueDifferently(comm, data).Wait());
               },
               {.verify = VerifyLevel::kEvery})
      .IgnoreError();
  EXPECT_LT(SteadyNow() - start, absl::Seconds(5));
  for (const absl::Status& status : seen.all()) {
    EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
    EXPECT_THAT(Message(status),
                AllOf(HasSubstr("rank 1 is at #1 broadcast (user) float32[10] root 1"),
                      HasSubstr("the ranks disagree")));
  }
}

TEST_P(AgreementTest, EveryComparesTheScaleToo) {
  if (GetParam() == Transport::kLocal) GTEST_SKIP() << "it finds that by itself";
  Statuses seen(2);
  RunRanksOver(GetParam(), 2,
               [&](Communicator& comm) {
                 std::vector<float> data(10, 1.0f);
                 const CallOptions options{.scale = comm.rank() == 0 ? 1.0 : 0.5};
                 return seen.Note(
                     comm,
                     comm.user().AllReduce(absl::MakeSpan(data), ReduceOp::kSum, options).Wait());
               },
               {.verify = VerifyLevel::kEvery})
      .IgnoreError();
  for (const absl::Status& status : seen.all()) {
    EXPECT_THAT(
        Message(status),
        AllOf(HasSubstr("rank 0 is at #0 all_reduce (user) float32[10] sum, scale 1 on"),
              HasSubstr("rank 1 is at #0 all_reduce (user) float32[10] sum, scale 0.5 on")));
  }
}

// Whatever the order in which a rank uses its channels, and whatever messages it sends in between.
TEST_P(AgreementTest, EachChannelNumbersItsCollectivesAlikeOnAllRanks) {
  constexpr int kRounds = 5;
  const absl::Status status = RunRanksOver(GetParam(), 3, [](Communicator& comm) -> absl::Status {
    EK_ASSIGN_OR_RETURN(Channel * other, comm.OpenChannel("other"));
    Channel* const user = &comm.user();
    for (int round = 0; round < kRounds; ++round) {
      EXPECT_EQ(user->position(), round);
      EXPECT_EQ(other->position(), 2 * round);
      std::vector<float> one(4, 1.0f), two(4, 1.0f), three(4, 1.0f);
      std::vector<Work> works;
      if (comm.rank() == 1) works.push_back(user->AllReduce(absl::MakeSpan(one), ReduceOp::kSum));
      works.push_back(other->AllReduce(absl::MakeSpan(two), ReduceOp::kSum));
      works.push_back(other->AllReduce(absl::MakeSpan(three), ReduceOp::kSum));
      if (comm.rank() != 1) works.push_back(user->AllReduce(absl::MakeSpan(one), ReduceOp::kSum));
      std::vector<float> message(2, 7.0f);
      if (comm.rank() == 0) works.push_back(user->Send(absl::MakeSpan(message), 2));
      if (comm.rank() == 2) works.push_back(user->Recv(absl::MakeSpan(message), 0));
      for (const Work& work : works) EK_RETURN_IF_ERROR(work.Wait());
    }
    const auto hash_of = [&comm](const Channel* channel) {
      uint64_t hash = 0;
      for (const FlightEntry& entry : comm.flight().Recent(channel->id(), 3 * kRounds))
        hash = HashOf(entry.what, hash);
      return hash;
    };
    const std::string mine = absl::StrCat(user->position(), " ", hash_of(user), " ",
                                          other->position(), " ", hash_of(other));
    EK_ASSIGN_OR_RETURN(const auto all, comm.control().Exchange("positions", mine, comm.timeout()));
    EXPECT_THAT(all, Each(mine)) << "rank " << comm.rank();
    EXPECT_NE(hash_of(user), hash_of(other));
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

INSTANTIATE_TEST_SUITE_P(Over, AgreementTest,
                         testing::Values(Transport::kLocal, Transport::kBlind, Transport::kTcp),
                         [](const auto& info) { return internal::ToString(info.param); });

// n ranks that each send a notice to all others would be n * n messages.
TEST(FinalizeTest, CostsEachRankAFewMessages) {
  constexpr int kRanks = 24;
  const auto group = internal::CreateGroupOver(Transport::kLocal, kRanks).value();
  const auto received = [&] {
    int64_t messages = 0;
    for (const auto& comm : group) messages += comm->control().link().Counters().messages_received;
    return messages;
  };
  int64_t before = 0;
  const absl::Status status = internal::RunGroup(group, [&](Communicator& comm) -> absl::Status {
    EK_RETURN_IF_ERROR(AllReduceOnce(comm));
    EK_RETURN_IF_ERROR(comm.AgreeAny(false).status());
    EK_RETURN_IF_ERROR(comm.Barrier());
    if (comm.rank() == 0) before = received();
    return comm.Barrier();
  });
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_LE(received() - before, 2 * kRanks) << "one notice, and the exchange";
}

TEST(CreationTest, LevelsThatDifferEndTheGroupOnAllRanks) {
  std::vector<CommunicatorOptions> options(3);
  options[2].verify = VerifyLevel::kEvery;
  auto group = internal::CreateGroupOver(Transport::kLocal, options);
  ASSERT_TRUE(group.ok()) << group.status();
  for (const auto& comm : *group) {
    const absl::Status status = EndOf(*comm);
    EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
    EXPECT_THAT(
        Message(status),
        HasSubstr("the level of verification: rank 2 has \"every\"; ranks 0,1 have \"positions\""));
  }
}

// So that nothing but what is tested finds a difference.
const CommunicatorOptions kUnwatched{.watch = {.beat = absl::InfiniteDuration()}};

TEST(CompareIssuedTest, WhatWasPairedWronglyIsNotUsed) {
  Statuses seen(3);
  RunRanksOver(
      Transport::kBlind, 3,
      [&](Communicator& comm) -> absl::Status {
        EK_RETURN_IF_ERROR(AllReduceOnce(comm));
        std::vector<float> data(10, 1.0f);
        const absl::Status moved = IssueDifferently(comm, data).Wait();
        EXPECT_TRUE(moved.ok()) << "this transport cannot know: " << moved;
        EK_RETURN_IF_ERROR(AllReduceOnce(comm));
        return seen.Note(comm, comm.CompareIssued(comm.user()).Wait());
      },
      kUnwatched)
      .IgnoreError();
  for (const absl::Status& status : seen.all()) {
    EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
    EXPECT_EQ(Message(status),
              "rank 1 is at #1 broadcast (user) float32[10] root 1 on channel \"user\"; ranks 0,2 "
              "are at #1 all_reduce "
              "(user) float32[10] sum on channel \"user\": the ranks disagree");
  }
}

TEST(CompareIssuedTest, AsManyAndTheSameIsFine) {
  const absl::Status status =
      RunRanksOver(Transport::kBlind, 2, [](Communicator& comm) -> absl::Status {
        for (int i = 0; i < 5; ++i) {
          EK_RETURN_IF_ERROR(AllReduceOnce(comm));
          EK_RETURN_IF_ERROR(comm.CompareIssued(comm.user()).Wait());
        }
        return absl::OkStatus();
      });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(CompareIssuedTest, ADifferenceThatIsLongAgoIsStillOne) {
  Statuses seen(2);
  RunRanksOver(
      Transport::kBlind, 2,
      [&](Communicator& comm) -> absl::Status {
        std::vector<float> data(10, 1.0f);
        EK_RETURN_IF_ERROR(IssueDifferently(comm, data).Wait());
        for (int i = 0; i < 100; ++i) EK_RETURN_IF_ERROR(AllReduceOnce(comm));
        return seen.Note(comm, comm.CompareIssued(comm.user()).Wait());
      },
      kUnwatched)
      .IgnoreError();
  for (const absl::Status& status : seen.all()) {
    EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
    EXPECT_THAT(Message(status),
                AllOf(HasSubstr("issued on channel \"user\""), HasSubstr("rank 0 has 101 (hash"),
                      HasSubstr("rank 1 has 101 (hash")));
  }
}

TEST(CompareIssuedTest, NothingIsComparedWhereItNeedNotBe) {
  for (Transport transport : {Transport::kLocal, Transport::kBlind}) {
    const absl::Status status = RunRanksOver(
        transport, 2,
        [](Communicator& comm) -> absl::Status {
          if (comm.rank() == 1) return absl::OkStatus();  // Nobody but rank 0 compares.
          EXPECT_TRUE(comm.CompareIssued(comm.user()).IsDone());
          return absl::OkStatus();
        },
        {.verify = transport == Transport::kLocal ? VerifyLevel::kPositions : VerifyLevel::kOff});
    EXPECT_TRUE(status.ok()) << status;
  }
}

}  // namespace
}  // namespace evenkeel
