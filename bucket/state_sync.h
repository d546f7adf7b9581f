// Makes the ranks' tensors equal, and finds out whether they can be.
//
//   EK_RETURN_IF_ERROR(VerifySame(FactsOf(params, buffers), comm.control(), comm.timeout()));
//   EK_RETURN_IF_ERROR(BroadcastState(channel, views, /*root=*/0, Role::kState));
//
// Threads: blocking; every rank calls with tensors of the same sizes.
// Devices: tensors are complete, and may be used, after what is on `stream`.

#ifndef EVENKEEL_BUCKET_STATE_SYNC_H_
#define EVENKEEL_BUCKET_STATE_SYNC_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "evenkeel/bucket/parameter_set.h"
#include "evenkeel/comm/collective.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/types.h"
#include "evenkeel/comm/work.h"

namespace evenkeel {

// How the ranks' tensors become equal.
enum class BufferSync : uint8_t {
  kBroadcast,  // One rank's for all.
  kAverage,    // The mean over ranks; tensors that are not floats take one rank's.
};

// Whose tensors count.
struct StateSource {
  int root = 0;             // Broadcasts only.
  int contributors = 1;     // The number of ranks whose mean it is,
  bool contributes = true;  // and whether this rank is one of them.
};

// The collectives that make them equal, each of tensors of one dtype and of at most 250 MiB (or of one tensor). The
// root of a broadcast is not set.
std::vector<Collective> PlanStateSync(absl::Span<const TensorView> tensors, BufferSync how, Role role);

// Runs them, all in flight at once, and waits for their end.
absl::Status SyncState(Channel& channel, absl::Span<const TensorView> tensors, BufferSync how,
                       const StateSource& source, Role role, StreamRef stream = {});
// Does not wait for a device: later work on `stream` is ordered after it. On the CPU it waits for the end.
absl::StatusOr<std::vector<Work>> BeginSyncState(Channel& channel, absl::Span<const TensorView> tensors, BufferSync how,
                                                 const StateSource& source, Role role, StreamRef stream);
absl::Status BroadcastState(Channel& channel, absl::Span<const TensorView> tensors, int root, Role role,
                            StreamRef stream = {});

// What a rank can't do, all learn: OK on every rank if `own` is on all, else the error of the lowest that has one, with
// its number. `topic` is of this object and equal on all ranks.
absl::Status AgreeThatAllCan(absl::string_view topic, const absl::Status& own, ControlChannel& control,
                             absl::Duration timeout);

// Something that must be equal on all ranks: {"parameter 3", "\"fc1.weight\" float32[640]"}.
struct Fact {
  std::string what;
  std::string value;
};
// How many parameters and buffers there are; names, sizes, types of the parameters, and which are shared; of the
// ignored ones only names, and that they are; sizes and types of the buffers.
std::vector<Fact> FactsOf(const ParameterSet& params, absl::Span<const TensorView> buffers = {});
// InvalidArgument on every rank if the ranks' facts differ; it names the first that does, two ranks and both values.
absl::Status VerifySame(absl::Span<const Fact> facts, ControlChannel& control, absl::Duration timeout);

// All values but those of ignored parameters.
std::vector<TensorView> ValuesOf(const ParameterSet& params);

}  // namespace evenkeel

#endif  // EVENKEEL_BUCKET_STATE_SYNC_H_
