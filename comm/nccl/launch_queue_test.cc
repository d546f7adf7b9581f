#include "evenkeel/comm/nccl/launch_queue.h"

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "evenkeel/comm/collective.h"
#include "evenkeel/comm/control/control.h"
#include "evenkeel/comm/local/link.h"
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
    Push(rank, {.kind = CollectiveKind::kAllReduce, .count = count}, channel, sequence);
  }
  void Push(int rank, const Collective& what, uint64_t channel, int64_t sequence,
            uint64_t layout = 0) {
    Operation operation;
    operation.what = what;
    operation.channel = channel;
    operation.sequence = sequence;
    queues_[rank]->Push(RequestOf(operation, rank, layout),
                        [this, rank, channel, sequence](const LaunchQueue::Turn& turn) {
                          absl::MutexLock lock(&mutex_);
                          if (turn.status.ok()) launched_[rank].push_back({channel, sequence});
                          if (!turn.status.ok()) ended_[rank].push_back(turn.status);
                          if (!turn.is_alike) unlike_.push_back(rank);
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
  std::vector<int> unlike_;  // Ranks that were told so.
};

TEST_F(LaunchQueueTest, EveryRankLaunchesInTheSameOrder) {
  const std::vector<Key> orders[kRanks] = {
      {{7, 0}, {8, 0}, {7, 1}, {8, 1}},
      {{8, 0}, {8, 1}, {7, 0}, {7, 1}},
      {{7, 0}, {7, 1}, {8, 0}, {8, 1}},
  };
  for (int rank : {2, 1, 0}) {
    for (const auto& [channel, sequence] : orders[rank]) Push(rank, channel, sequence);
  }
  const std::vector<Key> order = Launched(0, 4);
  for (int rank = 1; rank < kRanks; ++rank) EXPECT_EQ(Launched(rank, 4), order) << rank;
}

TEST_F(LaunchQueueTest, AChannelThatARankHasNotComeToHoldsUpNoOther) {
  Push(0, 7, 0);
  Push(2, 7, 0);
  for (int rank = 0; rank < kRanks; ++rank) Push(rank, 8, 0);
  for (int rank = 0; rank < kRanks; ++rank)
    EXPECT_EQ(Launched(rank, 1), (std::vector<Key>{{8, 0}})) << rank;
  Push(1, 7, 0);
  for (int rank = 0; rank < kRanks; ++rank)
    EXPECT_EQ(Launched(rank, 2), (std::vector<Key>{{8, 0}, {7, 0}})) << rank;
}

TEST_F(LaunchQueueTest, AMessageWaitsForItsTwoRanksOnly) {
  for (int rank : {0, 1}) Push(rank, 7, 0);  // Rank 2 comes later.
  Push(1, {.kind = CollectiveKind::kSend, .count = 5, .root = 2}, 7, 0);
  Push(2, {.kind = CollectiveKind::kRecv, .count = 5, .root = 1}, 7, 0);
  for (int rank : {1, 2}) EXPECT_EQ(Launched(rank, 1).size(), 1u);
  EXPECT_TRUE(Launched(0, 0).empty());
  Push(2, 7, 0);
  EXPECT_EQ(Launched(0, 1).size(), 1u);
}

TEST_F(LaunchQueueTest, AllRanksLearnThatOneHasAnotherLayout) {
  for (int rank = 0; rank < kRanks; ++rank) {
    Push(rank, {.kind = CollectiveKind::kAllReduce, .count = 5}, 7, 0,
         /*layout=*/rank == 1 ? 2 : 1);
  }
  for (int rank = 0; rank < kRanks; ++rank) Launched(rank, 1);
  absl::MutexLock lock(&mutex_);
  EXPECT_EQ(unlike_.size(), 3u);
}

TEST_F(LaunchQueueTest, AnotherCollectiveAtThatPlaceEndsTheGroupBeforeAnythingIsLaunched) {
  for (int rank = 0; rank < kRanks; ++rank) {
    controls_[rank]->SetHandlers(
        [this, rank](int, const absl::Status& why) { queues_[rank]->Abort(why); },
        [](int, absl::string_view, absl::string_view) {});
  }
  Push(1, 7, 0, 101);
  Push(0, 7, 0, 100);
  Push(2, 7, 0, 100);
  for (int rank = 0; rank < kRanks; ++rank) {
    const std::vector<absl::Status> ended = Ended(rank, 1);
    EXPECT_EQ(ended[0].code(), absl::StatusCode::kFailedPrecondition) << ended[0];
    EXPECT_THAT(std::string(ended[0].message()),
                HasSubstr("is at #0 all_reduce (user) float32[101] sum"));
    EXPECT_THAT(std::string(ended[0].message()),
                HasSubstr("is at #0 all_reduce (user) float32[100] sum"));
    EXPECT_THAT(std::string(ended[0].message()), HasSubstr(": the ranks disagree"));
    EXPECT_TRUE(Launched(rank, 0).empty());
  }
}

TEST_F(LaunchQueueTest, AScaleAndAMessagesSizeAreCompared) {
  Operation sum, scaled;
  sum.what = scaled.what = {.kind = CollectiveKind::kAllReduce, .count = 5};
  scaled.scale = 0.5;
  EXPECT_NE(RequestOf(sum, 0, 0).hash, RequestOf(scaled, 0, 0).hash);
  Operation sent, received;
  sent.what = {.kind = CollectiveKind::kSend, .count = 5, .root = 1};
  received.what = {.kind = CollectiveKind::kRecv, .count = 5, .root = 0};
  EXPECT_EQ(RequestOf(sent, 0, 0).hash, RequestOf(received, 1, 0).hash);
  EXPECT_EQ(RequestOf(sent, 0, 0).key, RequestOf(received, 1, 0).key);
  received.what.count = 4;
  EXPECT_NE(RequestOf(sent, 0, 0).hash, RequestOf(received, 1, 0).hash);
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
