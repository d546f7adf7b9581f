// Which threads of this rank use a group, and which of them wait, and for what.
//
//   waits->Use();                                            // at each call that issues something
//   Waits::Scope scope(waits, [=] { return Wait{...}; }, [=] { return state->IsDone(); });   // around each blocking wait
//   Waits::Snapshot now = waits->Now();                       // on the watchdog's thread
//
// A rank can make no step by itself while every thread that has ever used the group, and still runs, waits in a call of
// the group for something that has not happened yet. That is what makes a deadlock of the group a fact and not a guess;
// see comm/internal/whereabouts.h. Threads of the library itself do not count: they only do what others ask. While one
// runs callbacks of an ended operation, however, the rank can go on.
//
// Threads: thread-safe. `describe` and `is_over` run on other threads, with the registry's lock held: they may take
//          locks of what is waited for, and must not call this.

#ifndef EVENKEEL_COMM_INTERNAL_WAITS_H_
#define EVENKEEL_COMM_INTERNAL_WAITS_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "evenkeel/comm/internal/whereabouts.h"

namespace evenkeel::internal {

class Waits : public std::enable_shared_from_this<Waits> {
 public:
  static std::shared_ptr<Waits> Create();

  // While it lives, this thread uses the group, and waits. `describe` is called only if somebody asks. Scopes of one
  // thread end in the opposite order of their beginning; the innermost is what the thread waits for.
  class Scope {
   public:
    // `waits` null: nobody keeps account of this wait. The same on a thread of the library's own.
    Scope(std::shared_ptr<Waits> waits, std::function<Wait()> describe, std::function<bool()> is_over);
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    const std::shared_ptr<Waits> waits_;
  };

  // While it lives, callbacks of an ended operation run: they may issue the next one, so the rank does not wait.
  class Callbacks {
   public:
    explicit Callbacks(std::shared_ptr<Waits> waits);  // Null: nobody keeps account.
    ~Callbacks();
    Callbacks(const Callbacks&) = delete;
    Callbacks& operator=(const Callbacks&) = delete;

   private:
    const std::shared_ptr<Waits> waits_;
  };

  // The calling thread uses the group, until the thread ends. A look at a thread's own list after the first call.
  void Use();

  struct Seen {
    Wait wait;
    int64_t id = 0;  // Of this wait alone.
    absl::Time since;
  };
  struct Snapshot {
    // There is a thread that uses the group, all of them wait for what is not over, and no callbacks run.
    bool everyone_waits = false;
    std::vector<Seen> waits;  // What is waited for and not over.
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

  const uint64_t id_;  // Never that of another one, which an address could be.
  mutable absl::Mutex mutex_;
  int64_t next_wait_ ABSL_GUARDED_BY(mutex_) = 0;
  int callbacks_ ABSL_GUARDED_BY(mutex_) = 0;                                        // Of how many operations they run.
  std::map<std::thread::id, std::vector<Waiting>> threads_ ABSL_GUARDED_BY(mutex_);  // Empty: it runs.
};

// Marks the calling thread as the library's own, for good: control threads, communication threads, workers.
void ThisThreadIsTheLibrarys();

// While it lives, the calling thread does the library's work: it runs callbacks.
class LibrarysTurn {
 public:
  LibrarysTurn();
  ~LibrarysTurn();
  LibrarysTurn(const LibrarysTurn&) = delete;
  LibrarysTurn& operator=(const LibrarysTurn&) = delete;

 private:
  const bool before_;
};

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_INTERNAL_WAITS_H_
