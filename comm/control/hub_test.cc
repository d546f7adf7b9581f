#include "evenkeel/comm/control/hub.h"

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "evenkeel/comm/base/clock.h"
#include "evenkeel/comm/control/exchange_tree.h"
#include "evenkeel/comm/control/messages.h"
#include "evenkeel/comm/control/rank_status.h"
#include "evenkeel/comm/net/frame.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel::internal {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;

constexpr uint64_t kChannel = 7;

// A hub, and all that it has told each rank.
class Group {
 public:
  explicit Group(int world_size, HubOptions options = {.patience = absl::ZeroDuration()})
      : told(world_size),
        hub(
            world_size,
            [this](absl::Span<const int> to, const ToRank& message) {
              for (const int rank : to) told[rank].push_back(message);
            },
            options) {}

  void Beat(int rank, const RankStatus& report = {}) {
    hub.OnMessage(rank, to_hub::Beat{.rank_status = report.Serialize()});
  }
  void Come(int rank, const std::string& topic, int64_t sequence = 0) {
    hub.OnMessage(rank, to_hub::Exchange{.id = {topic, sequence}, .parts = {{1, ""}}});
  }
  std::string Ask(int rank, const Wait& wait) {
    hub.OnMessage(rank, to_hub::WhoIsMissing{.request = 5, .wait = wait});
    EXPECT_EQ(Last<to_rank::Missing>(rank).request, 5);
    return std::string(Last<to_rank::Missing>(rank).status.message());
  }
  // Returns the message to a rank about the end of the group; null if the group goes on.
  const to_rank::Failed* FailureAt(int rank) const {
    for (const ToRank& message : told[rank]) {
      if (const auto* failed = std::get_if<to_rank::Failed>(&message)) return failed;
    }
    return nullptr;
  }
  // Returns the last message to a rank, or one without values if it is of another type.
  template <typename Message>
  Message Last(int rank) const {
    const auto* last = told[rank].empty() ? nullptr : std::get_if<Message>(&told[rank].back());
    EXPECT_NE(last, nullptr) << "rank " << rank;
    return last == nullptr ? Message() : *last;
  }
  // Messages that count in a rank's `received`.
  int64_t CountTold(int rank) const {
    int64_t count = 0;
    for (const ToRank& message : told[rank]) count += !IsBeat(message);
    return count;
  }

  std::vector<std::vector<ToRank>> told;  // By rank.
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
  EXPECT_TRUE(IsBeat(group.told[1][0]));
  EXPECT_TRUE(group.told[0].empty());
  group.hub.OnMessage(1, to_hub::Beat{.rank_status = "no rank status"});
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
    EXPECT_EQ(group.FailureAt(rank)->why.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_EQ(group.FailureAt(rank)->culprit, 1);
    EXPECT_EQ(group.FailureAt(rank)->why.message(),
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
        group.FailureAt(rank)->why.message(),
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
  EXPECT_THAT(group.FailureAt(0)->why.message(), HasSubstr("the ranks disagree"));
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
  EXPECT_THAT(group.FailureAt(1)->why.message(), HasSubstr("rank 2 is cut off"));
  EXPECT_EQ(FailureInfoOf(group.FailureAt(1)->why)->ranks, std::vector<int>{2});
  ASSERT_NE(group.FailureAt(2), nullptr);
  EXPECT_TRUE(group.FailureAt(2)->is_cut_off) << "it is cut off by this message";
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
  group.hub.OnMessage(0, to_hub::Message{.to = {1}, .topic = "hello"});
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
  group.hub.OnMessage(0, to_hub::WhoIsMissing{.request = 6});
  EXPECT_EQ(group.Last<to_rank::Missing>(0).request, 6);
}

TEST(ControlHubTest, EqualNoticesArePassedOnOnce) {
  Group group(3);
  const auto notify = [&](int rank, const std::string& payload, bool is_once) {
    group.hub.OnMessage(rank,
                        to_hub::Notice{.is_once = is_once, .topic = "end", .payload = payload});
  };
  for (const int rank : {1, 0, 2}) notify(rank, "at 5", true);
  EXPECT_EQ(group.CountTold(1), 0);
  ASSERT_EQ(group.CountTold(0), 1);
  EXPECT_EQ(group.Last<to_rank::Notice>(0).from, 1);
  notify(2, "at 6", true);
  EXPECT_EQ(group.CountTold(1), 1);
  EXPECT_EQ(group.CountTold(0), 2);
  for (const int rank : {1, 2}) notify(rank, "each", false);
  EXPECT_EQ(group.CountTold(0), 4);
}

TEST(ControlHubTest, AGetIsAnsweredOnceItsValueIsPublished) {
  Group group(3);
  group.hub.OnMessage(0, to_hub::Get{.request = 4, .key = "plan"});
  EXPECT_EQ(group.CountTold(0), 0);
  group.hub.OnMessage(2, to_hub::Put{.key = "plan", .value = "p"});
  group.hub.OnMessage(1, to_hub::Get{.request = 5, .key = "plan"});
  for (const int rank : {0, 1}) {
    ASSERT_EQ(group.CountTold(rank), 1);
    EXPECT_EQ(group.Last<to_rank::Value>(rank).request, 4 + rank);
    EXPECT_EQ(group.Last<to_rank::Value>(rank).value, "p");
  }
  group.hub.OnDisconnect(2);
  group.hub.OnMessage(1, to_hub::Get{.request = 6, .key = "plan"});
  EXPECT_FALSE(group.Last<to_rank::Failed>(1).why.ok());
}

TEST(ControlHubTest, ANoticeToOneRankReachesThatOne) {
  Group group(3);
  group.hub.OnMessage(0, to_hub::Notice{.to = 2, .topic = "sends", .payload = "5"});
  ASSERT_EQ(group.CountTold(2), 1);
  EXPECT_EQ(group.Last<to_rank::Notice>(2).from, 0);
  group.hub.OnMessage(0, to_hub::Notice{.to = 0, .topic = "sends", .payload = "5"});
  group.hub.OnMessage(0, to_hub::Notice{.to = 9, .topic = "sends", .payload = "5"});
  EXPECT_EQ(group.CountTold(0) + group.CountTold(1) + group.CountTold(2), 1);
}

TEST(ControlHubTest, AMessageToSeveralRanksReachesThose) {
  Group group(4);
  group.hub.OnMessage(0,
                      to_hub::Message{.to = {3, 1, 4, -1}, .topic = "action", .payload = "step"});
  for (const int rank : {1, 3}) {
    ASSERT_EQ(group.CountTold(rank), 1);
    EXPECT_EQ(group.Last<to_rank::Message>(rank).from, 0);
    EXPECT_EQ(group.Last<to_rank::Message>(rank).payload, "step");
  }
  EXPECT_EQ(group.CountTold(0) + group.CountTold(2), 0);
}

// Over a tree the hub asks all ranks whether they have come, but only once for many ranks that ask.
TEST(ControlHubTest, RanksThatAskTogetherAreAnsweredTogether) {
  constexpr int kRanks = 100, kFanout = 32;
  Group group(kRanks);
  const auto ask = [&](int rank, bool is_urgent = false) {
    group.hub.OnMessage(rank, to_hub::WhoIsMissing{.request = rank,
                                                   .wait = InExchange("step"),
                                                   .is_urgent = is_urgent,
                                                   .fanout = kFanout});
  };
  const auto take_replies = [&] {
    std::vector<std::string> replies;  // "rank: text".
    for (int rank = 0; rank < kRanks; ++rank) {
      std::erase_if(group.told[rank], [&](const ToRank& message) {
        const auto* reply = std::get_if<to_rank::Missing>(&message);
        if (reply != nullptr) replies.push_back(absl::StrCat(rank, ": ", reply->status.message()));
        return reply != nullptr;
      });
    }
    return replies;
  };
  // All ranks but `late` have come. Returns the number of questions to each rank.
  const auto answer = [&](int late) {
    std::vector<std::vector<ToRank>> questions(kRanks);
    questions.swap(group.told);
    for (int rank = 0; rank < kRanks; ++rank) {
      EXPECT_EQ(questions[rank].size(), questions[0].size());
      for (const ToRank& question : questions[rank]) {
        const auto* poll = std::get_if<to_rank::Poll>(&question);
        EXPECT_NE(poll, nullptr);
        if (poll != nullptr)
          group.hub.OnMessage(rank, to_hub::PollReply{poll->number, rank != late});
      }
    }
    return questions[0].size();
  };
  for (int rank = 0; rank < kRanks; ++rank) ask(rank);
  ask(3, /*is_urgent=*/true);
  EXPECT_THAT(take_replies(), ElementsAre(testing::StartsWith("3: ranks 0-99")));
  EXPECT_EQ(answer(/*late=*/7), 1u);
  EXPECT_THAT(take_replies(), ElementsAre("0: rank 7"));
  EXPECT_EQ(answer(/*late=*/8), 1u)
      << "the next poll must begin after the questions to which it replies";
  const std::vector<std::string> replies = take_replies();
  EXPECT_THAT(replies, testing::SizeIs(98));
  EXPECT_THAT(replies, testing::Each(testing::EndsWith(": rank 8")));
  EXPECT_EQ(answer(/*late=*/8), 0u);
}

TEST(ControlHubTest, AnExchangeMustFitIntoAMessage) {
  const ExchangeId id{.topic = "states"};
  EXPECT_THAT(std::string(CheckSize(id, {{3, std::string(kMaxFrame, 'x')}, {1, ""}}).message()),
              HasSubstr("the parts of 4 ranks for \"states\" #0 have 268"));
  EXPECT_TRUE(CheckSize(id, {{4096, ""}}).ok());
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
  group.hub.OnMessage(0, to_hub::Regroup{.request = 1});
  group.hub.OnMessage(1, to_hub::Regroup{.request = 2});
  for (int rank = 0; rank < 2; ++rank) {
    ASSERT_NE(group.FailureAt(rank), nullptr);
    EXPECT_EQ(group.FailureAt(rank)->why.code(), absl::StatusCode::kUnavailable);
    EXPECT_EQ(group.FailureAt(rank)->culprit, 2);
    EXPECT_FALSE(group.FailureAt(rank)->is_cut_off);
    EXPECT_EQ(group.FailureAt(rank)->why.message(),
              "rank 2 is silent: no heartbeat for 5s; at its last heartbeat it runs, 1 s after #3 "
              "barrier");
    EXPECT_THAT(group.Last<to_rank::Regrouped>(rank).ranks, ElementsAre(0, 1));
  }
  ASSERT_NE(group.FailureAt(2), nullptr);
  EXPECT_TRUE(group.FailureAt(2)->is_cut_off);
  EXPECT_THAT(group.FailureAt(2)->why.message(),
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
      group.hub.OnMessage(rank, to_hub::Regroup{.request = rank});
    const size_t told = group.told[0].size();
    is_silent ? group.hub.OnSilence(2, absl::Seconds(5)) : group.hub.OnDisconnect(2);
    for (const int rank : {0, 1, 3}) {
      ASSERT_EQ(group.told[rank].size(), told + 1);
      const absl::Status why = group.Last<to_rank::SurvivorLost>(rank).why;
      EXPECT_EQ(why.code(), absl::StatusCode::kUnavailable);
      EXPECT_THAT(std::string(why.message()), testing::StartsWith("rank 2 "));
      EXPECT_THAT(FailureInfoOf(why).value_or(FailureInfo()).ranks, ElementsAre(2));
    }
    group.hub.OnDisconnect(1);
    EXPECT_EQ(group.told[0].size(), told + 1) << "one loss is enough";
    for (const int rank : {0, 3}) group.hub.OnMessage(rank, to_hub::Regroup{.request = 4 + rank});
    EXPECT_THAT(group.Last<to_rank::Regrouped>(0).ranks, ElementsAre(0, 3));
    group.hub.OnDisconnect(3);
    EXPECT_FALSE(group.Last<to_rank::SurvivorLost>(0).why.ok());
  }
}

TEST(ControlHubTest, WhoHasLeftMayBeSilent) {
  Group group(2);
  group.hub.OnMessage(1, to_hub::Leave());
  group.hub.OnSilence(1, absl::Seconds(5));
  EXPECT_EQ(group.FailureAt(0), nullptr);
}

TEST(ControlHubTest, AGroupEndsOnce) {
  Group group(2);
  group.hub.OnDisconnect(1);
  const size_t told = group.told[0].size();
  group.Beat(0, At(1, "a"));
  EXPECT_EQ(group.told[0].size(), told + 1) << "the beat's answer";
  EXPECT_TRUE(IsBeat(group.told[0].back()));
}

}  // namespace
}  // namespace evenkeel::internal
