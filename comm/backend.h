// The interface that a transport implements to become a backend of Communicator.
//
// A backend is one rank's half of a group. It executes operations. Communicator does the rest, for
// all backends: sequence numbers, argument checks, deadlines of waiters, failure notices,
// positions. Users call Communicator.
//
// Contract of an implementation:
// - Start() never blocks on a peer. It ends each operation exactly once through `work->Finish()`.
// - Operations of one channel run in sequence order; operations of different channels must not wait
//   for each other, because ranks may interleave channels differently. The same holds for messages
//   with different tags. Tags are many: an idle one has no thread and no buffer.
// - Rank a's operation meets rank b's of the same channel and sequence. A backend whose transport
//   carries a header or a tag never lets two different `Collective`s complete as a pair; any other
//   backend returns false from checks_pairs().
// - Abort() is thread-safe, may come at any time, ends everything in flight and everything later
//   with `why`, and after it returns no buffer of an ended operation is accessed.
// - `what.op` kAverage is a sum. Of floats it arrives with `scale` already divided by the world
//   size; integers arrive in a type that has room for their sum, and are divided afterwards.
// - No exception leaves it; no wait is without the operation's `deadline`.

#ifndef EVENKEEL_COMM_BACKEND_H_
#define EVENKEEL_COMM_BACKEND_H_

#include <cstdint>
#include <functional>
#include <memory>

#include "absl/container/inlined_vector.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "evenkeel/comm/collective.h"
#include "evenkeel/comm/device/runtime.h"
#include "evenkeel/comm/memory.h"
#include "evenkeel/comm/types.h"
#include "evenkeel/comm/work.h"

namespace evenkeel {

using TensorList = absl::InlinedVector<TensorView, 1>;

// One rank's part in one collective.
struct Operation {
  Collective what;
  uint64_t channel = 0;  // The channel's id: equal on all ranks, unique within the group.
  int64_t sequence = 0;  // Position in the channel, from 0. For send and recv: position among those
                         // of this pair, direction and tag.
  // Coalesced operations have several views, which together behave like one of `what.count`
  // elements. In-place operations (all_reduce, reduce, broadcast) have their views in both lists;
  // send and barrier have no `out`, recv and barrier no `in`.
  TensorList in;
  TensorList out;
  double scale = 1.0;  // Float reductions: the result is multiplied by it. A backend whose sums
                       // could overflow in between multiplies the contributions instead.
  bool contributes = true;  // False: take the reduction's identity for this rank, `in` is not read.
  // For an operation that is a step of another backend's operation, or an average of integers that
  // travels in a wider type: a hash of the original, which must be equal on all ranks, as `what`
  // must. 0: neither.
  uint64_t step_of = 0;
  // A time of SteadyNow() (comm/base/clock.h).
  absl::Time deadline = absl::InfiniteFuture();
  StreamRef after;    // Start after the work that is on this stream now,
  Event after_event;  // and after this moment.
};

class Backend {
 public:
  virtual ~Backend() = default;

  virtual absl::string_view name() const = 0;
  // The place of its tensors.
  virtual Device device() const { return Device::Cpu(); }
  // The runtime of that device; null on the CPU. Outlives the group.
  virtual DeviceRuntime* runtime() const { return nullptr; }
  // Returns OK, or Unimplemented with the reason, for a collective that is valid by itself.
  virtual absl::Status Supports(const Collective& /*what*/) const { return absl::OkStatus(); }
  // Returns whether two different collectives can never complete as a pair. If false, they can,
  // with garbage, so issued collectives are compared before results are used
  // (Communicator::CompareIssued()).
  virtual bool checks_pairs() const { return true; }
  virtual void Start(Operation operation, std::shared_ptr<WorkState> work) = 0;
  virtual void Abort(const absl::Status& why) = 0;
  // Called when nothing is in flight on this rank, before it leaves: returns once all that other
  // ranks still need of its operations is on its way, at the latest at the deadline.
  virtual void Flush(absl::Time /*deadline*/) {}
  // Returns zeroed memory, aligned to at least 64 bytes, that the transport uses without a copy.
  // The default is plain memory.
  virtual absl::StatusOr<Memory> Allocate(int64_t bytes);
};

}  // namespace evenkeel

#endif  // EVENKEEL_COMM_BACKEND_H_
