// Correct use of every lock operation; --config=tsan must find nothing in it.

#include <map>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/barrier.h"
#include "absl/synchronization/blocking_counter.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "absl/time/time.h"
#include "gtest/gtest.h"

namespace {

constexpr int kThreads = 4;

// Runs `body(i)` on kThreads threads.
template <typename Body>
void OnThreads(Body body) {
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) threads.emplace_back(body, i);
  for (std::thread& thread : threads) thread.join();
}

bool IsFull(int* count) { return *count == kThreads; }

TEST(MutexTest, OrdersWritesToAContainer) {
  absl::Mutex mutex;
  std::map<int, std::vector<int>> seen;
  OnThreads([&](int thread) {
    for (int i = 0; i < 2000; ++i) {
      absl::MutexLock lock(&mutex);
      seen[i % 7].push_back(thread);
    }
  });
  EXPECT_EQ(seen.size(), 7u);
}

TEST(MutexTest, OrdersReadersAfterWriters) {
  absl::Mutex mutex;
  int value = 0;
  OnThreads([&](int thread) {
    for (int i = 0; i < 1000; ++i) {
      if (thread % 2 == 0) {
        absl::ReaderMutexLock lock(&mutex);
        EXPECT_GE(value, 0);
      } else {
        absl::WriterMutexLock lock(&mutex);
        ++value;
      }
    }
  });
  EXPECT_EQ(value, 2000);
}

TEST(MutexTest, OrdersThroughTryLockAndRelease) {
  absl::Mutex mutex;
  int value = 0;
  OnThreads([&](int) {
    while (!mutex.TryLock()) std::this_thread::yield();
    ++value;
    mutex.Unlock();
    absl::ReleasableMutexLock lock(&mutex);
    ++value;
    lock.Release();
    while (!mutex.ReaderTryLock()) std::this_thread::yield();
    EXPECT_GE(value, 2);
    mutex.ReaderUnlock();
  });
  EXPECT_EQ(value, 2 * kThreads);
}

TEST(MutexTest, OrdersThroughConditions) {
  absl::Mutex mutex;
  int arrived = 0;
  OnThreads([&](int thread) {
    absl::Condition all(&IsFull, &arrived);
    {
      absl::MutexLock lock(&mutex);
      ++arrived;
      if (thread == 0) mutex.Await(all);
      if (thread == 1) mutex.AwaitWithTimeout(all, absl::InfiniteDuration());
      if (thread == 2) mutex.AwaitWithDeadline(all, absl::InfiniteFuture());
    }
    absl::MutexLock lock(&mutex, all);
    EXPECT_EQ(arrived, kThreads);
  });

  absl::ReaderMutexLock lock(&mutex, absl::Condition(&IsFull, &arrived));
  arrived = 0;  // no other thread is left
  EXPECT_FALSE(mutex.AwaitWithTimeout(absl::Condition(&IsFull, &arrived), absl::Milliseconds(1)));
}

TEST(CondVarTest, OrdersWhatTheSignalAnnounces) {
  absl::Mutex mutex;
  absl::CondVar changed;
  int arrived = 0;
  OnThreads([&](int thread) {
    absl::MutexLock lock(&mutex);
    ++arrived;
    changed.SignalAll();
    while (arrived < kThreads) {
      if (thread % 2 == 0) {
        changed.Wait(&mutex);
      } else {
        changed.WaitWithTimeout(&mutex, absl::Milliseconds(1));
      }
    }
  });
  EXPECT_EQ(arrived, kThreads);
}

TEST(NotificationTest, OrdersWhatCameBefore) {
  absl::Notification notification;
  int value = 0;
  OnThreads([&](int thread) {
    if (thread == 0) {
      value = 4;
      notification.Notify();
    }
    if (thread == 1) notification.WaitForNotification();
    if (thread == 2) {
      notification.WaitForNotificationWithTimeout(absl::InfiniteDuration());
    }
    while (!notification.HasBeenNotified()) std::this_thread::yield();
    EXPECT_EQ(value, 4);
  });
}

TEST(BlockingCounterTest, OrdersEveryDecrementBeforeTheWait) {
  absl::BlockingCounter counter(kThreads);
  int values[kThreads] = {};
  std::thread waiter([&] {
    counter.Wait();
    for (int i = 0; i < kThreads; ++i) EXPECT_EQ(values[i], i);
  });
  OnThreads([&](int thread) {
    values[thread] = thread;
    counter.DecrementCount();
  });
  waiter.join();
}

TEST(BarrierTest, OrdersBothSides) {
  auto* barrier = new absl::Barrier(kThreads);
  int values[kThreads] = {};
  OnThreads([&](int thread) {
    values[thread] = thread;
    bool is_last = barrier->Block();
    for (int i = 0; i < kThreads; ++i) EXPECT_EQ(values[i], i);
    if (is_last) delete barrier;
  });
}

}  // namespace
