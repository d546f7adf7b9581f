// A reducer's state on a device: the streams on which its reduction runs, and the work there whose
// end it has not seen. Null on the CPU.
//
//   EK_ASSIGN_OR_RETURN(device_, DeviceSide::Create(comm, params));
//   EK_RETURN_IF_ERROR(device_->Confirm());  // of earlier steps: nothing has failed
//   ... device_->Keep(works); device_->EndStep() when a step has put all there ...
//   EK_RETURN_IF_ERROR(device_->Drain());                          // before memory goes
//
// Threads:   thread-compatible.
// Ownership: the runtime outlives it, and so does the parameters' stream.

#ifndef EVENKEEL_BUCKET_REDUCER_DEVICE_SIDE_H_
#define EVENKEEL_BUCKET_REDUCER_DEVICE_SIDE_H_

#include <cstddef>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "evenkeel/bucket/parameter_set.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/device/runtime.h"
#include "evenkeel/comm/memory.h"
#include "evenkeel/comm/types.h"

namespace evenkeel {

class DeviceSide {
 public:
  // Null for a group on the CPU.
  static absl::StatusOr<std::unique_ptr<DeviceSide>> Create(const Communicator& comm,
                                                            const ParameterSet& params);

  DeviceRuntime& runtime() const { return *runtime_; }
  StreamRef stream() const { return stream_; }  // The parameters'.
  // Returns this number of further streams, the same ones on each call.
  absl::StatusOr<std::vector<StreamRef>> SideStreams(int count);

  // Orders later work on the parameters' stream after all work on the others.
  absl::Status Join();
  // The host waits until all streams have run what is on them.
  absl::Status Drain();
  // The tensors' contents, one after the other; the host waits for them.
  absl::StatusOr<absl::Span<const std::byte>> Read(absl::Span<const TensorView> tensors);

  // Keep() takes operations that the host does not wait for, in a step that has begun. EndStep() is
  // called when the step has ended for the host.
  void Keep(std::vector<Work> works);
  void EndStep();
  // Forgets those that have ended well. The error of one that has not; waits for none.
  absl::Status Confirm();
  // After the group has ended, when they all have: whether those of steps that had ended went well.
  absl::Status CheckEnded() const;

  // Forgets operations.
  void ReplaceGroup(const Communicator& comm);

 private:
  DeviceSide(const Communicator& comm, StreamRef stream) : stream_(stream) { ReplaceGroup(comm); }
  absl::Time deadline() const;

  DeviceRuntime* runtime_ = nullptr;
  absl::Duration timeout_;
  const StreamRef stream_;
  std::vector<Stream> side_;
  Memory pinned_;
  std::vector<Work> open_, ended_;
};

}  // namespace evenkeel

#endif  // EVENKEEL_BUCKET_REDUCER_DEVICE_SIDE_H_
