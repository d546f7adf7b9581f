// A copy of some tensors' contents, to be restored later.
//
//   TensorSnapshot kept;
//   EK_RETURN_IF_ERROR(kept.Take(buffers, comm.runtime(), params.stream()));
//   ... the buffers change ...
//   EK_RETURN_IF_ERROR(kept.Restore(buffers, comm.runtime(), params.stream()));
//
// On a device (`runtime` not null) both are enqueued on `stream`; Take() is one launch, and does
// not wait if it is called with the same tensors again.
//
// Threads:   thread-compatible.
// Ownership: on a device it must outlive its work on the stream.

#ifndef EVENKEEL_BUCKET_TENSOR_SNAPSHOT_H_
#define EVENKEEL_BUCKET_TENSOR_SNAPSHOT_H_

#include <cstddef>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "evenkeel/comm/device/copy.h"
#include "evenkeel/comm/device/runtime.h"
#include "evenkeel/comm/memory.h"
#include "evenkeel/comm/types.h"

namespace evenkeel {

class TensorSnapshot {
 public:
  absl::Status Take(absl::Span<const TensorView> tensors, DeviceRuntime* runtime, StreamRef stream);
  // Restores the tensors of Take(), which may have moved since; no effect if it holds none.
  absl::Status Restore(absl::Span<const TensorView> tensors, DeviceRuntime* runtime,
                       StreamRef stream) const;
  void Forget() { size_ = 0; }
  size_t size() const { return size_; }  // Tensors that it holds.

 private:
  size_t size_ = 0;
  std::vector<std::vector<std::byte>> bytes_;
  // On a device.
  std::vector<TensorView> taken_from_, kept_;
  Memory memory_;  // Holds kept_.
  std::optional<SegmentCopy> take_;
};

}  // namespace evenkeel

#endif  // EVENKEEL_BUCKET_TENSOR_SNAPSHOT_H_
