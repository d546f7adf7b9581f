// One of the compared contenders: the ranks of a backend, which wait for requests.
//
//   EK_ASSIGN_OR_RETURN(std::vector<double> seconds,
//                       peer.Time(what, {.warmups = 1, .repetitions = 10}));
//   EK_RETURN_IF_ERROR(peer.Check(what));        // DataLoss: the result of a fresh run was wrong
//
// Threads: thread-compatible.
// Errors:  Unimplemented: the transport does not do that; the peer continues. DataLoss names rank,
//          element and values, what else comes back is what a rank said or how it ended: the peer
//          is of no more use.

#ifndef EVENKEEL_TOOLS_BENCH_PEER_H_
#define EVENKEEL_TOOLS_BENCH_PEER_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "evenkeel/tools/bench/case.h"

namespace evenkeel::bench {

struct Block {
  int warmups = 0;
  int repetitions = 1;
};

class Peer {
 public:
  virtual ~Peer() = default;

  virtual const std::string& name() const = 0;
  // Returns the slowest rank's seconds for each repetition, from when all ranks had met.
  virtual absl::StatusOr<std::vector<double>> Time(const Case& what, const Block& block) = 0;
  // The mean of calls back to back, on the slowest rank.
  virtual absl::StatusOr<double> Loop(const Case& what, const Block& block) = 0;
  virtual absl::Status Check(const Case& what) = 0;
  // Frees the buffers of the last case.
  virtual absl::Status Forget() = 0;
};

}  // namespace evenkeel::bench

#endif  // EVENKEEL_TOOLS_BENCH_PEER_H_
