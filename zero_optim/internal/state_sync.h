// From one rank to all, for ranks that go on together after a failure: parameters, settings and
// optimizer state.
//
//   const StateSync sync{.comm = comm, .channel = *channel, .name = join_name()};
//   EK_RETURN_IF_ERROR(sync.BroadcastState(updater, params, /*source=*/0));
//
// Every rank calls the same. A rank that has what the source has gets the same bytes again.

#ifndef EVENKEEL_ZERO_OPTIM_INTERNAL_STATE_SYNC_H_
#define EVENKEEL_ZERO_OPTIM_INTERNAL_STATE_SYNC_H_

#include <string>

#include "absl/status/status.h"
#include "evenkeel/bucket/parameter_set.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/zero_optim/internal/parameter_updater.h"

namespace evenkeel::internal {

struct StateSync {
  Communicator& comm;
  Channel& channel;
  const std::string& name;

  // The groups' settings alone.
  absl::Status BroadcastSettings(ParameterUpdater& updater, int source) const;
  // Those, and the state of every parameter.
  absl::Status BroadcastState(ParameterUpdater& updater, const ParameterSet& params,
                              int source) const;
};

}  // namespace evenkeel::internal

#endif  // EVENKEEL_ZERO_OPTIM_INTERNAL_STATE_SYNC_H_
