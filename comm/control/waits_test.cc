#include "evenkeel/comm/control/waits.h"

#include <atomic>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "absl/synchronization/notification.h"
#include "absl/time/time.h"
#include "evenkeel/comm/base/clock.h"
#include "evenkeel/comm/base/librarys_thread.h"
#include "evenkeel/comm/control/rank_status.h"
#include "gtest/gtest.h"

namespace evenkeel::internal {
namespace {

Wait ForRank(int peer) { return {.kind = Wait::Kind::kMessage, .peer = peer}; }

// A thread that uses a group and does what it is told.
class Worker {
 public:
  explicit Worker(std::shared_ptr<Waits> waits)
      : thread_([this, waits = std::move(waits)] {
          waits->Use();
          uses_.Notify();
          may_wait_.WaitForNotification();
          if (!stops_) {
            Waits::Scope scope(
                waits, [] { return ForRank(1); }, [this] { return is_over_.load(); });
            waits_.Notify();
            may_end_.WaitForNotification();
          }
        }) {
    uses_.WaitForNotification();
  }
  ~Worker() { End(); }
  void Wait() {
    may_wait_.Notify();
    waits_.WaitForNotification();
  }
  void SayOver() { is_over_ = true; }
  void End() {
    if (!thread_.joinable()) return;
    stops_ = !may_wait_.HasBeenNotified();
    if (stops_) may_wait_.Notify();
    may_end_.Notify();
    thread_.join();
  }

 private:
  std::atomic<bool> is_over_ = false, stops_ = false;
  absl::Notification uses_, may_wait_, waits_, may_end_;
  std::thread thread_;
};

TEST(WaitsTest, NobodyWaitsInAGroupThatNobodyUses) {
  auto waits = Waits::Create();
  EXPECT_FALSE(waits->EveryoneWaits());
  EXPECT_TRUE(waits->Now().waits.empty());
}

TEST(WaitsTest, EveryoneWaitsWhenEachThreadThatUsesTheGroupDoes) {
  auto waits = Waits::Create();
  const absl::Time before = SteadyNow();
  Worker a(waits), b(waits);
  EXPECT_FALSE(waits->EveryoneWaits());
  a.Wait();
  EXPECT_FALSE(waits->EveryoneWaits()) << "b runs";
  ASSERT_EQ(waits->Now().waits.size(), 1u);
  EXPECT_EQ(waits->Now().waits[0].wait.peer, 1);
  b.Wait();
  EXPECT_TRUE(waits->EveryoneWaits());
  const std::vector<Waits::Seen> seen = waits->Now().waits;
  ASSERT_EQ(seen.size(), 2u);
  EXPECT_NE(seen[0].id, seen[1].id);
  for (const Waits::Seen& one : seen) {
    EXPECT_GE(one.since, before);
    EXPECT_LE(one.since, SteadyNow());
  }
}

TEST(WaitsTest, AreInTheOrderInWhichTheyBegan) {
  for (const bool is_first_first : {true, false}) {
    auto waits = Waits::Create();
    Worker a(waits), b(waits);
    (is_first_first ? a : b).Wait();
    const int64_t first = waits->Now().waits.at(0).id;
    (is_first_first ? b : a).Wait();
    EXPECT_EQ(waits->Now().waits.at(0).id, first);
  }
}

TEST(WaitsTest, AWaitThatIsOverIsNone) {
  auto waits = Waits::Create();
  Worker a(waits);
  a.Wait();
  EXPECT_TRUE(waits->EveryoneWaits());
  a.SayOver();
  EXPECT_FALSE(waits->EveryoneWaits()) << "the thread will run as soon as it gets a core";
  EXPECT_TRUE(waits->Now().waits.empty());
}

TEST(WaitsTest, AThreadThatHasEndedUsesTheGroupNoMore) {
  auto waits = Waits::Create();
  Worker a(waits), b(waits);
  a.Wait();
  EXPECT_FALSE(waits->EveryoneWaits());
  b.End();
  EXPECT_TRUE(waits->EveryoneWaits());
  a.End();
  EXPECT_FALSE(waits->EveryoneWaits());
}

TEST(WaitsTest, AThreadUsesSeveralGroupsOneAfterTheOther) {
  auto first = Waits::Create(), second = Waits::Create();
  std::thread([&] {
    first->Use();
    for (int i = 0; i < 3; ++i) {
      second = Waits::Create();  // Perhaps at the address of the one before.
      second->Use();
      second->Use();
      EXPECT_FALSE(second->EveryoneWaits());
      Waits::Scope scope(
          second, [] { return ForRank(2); }, [] { return false; });
      EXPECT_TRUE(second->EveryoneWaits());
      EXPECT_FALSE(first->EveryoneWaits());
    }
  }).join();
  Waits::Scope scope(
      second, [] { return ForRank(2); }, [] { return false; });
  EXPECT_TRUE(second->EveryoneWaits()) << "only this thread is left";
}

TEST(WaitsTest, TheInnermostWaitCounts) {
  auto waits = Waits::Create();
  Waits::Scope outer(
      waits, [] { return ForRank(1); }, [] { return true; });
  {
    Waits::Scope inner(
        waits, [] { return ForRank(2); }, [] { return false; });
    EXPECT_TRUE(waits->EveryoneWaits());
    ASSERT_EQ(waits->Now().waits.size(), 1u);
    EXPECT_EQ(waits->Now().waits[0].wait.peer, 2);
  }
  EXPECT_FALSE(waits->EveryoneWaits());
}

TEST(WaitsTest, TheLibrarysThreadsDoNotCount) {
  auto waits = Waits::Create();
  Waits::Scope scope(
      waits, [] { return ForRank(1); }, [] { return false; });
  std::thread([&] {
    ThisThreadIsTheLibrarys();
    waits->Use();
    Waits::Scope unseen(
        waits, [] { return ForRank(2); }, [] { return false; });
    EXPECT_TRUE(waits->EveryoneWaits());
    EXPECT_EQ(waits->Now().waits.size(), 1u);
  }).join();
  std::thread([&] {
    {
      LibrarysTurn turn;
      waits->Use();
      EXPECT_TRUE(waits->EveryoneWaits());
    }
    waits->Use();
    EXPECT_FALSE(waits->EveryoneWaits());
  }).join();
  EXPECT_TRUE(waits->EveryoneWaits());
}

TEST(WaitsTest, ANullRegistryKeepsNoAccount) {
  Waits::Scope scope(
      nullptr, [] { return ForRank(1); }, [] { return false; });
}

TEST(WaitsTest, AGroupMayGoBeforeTheThreadsThatUsedIt) {
  auto waits = Waits::Create();
  absl::Notification used, gone;
  std::thread thread([&] {
    waits->Use();
    used.Notify();
    gone.WaitForNotification();
  });
  used.WaitForNotification();
  waits.reset();
  gone.Notify();
  thread.join();
}

TEST(WaitsTest, ThreadsComeWaitAndGoWhileSomebodyLooks) {
  auto waits = Waits::Create();
  std::atomic<bool> stop = false;
  std::thread looker([&] {
    while (!stop) waits->Now();
  });
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 300; ++i) {
        waits->Use();
        Waits::Scope scope(
            waits, [] { return ForRank(1); }, [] { return false; });
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  stop = true;
  looker.join();
  EXPECT_FALSE(waits->EveryoneWaits());
}

}  // namespace
}  // namespace evenkeel::internal
