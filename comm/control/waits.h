// The threads of this rank that use a group, and their waits.
//
//   waits->Use();                                            // at each call that issues something
//   // around each blocking wait
//   Waits::Scope scope(waits, [=] { return Wait{...}; }, [=] { return state->IsDone(); });
//   Waits::Snapshot now = waits->Now();                       // on the watchdog's thread
//
// A rank can make no progress by itself while every thread that has ever used the group, and still
// runs, waits in a call of the group for an event that has not happened yet. This makes the
// detection of a deadlock a proof instead of a guess; see comm/control/rank_status.h. Threads of
// the library do not count, since they only act on requests. But while one of them runs callbacks
// of an ended operation, the rank can make progress.
//
// Threads: thread-safe. `describe` and `is_over` run on other threads, with the registry's lock
//          held: they may take locks of what is waited for, and must not call this class.

#ifndef EVENKEEL_COMM_CONTROL_WAITS_H_
#define EVENKEEL_COMM_CONTROL_WAITS_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "evenkeel/comm/control/rank_status.h"

namespace evenkeel::internal {

// Returns the time, in nanoseconds, that this thread has spent in waits of the library, in all
// groups.
int64_t NanosWaited();

// Counts its lifetime as a wait of this thread; once, if such objects are nested.
class CountedWait {
 public:
  CountedWait();
  ~CountedWait();
  CountedWait(const CountedWait&) = delete;
  CountedWait& operator=(const CountedWait&) = delete;
};

class Waits : public std::enable_shared_from_this<Waits> {
 public:
  static std::shared_ptr<Waits> Create();

  // While it lives, this thread uses the group, and waits. `describe` is called only on demand.
  // Scopes of one thread end in the reverse order of their beginning; the innermost is the thread's
  // wait.
  class Scope {
   public:
    // If `waits` is null, or on a thread of the library, the wait is not recorded.
    Scope(std::shared_ptr<Waits> waits, std::function<Wait()> describe,
          std::function<bool()> is_over);
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    const CountedWait counted_;
    const std::shared_ptr<Waits> waits_;
  };

  // While it lives, callbacks of an ended operation run. They may issue the next one, so the rank
  // does not wait.
  class Callbacks {
   public:
    explicit Callbacks(std::shared_ptr<Waits> waits);  // Null: not recorded.
    ~Callbacks();
    Callbacks(const Callbacks&) = delete;
    Callbacks& operator=(const Callbacks&) = delete;

   private:
    const std::shared_ptr<Waits> waits_;
  };

  // Records that the calling thread uses the group until the thread ends. After the first call it
  // costs a search of the thread's own list.
  void Use();

  struct Seen {
    Wait wait;
    int64_t id = 0;  // Unique for each wait.
    absl::Time since;
  };
  struct Snapshot {
    // At least one thread uses the group, all of them wait for events that have not happened, and
    // no callbacks run.
    bool everyone_waits = false;
    std::vector<Seen> waits;  // Those that are not over, in the order in which they began.
  };
  Snapshot Now() const;
  bool EveryoneWaits() const { return Now().everyone_waits; }

 private:
  friend class Memberships;
  struct Waiting {
    std::function<Wait()> describe;
    std::function<bool()> is_over;
    int64_t id = 0;
    absl::Time since;
  };

  Waits();
  void Join(std::thread::id thread);
  void Leave(std::thread::id thread);

  const uint64_t id_;  // Never reused, unlike an address.
  mutable absl::Mutex mutex_;
  int64_t next_wait_ ABSL_GUARDED_BY(mutex_) = 0;
  int callbacks_ ABSL_GUARDED_BY(mutex_) = 0;  // The number of operations whose callbacks run.
  std::map<std::thread::id, std::vector<Waiting>> threads_
      ABSL_GUARDED_BY(mutex_);  // Empty list: the thread runs.
};

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_CONTROL_WAITS_H_
