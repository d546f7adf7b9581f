// The hub and the groups of a server, when newcomers take the places of lost ranks.

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "evenkeel/comm/control/groups.h"
#include "evenkeel/comm/control/messages.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel::internal {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

constexpr int kRanks = 4;
constexpr int kNewcomer = 100;  // The peers of newcomers begin here; those of ranks are the ranks.
constexpr absl::Duration kLong = absl::Seconds(60), kShort = absl::Milliseconds(50);

// A server with a group of four ranks, and the last message of each kind to each peer.
class Server {
 public:
  Server()
      : groups_([this](ControlSeats::PeerId peer, absl::string_view payload) {
          const ToRank message = ParseControlMessage<ToRank>(payload).value();
          if (const auto* regrouped = std::get_if<to_rank::Regrouped>(&message))
            regrouped_[peer].push_back(*regrouped);
          if (const auto* lost = std::get_if<to_rank::SurvivorLost>(&message))
            lost_[peer] = lost->why;
        }) {
    for (int rank = 0; rank < kRanks; ++rank) {
      groups_.Join(
          rank,
          {.kind = Hello::Kind::kControl, .group = "world", .rank = rank, .world_size = kRanks});
    }
  }

  static Hello NewcomerFor(int place, int number) {
    return {.kind = Hello::Kind::kControl,
            .group = "world",
            .rank = place,
            .world_size = kRanks,
            .incarnation = number};
  }
  // A newcomer comes, and is ready.
  void Come(int peer, int place, int number = 1) {
    ASSERT_TRUE(groups_.Check(NewcomerFor(place, number)).ok());
    groups_.Join(peer, NewcomerFor(place, number));
    Ask(peer);
  }
  void Ask(int peer) { Send(peer, to_hub::Regroup{.request = ++requests_}); }
  void Regroup(int rank, absl::Duration wait) {
    Send(rank, to_hub::Regroup{.request = ++requests_,
                               .wait_us = absl::ToInt64Microseconds(wait),
                               .members = {0, 1, 2, 3}});
  }
  void Lose(int peer) { groups_.OnDisconnect(peer); }
  void Wait(absl::Duration time) {
    absl::SleepFor(time);
    for (const ControlSeats::PeerId peer : groups_.PassTime(time)) {
      dismissed_.push_back(static_cast<int>(peer));
      Lose(static_cast<int>(peer));
    }
  }
  void Beat(int peer, absl::Duration silence) {
    groups_.OnBytes(peer);
    Send(peer, to_hub::Beat{.silence_us = absl::ToInt64Microseconds(silence)});
  }
  const std::vector<int>& dismissed() const { return dismissed_; }
  bool HasReply(int peer) const { return regrouped_.contains(peer); }
  const to_rank::Regrouped& Reply(int peer) {
    EXPECT_TRUE(HasReply(peer)) << peer;
    if (!HasReply(peer)) regrouped_[peer].emplace_back();
    return regrouped_[peer].back();
  }
  int Replies(int peer) { return static_cast<int>(regrouped_[peer].size()); }
  const absl::Status& LossAt(int peer) { return lost_[peer]; }
  ControlGroups& groups() { return groups_; }

 private:
  std::vector<int> dismissed_;
  void Send(int peer, ToHub message) {
    EXPECT_TRUE(groups_.OnFrame(peer, Serialize(message)).ok());
  }

  int64_t requests_ = 0;
  std::map<int64_t, std::vector<to_rank::Regrouped>> regrouped_;
  std::map<int64_t, absl::Status> lost_;
  ControlGroups groups_;
};

TEST(NewcomersTest, OneTakesThePlaceOfALostRank) {
  Server server;
  server.Lose(2);
  for (const int rank : {0, 1, 3}) server.Regroup(rank, kLong);
  EXPECT_FALSE(server.HasReply(0));
  server.Come(kNewcomer, 2);
  for (const int peer : {0, 1, 3, kNewcomer}) {
    EXPECT_THAT(server.Reply(peer).ranks, ElementsAre(0, 1, 2, 3));
    EXPECT_THAT(server.Reply(peer).entered, ElementsAre(2));
    EXPECT_EQ(server.Reply(peer).round, 1);
  }
  EXPECT_EQ(server.Reply(kNewcomer).group, "world");
  EXPECT_THAT(server.Reply(kNewcomer).members, ElementsAre(0, 1, 2, 3));
}

TEST(NewcomersTest, OneThatIsEarlyWaitsForTheLossOfItsRank) {
  Server server;
  server.Come(kNewcomer, 2);
  server.Come(kNewcomer + 1, 1);
  server.Lose(2);
  for (const int rank : {0, 1, 3}) server.Regroup(rank, kLong);
  EXPECT_THAT(server.Reply(0).entered, ElementsAre(2));
  EXPECT_TRUE(server.HasReply(kNewcomer));
  EXPECT_FALSE(server.HasReply(kNewcomer + 1)) << "rank 1 is there";
}

TEST(NewcomersTest, WithoutAWaitNoneEnters) {
  Server server;
  server.Come(kNewcomer, 2);
  server.Lose(2);
  for (const int rank : {0, 1, 3}) server.Regroup(rank, absl::ZeroDuration());
  EXPECT_THAT(server.Reply(0).ranks, ElementsAre(0, 1, 3));
  EXPECT_THAT(server.Reply(0).entered, IsEmpty());
  EXPECT_THAT(std::string(server.Reply(kNewcomer).refusal.message()), HasSubstr("comes too late"));
}

TEST(NewcomersTest, TheGroupGoesOnWithoutOneThatDoesNotCome) {
  Server server;
  server.Lose(2);
  for (const int rank : {0, 1, 3}) server.Regroup(rank, kShort);
  EXPECT_TRUE(server.groups().ListensForBeats()) << "the loop must call PassTime()";
  server.Wait(2 * kShort);
  EXPECT_THAT(server.Reply(0).ranks, ElementsAre(0, 1, 3));
  EXPECT_THAT(std::string(server.groups().Check(Server::NewcomerFor(2, 1)).message()),
              HasSubstr("the process in the place of rank 2 comes too late"));
}

// One that takes long, so a second loss gives all of them time again, and a third does not.
TEST(NewcomersTest, ASecondLossBeginsTheWaitAgainAndAThirdDoesNot) {
  Server server;
  constexpr absl::Duration kWait = absl::Seconds(1);
  server.Lose(3);
  for (const int rank : {0, 1, 2}) server.Regroup(rank, kWait);
  server.Wait(kWait * 0.6);
  server.Lose(2);
  server.Wait(kWait * 0.6);
  EXPECT_FALSE(server.HasReply(0));
  server.Lose(1);
  server.Wait(kWait * 0.6);
  EXPECT_THAT(server.Reply(0).ranks, ElementsAre(0));
}

TEST(NewcomersTest, AllLostRanksAreReplacedAtOnce) {
  Server server;
  server.Lose(0);
  server.Lose(3);
  for (const int rank : {1, 2}) server.Regroup(rank, kLong);
  server.Come(kNewcomer, 3);
  EXPECT_FALSE(server.HasReply(1));
  server.Come(kNewcomer + 1, 0);
  EXPECT_THAT(server.Reply(1).entered, ElementsAre(0, 3));
  EXPECT_TRUE(server.HasReply(kNewcomer));
  EXPECT_TRUE(server.HasReply(kNewcomer + 1));
}

TEST(NewcomersTest, OneThatDiesBeforeIsNotWaitedFor) {
  Server server;
  server.Come(kNewcomer, 2);
  server.Lose(kNewcomer);
  server.Lose(2);
  for (const int rank : {0, 1, 3}) server.Regroup(rank, kLong);
  EXPECT_FALSE(server.HasReply(0));
  server.Come(kNewcomer + 1, 2, 2);
  EXPECT_THAT(server.Reply(0).entered, ElementsAre(2));
}

// The others wait for it in the new group.
TEST(NewcomersTest, OneThatDiesAfterItWasChosenEndsTheWaitForIt) {
  Server server;
  server.Come(kNewcomer, 2);
  server.Lose(2);
  for (const int rank : {0, 1, 3}) server.Regroup(rank, kLong);
  server.Lose(kNewcomer);
  for (const int rank : {0, 1, 3}) {
    EXPECT_THAT(std::string(server.LossAt(rank).message()),
                HasSubstr("the newcomer in the place of rank 2 is lost"));
    server.Regroup(rank, kLong);
  }
  server.Come(kNewcomer + 1, 2, 2);
  EXPECT_EQ(server.Reply(0).round, 2);
  EXPECT_THAT(server.Reply(0).entered, ElementsAre(2));
}

TEST(NewcomersTest, OneThatFallsSilentLeavesTheList) {
  Server server;
  server.Come(kNewcomer, 2);
  server.Come(kNewcomer + 1, 3);
  server.Beat(kNewcomer, kShort);
  server.Beat(kNewcomer + 1, kShort);
  EXPECT_TRUE(server.groups().ListensForBeats());
  server.Wait(kShort);
  server.Beat(kNewcomer + 1, kShort);
  server.Wait(kShort);
  EXPECT_THAT(server.dismissed(), ElementsAre(kNewcomer));
  server.Lose(2);
  for (const int rank : {0, 1, 3}) server.Regroup(rank, kLong);
  EXPECT_FALSE(server.HasReply(0));
}

TEST(NewcomersTest, OneThatFallsSilentAfterItWasChosenEndsTheWaitForIt) {
  Server server;
  server.Come(kNewcomer, 2);
  server.Beat(kNewcomer, kShort);
  server.Lose(2);
  for (const int rank : {0, 1, 3}) server.Regroup(rank, kLong);
  EXPECT_TRUE(server.HasReply(kNewcomer));
  server.Wait(2 * kShort);
  EXPECT_THAT(std::string(server.LossAt(0).message()),
              HasSubstr("the newcomer in the place of rank 2 is lost"));
}

TEST(NewcomersTest, OneThatHasEnteredIsNotMissedHere) {
  Server server;
  server.Come(kNewcomer, 2);
  server.Beat(kNewcomer, kShort);
  server.Beat(kNewcomer, absl::ZeroDuration());
  server.Wait(2 * kShort);
  EXPECT_THAT(server.dismissed(), IsEmpty());
  EXPECT_FALSE(server.groups().ListensForBeats());
}

TEST(NewcomersTest, TheLossOfASurvivorReachesANewcomerThatWasChosen) {
  Server server;
  server.Come(kNewcomer, 2);
  server.Lose(2);
  for (const int rank : {0, 1, 3}) server.Regroup(rank, kLong);
  server.Lose(3);
  EXPECT_THAT(std::string(server.LossAt(kNewcomer).message()), HasSubstr("rank 3 of 4 is lost"));
  for (const int rank : {0, 1}) server.Regroup(rank, kLong);
  server.Ask(kNewcomer);
  EXPECT_EQ(server.Replies(kNewcomer), 1) << "rank 3 is not replaced yet";
  server.Come(kNewcomer + 1, 3);
  EXPECT_THAT(server.Reply(kNewcomer).entered, ElementsAre(2, 3));
}

// A rank that asked and then died has a request in the hub; the newcomer in its place must not get
// the reply to that.
TEST(NewcomersTest, OneGetsNoReplyThatIsForTheRankBeforeIt) {
  Server server;
  server.Lose(3);
  for (const int rank : {0, 1, 2}) server.Regroup(rank, kLong);
  server.Lose(2);
  server.Come(kNewcomer, 2);
  server.Come(kNewcomer + 1, 3);
  EXPECT_EQ(server.Replies(kNewcomer), 1);
  EXPECT_EQ(server.Reply(kNewcomer).group, "world");
}

TEST(NewcomersTest, OfTwoForOnePlaceTheLaterProcessCounts) {
  Server server;
  server.Come(kNewcomer, 2, 1);
  server.Come(kNewcomer + 1, 2, 3);
  EXPECT_THAT(std::string(server.Reply(kNewcomer).refusal.message()),
              HasSubstr("another process, number 3, has come to the place of rank 2"));
  for (const int number : {2, 3}) {
    EXPECT_THAT(std::string(server.groups().Check(Server::NewcomerFor(2, number)).message()),
                HasSubstr("number 3 has come already"));
  }
  server.Lose(2);
  for (const int rank : {0, 1, 3}) server.Regroup(rank, kLong);
  EXPECT_TRUE(server.Reply(kNewcomer + 1).refusal.ok());
  EXPECT_THAT(server.Reply(kNewcomer + 1).ranks, ElementsAre(0, 1, 2, 3));
}

TEST(NewcomersTest, OneThatWasChosenKeepsThePlaceUntilItIsLost) {
  Server server;
  server.Lose(2);
  server.Come(kNewcomer, 2, 1);
  for (const int rank : {0, 1, 3}) server.Regroup(rank, kLong);
  EXPECT_TRUE(server.HasReply(kNewcomer));
  server.Lose(3);  // The new group is made again.
  server.Come(kNewcomer + 1, 2, 2);
  server.Come(kNewcomer + 2, 3, 1);
  for (const int rank : {0, 1}) server.Regroup(rank, kLong);
  EXPECT_EQ(server.Replies(0), 1) << "number 1 has not asked yet";
  server.Ask(kNewcomer);
  EXPECT_EQ(server.Replies(kNewcomer), 2);
  EXPECT_THAT(server.Reply(kNewcomer).entered, ElementsAre(2, 3));
  EXPECT_FALSE(server.HasReply(kNewcomer + 1)) << "it waits";
  server.Lose(kNewcomer);
  for (const int rank : {0, 1}) server.Regroup(rank, kLong);
  server.Ask(kNewcomer + 2);
  EXPECT_THAT(server.Reply(kNewcomer + 1).entered, ElementsAre(2, 3));
}

TEST(NewcomersTest, OneOfAnotherWorldIsRefused) {
  Server server;
  Hello other = Server::NewcomerFor(2, 1);
  other.world_size = 8;
  EXPECT_THAT(std::string(server.groups().Check(other).message()),
              HasSubstr("began with 8 ranks, but it had 4"));
}

TEST(NewcomersTest, OneIsRefusedWhereThereIsNoJob) {
  Server server;
  server.Come(kNewcomer, 2);
  for (int rank = 0; rank < kRanks; ++rank) server.Lose(rank);
  EXPECT_THAT(std::string(server.Reply(kNewcomer).refusal.message()),
              HasSubstr("the job has ended"));
  EXPECT_THAT(std::string(server.groups().Check(Server::NewcomerFor(2, 2)).message()),
              HasSubstr("the job has no group world in which rank 2 could be replaced"));
}

// The groups that continue the job's group have new names, and the same places.
TEST(NewcomersTest, OneEntersTheGroupThatContinuesTheFirst) {
  Server server;
  server.Lose(1);
  for (const int rank : {0, 2, 3}) server.Regroup(rank, absl::ZeroDuration());
  for (const int rank : {0, 1, 2}) {
    server.groups().Join(10 + rank, {.kind = Hello::Kind::kControl,
                                     .group = "world+1",
                                     .members = "0,2,3",
                                     .rank = rank,
                                     .world_size = 3});
  }
  for (const int rank : {0, 2, 3}) server.Lose(rank);  // They have left the first group.
  server.Lose(12);
  server.Come(kNewcomer, 3);
  for (const int rank : {10, 11}) {
    const to_hub::Regroup ask{.request = 7, .wait_us = -1, .members = {0, 2, 3}};
    EXPECT_TRUE(server.groups().OnFrame(rank, Serialize(ToHub(ask))).ok());
  }
  EXPECT_EQ(server.Reply(kNewcomer).group, "world+1");
  EXPECT_THAT(server.Reply(kNewcomer).ranks, ElementsAre(0, 1, 2));
  EXPECT_THAT(server.Reply(kNewcomer).members, ElementsAre(0, 2, 3));
  EXPECT_FALSE(server.groups().Check(Server::NewcomerFor(1, 1)).ok())
      << "it went on without rank 1";
}

// Its connection as a newcomer may end later than that to the group.
TEST(NewcomersTest, OneThatIsLostInTheNewGroupHasThePlaceNoMore) {
  Server server;
  server.Come(kNewcomer, 2, 1);
  server.Lose(2);
  for (const int rank : {0, 1, 3}) server.Regroup(rank, kLong);
  for (int rank = 0; rank < kRanks; ++rank) {
    server.groups().Join(10 + rank, {.kind = Hello::Kind::kControl,
                                     .group = "world+1",
                                     .members = "0,1,2,3",
                                     .rank = rank,
                                     .world_size = kRanks});
  }
  server.Come(kNewcomer + 1, 2, 2);
  for (int rank = 0; rank < kRanks; ++rank) {
    const to_hub::Exchange made{.id = {kMadeTopic, 0}, .parts = {{1, ""}}};
    EXPECT_TRUE(server.groups().OnFrame(10 + rank, Serialize(ToHub(made))).ok());
  }
  server.Lose(12);
  for (const int rank : {10, 11, 13}) server.Regroup(rank, kLong);
  EXPECT_EQ(server.Reply(kNewcomer + 1).group, "world+1");
}

// A rank whose attempt has ended just before does not meet those that are left behind: two groups
// would go on.
TEST(NewcomersTest, TheEndedGroupReplacesNoGroupThatIsMade) {
  Server server;
  server.Lose(3);
  for (const int rank : {0, 1, 2}) server.Regroup(rank, absl::ZeroDuration());
  for (const int rank : {0, 1, 2}) {
    server.groups().Join(10 + rank, {.kind = Hello::Kind::kControl,
                                     .group = "world+1",
                                     .members = "0,1,2",
                                     .rank = rank,
                                     .world_size = 3});
  }
  server.Regroup(2, absl::ZeroDuration());
  EXPECT_EQ(server.Replies(2), 1) << "the next group may still fail";
  for (const int rank : {10, 11, 12}) {
    const to_hub::Exchange made{.id = {kMadeTopic, 0}, .parts = {{1, ""}}};
    EXPECT_TRUE(server.groups().OnFrame(rank, Serialize(ToHub(made))).ok());
  }
  server.Regroup(1, absl::ZeroDuration());
  EXPECT_THAT(server.Reply(1).ranks, IsEmpty());
}

}  // namespace
}  // namespace evenkeel::internal
