// Moves the optimizer's state to new owners when the slices change: only what changes hands
// travels, from rank to rank.
//
//   StateMove move(&updater, channel, rank);
//   // asynchronous
//   for (bucket : plan.buckets) EK_RETURN_IF_ERROR(move.Start(changes_of(bucket)));
//   EK_RETURN_IF_ERROR(move.Wait());  // the updater has the new parts, with their state
//
// The earlier state stays until the move is destroyed, so that it can be undone: it takes up to
// twice the state of the parameters that move. Destroy it when all ranks are known to have ended
// theirs.
//
// Devices: what is sent is what is on the updater's stream when the move starts. Order that stream
//          behind the move before it is destroyed.
// Order:   all ranks start the same changes in the same order, with nothing else on the channel
//          between two of the same ranks.
// Threads: thread-compatible.

#ifndef EVENKEEL_ZERO_OPTIM_INTERNAL_PLACEMENT_SLICE_MOVE_H_
#define EVENKEEL_ZERO_OPTIM_INTERNAL_PLACEMENT_SLICE_MOVE_H_

#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/types.h"
#include "evenkeel/comm/work.h"
#include "evenkeel/zero_optim/internal/parameter_updater.h"
#include "evenkeel/zero_optim/internal/placement/slice_layout.h"

namespace evenkeel::internal {

// A parameter's new division.
struct OwnerChange {
  int param = 0;
  Holders from, to;
};

class StateMove {
 public:
  // Both outlive it.
  StateMove(ParameterUpdater* updater, Channel* channel, int rank)
      : updater_(updater), channel_(channel), rank_(rank) {}
  StateMove(const StateMove&) = delete;
  StateMove& operator=(const StateMove&) = delete;
  ~StateMove();

  // Parameters of one type. What has no state yet changes hands without a message.
  absl::Status Start(absl::Span<const OwnerChange> changes);
  absl::Status Wait() const;
  // On a device: without the host; what is on the stream then may use the new parts.
  absl::Status OrderBefore(StreamRef stream) const;
  // Everything is as before Start(); the group has ended, or Wait() has.
  void Undo();
  // The holders before the move.
  const std::vector<std::pair<int, Holders>>& before() const { return before_; }

 private:
  ParameterUpdater* const updater_;
  Channel* const channel_;
  const int rank_;
  std::vector<std::pair<int, Holders>> before_;                // By parameter.
  std::vector<std::pair<int, ParameterUpdater::Part>> parts_;  // This rank's, by parameter.
  std::vector<Work> works_;
};

}  // namespace evenkeel::internal

#endif  // EVENKEEL_ZERO_OPTIM_INTERNAL_PLACEMENT_SLICE_MOVE_H_
