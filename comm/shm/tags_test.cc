#include "evenkeel/comm/shm/tags.h"

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "evenkeel/comm/shm/board.h"
#include "evenkeel/comm/shm/lane.h"
#include "gtest/gtest.h"

namespace evenkeel::internal {
namespace {

// Both sides of a lane in this process. A message that the sender begins is over at once.
class Pair {
 public:
  Pair() {
    for (int me = 0; me < 2; ++me) {
      lanes_[me] = {
          .board = &board_, .seats = seats_.get(), .ranks = {0, 1}, .me = me, .has_tags = true};
    }
  }
  void Send(int64_t tag) { tags_[0].Add(tag); }
  void Receive(int64_t tag) { tags_[1].Add(tag); }
  std::optional<int64_t> NextToReceive() { return Next(1); }
  std::optional<int64_t> NextToSend() {
    const std::optional<int64_t> tag = Next(0);
    if (!tag.has_value()) return tag;
    seats_[0].headers.Of(lanes_[0].operations).what.tag = *tag;
    seats_[0].arrived = ++lanes_[0].operations;
    EXPECT_EQ(NextToReceive(), tag);
    ++lanes_[1].operations;
    return tag;
  }
  // Returns the number of calls of Next() that have woken a thread that waits on the other side,
  // however often each of them notified it.
  uint32_t wakes() const { return seats_[0].bell + seats_[1].bell; }

 private:
  std::optional<int64_t> Next(int me) {
    seats_[1 - me].watch = static_cast<uint32_t>(ShmWatch::kRingWaiter);
    return tags_[me].Next(lanes_[me]);
  }

  ShmBoard board_{ShmBoard::CreateMemory(2).value(), 2};
  const std::unique_ptr<ShmSeat[]> seats_ = std::make_unique<ShmSeat[]>(2);
  ShmLane lanes_[2];
  ShmTags tags_[2];
};

TEST(ShmTagsTest, ASendBeginsWhenItsReceiveIsPosted) {
  Pair pair;
  pair.Send(1);
  pair.Send(2);
  EXPECT_EQ(pair.NextToSend(), std::nullopt);
  pair.Receive(2);
  EXPECT_EQ(pair.NextToReceive(), std::nullopt);
  EXPECT_EQ(pair.wakes(), 1u);
  EXPECT_EQ(pair.NextToSend(), 2);
  EXPECT_EQ(pair.NextToSend(), std::nullopt);
  pair.Receive(1);
  EXPECT_EQ(pair.NextToReceive(), std::nullopt);
  EXPECT_EQ(pair.NextToSend(), 1);
}

TEST(ShmTagsTest, OneReceiveMeetsOneSend) {
  Pair pair;
  for (int i = 0; i < 3; ++i) pair.Send(7);
  pair.Receive(7);
  pair.Receive(7);
  EXPECT_EQ(pair.NextToReceive(), std::nullopt);
  EXPECT_EQ(pair.NextToSend(), 7);
  EXPECT_EQ(pair.NextToSend(), 7);
  EXPECT_EQ(pair.NextToSend(), std::nullopt);
}

TEST(ShmTagsTest, MoreReceivesThanTheSeatHoldsArePostedByAndBy) {
  Pair pair;
  constexpr int kTags = 5 * ShmSeat::kTags + 3;
  for (int tag = 1; tag <= kTags; ++tag) pair.Receive(tag);
  pair.Send(kTags);  // The last one that is posted.
  int rounds = 0;
  for (; pair.NextToSend() != kTags; ++rounds) EXPECT_EQ(pair.NextToReceive(), std::nullopt);
  EXPECT_EQ(rounds, 6);
}

}  // namespace
}  // namespace evenkeel::internal
