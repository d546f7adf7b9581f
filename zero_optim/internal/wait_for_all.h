// Waits for several works, each of them, and answers the first error.

#ifndef EVENKEEL_ZERO_OPTIM_INTERNAL_WAIT_FOR_ALL_H_
#define EVENKEEL_ZERO_OPTIM_INTERNAL_WAIT_FOR_ALL_H_

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

}  // namespace evenkeel::internal

#endif  // EVENKEEL_ZERO_OPTIM_INTERNAL_WAIT_FOR_ALL_H_
