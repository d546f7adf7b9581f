// Exchanges over a tree of ranks that are threads; over sockets: tcp_store_test.

#include "evenkeel/comm/control/tree_link.h"

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "evenkeel/comm/control/control.h"
#include "evenkeel/comm/control/exchange_tree.h"
#include "evenkeel/comm/control/messages.h"
#include "evenkeel/comm/control/rank_status.h"
#include "evenkeel/comm/control/waits.h"
#include "evenkeel/comm/local/link.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel::internal {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::UnorderedElementsAreArray;

constexpr absl::Duration kSoon =
    absl::Seconds(30);  // For what takes milliseconds when the machine is free.
const int kWorlds[] = {1, 2, 3, 5, 8, 13};

// The shape ---------------------------------------------------------------------------------------

TEST(TreeShapeTest, HasEachRankOnce) {
  for (const int fanout : {1, 2, 3, 32}) {
    for (const int world_size : {1, 2, 3, 4, 5, 8, 13, 40, 1100}) {
      SCOPED_TRACE(absl::StrCat(world_size, " ranks, fanout ", fanout));
      const TreeShape shape{.world_size = world_size, .fanout = fanout};
      std::vector<int> all;
      for (const int top : shape.ChildrenOf(kHub)) {
        EXPECT_EQ(shape.ParentOf(top), kHub);
        for (const int rank : shape.SubtreeOf(top)) all.push_back(rank);
      }
      std::vector<int> expected;
      for (int rank = 0; rank < world_size; ++rank) expected.push_back(rank);
      EXPECT_THAT(all, UnorderedElementsAreArray(expected));
      for (int rank = 0; rank < world_size; ++rank) {
        EXPECT_LE(shape.ChildrenOf(rank).size(), static_cast<size_t>(fanout));
        for (const int child : shape.ChildrenOf(rank)) EXPECT_EQ(shape.ParentOf(child), rank);
      }
      EXPECT_EQ(shape.is_star(), shape.ChildrenOf(kHub).size() == static_cast<size_t>(world_size));
    }
  }
}

TEST(TreeShapeTest, IsWhatItsHeaderSays) {
  const TreeShape shape{.world_size = 8, .fanout = 2};
  EXPECT_THAT(shape.ChildrenOf(kHub), ElementsAre(0, 1));
  EXPECT_THAT(shape.ChildrenOf(0), ElementsAre(2, 3));
  EXPECT_THAT(shape.ChildrenOf(2), ElementsAre(6, 7));
  EXPECT_THAT(shape.ChildrenOf(3), IsEmpty());
  EXPECT_THAT(shape.SubtreeOf(0), ElementsAre(0, 2, 6, 7, 3));
}

// The relay ---------------------------------------------------------------------------------------

to_hub::Exchange Parts(ExchangeParts parts, int64_t sequence = 0) {
  return {.id = {"t", sequence}, .parts = std::move(parts)};
}
to_hub::Exchange Part(const std::string& part, int64_t sequence = 0) {
  return Parts({{1, part}}, sequence);
}

TEST(ExchangeRelayTest, MergesASubtreeInItsOrder) {
  ExchangeRelay relay({.world_size = 8, .fanout = 2}, 0);
  EXPECT_FALSE(relay.OnExchange(3, Parts({{1, "d"}})).value().has_value());
  EXPECT_FALSE(relay.OnExchange(0, Part("a")).value().has_value());
  EXPECT_FALSE(relay.OnExchange(0, Part("a", 1)).value().has_value());
  const auto up = relay.OnExchange(2, Parts({{1, "a"}, {2, "d"}})).value();
  ASSERT_TRUE(up.has_value());
  EXPECT_THAT(up->parts, ElementsAre(EqualParts{2, "a"}, EqualParts{3, "d"}));
  EXPECT_EQ(up->fanout, 2);
  EXPECT_EQ(up->id, (ExchangeId{"t", 0}));
}

TEST(ExchangeRelayTest, RefusesWhatIsNotOfItsTree) {
  ExchangeRelay relay({.world_size = 8, .fanout = 2}, 0);
  EXPECT_TRUE(absl::IsInvalidArgument(relay.OnExchange(3, Parts({{2, "d"}})).status()));
  EXPECT_TRUE(
      absl::IsInvalidArgument(relay.OnExchange(2, Parts({{2, "d"}, {0, ""}, {1, "x"}})).status()));
  EXPECT_TRUE(
      absl::IsInvalidArgument(relay.OnExchange(2, Parts({{int64_t{1} << 62, "d"}})).status()));
  EXPECT_TRUE(absl::IsInvalidArgument(relay.OnExchange(5, Parts({{1, "d"}})).status()));
}

TEST(ExchangeRelayTest, KnowsWhoHasLeft) {
  ExchangeRelay relay({.world_size = 4, .fanout = 2}, 0);
  EXPECT_FALSE(relay.OnExchange(2, Parts({{1, "c"}})).value().has_value());
  EXPECT_TRUE(relay.OnLeave(2).ok()) << "it has come to all that there is";
  const absl::Status status = relay.OnLeave(3);
  EXPECT_EQ(status.message(),
            "rank 3 has left the group while rank 2 is at \"t\" #0: the ranks disagree");
  EXPECT_FALSE(relay.OnExchange(0, Part("a", 1)).ok());
}

// Groups ------------------------------------------------------------------------------------------

// All ranks' ends of a group over a tree of fanout 2, and what they were told.
class Group {
 public:
  explicit Group(int world_size, int fanout = 2) : told_(world_size) {
    std::vector<std::unique_ptr<ControlLink>> links = CreateLocalLinks(world_size, fanout);
    for (int rank = 0; rank < world_size; ++rank) {
      channels_.push_back(
          std::make_unique<ControlChannel>(rank, world_size, std::move(links[rank])));
      channels_[rank]->SetHandlers(
          [this, rank](int, const absl::Status& why) {
            {
              absl::MutexLock lock(&mutex_);
              told_[rank] = why;
            }
            channels_[rank]->Close(why);
          },
          [](int, absl::string_view, absl::string_view) {});
    }
  }

  ControlChannel& operator[](int rank) { return *channels_[rank]; }
  int world_size() const { return static_cast<int>(channels_.size()); }
  void Lose(int rank) { channels_[rank]->Stop(); }
  absl::Status WaitForFailure(int rank) {
    absl::MutexLock lock(&mutex_);
    const auto failed = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return !told_[rank].ok(); };
    mutex_.AwaitWithTimeout(absl::Condition(&failed), kSoon);
    return told_[rank];
  }
  // On a thread for each rank.
  void ForEach(const std::function<void(int rank, ControlChannel& channel)>& body) {
    std::vector<std::thread> threads;
    for (int rank = 0; rank < world_size(); ++rank) {
      threads.emplace_back([&, rank] { body(rank, *channels_[rank]); });
    }
    for (std::thread& thread : threads) thread.join();
  }
  // A heartbeat of each rank, as a watchdog sends it.
  void BeatAll() {
    for (const auto& channel : channels_) {
      RankStatus report{.received = channel->received()};
      const Waits::Snapshot now = channel->waits()->Now();
      report.everyone_waits = now.everyone_waits;
      for (const Waits::Seen& seen : now.waits) report.waits.push_back(seen.wait);
      channel->Beat(report.Serialize(), absl::ZeroDuration());
    }
  }

 private:
  absl::Mutex mutex_;
  std::vector<absl::Status> told_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::unique_ptr<ControlChannel>> channels_;
};

TEST(TreeLinkTest, GivesEveryRanksPartToEveryRank) {
  for (const int world_size : kWorlds) {
    SCOPED_TRACE(world_size);
    Group group(world_size);
    group.ForEach([&](int rank, ControlChannel& channel) {
      for (int step = 0; step < 50; ++step) {
        const auto parts = channel.Exchange("step", absl::StrCat(rank, ":", step), kSoon);
        ASSERT_TRUE(parts.ok()) << parts.status();
        ASSERT_EQ(parts->size(), static_cast<size_t>(world_size));
        for (int r = 0; r < world_size; ++r) EXPECT_EQ((*parts)[r], absl::StrCat(r, ":", step));
      }
      channel.Leave();
    });
  }
}

TEST(TreeLinkTest, SendsTwoMessagesPerStepAndEdge) {
  constexpr int kSteps = 20;
  for (const int world_size : kWorlds) {
    SCOPED_TRACE(world_size);
    Group group(world_size);
    const TreeShape shape{.world_size = world_size, .fanout = 2};
    group.ForEach([&](int rank, ControlChannel& channel) {
      for (int step = 0; step < kSteps; ++step)
        EXPECT_TRUE(channel.Exchange("step", "same", kSoon).ok());
      // One up and one down for the edge to the parent, and for each edge to a child.
      const auto edges = static_cast<int64_t>(1 + shape.ChildrenOf(rank).size());
      const ControlCounters counters = channel.link().Counters();
      EXPECT_EQ(counters.messages_sent, kSteps * edges) << "rank " << rank;
      EXPECT_EQ(counters.messages_received, kSteps * edges) << "rank " << rank;
      EXPECT_LE(counters.bytes_sent + counters.bytes_received, kSteps * edges * 2 * 8)
          << "what is equal is sent once";
    });
    for (int rank = 0; rank < world_size; ++rank) group[rank].Leave();
  }
}

TEST(TreeLinkTest, EverythingElseGoesAsInAStar) {
  Group group(13);
  group.ForEach([&](int rank, ControlChannel& channel) {
    if (rank == 12) channel.Put("plan", "p");
    EXPECT_EQ(channel.Get("plan", kSoon).value(), "p");
    channel.Send((rank + 1) % 13, "ring", absl::StrCat("from ", rank));
    EXPECT_EQ(channel.Receive("ring", kSoon).value(), absl::StrCat("from ", (rank + 12) % 13));
  });
  for (int rank = 0; rank < 13; ++rank) group[rank].Leave();
}

TEST(TreeLinkTest, AReceiveReportsTheEventThatItsMessageStandsFor) {
  Group group(2);
  const Wait step{.kind = Wait::Kind::kExchange, .sequence = 6, .topic = "step", .text = "step 7"};
  std::thread reader([&] {
    const ControlChannel::From from{.is_endless = true, .as = step};
    EXPECT_TRUE(group[0].Receive("log", kSoon, from).ok());
  });
  std::vector<Waits::Seen> seen;
  for (const absl::Time start = absl::Now(); seen.empty() && absl::Now() < start + kSoon;) {
    seen = group[0].waits()->Now().waits;
    absl::SleepFor(absl::Milliseconds(1));
  }
  EXPECT_EQ(seen.size(), 1u);
  if (!seen.empty()) {
    EXPECT_EQ(seen[0].wait.kind, step.kind);
    EXPECT_EQ(seen[0].wait.sequence, step.sequence);
    EXPECT_EQ(seen[0].wait.topic, step.topic);
    EXPECT_EQ(seen[0].wait.text, step.text);
  }
  group[1].Send(0, "log", "");
  reader.join();
  for (int rank = 0; rank < 2; ++rank) group[rank].Leave();
}

TEST(TreeLinkTest, AllLearnOfALostRankWhereverItStands) {
  for (const int lost : {0, 2, 12}) {
    SCOPED_TRACE(lost);
    Group group(13);
    group.ForEach([&](int rank, ControlChannel& channel) {
      if (rank == lost) return group.Lose(rank);
      const absl::Status status = channel.Exchange("step", "", kSoon).status();
      EXPECT_THAT(std::string(status.message()),
                  HasSubstr(absl::StrCat("rank ", lost, " of 13 is lost")));
    });
  }
}

TEST(TreeLinkTest, WhoLeavesTooEarlyIsNamed) {
  for (const int gone : {0, 2, 12}) {
    SCOPED_TRACE(gone);
    Group group(13);
    group.ForEach([&](int rank, ControlChannel& channel) {
      if (rank == gone) return channel.Leave();
      const absl::Status status = channel.Exchange("step", "", kSoon).status();
      EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
      EXPECT_THAT(std::string(status.message()),
                  HasSubstr(absl::StrCat("rank ", gone, " has left")));
    });
  }
}

TEST(TreeLinkTest, WhoIsMissingIsExact) {
  Group group(13);
  std::atomic<int> answered = 0;
  for (int rank = 0; rank < 13; ++rank) {
    if (rank == 4 || rank == 7 || rank == 12) continue;
    group[rank].Exchange("step", "", [&](const auto& parts) { answered += parts.ok(); });
  }
  EXPECT_EQ(group[5].WhoIsMissing("step", 0).text, "ranks 4,7,12");
  EXPECT_EQ(group[12].WhoIsMissing("step", 0).text, "ranks 4,7,12");
  const absl::Status late = group[7].Exchange("step", "", absl::Milliseconds(50)).status();
  EXPECT_THAT(std::string(late.message()), HasSubstr("for ranks 4,12"));
  group.BeatAll();
  EXPECT_THAT(group[5].WhoIsMissing("step", 0).text, HasSubstr("ranks 4,12 ("));
  EXPECT_EQ(group[5].WhoIsMissing("step", 1).text.substr(0, 16), "ranks 0,1,2,3,4,");
  for (const int rank : {4, 12})
    group[rank].Exchange("step", "", [&](const auto& parts) { answered += parts.ok(); });
  const absl::Time start = absl::Now();
  while (answered < 12 && absl::Now() < start + kSoon) absl::SleepFor(absl::Milliseconds(1));
  EXPECT_EQ(answered, 12);
  EXPECT_EQ(group[5].WhoIsMissing("step", 0).text, "");
  for (int rank = 0; rank < 13; ++rank) group[rank].Leave();
}

// The hub alone can't know who has come to an exchange; the heartbeats tell.
TEST(TreeLinkTest, ADeadlockIsFoundAndNothingElse) {
  Group group(8);
  std::thread beats;
  std::atomic<bool> ends = false;
  beats = std::thread([&] {
    while (!ends) {
      group.BeatAll();
      absl::SleepFor(absl::Milliseconds(20));
    }
  });
  group.ForEach([&](int rank, ControlChannel& channel) {
    for (int step = 0; step < 5; ++step) {
      // The others wait for longer than a deadlock has to stand; nobody is accused, because one
      // rank runs.
      if (rank == 7 && step == 2) absl::SleepFor(absl::Milliseconds(1500));
      EXPECT_TRUE(channel.Exchange("step", "", kSoon).ok());
    }
    // All have come to this one, but nobody waits for it: that holds up nothing.
    if (rank != 3) channel.Exchange("beside", "", [](const auto&) {});
    const absl::Status status = rank == 7 ? channel.Get("plan", kSoon).status()
                                          : channel.Exchange("step", "", kSoon).status();
    EXPECT_EQ(
        status.message(),
        absl::StrCat(
            "rank 7 waits in the value \"plan\"; ranks 0,1,2,3,4,5,6 wait in \"step\" #5 until "
            "all ranks have reached it: they cannot go on: the ranks disagree (",
            kCallsAdvice, "; ", kJoinAdvice, ")"));
  });
  ends = true;
  beats.join();
}

TEST(TreeLinkTest, ANewGroupOfThoseThatAreLeftHasATreeToo) {
  Group group(8);
  group.Lose(1);
  std::vector<std::unique_ptr<ControlChannel>> next(8);
  group.ForEach([&](int rank, ControlChannel& channel) {
    if (rank == 1) return;
    EXPECT_FALSE(group.WaitForFailure(rank).ok());
    const auto survivors = channel.Regroup(kSoon);
    ASSERT_TRUE(survivors.ok()) << survivors.status();
    EXPECT_THAT(survivors->ranks, ElementsAre(0, 2, 3, 4, 5, 6, 7));
    const int seat = rank == 0 ? 0 : rank - 1;
    auto link = channel.link().Open("next", seat, 7, kSoon, {});
    ASSERT_TRUE(link.ok()) << link.status();
    next[rank] = std::make_unique<ControlChannel>(seat, 7, *std::move(link));
    EXPECT_EQ(next[rank]->Exchange("x", absl::StrCat(seat), kSoon).value().size(), 7u);
    next[rank]->Leave();
  });
}

}  // namespace
}  // namespace evenkeel::internal
