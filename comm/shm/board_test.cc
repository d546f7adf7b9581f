#include "evenkeel/comm/shm/board.h"

#include <unistd.h>

#include <cstring>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "evenkeel/comm/base/shared_memory.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel::internal {
namespace {

constexpr int kWorld = 3;

constexpr absl::Duration kPatience = absl::Seconds(60);

// The boards of a group's ranks, here in one process: each maps the memory by itself.
struct Boards {
  explicit Boards(int world = kWorld) {
    const auto memory = ShmBoard::CreateMemory(world).value();
    for (int rank = 0; rank < world; ++rank) {
      ranks.push_back(std::make_unique<ShmBoard>(
          SharedMemory::Map(dup(memory->fd()), memory->bytes()).value(), world));
    }
  }
  ShmPlace Join(int rank, uint64_t key) { return *ranks[rank]->Join(key, kPatience).value(); }
  std::span<ShmSeat> Seats(int rank, const ShmPlace& place, size_t count = kWorld) {
    return {ranks[rank]->Seats(place, count).value(), count};
  }
  void Leave(int rank, const ShmPlace& place, size_t count = kWorld) {
    EXPECT_TRUE(*ranks[rank]->Leave(place, Seats(rank, place, count), kPatience));
  }

  std::vector<std::unique_ptr<ShmBoard>> ranks;
};

TEST(ShmLatestTwoTest, TheSlowestRankThatMayBeReadingFindsItsValue) {
  ShmLatestTwo<uint64_t> values;
  for (uint64_t operation = 0; operation < 10; ++operation) {
    values.Of(operation) = operation;
    const uint64_t slowest = ShmLatestTwo<uint64_t>::EndedBefore(operation);
    EXPECT_EQ(values.Of(slowest), slowest);
    if (slowest > 0) {
      EXPECT_NE(values.Of(slowest - 1), slowest - 1) << "waits no longer than it must";
    }
  }
}

TEST(ShmBoardTest, AllRanksFindALaneInOnePlace) {
  Boards boards;
  const ShmPlace place = boards.Join(0, 7), other = boards.Join(1, 8);
  EXPECT_NE(place.index, other.index);
  for (const int rank : {1, 2}) {
    EXPECT_EQ(boards.Join(rank, 7).index, place.index);
    boards.Seats(0, place)[rank].published = rank;
    EXPECT_EQ(boards.Seats(rank, place)[rank].published, rank);
    EXPECT_EQ(boards.Seats(rank, other)[rank].published, 0u);
  }
  std::set<std::byte*> rings;
  for (const ShmPlace& of : {place, other}) {
    for (int seat = 0; seat < kWorld; ++seat) {
      std::byte* const mine = boards.ranks[0]->Ring(of, seat).value();
      EXPECT_TRUE(rings.insert(mine).second);
      std::memset(mine, 10 * static_cast<int>(of.use) + seat, kShmSlots * kShmSlotBytes);
    }
  }
  for (const ShmPlace& of : {place, other}) {
    for (int seat = 0; seat < kWorld; ++seat) {
      const std::byte* const theirs = boards.ranks[1]->Ring(of, seat).value();
      for (const int64_t at : {int64_t{0}, kShmSlots * kShmSlotBytes - 1})
        EXPECT_EQ(static_cast<int>(theirs[at]), 10 * static_cast<int>(of.use) + seat);
      EXPECT_EQ(boards.Seats(0, of)[seat].done, 0u) << "nothing overlaps";
    }
  }
}

TEST(ShmBoardTest, ALaneStaysWhereItIsUntilAllHaveLeft) {
  Boards boards;
  const ShmPlace place = boards.Join(0, 7);
  boards.Join(1, 7);
  boards.Seats(0, place)[0].done = 5;
  boards.Leave(0, place);
  const ShmPlace again = boards.Join(0, 7);
  EXPECT_EQ(again.index, place.index);
  EXPECT_EQ(again.use, place.use);
  EXPECT_EQ(boards.Seats(0, place)[0].done, 5u);
}

TEST(ShmBoardTest, TheNextLaneOfAPlaceFindsItAsNew) {
  Boards boards;
  const ShmPlace place = boards.Join(0, 7);
  boards.Join(1, 7);
  for (ShmSeat& seat : boards.Seats(0, place)) {
    for (auto* counter : {&seat.arrived, &seat.done, &seat.published, &seat.reduced, &seat.taken,
                          &seat.claimed, &seat.finished, &seat.tags_known})
      *counter = 9;
    seat.watch = static_cast<uint32_t>(ShmWatch::kRingThread);
  }
  boards.Leave(1, place);
  boards.Leave(0, place);
  for (const uint64_t key : {8, 7}) {
    const ShmPlace next = boards.Join(2, key);
    EXPECT_NE(next.use, place.use);
    if (key == 8) {
      EXPECT_EQ(next.index, place.index);
    }
    for (const ShmSeat& seat : boards.Seats(2, next)) {
      for (const auto* counter : {&seat.arrived, &seat.done, &seat.published, &seat.reduced,
                                  &seat.taken, &seat.claimed, &seat.finished, &seat.tags_known})
        EXPECT_EQ(*counter, 0u);
      EXPECT_EQ(seat.watch, static_cast<uint32_t>(ShmWatch::kAwake));
    }
  }
}

TEST(ShmBoardTest, ManyLanesComeAndGoInFewPlaces) {
  Boards boards(2);
  std::vector<ShmPlace> places;
  for (uint64_t key = 1; key <= 10000; ++key) {
    places.push_back(boards.Join(0, key));
    if (key > 5) boards.Leave(0, places[key - 6], 2);
    EXPECT_LT(places.back().index, 6);
  }
}

TEST(ShmBoardTest, ThousandsOfLanesAreInUse) {
  Boards boards(2);
  std::set<int64_t> indices;
  for (uint64_t key = 1; key <= 3000; ++key) indices.insert(boards.Join(0, key).index);
  EXPECT_EQ(indices.size(), 3000u);
  for (const uint64_t key : {1, 1500, 3000}) {
    const ShmPlace place = boards.Join(1, key);
    EXPECT_EQ(place.use, key);
    boards.Seats(1, place, 2)[1].done = key;
    EXPECT_EQ(boards.Seats(0, place, 2)[1].done, key);
  }
}

TEST(ShmBoardTest, RanksThatJoinTogetherJoinOneLane) {
  Boards boards;
  for (uint64_t key = 1; key <= 300; ++key) {
    ShmPlace places[kWorld];
    std::vector<std::thread> threads;
    for (int rank = 0; rank < kWorld; ++rank)
      threads.emplace_back([&, rank] { places[rank] = boards.Join(rank, key); });
    for (std::thread& thread : threads) thread.join();
    for (const ShmPlace& place : places) EXPECT_EQ(place.use, key);
    for (int rank = 0; rank < kWorld; ++rank) boards.Leave(rank, places[rank]);
  }
}

// As if it were stopped, or dead, in the middle of a Join().
TEST(ShmBoardTest, ARankThatKeepsTheLockIsNotAwaitedForLong) {
  const auto memory = ShmBoard::CreateMemory(kWorld).value();
  ShmBoard board(memory, kWorld);
  const ShmPlace place = *board.Join(7, kPatience).value();
  ShmSeat* const seats = board.Seats(place, kWorld).value();
  memory->data()[0] = std::byte{1};  // The lock.
  for (const absl::Duration patience : {absl::ZeroDuration(), absl::Milliseconds(30)}) {
    const absl::Time begin = absl::Now();
    EXPECT_EQ(board.Join(8, patience).value(), std::nullopt);
    EXPECT_FALSE(*board.Leave(place, {seats, kWorld}, patience));
    EXPECT_GE(absl::Now() - begin, 2 * patience);
  }
  memory->data()[0] = std::byte{0};
  EXPECT_EQ(board.Join(7, absl::ZeroDuration()).value()->use, place.use);
}

}  // namespace
}  // namespace evenkeel::internal
