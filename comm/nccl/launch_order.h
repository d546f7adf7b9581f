// The order in which a group's ranks launch their operations on devices: rank 0 makes it, from what
// the ranks say that they have issued.
//
//   LaunchOrder order(world_size);
//   EK_ASSIGN_OR_RETURN(std::optional<LaunchTurn> turn, order.Arrive(rank, request));
//   if (turn.has_value()) ...  // all ranks that take part have issued it: launch it next
//
// An operation has its turn when all ranks that take part have issued it, and not before: so an
// operation that waits for a rank never delays another one, whatever the ranks' order of channels,
// and a device waits only for its peers' streams. Ranks also find out here, before a launch, that
// they disagree: the transport carries no header.
//
// Order:   requests of one rank come in the order of its calls.
// Threads: thread-compatible.
// Errors:  FailedPrecondition that names the ranks and what they have; the order has ended then.

#ifndef EVENKEEL_COMM_NCCL_LAUNCH_ORDER_H_
#define EVENKEEL_COMM_NCCL_LAUNCH_ORDER_H_

#include <compare>
#include <cstdint>
#include <map>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "evenkeel/comm/backend.h"

namespace evenkeel::internal {

// Identifies an operation of the group: a collective of a channel, or a message of a channel from
// one rank to another.
struct LaunchKey {
  uint64_t channel = 0;
  int64_t sequence = 0;
  int from = -1;
  int to = -1;

  bool Concerns(int rank) const { return from < 0 || rank == from || rank == to; }
  friend auto operator<=>(const LaunchKey&, const LaunchKey&) = default;

  static void VisitFields(auto& self, auto& visit) {
    visit(self.channel, self.sequence, self.from, self.to);
  }
};

// One rank's part in one.
struct LaunchRequest {
  LaunchKey key;
  uint64_t hash = 0;    // Must be equal on all ranks.
  uint64_t layout = 0;  // May differ, but changes how it is done.
  std::string text;

  static void VisitFields(auto& self, auto& visit) {
    visit(self.key, self.hash, self.layout, self.text);
  }
};
// `layout`: of the operation's views, as its backend sees them.
LaunchRequest RequestOf(const Operation& operation, int rank, uint64_t layout);

struct LaunchTurn {
  LaunchKey key;
  bool is_alike = true;  // All parts have the same layout.

  static void VisitFields(auto& self, auto& visit) { visit(self.key, self.is_alike); }
};

class LaunchOrder {
 public:
  explicit LaunchOrder(int world_size) : world_size_(world_size) {}

  // Returns the turn that this request completes; nullopt: a rank is still missing.
  absl::StatusOr<std::optional<LaunchTurn>> Arrive(int rank, const LaunchRequest& request);

 private:
  const int world_size_;
  std::map<LaunchKey, std::map<int, LaunchRequest>> arrived_;  // By rank.
};

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_NCCL_LAUNCH_ORDER_H_
