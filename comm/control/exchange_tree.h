// The tree over which the exchanges of a large group travel: parts go upwards and are merged on the
// way, results go downwards.
//
//   const TreeShape shape{.world_size = 1000, .fanout = 32};
//   ExchangeRelay relay(shape, rank);
//   // returns a message when the parts of the whole subtree have arrived
//   if (auto up = relay.OnExchange(child, message)) SendTo(shape.ParentOf(rank), *up);
//
// The parent of rank r is rank r / fanout - 1, for r < fanout the hub. So no rank, and not the hub,
// has more than `fanout` children, and up to `fanout` ranks the tree is a star. A merged message
// has the parts of a subtree in the order of SubtreeOf(), with equal neighbours counted, and
// contains the fanout.
//
// Threads: TreeShape is immutable, a relay is thread-compatible.

#ifndef EVENKEEL_COMM_CONTROL_EXCHANGE_TREE_H_
#define EVENKEEL_COMM_CONTROL_EXCHANGE_TREE_H_

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "evenkeel/comm/control/messages.h"

namespace evenkeel::internal {

inline constexpr int kDefaultFanout = 32;
inline constexpr int kHub = -1;

struct TreeShape {
  int world_size = 1;
  int fanout = kDefaultFanout;

  bool is_star() const { return world_size <= fanout; }
  int ParentOf(int rank) const { return rank < fanout ? kHub : rank / fanout - 1; }
  std::vector<int> ChildrenOf(int rank) const;  // Also of kHub.
  // Returns `rank`, then the subtree of each of its children.
  std::vector<int> SubtreeOf(int rank) const;
};

// Appends to a list of parts, and counts equal neighbours.
void AppendParts(ExchangeParts& parts, EqualParts more);
// Returns the number of ranks, or -1 if not every run has between 1 and `world_size` of them.
int64_t CountRanks(const ExchangeParts& parts, int world_size);
// Returns ResourceExhausted if these parts do not fit into one message.
absl::Status CheckSize(const ExchangeId& id, const ExchangeParts& parts);

// Collects, on one rank, the parts that go up to its parent.
class ExchangeRelay {
 public:
  ExchangeRelay(TreeShape shape, int rank);

  // Handles a part of this rank itself or of a child's subtree. Returns the message for the parent
  // if it was the last missing part.
  // Errors, for the whole group: FailedPrecondition if a child has left without its part.
  // InvalidArgument: not a message of such a tree. Those of CheckSize().
  absl::StatusOr<std::optional<to_hub::Exchange>> OnExchange(int from, to_hub::Exchange part);
  // Handles a child that leaves. Errors: as above.
  absl::Status OnLeave(int child);

 private:
  using Gathering = std::map<int, ExchangeParts>;  // By child; this rank's own, too.

  absl::Status CheckLeft(const ExchangeId& id, const Gathering& gathering) const;

  const TreeShape shape_;
  const int rank_;
  std::vector<int> sources_;      // This rank and its children, in the order of the subtree.
  std::map<int, int64_t> sizes_;  // The sizes of their subtrees.
  std::map<ExchangeId, Gathering> gathering_;
  std::set<int> left_;
};

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_CONTROL_EXCHANGE_TREE_H_
