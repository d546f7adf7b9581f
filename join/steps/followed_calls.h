// The collectives that user code issues inside RunJoined(), as one numbered list that ranks without
// inputs follow.
//
//   calls.Add(text, step, is_told); // active rank, before it issues one: whoever needs to know is
//     told
//   calls.BecomeExhausted();                 // this rank's loop has ended: from now on it follows
//   calls.HasNext(step); calls.TakeNext();
//
// A loop may issue them anywhere, also between two steps, where nobody knows yet who will have
// inputs in the next one. While a step is running that some ranks are known to be exhausted in, its
// lowest active rank tells them with all else it does (StepControl). For the rest there are
// notices: a rank that becomes exhausted says so, and how many it has issued; the lowest rank that
// has not said so tells what it has issued after that, and issues from then on. Who takes over that
// role repeats what was issued since the last agreed step; numbers say what a rank has followed
// already. So does an exhausted rank with what it has issued itself, when it learns of another one
// that was exhausted before. While all ranks have inputs no message is sent.
//
// Order: a call is followed before the step that it was issued before, and not before an earlier
//        one, whose beginning on this rank others may wait for: an active rank need not wait for
//        one step to issue calls after the next.
//
// Threads: thread-safe.

#ifndef EVENKEEL_JOIN_STEPS_FOLLOWED_CALLS_H_
#define EVENKEEL_JOIN_STEPS_FOLLOWED_CALLS_H_

#include <cstdint>
#include <deque>
#include <map>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "evenkeel/comm/control/control.h"

namespace evenkeel {

class FollowedCalls {
 public:
  static constexpr char kTopic[] = "calls";  // The topic of its notices.

  explicit FollowedCalls(ControlChannel* control) : control_(control) {}

  // A RunJoined() begins, or ends, on this rank; all ranks have the same ones.
  void BeginLoop();
  void EndLoop();

  // The number of the call that is about to be issued, before step `step`. `is_told(rank)`: that
  // rank will hear of it in another way.
  int64_t Add(const std::string& call, int64_t step, absl::FunctionRef<bool(int rank)> is_told);
  // Returns the number of calls that this rank has issued or shadowed, in all loops.
  int64_t position() const;
  // All ranks have issued or followed so many: what was before is not asked for any more.
  void Forget(int64_t before);

  // This rank follows from now on.
  void BecomeExhausted();
  // Returns whether it has received the next call, which came before that step.
  bool HasNext(int64_t step) const;
  // Waits until HasNext(step), or Answered(step) was called.
  void AwaitNext(int64_t step, absl::Time deadline);
  void Answered(int64_t step);
  // The next call; HasNext() must be true of it.
  std::string TakeNext();
  // The call was told in another way: false if it has been followed already.
  bool Take(int64_t number);

  void OnNotice(int from, absl::string_view notice);

 private:
  struct Call {
    int64_t step = 0;
    std::string text;
  };

  bool IsNext(int64_t step) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Returns the lowest rank that has not become exhausted in this loop, or the world size.
  int Leader() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool IsExhausted(int rank) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Notices of the calls from that one on; to be sent without the lock, which who asks about waits
  // takes inside others.
  std::vector<std::string> NoticesFrom(int64_t number) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Send(std::vector<std::string> notices);

  ControlChannel* const control_;
  mutable absl::Mutex mutex_;
  int64_t loop_ ABSL_GUARDED_BY(mutex_) = 0;
  bool is_exhausted_ ABSL_GUARDED_BY(mutex_) = false;
  int64_t position_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t answered_ ABSL_GUARDED_BY(mutex_) = -1;
  // On an active rank: calls first_, first_ + 1, ... that some rank may still have to receive.
  int64_t first_ ABSL_GUARDED_BY(mutex_) = 0;
  std::deque<Call> log_ ABSL_GUARDED_BY(mutex_);
  // By loop, of this one and of later ones that began on other ranks first: the ranks whose notice
  // of being exhausted has come.
  std::map<int64_t, std::vector<bool>> exhausted_ ABSL_GUARDED_BY(mutex_);
  // All lower ranks are exhausted in this loop. Kept, because a look at each rank for every notice
  // would be quadratic.
  int leader_ ABSL_GUARDED_BY(mutex_) = 0;
  // On an exhausted rank: calls that it has received and not yet shadowed, by number.
  std::map<int64_t, Call> pending_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace evenkeel

#endif  // EVENKEEL_JOIN_STEPS_FOLLOWED_CALLS_H_
