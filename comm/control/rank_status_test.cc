#include "evenkeel/comm/control/rank_status.h"

#include <algorithm>
#include <deque>
#include <map>
#include <random>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "evenkeel/comm/failure_info.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel::internal {
namespace {

using testing::ElementsAre;
using testing::EndsWith;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;

constexpr uint64_t kUser = 7;

// Values to put situations together from ----------------------------------------------------------

Wait InCollective(int64_t sequence, const std::string& text, uint64_t channel = kUser) {
  return {.kind = Wait::Kind::kCollective, .channel = channel, .sequence = sequence, .text = text};
}

Wait InExchange(const std::string& topic, int64_t sequence, const std::string& text) {
  return {.kind = Wait::Kind::kExchange, .sequence = sequence, .topic = topic, .text = text};
}

Wait ForMessage(int from, const std::string& text) { return {.peer = from, .text = text}; }

ChannelStatus OnUser(int64_t position, std::vector<Issued> recent = {}) {
  return {.id = kUser, .name = kUserChannel, .position = position, .recent = std::move(recent)};
}

RankFacts Waiting(std::vector<Wait> waits, std::vector<ChannelStatus> channels = {}) {
  RankFacts facts{.has_report = true};
  facts.report = {
      .everyone_waits = true, .waits = std::move(waits), .channels = std::move(channels)};
  return facts;
}

RankFacts Running(std::vector<ChannelStatus> channels = {}) {
  RankFacts facts{.has_report = true};
  facts.report.channels = std::move(channels);
  return facts;
}

std::string TextOf(const Judgement& judgement) { return std::string(judgement.status.message()); }

// Rule 1 ------------------------------------------------------------------------------------------

TEST(JudgeTest, NamesWhoHasAnotherCollectiveAtTheSamePosition) {
  const Issued barrier{.sequence = 412, .hash = 1, .text = "barrier (user)"};
  const Issued reduce{.sequence = 412, .hash = 2, .text = "all_reduce (user) float32[10] sum"};
  const Judgement judgement =
      Judge({Running({OnUser(413, {reduce})}), Running({OnUser(413, {barrier})}),
             Running({OnUser(414, {reduce, {.sequence = 413, .hash = 3, .text = "x"}})}),
             Running({OnUser(412)})},
            {});
  EXPECT_TRUE(absl::IsFailedPrecondition(judgement.status));
  EXPECT_EQ(TextOf(judgement),
            "rank 1 is at #412 barrier (user) on channel \"user\"; ranks 0,2 are at #412 "
            "all_reduce (user) float32[10] "
            "sum on channel \"user\": the ranks disagree");
  EXPECT_EQ(judgement.culprit, 1);
  EXPECT_EQ(FailureInfoOf(judgement.status), (FailureInfo{.kind = FailureKind::kDisagreement,
                                                          .ranks = {1},
                                                          .operation = "barrier (user)",
                                                          .position = 412}));
  EXPECT_THAT(judgement.stuck, IsEmpty()) << "no need to wait";
}

TEST(JudgeTest, TakesTheFirstPositionThatDiffers) {
  const auto issued = [](int64_t sequence, uint64_t hash) {
    return Issued{.sequence = sequence, .hash = hash, .text = absl::StrCat("op ", hash)};
  };
  const Judgement judgement =
      Judge({Running({OnUser(3, {issued(0, 1), issued(1, 2), issued(2, 3)})}),
             Running({OnUser(3, {issued(0, 1), issued(1, 3), issued(2, 2)})})},
            {});
  EXPECT_THAT(TextOf(judgement), HasSubstr("rank 0 is at #1 op 2"));
  EXPECT_THAT(TextOf(judgement), HasSubstr("rank 1 is at #1 op 3"));
}

TEST(JudgeTest, TellsApartWhatReadsTheSame) {
  const Judgement judgement =
      Judge({Running({OnUser(1, {{.sequence = 0, .hash = 0xa, .text = "same"}})}),
             Running({OnUser(1, {{.sequence = 0, .hash = 0xb, .text = "same"}})})},
            {});
  EXPECT_THAT(TextOf(judgement), HasSubstr("rank 0 is at #0 same (hash a)"));
  EXPECT_THAT(TextOf(judgement), HasSubstr("rank 1 is at #0 same (hash b)"));
}

TEST(JudgeTest, OtherPositionsAndOtherChannelsAreNoContradiction) {
  const auto at = [](uint64_t channel, int64_t sequence, uint64_t hash) {
    return ChannelStatus{.id = channel,
                         .name = absl::StrCat(channel),
                         .position = sequence + 1,
                         .recent = {{.sequence = sequence, .hash = hash}}};
  };
  EXPECT_TRUE(
      Judge({Running({at(1, 0, 1)}), Running({at(1, 1, 2)}), Running({at(2, 0, 3)}), RankFacts()},
            {})
          .status.ok());
}

// Rule 2 ------------------------------------------------------------------------------------------

TEST(JudgeTest, AUsersBarrierAndAStepAreADeadlock) {
  const std::vector<RankFacts> ranks = {
      Waiting({InCollective(0, "#0 barrier (user) on channel \"user\"")}, {OnUser(1)}),
      Waiting({InExchange("step", 5, "step 5 until all ranks have begun it")}),
  };
  const std::vector<OpenExchange> exchanges = {
      {.topic = "step", .sequence = 5, .arrived = {false, true}}};
  const Judgement judgement = Judge(ranks, exchanges);
  EXPECT_TRUE(absl::IsFailedPrecondition(judgement.status));
  EXPECT_EQ(TextOf(judgement),
            absl::StrCat("rank 0 waits in #0 barrier (user) on channel \"user\"; rank 1 waits in "
                         "step 5 until all ranks have begun it: they cannot go on: the ranks "
                         "disagree (",
                         kCallsAdvice, "; ", kJoinAdvice, ")"));
  EXPECT_THAT(judgement.stuck, ElementsAre(0, 1));
}

TEST(JudgeTest, WhatADryRankCannotKnowOfIsExplained) {
  std::vector<RankFacts> ranks = {
      Waiting({InCollective(0, "#0 barrier (user) on channel \"user\"")}, {OnUser(1)}),
      Waiting({ForMessage(0, absl::StrCat(kExhausted, "what rank 0 does in step 5"))}),
  };
  EXPECT_THAT(
      TextOf(Judge(ranks, {})),
      HasSubstr(
          "rank 1 waits in a join without more input: what rank 0 does in step 5: they cannot go "
          "on: the ranks disagree (with no more input on rank 1, the loop does not run there: move "
          "collectives that exhausted ranks do not shadow out of the join)"));
  ranks[1].report.waits[0].text = "something else";
  EXPECT_THAT(TextOf(Judge(ranks, {})), Not(HasSubstr("out of the join")));
  ranks[0].report.waits[0].text = absl::StrCat(kExhausted, "what rank 1 does in step 5");
  EXPECT_THAT(TextOf(Judge(ranks, {})), EndsWith(absl::StrCat("disagree (", kCallsAdvice, ")")))
      << "it is in a join";
}

TEST(JudgeTest, AnOptimizersStepThatARankHasOmittedIsNamed) {
  constexpr uint64_t kShards = 8;
  const auto at = [](const std::string& name, int64_t position) {
    return ChannelStatus{.id = kShards, .name = name, .position = position};
  };
  const auto in_step = [&](int64_t sequence, const std::string& what) {
    const std::string text = absl::StrCat("#", sequence, " ", what, " on channel \"optimizer#0\"");
    return Waiting({InCollective(sequence, text, kShards)}, {at("optimizer#0", sequence + 1)});
  };
  const RankFacts first = in_step(6, "broadcast shard 0/3 float32[40] root 0");
  const RankFacts second = in_step(7, "all_reduce (shard) float32[4] sum");
  const RankFacts omitter = Waiting({InExchange("step", 3, "step 3")}, {at("optimizer#0", 5)});
  RankFacts follower = omitter;
  follower.report.waits[0].text = absl::StrCat(kExhausted, "step 3");
  const std::vector<OpenExchange> step = {
      {.topic = "step", .sequence = 3, .arrived = {false, false, true, true}}};
  const auto advice = [](const std::string& who) {
    return absl::StrCat("the ranks disagree (", who, ": every rank must take every step)");
  };
  const Judgement judgement = Judge({first, second, omitter, follower}, step);
  EXPECT_THAT(TextOf(judgement),
              EndsWith(advice("rank 2 has not taken the step of optimizer#0 in which ranks 0,1 "
                              "wait")));
  EXPECT_EQ(judgement.culprit, 2);
  EXPECT_THAT(TextOf(Judge({first, second, follower, follower}, step)),
              EndsWith(advice("ranks 2,3 have not taken the step of optimizer#0 in which ranks 0,1 "
                              "wait")))
      << "their last one";
  const RankFacts in_barrier =
      Waiting({InCollective(0, "#0 barrier (user)")}, {OnUser(1), at("optimizer#0", 5)});
  EXPECT_THAT(TextOf(Judge({in_barrier, second}, {})),
              EndsWith(advice("rank 0 has not taken the step of optimizer#0 in which rank 1 "
                              "waits")));
  EXPECT_THAT(TextOf(Judge({in_step(6, "all_gather (state) float32[4]"), omitter}, step)),
              EndsWith(absl::StrCat("disagree (", kCallsAdvice, "; ", kJoinAdvice, ")")))
      << "a call between steps";
}

// The late rank leads: the exhausted one learns from it that there is a barrier. Until then the
// exhausted rank waits in a step that the rank in the barrier has not begun.
TEST(JudgeTest, AnExhaustedRankMayStillLearnOfACallFromALateRank) {
  const RankFacts exhausted =
      Waiting({InExchange("step", 0, absl::StrCat(kExhausted, "step 0"))}, {OnUser(0)});
  const RankFacts in_barrier = Waiting({InCollective(0, "#0 barrier")}, {OnUser(1)});
  const std::vector<OpenExchange> step = {
      {.topic = "step", .sequence = 0, .arrived = {true, false, false}}};
  EXPECT_TRUE(Judge({exhausted, Running({OnUser(0)}), in_barrier}, step).status.ok());
  const RankFacts in_step = Waiting({InExchange("step", 0, "step 0")}, {OnUser(0)});
  const Judgement judgement = Judge({exhausted, in_step, in_barrier}, step);
  EXPECT_THAT(judgement.stuck, ElementsAre(0, 1, 2)) << "no call will come";
}

TEST(JudgeTest, ARankThatMayGoOnExcusesThoseThatWaitForIt) {
  const RankFacts waits = Waiting({InCollective(0, "a")}, {OnUser(1)});
  const RankFacts late = Waiting({InExchange("t", 0, "b")});
  const std::vector<OpenExchange> open = {
      {.topic = "t", .sequence = 0, .arrived = {true, true, false}}};
  const RankFacts unheard_of;
  RankFacts told = Waiting({InCollective(0, "c", 99)}, {{.id = 99, .position = 1}});
  told.sent = 1;  // received is 0.
  EXPECT_TRUE(Judge({waits, late, Running()}, open).status.ok());
  EXPECT_TRUE(Judge({waits, late, unheard_of}, open).status.ok());
  EXPECT_TRUE(Judge({waits, late, told}, open).status.ok()) << "a message is on its way";
  told.report.received = 1;
  EXPECT_THAT(Judge({waits, late, told}, open).stuck, ElementsAre(0, 1, 2));
}

TEST(JudgeTest, WhatAllHaveIssuedIsRunning) {
  const RankFacts in_it = Waiting({InCollective(0, "a")}, {OnUser(1)});
  EXPECT_TRUE(Judge({in_it, in_it}, {}).status.ok());
  const RankFacts behind = Waiting({InCollective(1, "b")}, {OnUser(2)});
  EXPECT_TRUE(Judge({in_it, behind}, {}).status.ok()) << "#0 runs, and then rank 0 may come to #1";
  // All have come to the exchange, though the hub has not heard of it yet from all.
  const RankFacts exchanging = Waiting({InExchange("t", 0, "c")});
  EXPECT_TRUE(
      Judge({exchanging, exchanging}, {{.topic = "t", .sequence = 0, .arrived = {true, false}}})
          .status.ok());
  EXPECT_TRUE(Judge({exchanging, exchanging}, {}).status.ok())
      << "the exchange is over, so its answer is on its way";
}

TEST(JudgeTest, AnOpenOperationThatNobodyWaitsForMayStillDoSomething) {
  // Both wait for what only a callback of #0 on another channel could issue.
  const auto rank = [](bool is_open) {
    return Waiting({InCollective(0, "a", 2)},
                   {{.id = 1, .position = 1, .recent = {{.sequence = 0, .is_open = is_open}}},
                    {.id = 2, .position = 0}});
  };
  EXPECT_TRUE(Judge({rank(true), rank(true)}, {}).status.ok());
  EXPECT_THAT(Judge({rank(false), rank(false)}, {}).stuck, ElementsAre(0, 1));
  // The same with an exchange whose callback may do it.
  const std::vector<OpenExchange> open = {
      {.topic = "t", .sequence = 0, .arrived = {true, false, true}}};
  EXPECT_TRUE(Judge({rank(false), Running(), rank(false)}, open).status.ok());
}

TEST(JudgeTest, EachThreadIsAWayToGoOn) {
  const Wait stuck = ForMessage(1, "a message of rank 1");
  const RankFacts other = Waiting({ForMessage(2, "x")});
  const RankFacts running = Running();
  EXPECT_THAT(Judge({Waiting({stuck}), other, running}, {}).stuck, IsEmpty())
      << "rank 2 may let rank 1 go on";
  const RankFacts blocked = Waiting({ForMessage(0, "y")});
  EXPECT_THAT(Judge({Waiting({stuck}), other, blocked}, {}).stuck, ElementsAre(0, 1, 2));
  EXPECT_TRUE(Judge({Waiting({stuck, InExchange("over", 3, "")}), other, blocked}, {}).status.ok());
  EXPECT_THAT(
      TextOf(Judge({Waiting({stuck, ForMessage(2, "a message of rank 2")}), other, blocked}, {})),
      HasSubstr("rank 0 waits in a message of rank 1, and in a message of rank 2"));
}

TEST(JudgeTest, OnlyThoseThatCannotGoOnAreNamed) {
  const Judgement judgement =
      Judge({Waiting({ForMessage(1, "a")}), Waiting({ForMessage(0, "b")}), Running()}, {});
  EXPECT_THAT(judgement.stuck, ElementsAre(0, 1));
  EXPECT_THAT(TextOf(judgement), Not(HasSubstr("2")));
}

TEST(JudgeTest, AMessageOfAnybodyNeedsSomebody) {
  EXPECT_TRUE(Judge({Waiting({ForMessage(-1, "any")}), Running()}, {}).status.ok());
  EXPECT_THAT(Judge({Waiting({ForMessage(-1, "any")}), Waiting({ForMessage(-1, "any")})}, {}).stuck,
              ElementsAre(0, 1));
}

TEST(JudgeTest, ARankThatHasLeftComesToNothing) {
  RankFacts left = Running();
  left.has_left = true;
  const Judgement judgement =
      Judge({Waiting({InCollective(0, "#0 barrier (user)")}, {OnUser(1)}), left}, {});
  EXPECT_EQ(
      TextOf(judgement),
      absl::StrCat("rank 0 waits in #0 barrier (user); rank 1 has left: it cannot go on: the ranks "
                   "disagree (",
                   kCallsAdvice, "; ", kJoinAdvice, ")"));
  EXPECT_THAT(judgement.stuck, ElementsAre(0));
  left.report.channels = {OnUser(1)};
  EXPECT_TRUE(Judge({Waiting({InCollective(0, "")}, {OnUser(1)}), left}, {}).status.ok())
      << "it did come there";
}

TEST(JudgeTest, TheHalvesOfAPairMeet) {
  const auto half = [](int peer, bool is_send, int64_t sequence) {
    RankFacts facts = Waiting({{.kind = Wait::Kind::kPair,
                                .channel = 1,
                                .sequence = sequence,
                                .peer = peer,
                                .is_send = is_send}});
    facts.report.open_pairs = {
        {.channel = 1, .sequence = sequence, .peer = peer, .is_send = is_send}};
    facts.report.lanes = {
        {.channel = 1, .peer = peer, .is_send = is_send, .position = sequence + 1}};
    return facts;
  };
  EXPECT_TRUE(Judge({half(1, true, 0), half(0, false, 0)}, {}).status.ok());
  EXPECT_TRUE(Judge({half(1, true, 0), half(0, false, 1)}, {}).status.ok());
  EXPECT_THAT(Judge({half(1, true, 0), half(0, true, 0)}, {}).stuck, ElementsAre(0, 1))
      << "both send";
  EXPECT_THAT(Judge({half(1, false, 1), half(0, true, 0)}, {}).stuck, IsEmpty())
      << "#0 of the sender is over soon";
  RankFacts sent = Waiting({ForMessage(0, "")});
  sent.report.lanes = {{.channel = 1, .peer = 0, .is_send = true, .position = 1}};
  EXPECT_TRUE(Judge({half(1, false, 0), sent}, {}).status.ok())
      << "it is over for the sender, not yet for the receiver";
  sent.report.lanes[0].channel = 2;
  EXPECT_THAT(Judge({half(1, false, 0), sent}, {}).stuck, ElementsAre(0, 1));
}

TEST(JudgeTest, AReceiveFromAnyRankNeedsOneThatCanGoOn) {
  const auto receiver = [](bool is_waited_for) {
    std::vector<Wait> waits = {ForMessage(1, "")};
    if (is_waited_for) waits = {{.kind = Wait::Kind::kPair, .channel = 1, .text = "any"}};
    RankFacts facts = Waiting(waits);
    facts.report.open_pairs = {{.channel = 1}};
    return facts;
  };
  const RankFacts waiting = receiver(true), stuck = Waiting({ForMessage(0, "")});
  EXPECT_THAT(Judge({waiting, stuck, Running()}, {}).stuck, IsEmpty());
  EXPECT_THAT(Judge({waiting, stuck, receiver(true)}, {}).stuck, ElementsAre(0, 1, 2));
  EXPECT_THAT(Judge({receiver(false), stuck, Running()}, {}).stuck, IsEmpty())
      << "a callback may go on at its end";
  RankFacts told = waiting;
  told.sent = told.report.received + 1;
  EXPECT_THAT(Judge({told, stuck}, {}).stuck, IsEmpty()) << "an announcement is on its way";
  RankFacts left = Running();
  left.has_left = true;
  const Judgement judgement = Judge({waiting, left, left}, {});
  EXPECT_THAT(judgement.stuck, ElementsAre(0));
  EXPECT_THAT(TextOf(judgement), HasSubstr("rank 0 waits in any; ranks 1,2 have left"));
  EXPECT_THAT(TextOf(judgement), EndsWith(absl::StrCat("disagree (", kMessagesAdvice, ")")));
  EXPECT_THAT(MissingFrom(waiting.report.waits[0], 0, {waiting, left, stuck}), ElementsAre(2));
}

TEST(JudgeTest, HalvesWithDifferentTagsDoNotMeet) {
  const auto half = [](int peer, bool is_send, int64_t tag) {
    RankFacts facts = Waiting(
        {{.kind = Wait::Kind::kPair, .channel = 1, .peer = peer, .is_send = is_send, .tag = tag}});
    facts.report.lanes = {
        {.channel = 1, .peer = peer, .is_send = is_send, .position = 1, .tag = tag}};
    return facts;
  };
  EXPECT_TRUE(Judge({half(1, true, 5), half(0, false, 5)}, {}).status.ok());
  EXPECT_FALSE(Judge({half(1, true, 5), half(0, false, 6)}, {}).status.ok());
  // A rank with too many tags for a report may have issued any half.
  RankFacts many = half(0, false, 6);
  many.report.lacks_lanes = true;
  EXPECT_TRUE(Judge({half(1, true, 5), many}, {}).status.ok());
}

TEST(JudgeTest, OneRankAloneIsFine) {
  EXPECT_TRUE(Judge({}, {}).status.ok());
  EXPECT_TRUE(Judge({Waiting({InCollective(0, "")}, {OnUser(1)})}, {}).status.ok());
}

// Texts and bytes ---------------------------------------------------------------------------------

TEST(RankStatusTest, SaysWhereRanksAre) {
  std::vector<RankFacts> facts(5, Running());
  facts[0].report.doing = facts[2].report.doing = "waits in #411";
  facts[1].report.doing = "runs, 12 s after #411";
  facts[3].has_report = false;
  facts[4].has_left = true;
  EXPECT_EQ(DescribeRankStatus(facts, {0, 1, 2, 3, 4}),
            "ranks 0,2: waits in #411; rank 1 runs, 12 s after #411; rank 3 has not reported; rank "
            "4 has left");
  EXPECT_EQ(DescribeRankStatus(facts, {1}), "rank 1 runs, 12 s after #411");
  EXPECT_EQ(DescribeRankStatus(facts, {}), "");
}

RankStatus Everything() {
  RankStatus all{.everyone_waits = true, .received = 5, .doing = "waits"};
  all.waits = {InCollective(3, "text"), InExchange("topic", 4, "more"), ForMessage(2, "")};
  all.waits.push_back(
      {.kind = Wait::Kind::kPair, .channel = 9, .sequence = 1, .peer = 3, .is_send = true});
  all.channels = {OnUser(4, {{.sequence = 2, .hash = ~0ull, .text = "a"},
                             {.sequence = 3, .hash = 1, .is_open = true}})};
  all.lanes = {{.channel = 9, .peer = 3, .is_send = true, .position = 2, .tag = 7}};
  all.open_pairs = {{.channel = 9, .sequence = 1, .peer = 3, .is_send = true, .tag = 8}};
  return all;
}

TEST(RankStatusTest, ComeBackAsTheyWere) {
  const absl::StatusOr<RankStatus> parsed = RankStatus::Parse(Everything().Serialize());
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  EXPECT_EQ(parsed->Serialize(), Everything().Serialize());
  EXPECT_EQ(parsed->waits[1].topic, "topic");
  EXPECT_EQ(parsed->waits[3].peer, 3);
  EXPECT_EQ(parsed->channels[0].recent[0].hash, ~0ull);
  EXPECT_TRUE(parsed->channels[0].recent[1].is_open);
  EXPECT_EQ(parsed->lanes[0].position, 2);
  EXPECT_EQ(parsed->received, 5);
  EXPECT_TRUE(RankStatus::Parse(RankStatus().Serialize()).ok());
}

// Accepted bytes serialize to the same bytes, and can be judged.
TEST(RankStatusTest, NoBytesDoHarm) {
  constexpr int kSeed = 31;
  std::mt19937 random(kSeed);
  int accepted = 0;
  for (int round = 0; round < 20000; ++round) {
    std::string bytes = Everything().Serialize();
    if (round % 4 == 0) bytes.resize(random() % 200);
    for (int changes = random() % 3; changes >= 0 && !bytes.empty(); --changes) {
      bytes[random() % bytes.size()] ^= 1 << (random() % 8);
    }
    if (round % 4 == 2) bytes.resize(random() % bytes.size());
    if (round % 4 == 3)
      bytes.insert(random() % bytes.size(), std::string(1 + random() % 5, '\xff'));
    const absl::StatusOr<RankStatus> parsed = RankStatus::Parse(bytes);
    if (!parsed.ok()) {
      EXPECT_TRUE(absl::IsInvalidArgument(parsed.status()));
      continue;
    }
    ++accepted;
    EXPECT_EQ(parsed->Serialize(), bytes);
    (void)Judge({{.has_report = true, .report = *parsed}, {.has_report = true, .report = *parsed}},
                {});
  }
  EXPECT_GT(accepted, 1000);
  EXPECT_LT(accepted, 15000);
}

// Judge() against systems that are run ------------------------------------------------------------

// The next action of a rank's thread.
struct Do {
  enum class Kind {
    kIssue,          // A collective on `channel`, and goes on.
    kAwait,          // Until the own collective `index` of `channel` is over, issued or not.
    kBeginExchange,  // Comes to the next exchange of `topic`, and goes on; its answer may issue on
                     // `channel`.
    kAwaitExchange,  // Until the own exchange `index` of `topic` is answered, if it has begun.
    kTell,           // A message of `topic` to `peer`.
    kHear,           // Takes the next message of `topic`, which comes from `peer`; -1: of whoever.
    kSend,           // Half of a pair with `peer` on `channel`, and goes on.
    kRecv,
    kAwaitPair,  // Until the own half `index` of the lane is over, if it has begun.
  };
  Kind kind;
  int channel = 0;  // For exchanges: the channel that the answer issues on, or -1.
  int topic = 0;
  int peer = -1;
  int index = 0;
  uint64_t what = 0;  // Identifies the collective.
  bool is_send = false;
  int then = -1;  // A collective's: when it is over here, one on this channel is issued.
};
using Script = std::vector<Do>;

// A group of ranks with threads, a data plane, a hub, and messages between them that are on their
// way for any time. Threads of a rank share no channel, topic or lane, so it makes no difference
// for the end in which order things happen.
class System {
 public:
  System(std::vector<std::vector<Script>> scripts, bool sends_are_eager)
      : world_(static_cast<int>(scripts.size())),
        sends_are_eager_(sends_are_eager),
        facts_(world_) {
    for (auto& threads : scripts) {
      ranks_.emplace_back();
      for (Script& script : threads) ranks_.back().threads.push_back({.script = std::move(script)});
    }
  }

  // One of the things that can happen, at random; false if nothing can.
  bool Step(std::mt19937& random) {
    std::vector<std::pair<int, int>>
        possible;  // The kind of action; rank * 100 + thread or channel.
    for (int r = 0; r < world_; ++r) {
      const Rank& rank = ranks_[r];
      for (int t = 0; t < static_cast<int>(rank.threads.size()); ++t) {
        if (!IsOver(rank.threads[t]) && !IsBlocked(rank, rank.threads[t]))
          possible.emplace_back(0, r * 100 + t);
      }
      if (!rank.to_hub.empty()) possible.emplace_back(1, r * 100);
      if (!rank.from_hub.empty()) possible.emplace_back(2, r * 100);
      for (const auto& [channel, issued] : rank.issued) {
        if (CanComplete(r, channel)) possible.emplace_back(3, r * 100 + channel);
      }
      if (!rank.has_left && MayLeave(rank)) possible.emplace_back(4, r * 100);
    }
    if (possible.empty()) return false;
    const auto [kind, where] = possible[random() % possible.size()];
    const int r = where / 100, t = where % 100;
    Rank& rank = ranks_[r];
    switch (kind) {
      case 0:
        Act(rank, rank.threads[t]);
        break;
      case 1: {
        const ToHub message = std::move(rank.to_hub.front());
        rank.to_hub.pop_front();
        HubGets(r, message);
        break;
      }
      case 2: {
        const FromHub message = rank.from_hub.front();
        rank.from_hub.pop_front();
        RankGets(rank, message);
        break;
      }
      case 3: {
        const Done& done = rank.issued[t][rank.completed[t]++];
        if (done.then >= 0) rank.issued[done.then].push_back({.what = 1});
        break;
      }
      case 4:
        rank.has_left = true;
        Report(r);
        rank.to_hub.push_back({.leaves = true});
        break;
    }
    return true;
  }

  // Sends its rank_status to the hub.
  void Report(int r) {
    const Rank& rank = ranks_[r];
    RankStatus report{.received = rank.received};
    report.everyone_waits =
        !MayLeave(rank);  // Until then, who is through waits for all to be over: Finalize().
    for (const Thread& thread : rank.threads) {
      if (IsOver(thread)) continue;
      if (IsBlocked(rank, thread)) {
        report.waits.push_back(WaitOf(thread.script[thread.next]));
      } else {
        report.everyone_waits = false;
      }
    }
    for (const auto& [channel, issued] : rank.issued) {
      ChannelStatus at{.id = static_cast<uint64_t>(channel), .name = absl::StrCat("c", channel)};
      at.position = static_cast<int64_t>(issued.size());
      const int64_t over = Get(rank.completed, channel);
      for (int64_t s = 0; s < at.position; ++s) {
        if (s != over && s + 2 < at.position) continue;
        at.recent.push_back({.sequence = s, .hash = issued[s].what, .is_open = s >= over});
      }
      report.channels.push_back(std::move(at));
    }
    for (const auto& [lane, position] : rank.lanes) {
      const auto [channel, peer, is_send] = lane;
      report.lanes.push_back({static_cast<uint64_t>(channel), peer, is_send, position});
      for (int64_t s = 0; s < position; ++s) {
        if (IsPairOver(r, lane, s)) continue;
        report.open_pairs.push_back({static_cast<uint64_t>(channel), s, peer, is_send});
        break;
      }
    }
    ranks_[r].to_hub.push_back({.report = report.Serialize()});
  }

  Judgement Verdict() const {
    std::vector<OpenExchange> open;
    for (const auto& [key, arrived] : exchanges_) {
      open.push_back(
          {.topic = absl::StrCat(key.first), .sequence = key.second, .arrived = arrived});
    }
    return Judge(facts_, open);
  }

  void RunToTheEnd(std::mt19937& random) {
    while (Step(random)) {
    }
  }
  bool IsFinished(int r) const { return ranks_[r].has_left; }
  // How far a rank has come; only grows.
  std::vector<int64_t> Progress(int r) const {
    std::vector<int64_t> progress;
    for (const Thread& thread : ranks_[r].threads)
      progress.push_back(static_cast<int64_t>(thread.next));
    for (const auto& [channel, issued] : ranks_[r].issued)
      progress.push_back(static_cast<int64_t>(issued.size()));
    return progress;
  }
  // Whether two ranks have issued different collectives at one position.
  bool HasContradiction() const {
    for (const Rank& a : ranks_) {
      for (const Rank& b : ranks_) {
        for (const auto& [channel, issued] : a.issued) {
          const auto other = b.issued.find(channel);
          if (other == b.issued.end()) continue;
          for (size_t s = 0; s < std::min(issued.size(), other->second.size()); ++s) {
            if (issued[s].what != other->second[s].what) return true;
          }
        }
      }
    }
    return false;
  }
  int world() const { return world_; }

 private:
  struct Thread {
    Script script;
    size_t next = 0;
  };
  struct Done {
    uint64_t what = 0;
    int then = -1;
  };
  struct ToHub {
    int topic = -1;  // An exchange's topic, or that of a message to `peer`.
    int64_t sequence = 0;
    int peer = -1;
    bool leaves = false;
    std::string report;
  };
  struct FromHub {
    int topic = 0;
    bool is_exchange = false;
  };
  using Lane = std::tuple<int, int, bool>;  // Channel, peer, is_send.
  struct Rank {
    std::vector<Thread> threads;
    std::map<int, std::vector<Done>> issued;  // By channel.
    std::map<int, int64_t> completed;
    std::map<int, std::deque<int>>
        answers_issue;  // By topic: the channel that each outstanding answer issues on.
    std::map<int, int64_t> come, answered;  // By topic.
    std::map<int, int64_t> inbox;           // By topic.
    std::map<Lane, int64_t> lanes;
    std::deque<ToHub> to_hub;
    std::deque<FromHub> from_hub;
    int64_t received = 0;
    bool has_left = false;
  };

  template <typename Map, typename Key>
  static int64_t Get(const Map& map, const Key& key) {
    const auto found = map.find(key);
    return found == map.end() ? 0 : found->second;
  }
  static bool IsOver(const Thread& thread) { return thread.next == thread.script.size(); }

  // Its threads have come to their ends, and nothing is under way that could do something yet.
  static bool MayLeave(const Rank& rank) {
    return std::all_of(rank.threads.begin(), rank.threads.end(), IsOver) &&
           rank.come == rank.answered &&
           std::all_of(rank.issued.begin(), rank.issued.end(), [&](const auto& channel) {
             return Get(rank.completed, channel.first) ==
                    static_cast<int64_t>(channel.second.size());
           });
  }

  bool IsBlocked(const Rank& rank, const Thread& thread) const {
    const Do& act = thread.script[thread.next];
    switch (act.kind) {
      case Do::Kind::kAwait:
        return Get(rank.completed, act.channel) <= act.index;
      case Do::Kind::kAwaitExchange:
        return Get(rank.answered, act.topic) <= act.index && Get(rank.come, act.topic) > act.index;
      case Do::Kind::kHear:
        return Get(rank.inbox, act.topic) == 0;
      case Do::Kind::kAwaitPair: {
        const Lane lane(act.channel, act.peer, act.is_send);
        return Get(rank.lanes, lane) > act.index &&
               !IsPairOver(static_cast<int>(&rank - ranks_.data()), lane, act.index);
      }
      default:
        return false;
    }
  }

  static Wait WaitOf(const Do& act) {
    const auto channel = static_cast<uint64_t>(act.channel);
    switch (act.kind) {
      case Do::Kind::kAwait:
        return {.kind = Wait::Kind::kCollective, .channel = channel, .sequence = act.index};
      case Do::Kind::kAwaitExchange:
        return {
            .kind = Wait::Kind::kExchange, .sequence = act.index, .topic = absl::StrCat(act.topic)};
      case Do::Kind::kAwaitPair:
        return {.kind = Wait::Kind::kPair,
                .channel = channel,
                .sequence = act.index,
                .peer = act.peer,
                .is_send = act.is_send};
      default:
        return {.kind = Wait::Kind::kMessage, .peer = act.peer};
    }
  }

  void Act(Rank& rank, Thread& thread) {
    const Do& act = thread.script[thread.next++];
    switch (act.kind) {
      case Do::Kind::kIssue:
        rank.issued[act.channel].push_back({act.what, act.then});
        break;
      case Do::Kind::kBeginExchange:
        rank.answers_issue[act.topic].push_back(act.channel);
        rank.to_hub.push_back({.topic = act.topic, .sequence = rank.come[act.topic]++});
        break;
      case Do::Kind::kTell:
        rank.to_hub.push_back({.topic = act.topic, .peer = act.peer});
        break;
      case Do::Kind::kHear:
        --rank.inbox[act.topic];
        break;
      case Do::Kind::kSend:
      case Do::Kind::kRecv:
        ++rank.lanes[{act.channel, act.peer, act.kind == Do::Kind::kSend}];
        break;
      case Do::Kind::kAwait:
      case Do::Kind::kAwaitExchange:
      case Do::Kind::kAwaitPair:
        break;
    }
  }

  bool CanComplete(int r, int channel) const {
    const int64_t s = Get(ranks_[r].completed, channel);
    uint64_t what = 0;
    for (const Rank& rank : ranks_) {
      const auto issued = rank.issued.find(channel);
      if (issued == rank.issued.end() || static_cast<int64_t>(issued->second.size()) <= s)
        return false;
      if (&rank != &ranks_[0] && issued->second[s].what != what) return false;
      what = issued->second[s].what;
    }
    return true;
  }

  // A pair's end needs no step of its own: what is on its way there concerns nobody else.
  bool IsPairOver(int r, const Lane& lane, int64_t s) const {
    const auto [channel, peer, is_send] = lane;
    if (Get(ranks_[r].lanes, lane) <= s) return false;
    return (is_send && sends_are_eager_) || Get(ranks_[peer].lanes, Lane(channel, r, !is_send)) > s;
  }

  void Tell(int r, FromHub message) {
    ranks_[r].from_hub.push_back(message);
    ++facts_[r].sent;
  }

  void HubGets(int r, const ToHub& message) {
    if (message.leaves) {
      facts_[r].has_left = true;
    } else if (!message.report.empty()) {
      facts_[r].has_report = true;
      facts_[r].report = RankStatus::Parse(message.report).value();
    } else if (message.peer >= 0) {
      Tell(message.peer, {.topic = message.topic});
    } else {
      std::vector<bool>& arrived = exchanges_[{message.topic, message.sequence}];
      arrived.resize(world_);
      arrived[r] = true;
      if (std::count(arrived.begin(), arrived.end(), true) < world_) return;
      exchanges_.erase({message.topic, message.sequence});
      for (int to = 0; to < world_; ++to) Tell(to, {.topic = message.topic, .is_exchange = true});
    }
  }

  void RankGets(Rank& rank, const FromHub& message) {
    ++rank.received;
    if (!message.is_exchange) {
      ++rank.inbox[message.topic];
      return;
    }
    ++rank.answered[message.topic];
    std::deque<int>& channels = rank.answers_issue[message.topic];
    if (channels.front() >= 0) rank.issued[channels.front()].push_back({.what = 2});
    channels.pop_front();
  }

  const int world_;
  const bool sends_are_eager_;
  std::vector<Rank> ranks_;
  std::map<std::pair<int, int64_t>, std::vector<bool>> exchanges_;
  std::vector<RankFacts> facts_;
};

// A program for all ranks that ends well; each thread has channels, topics and lanes of its own.
std::vector<std::vector<Script>> RandomProgram(std::mt19937& random) {
  const int world = 2 + random() % 4, threads = 1 + random() % 2;
  std::vector<std::vector<Script>> scripts(world, std::vector<Script>(threads));
  for (int t = 0; t < threads; ++t) {
    std::map<int, int> issued, exchanged;  // By channel, by topic.
    std::map<std::pair<int, int>, int> sent;
    const auto everybody = [&](const Do& act) {
      for (auto& rank : scripts) rank[t].push_back(act);
    };
    for (int length = 1 + random() % 8; length > 0; --length) {
      const int channel = 10 * t + random() % 2;
      const int callbacks = 10 * t + 2 + channel % 10;  // Issued on by those of `channel`; 2 and 3.
      const int topic = 10 * t + random() % 2;
      const int from = random() % world, to = (from + 1 + random() % (world - 1)) % world;
      switch (random() % 7) {
        case 0:
        case 1: {
          const bool goes_on = random() % 3 == 0;
          everybody({.kind = Do::Kind::kIssue,
                     .channel = channel,
                     .what = 10 + random() % 2,
                     .then = goes_on ? callbacks : -1});
          if (random() % 2 == 0)
            everybody({.kind = Do::Kind::kAwait, .channel = channel, .index = issued[channel]});
          ++issued[channel];
          if (!goes_on) break;
          if (random() % 2 == 0)
            everybody({.kind = Do::Kind::kAwait, .channel = callbacks, .index = issued[callbacks]});
          ++issued[callbacks];
          break;
        }
        case 2:
        case 3: {
          const int answers = random() % 3 == 0 ? 10 * t + 4 + topic % 10 : -1;  // 4 and 5.
          everybody({.kind = Do::Kind::kBeginExchange, .channel = answers, .topic = topic});
          if (random() % 2 == 0) {
            everybody(
                {.kind = Do::Kind::kAwaitExchange, .topic = topic, .index = exchanged[topic]});
          }
          ++exchanged[topic];
          if (answers < 0) break;
          if (random() % 2 == 0)
            everybody({.kind = Do::Kind::kAwait, .channel = answers, .index = issued[answers]});
          ++issued[answers];
          break;
        }
        case 4:
        case 5: {
          const bool is_named = random() % 2 == 0;
          // A topic for each sender, so that a message is of whom it is thought to be.
          const int mail = 100 + 10 * t + from;
          scripts[from][t].push_back({.kind = Do::Kind::kTell, .topic = mail, .peer = to});
          scripts[to][t].push_back(
              {.kind = Do::Kind::kHear, .topic = mail, .peer = is_named ? from : -1});
          break;
        }
        case 6: {
          const int index = sent[{from, to}]++;
          const int lane = 10 * t + 6;
          scripts[from][t].push_back({.kind = Do::Kind::kSend, .channel = lane, .peer = to});
          scripts[to][t].push_back({.kind = Do::Kind::kRecv, .channel = lane, .peer = from});
          if (random() % 2 == 0) {
            scripts[from][t].push_back({.kind = Do::Kind::kAwaitPair,
                                        .channel = lane,
                                        .peer = to,
                                        .index = index,
                                        .is_send = true});
          }
          scripts[to][t].push_back(
              {.kind = Do::Kind::kAwaitPair, .channel = lane, .peer = from, .index = index});
          break;
        }
      }
    }
  }
  return scripts;
}

// Something that one rank does otherwise than the others think.
void Spoil(std::vector<std::vector<Script>>& scripts, std::mt19937& random) {
  Script& script = scripts[random() % scripts.size()][random() % scripts[0].size()];
  if (script.empty()) return;
  const size_t at = random() % script.size();
  switch (random() % 3) {
    case 0:
      script.erase(script.begin() + static_cast<int64_t>(at));
      break;
    case 1:
      std::swap(script[at], script[random() % script.size()]);
      break;
    case 2:
      script[at].what += 1;
      break;
  }
}

// Systems that run step by step, with reports at any time, which reach the hub at any time, and a
// judge who looks at any time. Whoever is found stuck must never move again, however long the rest
// goes on; and once nothing moves any more, whoever has not finished must be found stuck.
TEST(JudgeTest, AccusesThoseThatCannotGoOnAndNobodyElse) {
  int finished = 0, stuck = 0, contradictory = 0, early = 0;
  for (int seed = 0; seed < 1500; ++seed) {
    SCOPED_TRACE(absl::StrCat("seed ", seed));
    std::mt19937 random(seed);
    std::vector<std::vector<Script>> scripts = RandomProgram(random);
    for (int spoilt = random() % 3; spoilt > 0; --spoilt) Spoil(scripts, random);
    System system(scripts, random() % 2 == 0);
    bool accused = false;
    do {
      if (random() % 3 == 0) system.Report(random() % system.world());
      const Judgement judgement = system.Verdict();
      if (judgement.status.ok()) {
        ASSERT_THAT(judgement.stuck, IsEmpty());
        continue;
      }
      ASSERT_GE(judgement.culprit, 0);
      if (judgement.stuck.empty()) {
        ASSERT_TRUE(system.HasContradiction()) << judgement.status;
        break;  // In the group this is the end.
      }
      early += !accused;
      accused = true;
      System later = system;
      later.RunToTheEnd(random);
      for (const int rank : judgement.stuck) {
        ASSERT_EQ(later.Progress(rank), system.Progress(rank))
            << "rank " << rank << " went on: " << judgement.status;
      }
    } while (system.Step(random));
    // All have their say.
    system.RunToTheEnd(random);
    for (int rank = 0; rank < system.world(); ++rank) {
      if (!system.IsFinished(rank)) system.Report(rank);
    }
    system.RunToTheEnd(random);
    std::set<int> unfinished;
    for (int rank = 0; rank < system.world(); ++rank) {
      if (!system.IsFinished(rank)) unfinished.insert(rank);
    }
    const Judgement last = system.Verdict();
    if (!last.status.ok() && last.stuck.empty()) {
      ++contradictory;
      ASSERT_TRUE(system.HasContradiction()) << last.status;
    } else {
      ++(unfinished.empty() ? finished : stuck);
      ASSERT_EQ(last.stuck, unfinished) << last.status;
    }
  }
  // The test would say little if it were always the same.
  EXPECT_GT(finished, 150);
  EXPECT_GT(stuck, 150);
  EXPECT_GT(contradictory, 40);
  EXPECT_GT(early, 100) << "found while other things still happened";
}

}  // namespace
}  // namespace evenkeel::internal
