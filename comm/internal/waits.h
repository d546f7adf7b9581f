// Which threads of this rank use a group, and which of them wait, and for what.
//
//   waits->Use();                                            // at each call that issues something
//   Waits::Scope scope(waits, [=] { return Wait{...}; }, [=] { return state->IsDone(); });   // around each blocking wait
//   if (waits->EveryoneWaits()) ... waits->Current() ...     // on the watchdog's thread
//
// A rank can make no step by itself while every thread that has ever used the group, and still runs, waits in a call of
// the group for something that has not happened yet. That is what makes a deadlock of the group a fact and not a guess;
// see comm/internal/whereabouts.h. Threads of the library itself do not count: they only do what others ask.
//
// Threads: thread-safe. `describe` and `is_over` run on other threads, with the registry's lock held: they may take
//          locks of what is waited for, and must not call this.

#ifndef EVENKEEL_COMM_INTERNAL_WAITS_H_
#define EVENKEEL_COMM_INTERNAL_WAITS_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "evenkeel/comm/internal/whereabouts.h"

namespace evenkeel::internal {

class Waits : public std::enable_shared_from_this<Waits> {
 public:
  // While it lives, this thread waits. `describe` is called only if somebody asks.
  class Scope {
   public:
    Scope(std::shared_ptr<Waits> waits, std::function<Wait()> describe, std::function<bool()> is_over);
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    const std::shared_ptr<Waits> waits_;  // Null: nobody keeps account of this wait.
  };

  // The calling thread uses the group, until the thread ends. Cheap after the first call.
  void Use();
  // Whether there is a thread that uses the group, and all of them wait for what is not over.
  bool EveryoneWaits() const;
  // What is waited for at the moment.
  std::vector<Wait> Current() const;

 private:
  struct Waiting {
    std::function<Wait()> describe;
    std::function<bool()> is_over;
  };

  mutable absl::Mutex mutex_;
  std::map<std::thread::id, std::vector<Waiting>> threads_ ABSL_GUARDED_BY(mutex_);  // Empty: it runs.
};

// Marks the calling thread as the library's own, for good.
void ThisThreadIsTheLibrarys();

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_INTERNAL_WAITS_H_
