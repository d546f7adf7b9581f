// How many cores this process may really use.
//
//   UsableCores()   // 2 in a container with `--cpus=2`, also on a host with 64 cores
//
// The processors it may run on, and no more than the limits on processor time of its control group (Linux, version 1
// or 2), rounded up. More threads than that only wait for each other.
//
// Threads: thread-safe.

#ifndef EVENKEEL_TRAINER_USABLE_CORES_H_
#define EVENKEEL_TRAINER_USABLE_CORES_H_

#include <string>

#include "absl/strings/string_view.h"

namespace evenkeel {

int UsableCores();

// The same with everything that it looks at: `affinity` processors, and what lies in `cgroup_folder`.
int UsableCores(int affinity, const std::string& cgroup_folder);

// Cores for a quota of processor time per period, as in "200000 100000": 2. 0: no limit, or not understood.
int CoresOfQuota(absl::string_view quota, absl::string_view period);

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_USABLE_CORES_H_
