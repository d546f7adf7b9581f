// The time of a collective on any number of ranks, from samples of a few.
//
//   EK_ASSIGN_OR_RETURN(const Cluster cluster, FitCluster("tcp", /*cores=*/0, samples));
//   cluster.AllReduce({.ranks = 64, .ranks_per_host = 1}, 25 << 20);  // seconds
//
// A collective costs latency * turns + time per byte * bytes on its longest path. The algorithms of
// the backends (comm/shm, comm/tcp/collectives.h, comm/hierarchical) determine turns and bytes;
// samples determine the costs, on three levels:
//   memory   ranks of a host that share memory
//   host     the work of TCP on the processors
//   network  the link of a host to the others
// If ranks share processors, the costs of memory and host are multiplied by the number of ranks
// per processor. TCP takes as long as the slower of host and network.
//
// Units:   seconds, bytes.
// Threads: values; pure functions.
// Source:  Hockney, "The communication challenge for MPP", Parallel Computing 1994 (the cost of a
//          message); Thakur et al., "Optimization of collective communication operations in
//          MPICH", IJHPCA 2005 (the cost of the algorithms).

#ifndef EVENKEEL_TOOLS_PREDICT_CLUSTER_H_
#define EVENKEEL_TOOLS_PREDICT_CLUSTER_H_

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "evenkeel/bucket/plan/cost_model.h"
#include "evenkeel/tools/predict/traced_run.h"

namespace evenkeel {

struct Layout {
  int ranks = 1;
  int ranks_per_host = 1;

  int hosts() const { return (ranks + ranks_per_host - 1) / ranks_per_host; }
};

enum class Level { kMemory, kHost, kNetwork };
inline constexpr int kLevels = 3;
absl::string_view NameOf(Level level);

// The longest path of a collective: messages that follow each other, and the bytes in them.
struct Load {
  double turns = 0;
  double bytes = 0;
};
// Return the load of a collective of `bytes` over TCP.
Load TcpAllReduce(int ranks, int64_t bytes);
Load TcpBroadcast(int ranks, int64_t bytes);

struct LevelSample {
  Level level = Level::kMemory;
  Load load;
  double seconds = 0;
};

struct Cluster {
  std::string backend;  // "shm", "tcp" or "hierarchical".
  int cores = 0;        // Processors that all ranks share; 0: each rank has its own.
  std::array<LinkCost, kLevels> costs;

  double AllReduce(const Layout& where, int64_t bytes) const;
  double Broadcast(const Layout& where, int64_t bytes) const;
  double SecondsOf(Level level, const Load& load) const;

 private:
  double OverTcp(int ranks, const Load& load) const;
};

// Levels without samples cost nothing. Errors: InvalidArgument if the backend is unknown, or needs
// memory or a network and has no sample of it.
absl::StatusOr<Cluster> FitCluster(const std::string& backend, int cores,
                                   std::span<const LevelSample> samples);

// Returns a sample for each bucket of each step of the run: the time from when the last rank has
// the bucket, and the previous bucket is reduced, until the first rank notices the end of its
// reduction; other ranks notice it later if their processors compute. Buckets that backward hides
// are left out if there are others, since they wait for the processors. Returns no samples for a
// run over the hierarchical backend.
std::vector<LevelSample> SamplesOf(const TracedRun& run, int cores);

// Returns a sample for each row of bench_collectives --json=FILE that is an all-reduce over tcp, or
// over shm with registered memory. Errors: InvalidArgument for another file, or one without such
// rows.
absl::StatusOr<std::vector<LevelSample>> ParseRows(const std::string& name, absl::string_view text,
                                                   int cores);

}  // namespace evenkeel

#endif  // EVENKEEL_TOOLS_PREDICT_CLUSTER_H_
