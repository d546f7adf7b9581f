// The backend of ranks that are threads of one process.
//
//   std::vector<std::unique_ptr<Backend>> backends = CreateLocalBackends(4);   // one per rank
//
// The ranks' operations meet: the last one to arrive starts the work, which the group's worker
// threads share, each on a slice of the elements, straight from all inputs to all outputs. A rank
// that arrives with another collective than the others ends the group for every rank, before
// anything is touched.
//
// Threads: each backend as Backend says; one worker thread per rank ends operations, of whichever
//          rank.

#ifndef EVENKEEL_COMM_LOCAL_BACKEND_H_
#define EVENKEEL_COMM_LOCAL_BACKEND_H_

#include <memory>
#include <vector>

#include "evenkeel/comm/backend.h"
#include "evenkeel/comm/ranks/rank_names.h"

namespace evenkeel::internal {

struct LocalBackendOptions {
  // Like a transport without headers: different collectives of equal size in bytes complete as if
  // they were the one whose rank came first, with garbage. For tests of what is done about it.
  bool is_blind = false;
  RankNames names;  // For messages.
};

std::vector<std::unique_ptr<Backend>> CreateLocalBackends(int world_size,
                                                          const LocalBackendOptions& options = {});

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_LOCAL_BACKEND_H_
