#include "evenkeel/comm/flight_recorder.h"

#include <cstdint>
#include <random>
#include <set>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "evenkeel/comm/base/clock.h"
#include "evenkeel/comm/collective.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

FlightEntry Barrier(uint64_t channel, int64_t sequence) {
  return {.channel = channel,
          .sequence = sequence,
          .what = {.kind = CollectiveKind::kBarrier},
          .issued = absl::UnixEpoch() + absl::Seconds(sequence)};
}

std::vector<int64_t> Numbers(const std::vector<FlightEntry>& entries) {
  std::vector<int64_t> numbers;
  for (const FlightEntry& entry : entries) numbers.push_back(entry.number);
  return numbers;
}

TEST(FlightRecorderTest, KeepsWhatWasIssuedAndHowItEnded) {
  FlightRecorder recorder(8);
  EXPECT_TRUE(recorder.Entries().empty());
  const int64_t a = recorder.Begin(Barrier(7, 0)), b = recorder.Begin(Barrier(7, 1)),
                c = recorder.Begin(Barrier(7, 2));
  const absl::Time before = SteadyNow();
  recorder.End(b, absl::OkStatus());
  recorder.End(a, absl::UnavailableError("rank 1 is lost"));
  const std::vector<FlightEntry> entries = recorder.Entries();
  ASSERT_THAT(Numbers(entries), testing::ElementsAre(a, b, c));
  EXPECT_EQ(entries[0].code, absl::StatusCode::kUnavailable);
  EXPECT_EQ(entries[0].issued, absl::UnixEpoch());
  EXPECT_GE(entries[0].ended, before);
  EXPECT_LE(entries[0].ended, SteadyNow());
  EXPECT_EQ(entries[1].code, absl::StatusCode::kOk);
  EXPECT_EQ(entries[1].sequence, 1);
  EXPECT_FALSE(entries[1].is_open());
  EXPECT_TRUE(entries[2].is_open());
  EXPECT_THAT(Numbers(recorder.OpenEntries()), testing::ElementsAre(c));
  EXPECT_EQ(recorder.issued(), 3);
}

TEST(FlightRecorderTest, AReceiveFromAnyRankGetsItsSender) {
  FlightRecorder recorder(1);
  FlightEntry any = Barrier(7, 3);
  any.what = {.kind = CollectiveKind::kRecv};
  const int64_t in_the_ring = recorder.Begin(any);
  recorder.SetPeer(in_the_ring, 2, 5);
  const int64_t older = in_the_ring, newer = recorder.Begin(any);  // There is one place.
  recorder.SetPeer(newer, 4, 6);
  EXPECT_EQ(recorder.Get(older)->what.root, 2);
  EXPECT_EQ(recorder.Get(older)->sequence, 5);
  EXPECT_EQ(recorder.Get(newer)->what.root, 4);
  recorder.SetPeer(older, 1, 0);
  recorder.SetPeer(99, 1, 0);
  EXPECT_EQ(recorder.Get(older)->what.root, 1);
  EXPECT_EQ(recorder.Get(newer)->sequence, 6);
}

TEST(FlightRecorderTest, OnlyTheFirstEndCounts) {
  FlightRecorder recorder(4);
  const int64_t number = recorder.Begin(Barrier(7, 0));
  recorder.End(number, absl::AbortedError("first"));
  recorder.End(number, absl::OkStatus());
  recorder.End(-1, absl::OkStatus());
  recorder.End(99, absl::OkStatus());
  EXPECT_EQ(recorder.Entries()[0].code, absl::StatusCode::kAborted);
}

TEST(FlightRecorderTest, KeepsTheLastAndEveryOpenOne) {
  FlightRecorder recorder(3);
  const int64_t stuck = recorder.Begin(Barrier(7, 0));
  for (int i = 1; i <= 10; ++i) recorder.End(recorder.Begin(Barrier(7, i)), absl::OkStatus());
  EXPECT_THAT(Numbers(recorder.Entries()), testing::ElementsAre(stuck, 8, 9, 10));
  EXPECT_THAT(Numbers(recorder.OpenEntries()), testing::ElementsAre(stuck));
  EXPECT_EQ(recorder.Get(stuck)->sequence, 0);
  EXPECT_EQ(recorder.Get(9)->sequence, 9);
  EXPECT_FALSE(recorder.Get(5).has_value());
  recorder.End(stuck, absl::OkStatus());
  EXPECT_FALSE(recorder.Get(stuck).has_value());
  EXPECT_THAT(Numbers(recorder.Entries()), testing::ElementsAre(8, 9, 10));
}

TEST(FlightRecorderTest, ACapacityOfZeroStillKeepsWhatIsOpen) {
  FlightRecorder recorder(0);
  recorder.Begin(Barrier(7, 0));
  recorder.Begin(Barrier(7, 1));
  EXPECT_THAT(Numbers(recorder.OpenEntries()), testing::ElementsAre(0, 1));
}

TEST(FlightRecorderTest, RecentIsOfOneChannelAndOfWhatAllRanksIssue) {
  FlightRecorder recorder(16);
  for (int i = 0; i < 5; ++i) {
    recorder.Begin(Barrier(7, i));
    recorder.Begin(Barrier(8, i));
    FlightEntry send = Barrier(7, i);
    send.what.kind = CollectiveKind::kSend;
    recorder.Begin(send);
  }
  EXPECT_THAT(Numbers(recorder.Recent(7, 3)), testing::ElementsAre(6, 9, 12));
  EXPECT_THAT(Numbers(recorder.Recent(8, 100)), testing::ElementsAre(1, 4, 7, 10, 13));
  EXPECT_THAT(recorder.Recent(9, 3), testing::IsEmpty());
  EXPECT_THAT(recorder.Recent(7, 0), testing::IsEmpty());
}

// Against the obvious list, over many random orders of beginning and ending.
TEST(FlightRecorderTest, IsTheSameAsAListThatForgetsNothing) {
  for (uint32_t seed = 0; seed < 200; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937 random(seed);
    const size_t capacity = 1 + random() % 6;
    FlightRecorder recorder(capacity);
    std::set<int64_t> open;
    int64_t issued = 0;

    for (int i = 0; i < 60; ++i) {
      if (open.empty() || random() % 2 == 0) {
        open.insert(recorder.Begin(Barrier(random() % 2, issued)));
        ++issued;
        continue;
      }
      auto which = open.begin();
      std::advance(which, random() % open.size());
      recorder.End(*which, absl::OkStatus());
      open.erase(which);
    }
    std::vector<int64_t> expected;
    for (int64_t n = 0; n < issued; ++n) {
      if (open.contains(n) || n >= issued - static_cast<int64_t>(capacity)) expected.push_back(n);
    }
    EXPECT_EQ(Numbers(recorder.Entries()), expected);
    EXPECT_EQ(Numbers(recorder.OpenEntries()), std::vector<int64_t>(open.begin(), open.end()));
  }
}

TEST(FlightRecorderTest, ThreadsRecordAtTheSameTime) {
  FlightRecorder recorder(64);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&recorder, t] {
      for (int i = 0; i < 500; ++i) {
        recorder.End(recorder.Begin(Barrier(t, i)), absl::OkStatus());
        if (i % 50 == 0) recorder.Entries();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(recorder.issued(), 2000);
  EXPECT_EQ(recorder.Entries().size(), 64u);
  EXPECT_TRUE(recorder.OpenEntries().empty());
}

}  // namespace
}  // namespace evenkeel
