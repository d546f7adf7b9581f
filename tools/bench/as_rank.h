// The part of a benchmark process that is a rank, or all ranks, of one of the backends.
//
//   if (argc == 4 && std::string(argv[1]) == kAsRank) return RunAsRank(argv[2], argv[3]);
//
// Backends: memcpy (copies, no transport), raw_gloo, local (all ranks, as threads), else a name of
// comm/factory.h. Which rank it is the environment says, as for any program of a job
// (comm/environment.h).

#ifndef EVENKEEL_TOOLS_BENCH_AS_RANK_H_
#define EVENKEEL_TOOLS_BENCH_AS_RANK_H_

#include <string>

namespace evenkeel::bench {

inline constexpr char kAsRank[] = "--as_rank";

// Until the benchmark that listens in `folder` hangs up. `threads`: of local, how many ranks. The
// exit code.
int RunAsRank(const std::string& backend, const std::string& folder, int threads);

}  // namespace evenkeel::bench

#endif  // EVENKEEL_TOOLS_BENCH_AS_RANK_H_
