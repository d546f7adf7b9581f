// Functions that wait for all of several operations, and OpenWorks, the operations of past steps
// for which a device's stream waits, but the host has not waited.
//
//   open.Add(std::move(broadcasts));            // with each step
//   open.Forget();                              // removes operations that have succeeded
//   EK_RETURN_IF_ERROR(open.Wait());            // the host waits for the rest
//
// Threads: thread-compatible value; copies wait for the same operations.
// Errors:  the first error of an operation, after all of them have been waited for.

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

// Makes the stream wait for all of them; on the CPU the caller waits.
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
