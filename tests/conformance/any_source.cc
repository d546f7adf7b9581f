// Receives from any rank.

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "evenkeel/comm/collective.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/failure_info.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/types.h"
#include "evenkeel/comm/verify.h"
#include "evenkeel/comm/work.h"
#include "evenkeel/tests/conformance/placed.h"
#include "evenkeel/tests/conformance/tested_backend.h"
#include "evenkeel/tests/conformance/world_test.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

class AnySourceTest : public WorldTest {};         // World size.
class AnySourceFailureTest : public WorldTest {};  // World size, at least 2.

// Numbers that a rank sends, or the place for those that it receives.
struct Number {
  int from = -1;
  std::vector<int32_t> values;
  Placed<int32_t> placed;
  Work work;

  TensorView view() { return placed.view(); }
};

absl::StatusOr<std::unique_ptr<Number>> NewNumber(Communicator& comm, int32_t value,
                                                  size_t count = 3) {
  auto number = std::make_unique<Number>();
  number->values.assign(count, value);
  EK_ASSIGN_OR_RETURN(number->placed, Place(comm, number->values));
  return number;
}

std::vector<int> Others(int world_size) {
  std::vector<int> others;
  for (int rank = 1; rank < world_size; ++rank) others.push_back(rank);
  return others;
}

TEST_P(AnySourceTest, MessagesOfEachSenderArriveInOrder) {
  absl::Status status = RunTested(GetParam(), [](Communicator& comm) -> absl::Status {
    constexpr int kMessages = 10;
    const int world = comm.world_size();
    for (const bool receives_first : {false, true}) {
      std::vector<std::unique_ptr<Number>> sent, received;
      const auto receive = [&]() -> absl::Status {
        for (int i = 0; i < kMessages * (world - 1); ++i) {
          EK_ASSIGN_OR_RETURN(auto number, NewNumber(comm, -1));
          number->work = comm.user().RecvAny(number->view(), &number->from);
          received.push_back(std::move(number));
        }
        return absl::OkStatus();
      };
      if (receives_first) EK_RETURN_IF_ERROR(receive());
      for (int i = 0; i < kMessages; ++i) {
        for (int to = 0; to < world; ++to) {
          if (to == comm.rank()) continue;
          EK_ASSIGN_OR_RETURN(auto number, NewNumber(comm, 1000 * comm.rank() + i));
          number->work = comm.user().Send(number->view(), to);
          sent.push_back(std::move(number));
        }
      }
      if (!receives_first) EK_RETURN_IF_ERROR(receive());
      std::map<int, int> next;
      for (const auto& number : received) {
        EK_RETURN_IF_ERROR(number->work.Wait());
        EK_RETURN_IF_ERROR(number->placed.Fetch());
        for (const int32_t value : number->values)
          EXPECT_EQ(value, 1000 * number->from + next[number->from]);
        ++next[number->from];
      }
      for (int from = 0; from < world; ++from)
        EXPECT_EQ(next[from], from == comm.rank() ? 0 : kMessages) << from;
      for (const auto& number : sent) EK_RETURN_IF_ERROR(number->work.Wait());
      EK_RETURN_IF_ERROR(comm.Barrier());
    }
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST_P(AnySourceTest, AReceiveFromANamedRankTakesItsNextMessage) {
  absl::Status status = RunTested(GetParam(), [](Communicator& comm) -> absl::Status {
    EK_ASSIGN_OR_RETURN(auto first, NewNumber(comm, 1));
    EK_ASSIGN_OR_RETURN(auto second, NewNumber(comm, 2));
    if (comm.rank() == 0 && comm.world_size() > 1) {
      second->work = comm.user().RecvAny(second->view(), &second->from);
      first->work = comm.user().Recv(first->view(), 1);
      for (auto* values : {&first->values, &second->values}) values->assign(3, -1);
    }
    EK_RETURN_IF_ERROR(comm.Barrier());
    if (comm.rank() == 1) {
      first->work = comm.user().Send(first->view(), 0);
      second->work = comm.user().Send(second->view(), 0);
    }
    EK_RETURN_IF_ERROR(first->work.Wait());
    EK_RETURN_IF_ERROR(second->work.Wait());
    EK_RETURN_IF_ERROR(first->placed.Fetch());
    EK_RETURN_IF_ERROR(second->placed.Fetch());
    EXPECT_EQ(first->values[2], 1);
    EXPECT_EQ(second->values[2], 2);
    EXPECT_EQ(second->from, comm.rank() == 0 && comm.world_size() > 1 ? 1 : -1);
    return comm.Barrier();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST_P(AnySourceTest, AnAnnouncedMessageIsTakenOnce) {
  absl::Status status = RunTested(GetParam(), [](Communicator& comm) -> absl::Status {
    if (comm.world_size() < 2) return absl::OkStatus();
    const int last = comm.world_size() - 1;
    std::vector<std::unique_ptr<Number>> numbers;
    for (const int value : {1, 2, 3}) {
      EK_ASSIGN_OR_RETURN(auto number, NewNumber(comm, comm.rank() == 0 ? -1 : value));
      numbers.push_back(std::move(number));
    }
    Number &first = *numbers[0], &second = *numbers[1], &third = *numbers[2];
    if (comm.rank() == 0) first.work = comm.user().RecvAny(first.view(), &first.from);
    // When it ends, all ranks have handled the control messages that were sent before it.
    EK_RETURN_IF_ERROR(comm.AgreeAny(false).status());
    for (Number* number : {&first, &second})
      if (comm.rank() == 1) number->work = comm.user().Send(number->view(), 0);
    EK_RETURN_IF_ERROR(comm.AgreeAny(false).status());
    if (comm.rank() == 0) {
      second.work = comm.user().Recv(second.view(), 1);
      third.work = comm.user().RecvAny(third.view(), &third.from);
    }
    if (comm.rank() == last) third.work = comm.user().Send(third.view(), 0);
    for (const int value : {1, 2, 3}) {
      Number& number = *numbers[value - 1];
      EK_RETURN_IF_ERROR(number.work.Wait());
      EK_RETURN_IF_ERROR(number.placed.Fetch());
      EXPECT_EQ(number.values[2], value);
    }
    EXPECT_EQ(first.from, comm.rank() == 0 ? 1 : -1);
    EXPECT_EQ(third.from, comm.rank() == 0 ? last : -1);
    return comm.Barrier();
  });
  EXPECT_TRUE(status.ok()) << status;
}

// Rank 1 sends more messages than the others, which are received by its name.
TEST_P(AnySourceTest, EachReceiveTakesOneMessage) {
  absl::Status status = RunTested(GetParam(), [](Communicator& comm) -> absl::Status {
    constexpr size_t kNamed = 20;
    if (comm.world_size() < 2) return absl::OkStatus();
    const size_t others = comm.world_size() - 1;
    std::vector<std::unique_ptr<Number>> numbers;
    while (numbers.size() < (comm.rank() < 2 ? kNamed : 0) + (comm.rank() == 0 ? others : 1)) {
      EK_ASSIGN_OR_RETURN(
          auto number, NewNumber(comm, comm.rank() == 0 ? -1 : static_cast<int>(numbers.size())));
      if (comm.rank() > 0) {
        number->work = comm.user().Send(number->view(), 0);
      } else if (numbers.size() < kNamed) {
        number->work = comm.user().Recv(number->view(), 1);
      } else {
        number->work = comm.user().RecvAny(number->view(), &number->from);
      }
      numbers.push_back(std::move(number));
    }
    std::vector<int> from;
    for (size_t i = 0; i < numbers.size(); ++i) {
      Number& number = *numbers[i];
      EK_RETURN_IF_ERROR(number.work.Wait());
      EK_RETURN_IF_ERROR(number.placed.Fetch());
      if (comm.rank() > 0) continue;
      EXPECT_EQ(number.values[2], i < kNamed ? i : number.from == 1 ? kNamed : 0);
      if (i >= kNamed) from.push_back(number.from);
    }
    std::sort(from.begin(), from.end());
    EXPECT_EQ(from, comm.rank() > 0 ? std::vector<int>() : Others(comm.world_size()));
    return comm.Barrier();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST_P(AnySourceTest, OnlyMessagesWithItsTagAreTaken) {
  absl::Status status = RunTested(GetParam(), [](Communicator& comm) -> absl::Status {
    if (!comm.Supports({.kind = CollectiveKind::kSend, .root = 0, .tag = 1}).ok())
      return absl::OkStatus();
    for (const size_t count : {size_t{1}, size_t{3'000'001}}) {
      EK_ASSIGN_OR_RETURN(auto one, NewNumber(comm, comm.rank() * 10 + 1, count));
      EK_ASSIGN_OR_RETURN(auto two, NewNumber(comm, comm.rank() * 10 + 2, count));
      if (comm.rank() > 0) {
        one->work = comm.user().Send(one->view(), 0, {.tag = 1});
        two->work = comm.user().Send(two->view(), 0, {.tag = 2});
        EK_RETURN_IF_ERROR(one->work.Wait());
        EK_RETURN_IF_ERROR(two->work.Wait());
      }
      for (int i = 1; comm.rank() == 0 && i < comm.world_size(); ++i) {
        EK_RETURN_IF_ERROR(comm.user().RecvAny(two->view(), &two->from, {.tag = 2}).Wait());
        EK_RETURN_IF_ERROR(comm.user().RecvAny(one->view(), &one->from, {.tag = 1}).Wait());
        EXPECT_EQ(std::count(one->values.begin(), one->values.end(), one->from * 10 + 1), count);
        EXPECT_EQ(std::count(two->values.begin(), two->values.end(), two->from * 10 + 2), count);
      }
      // A rank's next messages, which are longer, may be announced before the others' first ones.
      EK_RETURN_IF_ERROR(comm.Barrier());
    }
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

// Rank 0 is a server, which replies to the rank whose question it has received.
TEST_P(AnySourceTest, AServerSendsToEachRankThatAsks) {
  absl::Status status = RunTested(GetParam(), [](Communicator& comm) -> absl::Status {
    constexpr int kQuestions = 20;
    EK_ASSIGN_OR_RETURN(auto question, NewNumber(comm, comm.rank()));
    EK_ASSIGN_OR_RETURN(auto answer, NewNumber(comm, -1));
    for (int i = 0; i < kQuestions * (comm.world_size() - 1) && comm.rank() == 0; ++i) {
      int asker = -1;
      EK_RETURN_IF_ERROR(comm.user().RecvAny(question->view(), &asker).Wait());
      EK_RETURN_IF_ERROR(question->placed.Fetch());
      EXPECT_EQ(question->values[2], asker);
      answer->values.assign(3, asker + 100);
      EK_RETURN_IF_ERROR(answer->placed.Store());
      EK_RETURN_IF_ERROR(comm.user().Send(answer->view(), asker).Wait());
    }
    for (int i = 0; i < kQuestions && comm.rank() != 0; ++i) {
      EK_RETURN_IF_ERROR(comm.user().Send(question->view(), 0).Wait());
      EK_RETURN_IF_ERROR(comm.user().Recv(answer->view(), 0).Wait());
      EK_RETURN_IF_ERROR(answer->placed.Fetch());
      EXPECT_EQ(answer->values[2], comm.rank() + 100);
    }
    return comm.Barrier();
  });
  EXPECT_TRUE(status.ok()) << status;
}

// Callbacks run without the locks that their calls need, while another thread drives the lanes.
TEST_P(AnySourceTest, CallbacksAnswerOnTheSameChannel) {
  absl::Status status = RunTested(GetParam(), [](Communicator& comm) -> absl::Status {
    constexpr int kQuestions = 50;
    const int world = comm.world_size();
    const bool has_tags = comm.Supports({.kind = CollectiveKind::kSend, .root = 0, .tag = 1}).ok();
    std::vector<std::unique_ptr<Number>> answers;
    for (int rank = 0; rank < world; ++rank) {
      EK_ASSIGN_OR_RETURN(auto answer, NewNumber(comm, comm.rank() == 0 ? 100 + rank : -1));
      answers.push_back(std::move(answer));
    }
    EK_ASSIGN_OR_RETURN(auto named, NewNumber(comm, 7));
    const auto other_thread = [&]() -> absl::Status {
      for (int i = 0; i < kQuestions && has_tags && world > 1 && comm.rank() < 2; ++i) {
        EK_RETURN_IF_ERROR((comm.rank() == 0 ? comm.user().Recv(named->view(), 1, {.tag = 1})
                                             : comm.user().Send(named->view(), 0, {.tag = 1}))
                               .Wait());
      }
      return absl::OkStatus();
    };
    absl::Status of_thread;
    std::thread thread([&] { of_thread = other_thread(); });
    const auto serve_or_ask = [&]() -> absl::Status {
      EK_ASSIGN_OR_RETURN(auto question, NewNumber(comm, comm.rank()));
      for (int i = 0; i < kQuestions && comm.rank() > 0; ++i) {
        EK_RETURN_IF_ERROR(comm.user().Send(question->view(), 0).Wait());
        EK_RETURN_IF_ERROR(comm.user().Recv(answers[0]->view(), 0).Wait());
        EK_RETURN_IF_ERROR(answers[0]->placed.Fetch());
        EXPECT_EQ(answers[0]->values[2], 100 + comm.rank());
      }
      for (int i = 0; i < kQuestions * (world - 1) && comm.rank() == 0; ++i) {
        int asker = -1;
        absl::Mutex mutex;
        bool has_sent = false;
        Work answer;
        const Work asked = comm.user().RecvAny(question->view(), &asker);
        asked.OnDone([&](const absl::Status& received) {
          Work sent =
              received.ok() ? comm.user().Send(answers[asker]->view(), asker) : Work(received);
          absl::MutexLock lock(&mutex);
          answer = std::move(sent);
          has_sent = true;
        });
        EK_RETURN_IF_ERROR(asked.Wait());
        {
          absl::MutexLock lock(&mutex);
          mutex.Await(absl::Condition(&has_sent));
        }
        EK_RETURN_IF_ERROR(answer.Wait());
      }
      return absl::OkStatus();
    };
    const absl::Status served = serve_or_ask();
    if (!served.ok()) comm.Abort(served);
    thread.join();
    EK_RETURN_IF_ERROR(served);
    EK_RETURN_IF_ERROR(of_thread);
    return comm.Barrier();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST_P(AnySourceTest, TwoThreadsReceiveAtOnce) {
  absl::Status status = RunTested(GetParam(), [](Communicator& comm) -> absl::Status {
    constexpr int kMessages = 40;  // Of each sender; an even number.
    if (comm.world_size() < 2) return absl::OkStatus();
    EK_ASSIGN_OR_RETURN(auto sent, NewNumber(comm, comm.rank()));
    for (int i = 0; i < kMessages && comm.rank() > 0; ++i)
      EK_RETURN_IF_ERROR(comm.user().Send(sent->view(), 0).Wait());
    if (comm.rank() > 0) return comm.Barrier();
    std::map<int, int> counts[2];
    absl::Status ends[2];
    const auto receive = [&](int thread) -> absl::Status {
      EK_ASSIGN_OR_RETURN(auto number, NewNumber(comm, -1));
      for (int i = 0; i < kMessages / 2 * (comm.world_size() - 1); ++i) {
        EK_RETURN_IF_ERROR(comm.user().RecvAny(number->view(), &number->from).Wait());
        EK_RETURN_IF_ERROR(number->placed.Fetch());
        EXPECT_EQ(number->values[2], number->from);
        ++counts[thread][number->from];
      }
      return absl::OkStatus();
    };
    std::thread other([&] { ends[1] = receive(1); });
    ends[0] = receive(0);
    other.join();
    for (const absl::Status& end : ends) EK_RETURN_IF_ERROR(end);
    for (int from = 1; from < comm.world_size(); ++from)
      EXPECT_EQ(counts[0][from] + counts[1][from], kMessages);
    return comm.Barrier();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST_P(AnySourceTest, WithoutAnotherRankItIsRefused) {
  absl::Status status = RunTested(GetParam(), [](Communicator& comm) -> absl::Status {
    EK_ASSIGN_OR_RETURN(auto number, NewNumber(comm, 0));
    if (comm.world_size() > 1) return absl::OkStatus();
    const absl::Status refused = comm.user().RecvAny(number->view(), &number->from).Wait();
    EXPECT_TRUE(absl::IsInvalidArgument(refused)) << refused;
    EXPECT_TRUE(absl::StrContains(refused.message(),
                                  "recv from any rank on channel user, rank 0: the group has no"))
        << refused;
    return comm.Barrier();
  });
  EXPECT_TRUE(status.ok()) << status;
}

// Failures ----------------------------------------------------------------------------------------

// Rank 0 waits for any rank while the others run `others`. Returns the error of rank 0.
absl::Status ErrorOfRank0(int world_size, const CommunicatorOptions& options,
                          absl::FunctionRef<absl::Status(Communicator&)> others) {
  absl::Status ended;
  const absl::Time start = absl::Now();
  absl::Status ignored = RunTested(
      world_size,
      [&](Communicator& comm) -> absl::Status {
        EK_ASSIGN_OR_RETURN(auto number, NewNumber(comm, comm.rank()));
        if (comm.rank() > 0) return others(comm);
        ended = comm.user().RecvAny(number->view(), &number->from).Wait();
        return ended;
      },
      options);
  EXPECT_FALSE(ended.ok());
  EXPECT_LT(absl::Now() - start, kAtOnce);
  return ended;
}

const CommunicatorOptions kWatched = {.timeout = kPatience,
                                      .watch = {.beat = absl::Milliseconds(50)}};

std::vector<int> RanksOf(const absl::Status& status) {
  return FailureInfoOf(status).value_or(FailureInfo()).ranks;
}

TEST_P(AnySourceFailureTest, RanksThatAllWaitForAnyOtherLearnOfIt) {
  const absl::Status ended =
      ErrorOfRank0(GetParam(), kWatched, [](Communicator& comm) -> absl::Status {
        EK_ASSIGN_OR_RETURN(auto number, NewNumber(comm, 0));
        return comm.user().RecvAny(number->view(), &number->from).Wait();
      });
  EXPECT_TRUE(absl::IsFailedPrecondition(ended)) << ended;
  EXPECT_TRUE(absl::StrContains(ended.message(), "#0 recv (user) int32[3] from any rank")) << ended;
}

TEST_P(AnySourceFailureTest, AWaitForALateRankIsNoDeadlock) {
  absl::Status status = RunTested(
      GetParam(),
      [](Communicator& comm) -> absl::Status {
        EK_ASSIGN_OR_RETURN(auto number, NewNumber(comm, comm.rank()));
        if (comm.rank() == 0) {
          EK_RETURN_IF_ERROR(comm.user().RecvAny(number->view(), &number->from).Wait());
        } else if (comm.rank() == comm.world_size() - 1) {
          absl::SleepFor(absl::Milliseconds(500));  // For ten heartbeats.
          EK_RETURN_IF_ERROR(comm.user().Send(number->view(), 0).Wait());
        }
        return comm.Barrier();
      },
      kWatched);
  EXPECT_TRUE(status.ok()) << status;
}

TEST_P(AnySourceFailureTest, WhenTheOthersHaveLeftItEnds) {
  const absl::Status ended =
      ErrorOfRank0(GetParam(), kWatched, [](Communicator& comm) { return comm.Leave(); });
  EXPECT_TRUE(absl::IsFailedPrecondition(ended)) << ended;
  EXPECT_TRUE(absl::StrContains(ended.message(), GetParam() == 2 ? "has left" : "have left"))
      << ended;
}

TEST_P(AnySourceFailureTest, AFailedRankIsNamed) {
  const int last = GetParam() - 1;
  const absl::Status ended =
      ErrorOfRank0(GetParam(), kWatched, [&](Communicator& comm) -> absl::Status {
        EK_ASSIGN_OR_RETURN(auto number, NewNumber(comm, 0));
        if (comm.rank() == last) return absl::DataLossError("no such file");
        return comm.user().RecvAny(number->view(), &number->from).Wait();
      });
  EXPECT_TRUE(absl::StrContains(ended.message(), "no such file")) << ended;
  EXPECT_EQ(RanksOf(ended), std::vector<int>{last}) << ended;
}

TEST_P(AnySourceFailureTest, AMissedDeadlineNamesTheOthers) {
  CommunicatorOptions options = kWatched;
  options.timeout = absl::Milliseconds(500);
  const absl::Status ended =
      ErrorOfRank0(GetParam(), options, [](Communicator& comm) -> absl::Status {
        while (comm.status().ok()) absl::SleepFor(absl::Milliseconds(20));
        return comm.status();
      });
  EXPECT_TRUE(absl::IsDeadlineExceeded(ended)) << ended;
  EXPECT_TRUE(
      absl::StrContains(ended.message(), "int32[3] from any rank on channel \"user\" for rank"))
      << ended;
  EXPECT_EQ(RanksOf(ended), Others(GetParam())) << ended;
}

TEST_P(AnySourceFailureTest, TheTimeoutOfACallCountsAtEachLevelOfChecks) {
  for (const VerifyLevel level :
       {VerifyLevel::kOff, VerifyLevel::kPositions, VerifyLevel::kEvery}) {
    CommunicatorOptions options = kWatched;
    options.verify = level;
    absl::Status ended;
    RunTested(
        GetParam(),
        [&](Communicator& comm) -> absl::Status {
          EK_ASSIGN_OR_RETURN(auto number, NewNumber(comm, comm.rank()));
          if (comm.rank() == 1) EK_RETURN_IF_ERROR(comm.user().Send(number->view(), 0).Wait());
          if (comm.rank() == 0) {
            EK_RETURN_IF_ERROR(comm.user().RecvAny(number->view(), &number->from).Wait());
            EXPECT_EQ(number->from, 1);
          }
          EK_RETURN_IF_ERROR(comm.Barrier());
          if (comm.rank() == 0) {
            const CallOptions call = {.timeout = absl::Milliseconds(300)};
            return ended = comm.user().RecvAny(number->view(), &number->from, call).Wait();
          }
          while (comm.status().ok()) absl::SleepFor(absl::Milliseconds(20));
          return comm.status();
        },
        options)
        .IgnoreError();
    EXPECT_TRUE(absl::IsDeadlineExceeded(ended)) << ended;
    EXPECT_TRUE(absl::StrContains(ended.message(), "rank 0 waited 300ms in #1 recv")) << ended;
  }
}

// The report of a rank has at most a thousand lanes; receives from any rank do not count as lanes.
TEST_P(AnySourceFailureTest, ManyTagsDoNotHideADeadlock) {
  const absl::Time start = absl::Now();
  absl::Status seen[2];
  std::atomic<bool> has_tags = true;
  RunTested(
      GetParam(),
      [&](Communicator& comm) -> absl::Status {
        has_tags = comm.Supports({.kind = CollectiveKind::kSend, .root = 0, .tag = 1}).ok();
        if (!has_tags) return absl::OkStatus();
        EK_ASSIGN_OR_RETURN(auto number, NewNumber(comm, comm.rank()));
        for (int tag = 0; tag < 600 && comm.rank() < 2; ++tag) {
          const CallOptions call = {.tag = tag};
          EK_RETURN_IF_ERROR((comm.rank() == 0
                                  ? comm.user().RecvAny(number->view(), &number->from, call)
                                  : comm.user().Send(number->view(), 0, call))
                                 .Wait());
        }
        EK_RETURN_IF_ERROR(comm.Barrier());
        if (comm.rank() > 1) return comm.Leave();
        return seen[comm.rank()] = comm.user().Recv(number->view(), 1 - comm.rank()).Wait();
      },
      kWatched)
      .IgnoreError();
  if (!has_tags) GTEST_SKIP() << "the backend has no tags";
  for (const absl::Status& ended : seen) {
    EXPECT_TRUE(absl::IsFailedPrecondition(ended)) << ended;
    EXPECT_TRUE(absl::StrContains(ended.message(), "count the messages")) << ended;
  }
  EXPECT_LT(absl::Now() - start, kPatience / 2);
}

TEST_P(AnySourceFailureTest, AMessageOfAnotherSizeEndsTheGroup) {
  const absl::Status ended =
      ErrorOfRank0(GetParam(), kWatched, [](Communicator& comm) -> absl::Status {
        EK_ASSIGN_OR_RETURN(auto number, NewNumber(comm, 0, 4));
        return comm.rank() == 1 ? comm.user().Send(number->view(), 0).Wait() : comm.Barrier();
      });
  EXPECT_TRUE(absl::IsFailedPrecondition(ended)) << ended;
  for (const absl::string_view half :
       {"#0 send (user) int32[4] to rank 0", "#0 recv (user) int32[3] from rank 1"})
    EXPECT_TRUE(absl::StrContains(ended.message(), half)) << ended;
}

INSTANTIATE_TEST_SUITE_P(WorldSize, AnySourceTest, testing::ValuesIn(WorldSizes(1)),
                         testing::PrintToStringParamName());
INSTANTIATE_TEST_SUITE_P(WorldSize, AnySourceFailureTest, testing::ValuesIn(WorldSizes(2)),
                         testing::PrintToStringParamName());

}  // namespace
}  // namespace evenkeel
