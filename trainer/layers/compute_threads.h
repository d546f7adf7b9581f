// Sets the number of threads that a model's kernels use.
//
//   SetComputeThreads(1);   // several ranks share this host
//
// Call it before the first model is made: kernels are planned for the number of threads at that
// time. It applies to models that the calling thread uses; other threads start from
// OMP_NUM_THREADS, or all cores.

#ifndef EVENKEEL_TRAINER_LAYERS_COMPUTE_THREADS_H_
#define EVENKEEL_TRAINER_LAYERS_COMPUTE_THREADS_H_

#include <string>

#include "absl/strings/string_view.h"

namespace evenkeel {

// Sets the number of threads; a value below 1 counts as 1.
void SetComputeThreads(int threads);
int ComputeThreads();

// The number of cores that this process may use.
//
//   UsableCores()   // 2 in a container with `--cpus=2`, also on a host with 64 cores
//
// It is the number of processors on which the process may run, at most the limit on processor time
// of its control group (Linux, version 1 or 2), rounded up. More threads would only wait for each
// other.
//
// Threads: thread-safe.
int UsableCores();

// Returns the same from given inputs: `affinity` processors, and the files in `cgroup_folder`.
int UsableCores(int affinity, const std::string& cgroup_folder);

// Returns the cores for a quota of processor time per period: 2 for "200000 100000". 0: no limit,
// or malformed.
int CoresOfQuota(absl::string_view quota, absl::string_view period);

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_LAYERS_COMPUTE_THREADS_H_
