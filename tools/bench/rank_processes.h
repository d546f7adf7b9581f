// A peer whose ranks are processes of this host: starts them, and speaks with each over a socket
// (rank_side.h).
//
//   EK_ASSIGN_OR_RETURN(std::unique_ptr<Peer> tcp,
//                   StartRanks({.name = "tcp", .world = 2, .folder = folder, .programs = {...}}));
//
// Their output goes to <folder>/log, and its end into the message where a rank does not come or
// goes too early. Destruction hangs up, which ends them well, and kills those that are still there
// after some seconds.
//
// Errors: Unavailable.

#ifndef EVENKEEL_TOOLS_BENCH_RANK_PROCESSES_H_
#define EVENKEEL_TOOLS_BENCH_RANK_PROCESSES_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "evenkeel/tools/bench/peer.h"
#include "evenkeel/tools/bench/process.h"

namespace evenkeel::bench {

struct RankOptions {
  std::string name;
  int world = 2;
  std::string folder;  // An empty one, for these ranks alone.
  // One for each rank, or one that makes all of them. They find the folder in their command.
  std::vector<Program> programs;
  absl::Duration patience = absl::Seconds(60);  // Until they are all there.
};

absl::StatusOr<std::unique_ptr<Peer>> StartRanks(const RankOptions& options);

}  // namespace evenkeel::bench

#endif  // EVENKEEL_TOOLS_BENCH_RANK_PROCESSES_H_
