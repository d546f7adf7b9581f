#include "evenkeel/comm/control/hub.h"

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "evenkeel/comm/base/clock.h"
#include "evenkeel/comm/control/exchange_tree.h"
#include "evenkeel/comm/control/link.h"
#include "evenkeel/comm/control/rank_status.h"
#include "evenkeel/comm/net/frame.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel::internal {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using Type = ControlMessage::Type;

constexpr uint64_t kChannel = 7;

// A hub, and all that it has told each rank.
class Group {
 public:
  explicit Group(int world_size, HubOptions options = {.patience = absl::ZeroDuration()})
      : told(world_size),
        hub(
            world_size,
            [this](absl::Span<const int> to, const ControlMessage& message) {
              for (const int rank : to) told[rank].push_back(message);
            },
            options) {}

  void Beat(int rank, const RankStatus& report = {}) {
    hub.OnMessage(rank, {.type = Type::kBeat, .payload = report.Serialize()});
  }
  void Come(int rank, const std::string& topic, int64_t sequence = 0) {
    hub.OnMessage(rank, {.type = Type::kExchange, .sequence = sequence, .topic = topic});
  }
  std::string Ask(int rank, const Wait& wait) {
    RankStatus asked;
    asked.waits = {wait};
    hub.OnMessage(rank, {.type = Type::kMissing, .request = 5, .payload = asked.Serialize()});
    EXPECT_EQ(told[rank].back().request, 5);
    return std::string(told[rank].back().status.message());
  }
  // Returns the message to a rank about the end of the group; null if the group goes on.
  const ControlMessage* FailureAt(int rank) const {
    for (const ControlMessage& message : told[rank]) {
      if (message.type == Type::kFailed) return &message;
    }
    return nullptr;
  }
  // Messages that count in a rank's `received`.
  int64_t CountTold(int rank) const {
    int64_t count = 0;
    for (const ControlMessage& message : told[rank]) count += message.type != Type::kBeat;
    return count;
  }

  std::vector<std::vector<ControlMessage>> told;  // By rank.
  ControlHub hub;
};

Wait InCollective(int64_t sequence) {
  return {.kind = Wait::Kind::kCollective,
          .channel = kChannel,
          .sequence = sequence,
          .text = absl::StrCat("#", sequence, " barrier (user)")};
}

Wait InExchange(const std::string& topic, int64_t sequence = 0) {
  return {.kind = Wait::Kind::kExchange,
          .sequence = sequence,
          .topic = topic,
          .text = absl::StrCat("the ", topic)};
}

RankStatus WaitingIn(Wait wait, int64_t position = 0) {
  RankStatus report{.everyone_waits = true, .doing = absl::StrCat("waits in ", wait.text)};
  report.waits = {std::move(wait)};
  report.channels = {{.id = kChannel, .name = "user", .position = position}};
  return report;
}

RankStatus At(uint64_t hash, const std::string& text) {
  RankStatus report = WaitingIn(InCollective(0), 1);
  report.channels[0].recent = {{.sequence = 0, .hash = hash, .text = text, .is_open = true}};
  return report;
}

TEST(ControlHubTest, AnswersEachHeartbeat) {
  Group group(2);
  group.Beat(1);
  ASSERT_EQ(group.told[1].size(), 1u);
  EXPECT_EQ(group.told[1][0].type, Type::kBeat);
  EXPECT_TRUE(group.told[0].empty());
  group.hub.OnMessage(1, {.type = Type::kBeat, .payload = "no rank status"});
  EXPECT_EQ(group.told[1].size(), 2u);
}

TEST(ControlHubTest, EndsTheGroupAtOnceWhenRanksHaveDifferentCollectives) {
  Group group(3, {.patience = absl::Hours(1)});
  group.Beat(0, At(1, "all_reduce"));
  group.Beat(2, At(1, "all_reduce"));
  EXPECT_EQ(group.FailureAt(0), nullptr);
  group.Beat(1, At(2, "barrier"));
  for (int rank = 0; rank < 3; ++rank) {
    ASSERT_NE(group.FailureAt(rank), nullptr) << rank;
    EXPECT_EQ(group.FailureAt(rank)->status.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_EQ(group.FailureAt(rank)->rank, 1);
    EXPECT_EQ(group.FailureAt(rank)->status.message(),
              "rank 1 is at #0 barrier on channel \"user\"; ranks 0,2 are at #0 all_reduce on "
              "channel \"user\": the "
              "ranks disagree");
  }
}

TEST(ControlHubTest, ADeadlockHasToBeConfirmedByAllThatAreInIt) {
  Group group(2);
  group.Come(1, "step");
  group.Beat(0, WaitingIn(InCollective(0), 1));
  group.Beat(1, WaitingIn(InExchange("step")));
  EXPECT_EQ(group.FailureAt(0), nullptr) << "suspected";
  group.Beat(1, WaitingIn(InExchange("step")));
  EXPECT_EQ(group.FailureAt(0), nullptr) << "rank 0 has not confirmed it";
  group.Beat(0, WaitingIn(InCollective(0), 1));
  for (int rank = 0; rank < 2; ++rank) {
    ASSERT_NE(group.FailureAt(rank), nullptr);
    EXPECT_EQ(
        group.FailureAt(rank)->status.message(),
        absl::StrCat(
            "rank 0 waits in #0 barrier (user); rank 1 waits in the step: they cannot go on: the "
            "ranks disagree (",
            kCallsAdvice, "; ", kJoinAdvice, ")"));
  }
}

// The others may wait for a message from a rank that is about to be declared lost.
TEST(ControlHubTest, ADeadlockNeedsASignOfLifeOfEveryRank) {
  Group group(3);
  group.Come(1, "step");
  group.Beat(2);
  for (int i = 0; i < 3; ++i) {
    group.Beat(0, WaitingIn(InCollective(0), 1));
    group.Beat(1, WaitingIn(InExchange("step")));
    EXPECT_EQ(group.FailureAt(0), nullptr) << "rank 2 is silent";
  }
  group.Beat(2);
  group.Beat(0, WaitingIn(InCollective(0), 1));
  ASSERT_NE(group.FailureAt(0), nullptr);
  EXPECT_THAT(group.FailureAt(0)->status.message(), HasSubstr("the ranks disagree"));
}

// In a large group the hub judges after every so many reports; those in between count.
TEST(ControlHubTest, ADeadlockOfManyRanksIsDeclared) {
  constexpr int kRanks = 1000;
  Group group(kRanks, {.patience = absl::ZeroDuration()});
  group.Come(1, "step");
  const absl::Time limit = SteadyNow() + absl::Seconds(30);
  while (group.FailureAt(0) == nullptr && SteadyNow() < limit) {
    group.Beat(0, WaitingIn(InCollective(0), 1));
    for (int rank = 1; rank < kRanks; ++rank) group.Beat(rank, WaitingIn(InExchange("step")));
  }
  EXPECT_NE(group.FailureAt(0), nullptr);
}

TEST(ControlHubTest, ARankThatReceivesNothingIsTheLostOne) {
  Group group(3);
  group.hub.OnDeafness(2, absl::Seconds(5));
  ASSERT_NE(group.FailureAt(1), nullptr);
  EXPECT_THAT(group.FailureAt(1)->status.message(), HasSubstr("rank 2 is cut off"));
  EXPECT_EQ(FailureInfoOf(group.FailureAt(1)->status)->ranks, std::vector<int>{2});
  ASSERT_NE(group.FailureAt(2), nullptr);
  EXPECT_EQ(group.FailureAt(2)->sequence, 1) << "it is cut off by this message";
}

TEST(ControlHubTest, ADeadlockHasToStandForAWhile) {
  Group group(2, {.patience = absl::Milliseconds(200)});
  group.Come(1, "step");
  const absl::Time start = SteadyNow();
  while (group.FailureAt(0) == nullptr && SteadyNow() < start + absl::Seconds(20)) {
    group.Beat(0, WaitingIn(InCollective(0), 1));
    group.Beat(1, WaitingIn(InExchange("step")));
  }
  EXPECT_NE(group.FailureAt(0), nullptr);
  EXPECT_GE(SteadyNow() - start, absl::Milliseconds(200));
}

TEST(ControlHubTest, WhoeverGoesOnEndsTheSuspicion) {
  Group group(2);
  group.Come(1, "step");
  for (int round = 0; round < 5; ++round) {
    group.Beat(0, WaitingIn(InCollective(0), 1));
    group.Beat(1, WaitingIn(InExchange("step")));
    group.Beat(1, {});
  }
  EXPECT_EQ(group.FailureAt(0), nullptr);
}

TEST(ControlHubTest, AMessageOnItsWayIsAWayToGoOn) {
  Group group(2);
  const auto beat_all = [&](int64_t received_by_1) {
    RankStatus report = WaitingIn(InExchange("step"));
    report.received = received_by_1;
    for (int round = 0; round < 3; ++round) {
      group.Beat(0, WaitingIn(InCollective(0), 1));
      group.Beat(1, report);
    }
  };
  group.Come(1, "step");
  group.hub.OnMessage(0, {.type = Type::kSend, .rank = 1, .topic = "hello"});
  EXPECT_EQ(group.CountTold(1), 1);
  beat_all(0);
  EXPECT_EQ(group.FailureAt(0), nullptr);
  beat_all(1);
  EXPECT_NE(group.FailureAt(0), nullptr);
}

TEST(ControlHubTest, WhoHasComeToAnExchangeIsKnownHere) {
  Group group(2);
  group.Come(1, "step");
  const auto beat_all = [&](int64_t received) {
    for (int rank = 0; rank < 2; ++rank) {
      RankStatus report = WaitingIn(InExchange("step"));
      report.received = received;
      for (int round = 0; round < 3; ++round) group.Beat(rank, report);
    }
  };
  beat_all(0);
  EXPECT_EQ(group.FailureAt(0), nullptr) << "rank 0 says that it has come, so it will be heard of";
  group.Come(0, "step");
  beat_all(0);
  beat_all(1);
  EXPECT_EQ(group.FailureAt(0), nullptr) << "it is over";
}

TEST(ControlHubTest, SaysWhoIsMissingAndWhere) {
  Group group(4);
  group.Come(1, "step");
  group.Come(0, "step");
  EXPECT_EQ(group.Ask(1, InExchange("step")), "ranks 2,3");
  EXPECT_EQ(group.Ask(1, InExchange("other")), "");
  group.Beat(2, {.doing = "runs, 12 s after #411 all_reduce"});
  EXPECT_EQ(group.Ask(1, InExchange("step")),
            "ranks 2,3 (rank 2 runs, 12 s after #411 all_reduce; rank 3 has not reported)");
  group.Beat(3, WaitingIn(InCollective(1), 2));
  EXPECT_EQ(group.Ask(3, InCollective(1)), "rank 2 (rank 2 runs, 12 s after #411 all_reduce)");
  EXPECT_EQ(group.Ask(0, {.kind = Wait::Kind::kMessage, .peer = 3}),
            "rank 3 (rank 3 waits in #1 barrier (user))");
  EXPECT_EQ(group.Ask(0, InCollective(1)), "rank 2 (rank 2 runs, 12 s after #411 all_reduce)");
  group.hub.OnMessage(0, {.type = Type::kMissing, .request = 6, .payload = "nonsense"});
  EXPECT_EQ(group.told[0].back().request, 6);
}

TEST(ControlHubTest, EqualNoticesArePassedOnOnce) {
  Group group(3);
  const auto notify = [&](int rank, const std::string& payload, int64_t once) {
    group.hub.OnMessage(
        rank, {.type = Type::kNotice, .sequence = once, .topic = "end", .payload = payload});
  };
  for (const int rank : {1, 0, 2}) notify(rank, "at 5", 1);
  EXPECT_EQ(group.CountTold(1), 0);
  ASSERT_EQ(group.CountTold(0), 1);
  EXPECT_EQ(group.told[0][0].rank, 1);
  notify(2, "at 6", 1);
  EXPECT_EQ(group.CountTold(1), 1);
  EXPECT_EQ(group.CountTold(0), 2);
  for (const int rank : {1, 2}) notify(rank, "each", 0);
  EXPECT_EQ(group.CountTold(0), 4);
}

TEST(ControlHubTest, ANoticeToOneRankReachesThatOne) {
  Group group(3);
  group.hub.OnMessage(0, {.type = Type::kNotice, .rank = 2, .topic = "sends", .payload = "5"});
  ASSERT_EQ(group.CountTold(2), 1);
  EXPECT_EQ(group.told[2][0].rank, 0);
  group.hub.OnMessage(0, {.type = Type::kNotice, .rank = 0, .topic = "sends", .payload = "5"});
  group.hub.OnMessage(0, {.type = Type::kNotice, .rank = 9, .topic = "sends", .payload = "5"});
  EXPECT_EQ(group.CountTold(0) + group.CountTold(1) + group.CountTold(2), 1);
}

TEST(ControlHubTest, AMessageToSeveralRanksReachesThose) {
  Group group(4);
  group.hub.OnMessage(0, {.type = Type::kSend,
                          .topic = "action",
                          .payload = "step",
                          .parts = {{.count = 3}, {.count = 1}, {.count = 4}, {.count = -1}}});
  for (const int rank : {1, 3}) {
    ASSERT_EQ(group.CountTold(rank), 1);
    EXPECT_EQ(group.told[rank][0].rank, 0);
    EXPECT_EQ(group.told[rank][0].payload, "step");
    EXPECT_TRUE(group.told[rank][0].parts.empty());
  }
  EXPECT_EQ(group.CountTold(0) + group.CountTold(2), 0);
}

// Over a tree the hub asks all ranks whether they have come, but only once for many ranks that ask.
TEST(ControlHubTest, RanksThatAskTogetherAreAnsweredTogether) {
  constexpr int kRanks = 100, kFanout = 32;
  Group group(kRanks);
  RankStatus asked;
  asked.waits = {InExchange("step")};
  const auto ask = [&](int rank, int64_t at_once = 0) {
    group.hub.OnMessage(rank, {.type = Type::kMissing,
                               .rank = kFanout,
                               .sequence = at_once,
                               .request = rank,
                               .payload = asked.Serialize()});
  };
  const auto take_replies = [&] {
    std::vector<std::string> replies;  // "rank: text".
    for (int rank = 0; rank < kRanks; ++rank) {
      std::vector<ControlMessage>& told = group.told[rank];
      for (const ControlMessage& message : told) {
        if (message.type == Type::kValue)
          replies.push_back(absl::StrCat(rank, ": ", message.status.message()));
      }
      std::erase_if(told, [](const auto& message) { return message.type == Type::kValue; });
    }
    return replies;
  };
  // All ranks but `late` have come. Returns the number of questions to each rank.
  const auto answer = [&](int late) {
    std::vector<std::vector<ControlMessage>> questions(kRanks);
    questions.swap(group.told);
    for (int rank = 0; rank < kRanks; ++rank) {
      EXPECT_EQ(questions[rank].size(), questions[0].size());
      for (ControlMessage& question : questions[rank]) {
        question.sequence = rank != late;
        group.hub.OnMessage(rank, question);
      }
    }
    return questions[0].size();
  };
  for (int rank = 0; rank < kRanks; ++rank) ask(rank);
  ask(3, /*at_once=*/1);
  EXPECT_THAT(take_replies(), testing::ElementsAre(testing::StartsWith("3: ranks 0-99")));
  EXPECT_EQ(answer(/*late=*/7), 1u);
  EXPECT_THAT(take_replies(), testing::ElementsAre("0: rank 7"));
  EXPECT_EQ(answer(/*late=*/8), 1u)
      << "the next poll must begin after the questions to which it replies";
  const std::vector<std::string> replies = take_replies();
  EXPECT_THAT(replies, testing::SizeIs(98));
  EXPECT_THAT(replies, testing::Each(testing::EndsWith(": rank 8")));
  EXPECT_EQ(answer(/*late=*/8), 0u);
}

TEST(ControlHubTest, AnExchangeMustFitIntoAMessage) {
  const ControlMessage large{
      .topic = "states",
      .parts = {{.count = 3, .part = std::string(kMaxFrame, 'x')}, {.count = 1}}};
  EXPECT_THAT(std::string(CheckSize(large).message()),
              HasSubstr("the parts of 4 ranks for \"states\" #0 have 268"));
  EXPECT_TRUE(CheckSize({.topic = "states", .parts = {{.count = 4096}}}).ok());
}

TEST(ControlHubTest, AnObserverSeesTheFirstOfManyThatAreAwaited) {
  Group group(1000);
  group.Come(0, "step");
  for (const int rank : {0, 5}) group.Beat(rank, WaitingIn(InExchange("step")));
  const HubView view = group.hub.View();
  EXPECT_EQ(view.ranks[0].waits_for.size(), 100u);
  EXPECT_EQ(view.ranks[0].waits_for.back(), 100);
}

TEST(ControlHubTest, ASilentRankIsLostAndLearnsWhy) {
  Group group(3);
  group.Beat(2, {.doing = "runs, 1 s after #3 barrier"});
  group.hub.OnSilence(2, absl::Seconds(5));
  group.hub.OnMessage(0, {.type = Type::kRegroup, .request = 1});
  group.hub.OnMessage(1, {.type = Type::kRegroup, .request = 2});
  for (int rank = 0; rank < 2; ++rank) {
    ASSERT_NE(group.FailureAt(rank), nullptr);
    EXPECT_EQ(group.FailureAt(rank)->status.code(), absl::StatusCode::kUnavailable);
    EXPECT_EQ(group.FailureAt(rank)->rank, 2);
    EXPECT_EQ(group.FailureAt(rank)->sequence, 0);
    EXPECT_EQ(group.FailureAt(rank)->status.message(),
              "rank 2 is silent: no heartbeat for 5s; at its last heartbeat it runs, 1 s after #3 "
              "barrier");
    EXPECT_EQ(group.told[rank].back().type, Type::kRegrouped);
    EXPECT_EQ(group.told[rank].back().payload, "0,1");
  }
  ASSERT_NE(group.FailureAt(2), nullptr);
  EXPECT_EQ(group.FailureAt(2)->sequence, 1);
  EXPECT_THAT(group.FailureAt(2)->status.message(),
              AllOf(HasSubstr("rank 2 sent no heartbeat for 5s"), HasSubstr("declared it lost")));
  const size_t told = group.told[0].size();
  group.hub.OnDisconnect(2);
  group.hub.OnSilence(2, absl::Seconds(5));
  EXPECT_EQ(group.told[0].size(), told);
}

// They wait for it in the new group, whose hub it has never reached.
TEST(ControlHubTest, TheLossOfASurvivorReachesTheOthersOnce) {
  for (const bool is_silent : {false, true}) {
    Group group(5);
    group.hub.OnDisconnect(4);
    for (int rank = 0; rank < 4; ++rank)
      group.hub.OnMessage(rank, {.type = Type::kRegroup, .request = rank});
    const size_t told = group.told[0].size();
    is_silent ? group.hub.OnSilence(2, absl::Seconds(5)) : group.hub.OnDisconnect(2);
    for (const int rank : {0, 1, 3}) {
      ASSERT_EQ(group.told[rank].size(), told + 1);
      const ControlMessage& message = group.told[rank].back();
      EXPECT_EQ(message.type, Type::kRegrouped);
      EXPECT_EQ(message.request, -1);
      EXPECT_EQ(message.status.code(), absl::StatusCode::kUnavailable);
      EXPECT_THAT(std::string(message.status.message()), testing::StartsWith("rank 2 "));
      EXPECT_THAT(FailureInfoOf(message.status).value_or(FailureInfo()).ranks,
                  testing::ElementsAre(2));
    }
    group.hub.OnDisconnect(1);
    EXPECT_EQ(group.told[0].size(), told + 1) << "one loss is enough";
    for (const int rank : {0, 3})
      group.hub.OnMessage(rank, {.type = Type::kRegroup, .request = 4 + rank});
    EXPECT_EQ(group.told[0].back().payload, "0,3");
    group.hub.OnDisconnect(3);
    EXPECT_EQ(group.told[0].back().request, -1);
  }
}

TEST(ControlHubTest, WhoHasLeftMayBeSilent) {
  Group group(2);
  group.hub.OnMessage(1, {.type = Type::kLeave});
  group.hub.OnSilence(1, absl::Seconds(5));
  EXPECT_EQ(group.FailureAt(0), nullptr);
}

TEST(ControlHubTest, AGroupEndsOnce) {
  Group group(2);
  group.hub.OnDisconnect(1);
  const size_t told = group.told[0].size();
  group.Beat(0, At(1, "a"));
  EXPECT_EQ(group.told[0].size(), told + 1) << "the beat's answer";
  EXPECT_EQ(group.told[0].back().type, Type::kBeat);
}

}  // namespace
}  // namespace evenkeel::internal
