#include "evenkeel/comm/control/groups.h"

#include <cstddef>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "evenkeel/comm/control/messages.h"
#include "evenkeel/comm/failure_info.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel::internal {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;

constexpr absl::Duration kLimit = absl::Seconds(5), kBeat = absl::Milliseconds(250);

// A group whose ranks send heartbeats. The number of a peer is its rank.
class Server {
 public:
  explicit Server(int ranks) : Server(ranks, ranks) {}
  // The first ranks have joined.
  Server(int ranks, int joined)
      : failures_(ranks),
        groups_(
            [this](ControlSeats::PeerId peer, absl::string_view payload) {
              const ToRank message = ParseControlMessage<ToRank>(payload).value();
              const auto* failed = std::get_if<to_rank::Failed>(&message);
              if (failed != nullptr && peer < static_cast<int>(failures_.size()) &&
                  failures_[peer].ok())
                failures_[peer] = failed->why;
            },
            [this](const std::string& group, int world_size, const absl::Status& why) {
              reports_.push_back({group, world_size, why});
            }) {
    while (joined_ < joined) JoinNext();
  }

  void JoinNext() {
    groups_.Join(joined_, {.kind = Hello::Kind::kControl,
                           .group = "world",
                           .rank = joined_,
                           .world_size = static_cast<int>(failures_.size())});
    ++joined_;
  }

  // Returns the ranks that the loop must disconnect.
  std::vector<ControlSeats::PeerId> Run(absl::Duration time) {
    for (absl::Duration end = now_ + time; now_ < end; now_ += kBeat) {
      for (int rank = 0; rank < joined_; ++rank) {
        if (rank != silent_)
          Send(rank, to_hub::Beat{.silence_us = absl::ToInt64Microseconds(kLimit)});
      }
      for (const ControlSeats::PeerId peer : groups_.PassTime(kBeat)) dismissed_.push_back(peer);
    }
    return dismissed_;
  }
  void FallsSilent(int rank) { silent_ = rank; }
  void Stall(absl::Duration time) { (void)groups_.PassTime(time); }

  void ReceivesNothing(int rank) {
    const FailureInfo hub_lost{.kind = FailureKind::kRankLost};
    Send(rank, to_hub::Failed{
                   .why = WithFailureInfo(absl::UnavailableError("received nothing"), hub_lost),
                   .unheard_us = absl::ToInt64Microseconds(kLimit)});
  }

  // The ranks that the error names on `rank`.
  std::vector<int> NamedOn(int rank) const {
    const std::optional<FailureInfo> info = FailureInfoOf(failures_[rank]);
    return info.has_value() ? info->ranks : std::vector<int>{-1};
  }
  void Leave(int rank) {
    Send(rank, to_hub::Leave());
    groups_.OnDisconnect(rank);
  }
  ControlGroups& groups() { return groups_; }
  bool HasFailed() const { return !failures_[0].ok(); }
  struct Report {
    std::string group;
    int world_size = 0;
    absl::Status why;
  };
  const std::vector<Report>& reports() const { return reports_; }
  const absl::Status& failure(int rank) const { return failures_[rank]; }

 private:
  void Send(size_t rank, const ToHub& message) {
    groups_.OnBytes(rank);
    EXPECT_TRUE(groups_.OnFrame(rank, Serialize(message)).ok());
  }

  int silent_ = -1, joined_ = 0;
  std::vector<absl::Status> failures_;  // By rank: the first one that it has received.
  std::vector<ControlSeats::PeerId> dismissed_;
  absl::Duration now_;
  std::vector<Report> reports_;
  ControlGroups groups_;
};

TEST(ControlGroupsTest, ARankThatReceivesNothingIsLost) {
  Server server(3);
  server.Run(absl::Seconds(10));
  server.ReceivesNothing(2);
  EXPECT_THAT(server.Run(absl::Seconds(1)), IsEmpty()) << "the others may report the same";
  EXPECT_FALSE(server.HasFailed());
  server.ReceivesNothing(2);  // A further report does not begin the judgement again.
  EXPECT_THAT(server.Run(absl::Milliseconds(1500)), ElementsAre(2));
  EXPECT_THAT(server.NamedOn(0), ElementsAre(2));
}

TEST(ControlGroupsTest, AFailureIsReportedAsTheOthersGetIt) {
  Server server(3);
  server.Run(absl::Seconds(10));
  server.FallsSilent(1);
  server.Run(2 * kLimit);
  ASSERT_EQ(server.reports().size(), 2);
  EXPECT_EQ(server.reports().front().why, absl::OkStatus());  // It was complete.
  const auto& [group, world_size, why] = server.reports().back();
  EXPECT_EQ(group, "world");
  EXPECT_EQ(world_size, 3);
  EXPECT_EQ(why, server.failure(0));
  EXPECT_NE(why, server.failure(1));  // The lost rank gets another text.
  EXPECT_FALSE(server.failure(1).ok());
}

TEST(ControlGroupsTest, AGroupThatHasFailedIsNotReportedAsComplete) {
  Server server(3, /*joined=*/2);
  server.Run(absl::Seconds(10));
  EXPECT_THAT(server.reports(), IsEmpty()) << "a rank is missing";
  server.FallsSilent(1);
  server.Run(2 * kLimit);
  server.JoinNext();
  ASSERT_EQ(server.reports().size(), 1);
  EXPECT_FALSE(server.reports().front().why.ok());
}

// The launcher would end a rank that only makes the next attempt.
TEST(ControlGroupsTest, AFurtherGroupThatWasNeverMadeIsNotReported) {
  for (const bool is_made : {false, true}) {
    Server server(3);
    server.groups().OnDisconnect(2);
    const size_t before = server.reports().size();
    constexpr int kNext = 10;  // Peers from this one on are in the next group.
    for (const int rank : {0, 1}) {
      server.groups().Join(kNext + rank, {.kind = Hello::Kind::kControl,
                                          .group = "world+1",
                                          .members = "0,1",
                                          .rank = rank,
                                          .world_size = 2});
    }
    for (int rank = 0; is_made && rank < 2; ++rank) {
      const to_hub::Exchange made{.id = {kMadeTopic, 0}, .parts = {{1, ""}}};
      EXPECT_TRUE(server.groups().OnFrame(kNext + rank, Serialize(ToHub(made))).ok());
    }
    ASSERT_EQ(server.reports().size(), before + 1) << "all have connected";
    server.groups().OnDisconnect(kNext + 1);
    EXPECT_EQ(server.reports().size(), before + 1 + is_made);
  }
}

TEST(ControlGroupsTest, TheLastStateHasAFailureAsItWasAndOnlyThisState) {
  Server server(2);
  for (const int rank : {1, 0}) server.groups().OnDisconnect(rank);
  EXPECT_EQ(server.groups().StatusJson(), "[]");
  EXPECT_THAT(server.groups().LastStatusJson(),
              testing::ContainsRegex(
                  R"(^.."group":"world","error":"rank 1 .*"state":"connected".*"state":"lost")"));
}

TEST(ControlGroupsTest, AFailureIsNotInTheLastStateIfTheJobWentOn) {
  for (const bool has_gone : {false, true}) {  // Before the others join the next group.
    Server server(2);
    server.groups().OnDisconnect(1);
    if (has_gone) server.groups().OnDisconnect(0);
    EXPECT_THAT(server.groups().LastStatusJson(), testing::HasSubstr("rank 1 of 2 is lost"));
    constexpr int kNext = 2;  // A peer.
    server.groups().Join(kNext, {.kind = Hello::Kind::kControl,
                                 .group = "world",
                                 .id = "next",
                                 .rank = 0,
                                 .world_size = 1});
    EXPECT_THAT(server.groups().LastStatusJson(),
                testing::ContainsRegex(R"(^.."group":"world","error":"","ranks":.."state":"con)"));
    if (!has_gone) server.groups().OnDisconnect(0);
    server.Leave(kNext);
    EXPECT_EQ(server.groups().LastStatusJson(), "[]") << has_gone;
  }
}

TEST(ControlGroupsTest, AFailureIsNotInTheLastStateIfOneRankRegrouped) {
  Server server(2);
  server.groups().OnDisconnect(1);
  EXPECT_TRUE(server.groups().OnFrame(0, Serialize(ToHub(to_hub::Regroup{.request = 1}))).ok());
  EXPECT_EQ(server.groups().LastStatusJson(), "[]");
  server.groups().OnDisconnect(0);
  EXPECT_EQ(server.groups().LastStatusJson(), "[]");
}

TEST(ControlGroupsTest, NoRankIsLostIfAllReceiveNothing) {
  Server server(3);
  server.Run(absl::Seconds(10));
  for (int rank = 0; rank < 3; ++rank) {
    server.ReceivesNothing(rank);
    server.Run(kBeat);
  }
  EXPECT_THAT(server.Run(absl::Seconds(3)), IsEmpty());
  EXPECT_TRUE(server.HasFailed());
  EXPECT_THAT(server.NamedOn(0), IsEmpty());
}

// After the network of the hub has failed for a while, its ranks are as before.
TEST(ControlGroupsTest, ARankMayBeLostAfterAllReceivedNothing) {
  for (const bool is_silent : {true, false}) {
    Server server(3);
    server.Run(absl::Seconds(10));
    for (int rank = 0; rank < 3; ++rank) server.ReceivesNothing(rank);
    EXPECT_THAT(server.Run(absl::Seconds(10)), IsEmpty());
    if (is_silent) {
      server.FallsSilent(2);
    } else {
      server.ReceivesNothing(2);
    }
    EXPECT_THAT(server.Run(absl::Seconds(10)), ElementsAre(2));
  }
}

TEST(ControlGroupsTest, NoRankIsLostIfTheHubDidNotRun) {
  Server server(3);
  server.Run(absl::Seconds(10));
  server.Stall(absl::Seconds(6));
  server.ReceivesNothing(2);
  EXPECT_THAT(server.Run(absl::Seconds(3)), IsEmpty());
  EXPECT_TRUE(server.HasFailed());
  EXPECT_THAT(server.NamedOn(0), IsEmpty());
}

}  // namespace
}  // namespace evenkeel::internal
