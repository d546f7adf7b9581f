// SyncBatchNorm on a device: launches its kernels (batch_norm.cuh), and keeps their memory between
// calls.
//
//   EK_ASSIGN_OR_RETURN(on_device,
//                       DeviceBatchNorm::Create(scope, {.channels = 16, .stream = stream}));
//   EK_RETURN_IF_ERROR(on_device->Forward(scope, shape, input, affine, running, output));
//
// The caller has checked the tensors. All work is on the options' stream; the host waits for it
// only in the destructor.
//
// Threads:   thread-compatible.
// Ownership: the stream and the runtime outlive it.

#ifndef EVENKEEL_BUCKET_LAYERS_INTERNAL_DEVICE_BATCH_NORM_H_
#define EVENKEEL_BUCKET_LAYERS_INTERNAL_DEVICE_BATCH_NORM_H_

#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "evenkeel/bucket/layers/sync_batch_norm.h"
#include "evenkeel/comm/device/runtime.h"
#include "evenkeel/comm/memory.h"
#include "evenkeel/comm/types.h"
#include "evenkeel/join/scope.h"

namespace evenkeel::internal {

class DeviceBatchNorm {
 public:
  using Shape = SyncBatchNorm::Shape;

  static absl::StatusOr<std::unique_ptr<DeviceBatchNorm>> Create(
      const JoinScope& scope, const SyncBatchNormOptions& options);
  ~DeviceBatchNorm();

  // Returns whether it was made for such a group: after a loss the group may be another one.
  bool IsFor(const JoinScope& scope) const {
    return scope.communicator().runtime() == runtime_ &&
           scope.communicator().world_size() == world_size_;
  }

  absl::Status Forward(JoinScope& scope, const Shape& shape, const TensorView& input,
                       const SyncBatchNorm::Affine& affine, const SyncBatchNorm::Running& running,
                       const TensorView& output);
  // `shape` and `input` are those of the last Forward().
  absl::Status Backward(JoinScope& scope, const Shape& shape, const TensorView& input,
                        const TensorView& grad_output, const TensorView& gamma,
                        const SyncBatchNorm::Gradients& gradients);

 private:
  DeviceBatchNorm(DeviceRuntime* runtime, const SyncBatchNormOptions& options, int world_size);

  // Returns an error if an earlier Forward() had too few values, as far as this is known.
  absl::Status CheckCounts();
  int64_t PartsOf(const Shape& shape) const;
  double* Numbers(const Memory& memory) const { return static_cast<double*>(memory.data.get()); }
  TensorView View(const Memory& memory, int64_t count) const;

  DeviceRuntime* const runtime_;
  const SyncBatchNormOptions options_;
  const StreamRef stream_;
  const int64_t most_parts_;
  const int world_size_;
  // Doubles; batch_norm.cuh describes their layout.
  Memory parts_, own_, all_, statistics_, sums_;
  Memory least_;   // On the host: the least count, once `counted_` has passed.
  Event counted_;  // Null: no copy of it is under way.
  bool forgets_ = true;
};

}  // namespace evenkeel::internal

#endif  // EVENKEEL_BUCKET_LAYERS_INTERNAL_DEVICE_BATCH_NORM_H_
