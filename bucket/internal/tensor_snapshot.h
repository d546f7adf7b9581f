// What some tensors held at a moment, to be put back.
//
//   TensorSnapshot kept;
//   EK_RETURN_IF_ERROR(kept.Take(buffers, comm.runtime(), params.stream()));
//   ... the buffers change ...
//   EK_RETURN_IF_ERROR(kept.Restore(buffers, comm.runtime(), params.stream()));
//
// On a device (`runtime` not null) both are put on `stream`; taking is one launch, and waits for nothing if it is of
// the same tensors again.
//
// Threads:   thread-compatible.
// Ownership: on a device it outlives what is on the stream: a snapshot that was used there goes when that has run.

#ifndef EVENKEEL_BUCKET_INTERNAL_TENSOR_SNAPSHOT_H_
#define EVENKEEL_BUCKET_INTERNAL_TENSOR_SNAPSHOT_H_

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
  // The tensors of Take(), which may have moved since; nothing if it holds none.
  absl::Status Restore(absl::Span<const TensorView> tensors, DeviceRuntime* runtime, StreamRef stream) const;
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

#endif  // EVENKEEL_BUCKET_INTERNAL_TENSOR_SNAPSHOT_H_
