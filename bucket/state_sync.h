// Makes the ranks' tensors equal.
//
//   EK_RETURN_IF_ERROR(BroadcastState(channel, views, /*root=*/0, Role::kState));
//
// Threads: blocking; every rank calls with tensors of the same sizes.
// Devices: tensors are complete, and may be used, after the work on `stream`.

#ifndef EVENKEEL_BUCKET_STATE_SYNC_H_
#define EVENKEEL_BUCKET_STATE_SYNC_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "evenkeel/bucket/parameter_set.h"
#include "evenkeel/comm/collective.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/types.h"
#include "evenkeel/comm/work.h"

namespace evenkeel {

// The way in which the ranks' tensors become equal.
enum class BufferSync : uint8_t {
  kBroadcast,  // The values of one rank.
  kAverage,    // The mean over ranks; other types than floats use the values of one rank.
};

// The ranks whose tensors count.
struct StateSource {
  int root = 0;             // Broadcasts only.
  int contributors = 1;     // The number of ranks in the mean.
  bool contributes = true;  // This rank is one of them.
};

// Returns the collectives that make them equal, each for tensors of one dtype and of at most 250
// MiB (or for one tensor). The root of a broadcast is not set.
std::vector<Collective> PlanStateSync(absl::Span<const TensorView> tensors, BufferSync how,
                                      Role role);

// Runs these collectives at the same time, and waits for all of them.
absl::Status SyncState(Channel& channel, absl::Span<const TensorView> tensors, BufferSync how,
                       const StateSource& source, Role role, StreamRef stream = {});
// Does the same without waiting for a device: later work on `stream` is ordered after it. On the
// CPU it waits.
absl::StatusOr<std::vector<Work>> BeginSyncState(Channel& channel,
                                                 absl::Span<const TensorView> tensors,
                                                 BufferSync how, const StateSource& source,
                                                 Role role, StreamRef stream);
absl::Status BroadcastState(Channel& channel, absl::Span<const TensorView> tensors, int root,
                            Role role, StreamRef stream = {});

// Returns all values except those of ignored parameters.
std::vector<TensorView> ValuesOf(const ParameterSet& params);

}  // namespace evenkeel

#endif  // EVENKEEL_BUCKET_STATE_SYNC_H_
