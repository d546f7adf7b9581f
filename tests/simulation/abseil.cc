// absl::Mutex, absl::CondVar, absl::Condition, absl::Now() and absl::SleepFor() as operations on
// the world.
//
// This file defines every function of Abseil's object files for them that a program of ours refers
// to, so that the linker leaves those files out; if one is missing here, linking fails with
// duplicate definitions. Since 20230802 Abseil has fewer of them: all waits are inline calls of a
// common one. Outside a world there is one thread, and a lock only records its state.
//
// The first word of a Mutex is 0, the address of the thread that holds it plus kWriter, or the
// number of readers times kReader. Waiting threads are in a separate queue, found by the address of
// the Mutex.

#include <time.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <vector>

#include "absl/base/config.h"
#include "absl/container/flat_hash_map.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "evenkeel/comm/base/clock.h"
#include "evenkeel/tests/simulation/clock.h"
#include "evenkeel/tests/simulation/world.h"

namespace evenkeel::simulation {
namespace {

constexpr intptr_t kWriter = 1, kReader = 2;
constexpr intptr_t kOutside = kWriter;  // Held by a thread that is not simulated.

intptr_t& WordOf(const void* lock) { return *static_cast<intptr_t*>(const_cast<void*>(lock)); }

struct Waiter {
  Thread* thread;
  const absl::Condition* condition;  // Null: waits for no condition.
};

// Leaked, because locks are used until the process ends.
absl::flat_hash_map<const void*, std::vector<Waiter>>& Queues() {
  static auto* const queues = new absl::flat_hash_map<const void*, std::vector<Waiter>>();
  return *queues;
}

void WakeAll(const void* address) {
  const auto found = Queues().find(address);
  if (found == Queues().end()) return;
  std::vector<Waiter> woken;
  std::vector<Waiter> rest;
  for (const Waiter& waiter : found->second) {
    const bool is_due = waiter.condition == nullptr || waiter.condition->Eval();  // Takes no lock.
    (is_due ? woken : rest).push_back(waiter);
  }
  if (rest.empty()) {
    Queues().erase(found);
  } else {
    found->second = std::move(rest);
  }
  for (const Waiter& waiter : woken) World::Get()->Wake(waiter.thread);
}

void Forget(const void* address, const Thread* thread) {
  const auto found = Queues().find(address);
  if (found == Queues().end()) return;
  std::erase_if(found->second, [&](const Waiter& waiter) { return waiter.thread == thread; });
  if (found->second.empty()) Queues().erase(found);
}

// Waits to be woken, or until the deadline. Also returns true, as if woken, when its clock is set.
bool Block(const Deadline& deadline, const char* doing) {
  Thread* const self = World::Current();
  self->waits_by_clock = !deadline.is_steady && deadline.time != absl::InfiniteFuture();
  const bool is_woken = World::Get()->Block(deadline.InWorld(), doing);
  self->waits_by_clock = false;
  return is_woken;
}

// Waits until WakeAll() finds the condition true, or until the deadline. The caller looks again.
void WaitIn(const void* address, const absl::Condition* condition, const Deadline& deadline,
            const char* doing) {
  Thread* const self = World::Current();
  Queues()[address].push_back({self, condition});
  (void)Block(deadline, doing);
  Forget(address, self);
}

bool IsFree(intptr_t word, bool for_reading) {
  return word == 0 || (for_reading && (word & kWriter) == 0);
}

void Take(intptr_t& word, bool for_reading) {
  word = for_reading ? word + kReader
                     : reinterpret_cast<intptr_t>(World::Current()) | kWriter;  // Aligned: bit 0.
}

// Returns null if the lock is free, or not held for writing by a simulated thread.
Thread* HolderOf(const void* lock) {
  const intptr_t word = WordOf(lock);
  if ((word & kWriter) == 0 || word == kOutside) return nullptr;
  return reinterpret_cast<Thread*>(word & ~kWriter);
}

void Lock(const void* lock, bool for_reading, const char* doing) {
  const Inside inside;
  intptr_t& word = WordOf(lock);
  if (World::Current() == nullptr) {
    if (!IsFree(word, for_reading)) std::abort();  // A second thread outside the world.
    return Take(word, for_reading);
  }
  World::Get()->Point(doing);
  while (!IsFree(word, for_reading)) {
    World::Get()->WaitsFor(HolderOf(lock), lock);
    WaitIn(lock, nullptr, Deadline(), doing);
  }
  Take(word, for_reading);
}

bool TryLock(const void* lock, bool for_reading) {
  const Inside inside;
  if (World::Current() != nullptr) World::Get()->Point("tries a lock");
  if (!IsFree(WordOf(lock), for_reading)) return false;
  Take(WordOf(lock), for_reading);
  return true;
}

// Releases without a point at which the thread may lose the processor, since the caller waits next.
void Release(const void* lock) {
  intptr_t& word = WordOf(lock);
  if ((word & kWriter) == 0 && word > kReader) {
    word -= kReader;
    return;
  }
  if (World::Current() != nullptr) WakeAll(lock);  // Conditions are evaluated under the lock.
  word = 0;
}

void Unlock(const void* lock) {
  const Inside inside;
  Release(lock);
  Thread* const self = World::Current();
  if (self == nullptr) return;
  World::Get()->HasReleased(self, lock);
  World::Get()->Point("has released a lock");
}

bool LockWhen(const void* lock, bool for_reading, const absl::Condition& condition,
              const Deadline& deadline) {
  const Inside inside;
  static constexpr char kDoing[] = "waits for a condition";
  Lock(lock, for_reading, kDoing);
  while (!condition.Eval()) {
    if (World::Current() == nullptr) std::abort();  // No thread can ever make it true.
    if (deadline.InWorld() <= World::Get()->now()) return false;
    Release(lock);
    WaitIn(lock, &condition, deadline, kDoing);
    Lock(lock, for_reading, kDoing);
  }
  return true;
}

bool Await(const void* lock, const absl::Condition& condition, const Deadline& deadline) {
  const Inside inside;
  if (condition.Eval()) return true;
  const bool for_reading = (WordOf(lock) & kWriter) == 0;
  Release(lock);
  return LockWhen(lock, for_reading, condition, deadline);
}

bool WaitFor(const void* variable, const void* lock, const Deadline& deadline) {
  const Inside inside;
  static constexpr char kDoing[] = "waits for a signal";
  if (World::Current() == nullptr) std::abort();
  const bool for_reading = (WordOf(lock) & kWriter) == 0;
  Thread* const self = World::Current();
  Queues()[variable].push_back({self, nullptr});
  Release(lock);
  const bool is_late = !Block(deadline, kDoing) || deadline.InWorld() <= World::Get()->now();
  Forget(variable, self);
  Lock(lock, for_reading, kDoing);
  return is_late;
}

#if ABSL_LTS_RELEASE_VERSION >= 20230802
Deadline DeadlineOf(const absl::synchronization_internal::KernelTimeout& timeout) {
  if (!timeout.has_timeout()) return {};
  if (timeout.is_absolute_timeout()) return {absl::FromUnixNanos(timeout.MakeAbsNanos())};
  return {.time = SteadyNow() + absl::FromChrono(timeout.ToChronoDuration()), .is_steady = true};
}
#endif

}  // namespace
}  // namespace evenkeel::simulation

namespace evenkeel {

absl::Time SteadyNow() {
  const simulation::Thread* const thread = simulation::World::Current();
  if (thread == nullptr) return absl::Now();
  return absl::FromUnixNanos(
      simulation::SteadyTime(*thread->host, simulation::World::Get()->Tick()));
}

bool AwaitUntil(absl::Mutex& mutex, const absl::Condition& condition, absl::Time deadline) {
  return simulation::Await(&mutex, condition, {.time = deadline, .is_steady = true});
}

bool WaitUntil(absl::CondVar& signal, absl::Mutex& mutex, absl::Time deadline) {
  return simulation::WaitFor(&signal, &mutex, {.time = deadline, .is_steady = true});
}

}  // namespace evenkeel

namespace absl {
ABSL_NAMESPACE_BEGIN

namespace sim = evenkeel::simulation;
using synchronization_internal::KernelTimeout;

void Mutex::Lock() { sim::Lock(this, false, "takes a lock"); }
void Mutex::Unlock() { sim::Unlock(this); }
bool Mutex::TryLock() { return sim::TryLock(this, false); }
void Mutex::ReaderLock() { sim::Lock(this, true, "takes a lock for reading"); }
void Mutex::ReaderUnlock() { sim::Unlock(this); }
bool Mutex::ReaderTryLock() { return sim::TryLock(this, true); }
void Mutex::AssertHeld() const {
  if ((sim::WordOf(this) & sim::kWriter) != 0) return;
  std::fprintf(stderr, "simulation: AssertHeld() on a lock that is not held\n");
  std::abort();
}
void Mutex::AssertReaderHeld() const {
  if (sim::WordOf(this) == 0) AssertHeld();
}
void Mutex::AssertNotHeld() const {}
void Mutex::ForgetDeadlockInfo() {}
void Mutex::EnableInvariantDebugging(void (*)(void*), void*) {}
void Mutex::EnableDebugLog(const char*) {}

void CondVar::EnableDebugLog(const char*) {}
void CondVar::SignalAll() {
  const sim::Inside inside;
  if (sim::World::Current() == nullptr) return;
  sim::WakeAll(this);
  sim::World::Get()->Point("has signalled");
}
void CondVar::Signal() {
  const sim::Inside inside;
  if (sim::World::Current() == nullptr) return;
  if (const auto found = sim::Queues().find(this); found != sim::Queues().end()) {
    const int count = static_cast<int>(found->second.size());
    sim::Thread* const thread = found->second[sim::World::Get()->draws().Below(count)].thread;
    sim::Forget(this, thread);
    sim::World::Get()->Wake(thread);
  }
  sim::World::Get()->Point("has signalled");
}

const Condition Condition::kTrue;
#if ABSL_LTS_RELEASE_VERSION < 20230802
Condition::Condition() : eval_(nullptr), function_(nullptr), method_(nullptr), arg_(nullptr) {}
Condition::Condition(bool (*function)(void*), void* argument)
    : eval_(&CallVoidPtrFunction), function_(function), method_(nullptr), arg_(argument) {}
Condition::Condition(const bool* condition)
    : eval_([](const Condition* self) { return *static_cast<const bool*>(self->arg_); }),
      function_(nullptr),
      method_(nullptr),
      arg_(const_cast<bool*>(condition)) {}
bool Condition::CallVoidPtrFunction(const Condition* self) { return self->function_(self->arg_); }

Mutex::~Mutex() {}
void Mutex::Await(const Condition& condition) { sim::Await(this, condition, sim::Deadline()); }
void Mutex::LockWhen(const Condition& condition) {
  sim::LockWhen(this, false, condition, sim::Deadline());
}
void Mutex::ReaderLockWhen(const Condition& condition) {
  sim::LockWhen(this, true, condition, sim::Deadline());
}
bool Mutex::AwaitWithTimeout(const Condition& condition, Duration timeout) {
  return sim::Await(this, condition, {Now() + timeout});
}
bool Mutex::AwaitWithDeadline(const Condition& condition, Time deadline) {
  return sim::Await(this, condition, {deadline});
}
bool Mutex::LockWhenWithTimeout(const Condition& condition, Duration timeout) {
  return sim::LockWhen(this, false, condition, {Now() + timeout});
}
bool Mutex::LockWhenWithDeadline(const Condition& condition, Time deadline) {
  return sim::LockWhen(this, false, condition, {deadline});
}
bool Mutex::ReaderLockWhenWithTimeout(const Condition& condition, Duration timeout) {
  return sim::LockWhen(this, true, condition, {Now() + timeout});
}
bool Mutex::ReaderLockWhenWithDeadline(const Condition& condition, Time deadline) {
  return sim::LockWhen(this, true, condition, {deadline});
}

CondVar::~CondVar() {}
void CondVar::Wait(Mutex* mutex) { sim::WaitFor(this, mutex, sim::Deadline()); }
bool CondVar::WaitWithTimeout(Mutex* mutex, Duration timeout) {
  return sim::WaitFor(this, mutex, {Now() + timeout});
}
bool CondVar::WaitWithDeadline(Mutex* mutex, Time deadline) {
  return sim::WaitFor(this, mutex, {deadline});
}
#else
Condition::Condition(bool (*function)(void*), void* argument)
    : eval_(&CallVoidPtrFunction), arg_(argument) {
  StoreCallback(function);
}
Condition::Condition(const bool* condition)
    : eval_([](const Condition* self) { return *static_cast<const bool*>(self->arg_); }),
      arg_(const_cast<bool*>(condition)) {}
bool Condition::CallVoidPtrFunction(const Condition* self) {
  bool (*function)(void*);
  self->ReadCallback(&function);
  return function(self->arg_);
}

#ifdef NDEBUG
// Inline here, but Abseil's archives call it. Its address makes this file define it for them.
template <void (Mutex::*function)()>
struct Emitted {
  [[gnu::used]] static inline void (Mutex::*const address)() = function;
};
template struct Emitted<&Mutex::Dtor>;
#else
void Mutex::Dtor() {}
#endif
bool Mutex::AwaitCommon(const Condition& condition, KernelTimeout timeout) {
  return sim::Await(this, condition, sim::DeadlineOf(timeout));
}
bool Mutex::LockWhenCommon(const Condition& condition, KernelTimeout timeout, bool for_writing) {
  return sim::LockWhen(this, !for_writing, condition, sim::DeadlineOf(timeout));
}

bool CondVar::WaitCommon(Mutex* mutex, KernelTimeout timeout) {
  return sim::WaitFor(this, mutex, sim::DeadlineOf(timeout));
}
#endif

bool Condition::Eval() const { return eval_ == nullptr || eval_(this); }

void ReleasableMutexLock::Release() {
  mu_->Unlock();
  mu_ = nullptr;
}

// Abseil's own function extrapolates from the processor's cycles, which are not simulated.
int64_t GetCurrentTimeNanos() {
  timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  return now.tv_sec * int64_t{1'000'000'000} + now.tv_nsec;
}

Time Now() { return FromUnixNanos(GetCurrentTimeNanos()); }

ABSL_NAMESPACE_END
}  // namespace absl

extern "C" void ABSL_INTERNAL_C_SYMBOL(AbslInternalSleepFor)(absl::Duration duration) {
  for (absl::Duration left = duration; left > absl::ZeroDuration();) {
    const absl::Duration part = std::min(left, absl::Hours(1));
    const timespec time = absl::ToTimespec(part);
    nanosleep(&time, nullptr);
    left -= part;
  }
}
