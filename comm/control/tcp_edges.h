// The neighbours of a rank in the tree, over TCP: it listens for its children, and connects to its
// parent.
//
//   EK_ASSIGN_OR_RETURN(std::unique_ptr<TreeEdges> edges,
//       CreateTcpEdges({.job = job, .group = "world", .rank = 2, .shape = shape, .host = host}));
//
// Both sides prove to each other that they have the job's secret, as with the job's store. A parent
// accepts its children of this group, each once, and listens on the given address only.
//
// Errors: those of listening. A parent that cannot be reached, or is lost, is reported to `lost`
//         after a short delay: if its process has died, the hub's report, which is more precise,
//         comes first.

#ifndef EVENKEEL_COMM_CONTROL_TCP_EDGES_H_
#define EVENKEEL_COMM_CONTROL_TCP_EDGES_H_

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "evenkeel/comm/control/exchange_tree.h"
#include "evenkeel/comm/control/tree_link.h"
#include "evenkeel/comm/net/greet.h"

namespace evenkeel::internal {

struct TcpEdgesOptions {
  JobSecret job;
  std::string group;
  int rank = 0;
  TreeShape shape;
  std::string host;  // The address to listen on for children.
  absl::Duration timeout;
};

absl::StatusOr<std::unique_ptr<TreeEdges>> CreateTcpEdges(const TcpEdgesOptions& options);

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_CONTROL_TCP_EDGES_H_
