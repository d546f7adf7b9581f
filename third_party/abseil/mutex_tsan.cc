// Shows Abseil's locks to ThreadSanitizer.
//
// The installed Abseil is not compiled for it, and its mutex is its own atomics
// and futexes, so ThreadSanitizer would see a race behind every absl::Mutex.
// Under --config=tsan the linker redirects the lock operations (--wrap) to
// these functions, which announce what the original does.
//
// Memory accesses between a "pre" and its "post" are ignored; that covers the
// conditions that Abseil evaluates on behalf of a waiter while it unlocks.

#include <sanitizer/tsan_interface.h>

#include <cstdint>

#include "absl/synchronization/barrier.h"
#include "absl/synchronization/blocking_counter.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"

// EK_ABSL is the inline namespace as it is mangled, such as 12lts_20220623.
#define EK_TEXT(token) #token
#define EK_EXPANDED_TEXT(token) EK_TEXT(token)
#define EK_MEMBER "_ZN4absl" EK_EXPANDED_TEXT(EK_ABSL)
#define EK_CONST_MEMBER "_ZNK4absl" EK_EXPANDED_TEXT(EK_ABSL)

// Declares the original, and the function that is called in its place. The
// build reads the symbols to redirect from these lines.
#define EK_WRAP(result, name, symbol, ...)                        \
  result Real##name(__VA_ARGS__) asm("__real_" EK_MEMBER symbol); \
  result Wrapped##name(__VA_ARGS__) asm("__wrap_" EK_MEMBER symbol)
#define EK_WRAP_CONST(result, name, symbol, ...)                        \
  result Real##name(__VA_ARGS__) asm("__real_" EK_CONST_MEMBER symbol); \
  result Wrapped##name(__VA_ARGS__) asm("__wrap_" EK_CONST_MEMBER symbol)

namespace {

using absl::BlockingCounter;
using absl::Condition;
using absl::CondVar;
using absl::Duration;
using absl::Mutex;
using absl::Notification;
using absl::ReleasableMutexLock;
using absl::Time;

constexpr unsigned kWrite = 0;
constexpr unsigned kRead = __tsan_mutex_read_lock;

template <typename Call>
void Locking(Mutex* mutex, unsigned how, Call call) {
  __tsan_mutex_pre_lock(mutex, how);
  call();
  __tsan_mutex_post_lock(mutex, how, 0);
}

template <typename Call>
bool TryLocking(Mutex* mutex, unsigned how, Call call) {
  how |= __tsan_mutex_try_lock;
  __tsan_mutex_pre_lock(mutex, how);
  bool locked = call();
  __tsan_mutex_post_lock(mutex, locked ? how : how | __tsan_mutex_try_lock_failed, 0);
  return locked;
}

template <typename Call>
void Unlocking(Mutex* mutex, unsigned how, Call call) {
  __tsan_mutex_pre_unlock(mutex, how);
  call();
  __tsan_mutex_post_unlock(mutex, how);
}

// How the calling thread holds `mutex`: the writer bit of its first word.
unsigned HeldHow(Mutex* mutex) {
  constexpr intptr_t kWriterBit = 8;
  intptr_t word = __atomic_load_n(reinterpret_cast<intptr_t*>(mutex), __ATOMIC_RELAXED);
  return (word & kWriterBit) != 0 ? kWrite : kRead;
}

// A wait gives the lock up and returns with it held again.
template <typename Call>
auto Waiting(Mutex* mutex, Call call) {
  unsigned how = HeldHow(mutex);
  __tsan_mutex_pre_unlock(mutex, how);
  __tsan_mutex_post_unlock(mutex, how);
  __tsan_mutex_pre_lock(mutex, how);
  auto result = call();
  __tsan_mutex_post_lock(mutex, how, 0);
  return result;
}

// The flag that Notification::HasBeenNotified() reads inline.
char* Flag(const Notification* notification) {
  return reinterpret_cast<char*>(const_cast<Notification*>(notification)) + sizeof(Mutex);
}

}  // namespace

// Mutex

EK_WRAP(void, Lock, "5Mutex4LockEv", Mutex* mutex);
void WrappedLock(Mutex* mutex) {
  Locking(mutex, kWrite, [&] { RealLock(mutex); });
}

EK_WRAP(void, Unlock, "5Mutex6UnlockEv", Mutex* mutex);
void WrappedUnlock(Mutex* mutex) {
  Unlocking(mutex, kWrite, [&] { RealUnlock(mutex); });
}

EK_WRAP(bool, TryLock, "5Mutex7TryLockEv", Mutex* mutex);
bool WrappedTryLock(Mutex* mutex) {
  return TryLocking(mutex, kWrite, [&] { return RealTryLock(mutex); });
}

EK_WRAP(void, ReaderLock, "5Mutex10ReaderLockEv", Mutex* mutex);
void WrappedReaderLock(Mutex* mutex) {
  Locking(mutex, kRead, [&] { RealReaderLock(mutex); });
}

EK_WRAP(void, ReaderUnlock, "5Mutex12ReaderUnlockEv", Mutex* mutex);
void WrappedReaderUnlock(Mutex* mutex) {
  Unlocking(mutex, kRead, [&] { RealReaderUnlock(mutex); });
}

EK_WRAP(bool, ReaderTryLock, "5Mutex13ReaderTryLockEv", Mutex* mutex);
bool WrappedReaderTryLock(Mutex* mutex) {
  return TryLocking(mutex, kRead, [&] { return RealReaderTryLock(mutex); });
}

EK_WRAP(void, Destroy, "5MutexD1Ev", Mutex* mutex);
void WrappedDestroy(Mutex* mutex) {
  RealDestroy(mutex);
  __tsan_mutex_destroy(mutex, __tsan_mutex_not_static);
}

EK_WRAP(void, Release, "19ReleasableMutexLock7ReleaseEv", ReleasableMutexLock* lock);
void WrappedRelease(ReleasableMutexLock* lock) {
  Mutex* mutex = *reinterpret_cast<Mutex**>(lock);  // its only member
  Unlocking(mutex, kWrite, [&] { RealRelease(lock); });
}

// Mutex with conditions

EK_WRAP(void, LockWhen, "5Mutex8LockWhenERKNS0_9ConditionE", Mutex* mutex,
        const Condition& condition);
void WrappedLockWhen(Mutex* mutex, const Condition& condition) {
  Locking(mutex, kWrite, [&] { RealLockWhen(mutex, condition); });
}

EK_WRAP(void, ReaderLockWhen, "5Mutex14ReaderLockWhenERKNS0_9ConditionE", Mutex* mutex,
        const Condition& condition);
void WrappedReaderLockWhen(Mutex* mutex, const Condition& condition) {
  Locking(mutex, kRead, [&] { RealReaderLockWhen(mutex, condition); });
}

EK_WRAP(bool, LockWhenWithTimeout, "5Mutex19LockWhenWithTimeoutERKNS0_9ConditionENS0_8DurationE",
        Mutex* mutex, const Condition& condition, Duration timeout);
bool WrappedLockWhenWithTimeout(Mutex* mutex, const Condition& condition, Duration timeout) {
  bool met = false;
  Locking(mutex, kWrite, [&] { met = RealLockWhenWithTimeout(mutex, condition, timeout); });
  return met;
}

EK_WRAP(bool, LockWhenWithDeadline, "5Mutex20LockWhenWithDeadlineERKNS0_9ConditionENS0_4TimeE",
        Mutex* mutex, const Condition& condition, Time deadline);
bool WrappedLockWhenWithDeadline(Mutex* mutex, const Condition& condition, Time deadline) {
  bool met = false;
  Locking(mutex, kWrite, [&] { met = RealLockWhenWithDeadline(mutex, condition, deadline); });
  return met;
}

EK_WRAP(bool, ReaderLockWhenWithTimeout,
        "5Mutex25ReaderLockWhenWithTimeoutERKNS0_9ConditionENS0_8DurationE", Mutex* mutex,
        const Condition& condition, Duration timeout);
bool WrappedReaderLockWhenWithTimeout(Mutex* mutex, const Condition& condition, Duration timeout) {
  bool met = false;
  Locking(mutex, kRead, [&] { met = RealReaderLockWhenWithTimeout(mutex, condition, timeout); });
  return met;
}

EK_WRAP(bool, ReaderLockWhenWithDeadline,
        "5Mutex26ReaderLockWhenWithDeadlineERKNS0_9ConditionENS0_4TimeE", Mutex* mutex,
        const Condition& condition, Time deadline);
bool WrappedReaderLockWhenWithDeadline(Mutex* mutex, const Condition& condition, Time deadline) {
  bool met = false;
  Locking(mutex, kRead, [&] { met = RealReaderLockWhenWithDeadline(mutex, condition, deadline); });
  return met;
}

EK_WRAP(void, Await, "5Mutex5AwaitERKNS0_9ConditionE", Mutex* mutex, const Condition& condition);
void WrappedAwait(Mutex* mutex, const Condition& condition) {
  Waiting(mutex, [&] {
    RealAwait(mutex, condition);
    return true;
  });
}

EK_WRAP(bool, AwaitWithTimeout, "5Mutex16AwaitWithTimeoutERKNS0_9ConditionENS0_8DurationE",
        Mutex* mutex, const Condition& condition, Duration timeout);
bool WrappedAwaitWithTimeout(Mutex* mutex, const Condition& condition, Duration timeout) {
  return Waiting(mutex, [&] { return RealAwaitWithTimeout(mutex, condition, timeout); });
}

EK_WRAP(bool, AwaitWithDeadline, "5Mutex17AwaitWithDeadlineERKNS0_9ConditionENS0_4TimeE",
        Mutex* mutex, const Condition& condition, Time deadline);
bool WrappedAwaitWithDeadline(Mutex* mutex, const Condition& condition, Time deadline) {
  return Waiting(mutex, [&] { return RealAwaitWithDeadline(mutex, condition, deadline); });
}

// CondVar

EK_WRAP(void, Wait, "7CondVar4WaitEPNS0_5MutexE", CondVar* variable, Mutex* mutex);
void WrappedWait(CondVar* variable, Mutex* mutex) {
  Waiting(mutex, [&] {
    RealWait(variable, mutex);
    return true;
  });
}

EK_WRAP(bool, WaitWithTimeout, "7CondVar15WaitWithTimeoutEPNS0_5MutexENS0_8DurationE",
        CondVar* variable, Mutex* mutex, Duration timeout);
bool WrappedWaitWithTimeout(CondVar* variable, Mutex* mutex, Duration timeout) {
  return Waiting(mutex, [&] { return RealWaitWithTimeout(variable, mutex, timeout); });
}

EK_WRAP(bool, WaitWithDeadline, "7CondVar16WaitWithDeadlineEPNS0_5MutexENS0_4TimeE",
        CondVar* variable, Mutex* mutex, Time deadline);
bool WrappedWaitWithDeadline(CondVar* variable, Mutex* mutex, Time deadline) {
  return Waiting(mutex, [&] { return RealWaitWithDeadline(variable, mutex, deadline); });
}

// Notification and BlockingCounter, whose fast paths take no lock

EK_WRAP(void, Notify, "12Notification6NotifyEv", Notification* notification);
void WrappedNotify(Notification* notification) {
  __atomic_fetch_or(Flag(notification), 0, __ATOMIC_RELEASE);
  RealNotify(notification);
}

EK_WRAP_CONST(void, WaitForNotification, "12Notification19WaitForNotificationEv",
              const Notification* notification);
void WrappedWaitForNotification(const Notification* notification) {
  RealWaitForNotification(notification);
  __atomic_load_n(Flag(notification), __ATOMIC_ACQUIRE);
}

EK_WRAP_CONST(bool, WaitForNotificationWithTimeout,
              "12Notification30WaitForNotificationWithTimeoutENS0_8DurationE",
              const Notification* notification, Duration timeout);
bool WrappedWaitForNotificationWithTimeout(const Notification* notification, Duration timeout) {
  bool notified = RealWaitForNotificationWithTimeout(notification, timeout);
  __atomic_load_n(Flag(notification), __ATOMIC_ACQUIRE);
  return notified;
}

EK_WRAP_CONST(bool, WaitForNotificationWithDeadline,
              "12Notification31WaitForNotificationWithDeadlineENS0_4TimeE",
              const Notification* notification, Time deadline);
bool WrappedWaitForNotificationWithDeadline(const Notification* notification, Time deadline) {
  bool notified = RealWaitForNotificationWithDeadline(notification, deadline);
  __atomic_load_n(Flag(notification), __ATOMIC_ACQUIRE);
  return notified;
}

EK_WRAP(bool, DecrementCount, "15BlockingCounter14DecrementCountEv", BlockingCounter* counter);
bool WrappedDecrementCount(BlockingCounter* counter) {
  __tsan_release(counter);
  return RealDecrementCount(counter);
}

EK_WRAP(void, WaitForCount, "15BlockingCounter4WaitEv", BlockingCounter* counter);
void WrappedWaitForCount(BlockingCounter* counter) {
  RealWaitForCount(counter);
  __tsan_acquire(counter);
}
