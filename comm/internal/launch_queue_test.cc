#include "evenkeel/comm/internal/launch_queue.h"

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "evenkeel/comm/collective.h"
#include "evenkeel/comm/control.h"
#include "evenkeel/comm/local_link.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel::internal {
namespace {

using ::testing::HasSubstr;

// Three ranks' queues, and what each of them has launched or ended.
class LaunchQueueTest : public testing::Test {
 protected:
  static constexpr int kRanks = 3;
  using Key = std::pair<uint64_t, int64_t>;  // Channel, sequence.

  LaunchQueueTest() {
    std::vector<std::unique_ptr<ControlLink>> links = CreateLocalLinks(kRanks);
    for (int rank = 0; rank < kRanks; ++rank) {
      controls_.push_back(std::make_unique<ControlChannel>(rank, kRanks, std::move(links[rank])));
      queues_.push_back(std::make_unique<LaunchQueue>(*controls_.back(), "test"));
    }
    launched_.resize(kRanks);
    ended_.resize(kRanks);
  }
  ~LaunchQueueTest() override {
    for (auto& control : controls_) control->Close(absl::CancelledError("the test is over"));
    queues_.clear();
  }

  void Push(int rank, uint64_t channel, int64_t sequence, int64_t count = 1) {
    const Collective what{.kind = CollectiveKind::kAllReduce, .count = count};
    queues_[rank]->Push(what, channel, sequence, [this, rank, channel, sequence](const absl::Status& turn) {
      absl::MutexLock lock(&mutex_);
      if (turn.ok()) launched_[rank].push_back({channel, sequence});
      if (!turn.ok()) ended_[rank].push_back(turn);
    });
  }

  std::vector<Key> Launched(int rank, size_t at_least) {
    absl::MutexLock lock(&mutex_);
    const auto ready = [&] { return launched_[rank].size() >= at_least; };
    mutex_.Await(absl::Condition(&ready));
    return launched_[rank];
  }
  std::vector<absl::Status> Ended(int rank, size_t at_least) {
    absl::MutexLock lock(&mutex_);
    const auto ready = [&] { return ended_[rank].size() >= at_least; };
    mutex_.Await(absl::Condition(&ready));
    return ended_[rank];
  }

  std::vector<std::unique_ptr<ControlChannel>> controls_;
  std::vector<std::unique_ptr<LaunchQueue>> queues_;
  absl::Mutex mutex_;
  std::vector<std::vector<Key>> launched_;
  std::vector<std::vector<absl::Status>> ended_;
};

TEST_F(LaunchQueueTest, EveryRankLaunchesInRankZerosOrder) {
  const std::vector<Key> orders[kRanks] = {
      {{7, 0}, {8, 0}, {7, 1}, {8, 1}},
      {{8, 0}, {8, 1}, {7, 0}, {7, 1}},
      {{7, 0}, {7, 1}, {8, 0}, {8, 1}},
  };
  for (int rank : {2, 1, 0}) {
    for (const auto& [channel, sequence] : orders[rank]) Push(rank, channel, sequence);
  }
  for (int rank = 0; rank < kRanks; ++rank) EXPECT_EQ(Launched(rank, 4), orders[0]) << rank;
}

TEST_F(LaunchQueueTest, AnotherCollectiveAtThatPlaceIsNotLaunched) {
  Push(0, 7, 0, 100);
  Push(1, 7, 0, 101);
  Push(2, 7, 0, 100);
  Push(1, 7, 1, 5);
  const std::vector<absl::Status> ended = Ended(1, 2);
  EXPECT_EQ(ended[0].code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(ended[0].message()),
              HasSubstr("rank 1 is at #0 all_reduce (user) float32[101] sum; rank 0 is "
                        "at #0 all_reduce (user) float32[100] sum: the ranks disagree"));
  EXPECT_EQ(ended[1], ended[0]);
  EXPECT_EQ(Launched(2, 1).size(), 1u);
}

TEST_F(LaunchQueueTest, AbortEndsWhatHasNotHadItsTurn) {
  Push(1, 7, 0);  // Rank 0 never comes.
  queues_[1]->Abort(absl::CancelledError("enough"));
  Push(1, 7, 1);
  EXPECT_EQ(Ended(1, 2), std::vector<absl::Status>(2, absl::CancelledError("enough")));
  EXPECT_TRUE(Launched(1, 0).empty());
}

TEST_F(LaunchQueueTest, TheEndOfTheControlPlaneEndsWaits) {
  Push(2, 7, 0);
  controls_[2]->Close(absl::UnavailableError("rank 0 is lost"));
  EXPECT_EQ(Ended(2, 1), std::vector<absl::Status>{absl::UnavailableError("rank 0 is lost")});
}

}  // namespace
}  // namespace evenkeel::internal
