// The control plane of ranks that are threads of one process.
//
//   // one per rank, around one hub
//   std::vector<std::unique_ptr<ControlLink>> links = CreateLocalLinks(4);
//
// The hub handles a rank's message at once, on the sender's thread; a rank receives messages on its
// link's own thread. All ranks' messages go through the hub in one order. A link that stops is a
// rank that has gone: a failure for the others unless it has said that it leaves.

#ifndef EVENKEEL_COMM_LOCAL_LINK_H_
#define EVENKEEL_COMM_LOCAL_LINK_H_

#include <memory>
#include <vector>

#include "evenkeel/comm/control/exchange_tree.h"
#include "evenkeel/comm/control/link.h"

namespace evenkeel::internal {

// Groups of more than `fanout` ranks exchange over a tree.
std::vector<std::unique_ptr<ControlLink>> CreateLocalLinks(int world_size,
                                                           int fanout = kDefaultFanout);

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_LOCAL_LINK_H_
