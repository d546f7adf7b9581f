// Waits for several operations, each of them, with the first error; and OpenWorks, operations that
// a device's stream waits for, and the host does not: what the end of steps that the host has left
// still depends on.
//
//   open.Add(std::move(broadcasts));            // with each step
//   open.Forget();                              // those that have ended well; waits for none
//   EK_RETURN_IF_ERROR(open.Wait());            // the host waits; the first error
//
// Threads: thread-compatible value; copies wait for the same operations.

#ifndef EVENKEEL_ZERO_OPTIM_INTERNAL_OPEN_WORKS_H_
#define EVENKEEL_ZERO_OPTIM_INTERNAL_OPEN_WORKS_H_

#include <iterator>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "evenkeel/comm/types.h"
#include "evenkeel/comm/work.h"

namespace evenkeel::internal {

inline absl::Status WaitForAll(const std::vector<Work>& works) {
  absl::Status status;
  for (const Work& work : works) status.Update(work.Wait());
  return status;
}

// On a device the stream waits, on the CPU the caller.
inline absl::Status OrderAllBefore(const std::vector<Work>& works, StreamRef stream) {
  absl::Status status;
  for (const Work& work : works) status.Update(work.OrderBefore(stream));
  return status;
}

class OpenWorks {
 public:
  bool empty() const { return works_.empty(); }
  void Add(std::vector<Work> works) {
    works_.insert(works_.end(), std::make_move_iterator(works.begin()),
                  std::make_move_iterator(works.end()));
  }
  void Forget() {
    std::erase_if(works_, [](const Work& work) { return work.IsDone() && work.Wait().ok(); });
  }
  void Clear() { works_.clear(); }
  absl::Status Wait() const { return WaitForAll(works_); }

 private:
  std::vector<Work> works_;
};

}  // namespace evenkeel::internal

#endif  // EVENKEEL_ZERO_OPTIM_INTERNAL_OPEN_WORKS_H_
