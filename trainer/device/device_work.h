// The parts of every model on a device beside its kernels: memory for activations, batches on their
// way there, losses on their way back.
//
//   class DeviceMlp : public Model {  // Model::InitOnDevice() gives it parameters and buffers
//     absl::StatusOr<PendingResult> DoForward(const Batch& batch, ...) override {
//       EK_ASSIGN_OR_RETURN(const DeviceBatch here, work_->Upload(batch));
//       EK_RETURN_IF_ERROR(scores_.Need(*work_, elements * sizeof(float)));
//       ... kernels on work_->stream(), the last of which write work_->loss() ...
//       return work_->FetchLoss(predictions);  // pending: read when the device has come to it
//     }
//     DeviceBuffer scores_;
//     // The last member, so that it goes first: it waits for the device.
//     std::unique_ptr<DeviceWork> work_;
//   };
//
// Batches are copied into pinned memory before Upload() returns, from there by a stream of its own,
// two in turn: the copy of one runs beside the step before it. What Upload() answers is there for
// what comes on the stream after it, up to the next Upload() but one; Backward may use it.
//
// Host:      waits for the copy of the batch before the last one, which has long run, and when
//            memory has to grow.
// Threads:   thread-compatible.
// Errors:    ResourceExhausted for memory, and the runtime's own.

#ifndef EVENKEEL_TRAINER_DEVICE_DEVICE_WORK_H_
#define EVENKEEL_TRAINER_DEVICE_DEVICE_WORK_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "evenkeel/comm/device/runtime.h"
#include "evenkeel/comm/memory.h"
#include "evenkeel/trainer/data/batch.h"
#include "evenkeel/trainer/device/loss.h"
#include "evenkeel/trainer/device/math.h"
#include "evenkeel/trainer/models/batch_result.h"
#include "evenkeel/trainer/models/place.h"

namespace evenkeel {

// A batch in the device's memory; what the batch has not is null.
struct DeviceBatch {
  const float* images = nullptr;
  const uint8_t* labels = nullptr;
  const int32_t* inputs = nullptr;
  const int32_t* targets = nullptr;
  const std::byte* extra = nullptr;  // At a multiple of 256 bytes.
};

class DeviceWork {
 public:
  static absl::StatusOr<std::unique_ptr<DeviceWork>> Create(const DevicePlace& place);
  ~DeviceWork();
  DeviceWork(const DeviceWork&) = delete;
  DeviceWork& operator=(const DeviceWork&) = delete;

  DeviceRuntime& runtime() const { return *place_.runtime; }
  StreamRef stream() const { return place_.stream.ref(); }
  DeviceMath& math() const { return *place_.math; }
  // Returns the bytes of all DeviceBuffers, batches included.
  int64_t held_bytes() const { return held_bytes_; }

  // `extra`: what else a model wants to know of the batch, in the same copy.
  absl::StatusOr<DeviceBatch> Upload(const Batch& batch, std::span<const std::byte> extra = {});

  // In the device's memory.
  DeviceLoss* loss() const { return static_cast<DeviceLoss*>(loss_.data.get()); }
  // As it is after what is on the stream now.
  absl::StatusOr<PendingResult> FetchLoss(int64_t predictions);

 private:
  friend class DeviceBuffer;
  struct Slot;
  class LossPool;
  explicit DeviceWork(const DevicePlace& place);

  const DevicePlace place_;
  int64_t held_bytes_ = 0;
  Stream copies_;
  std::unique_ptr<Slot[]> slots_;  // Two.
  int64_t uploads_ = 0;
  Memory loss_;
  std::shared_ptr<LossPool> losses_;
};

// Memory on the device that grows, and is kept: zeroed when it is taken, then as work leaves it.
class DeviceBuffer {
 public:
  // At least so many bytes; what was there may be gone.
  absl::Status Need(DeviceWork& work, int64_t bytes);
  int64_t bytes() const { return memory_.bytes; }
  template <typename T>
  T* as() const {
    return static_cast<T*>(memory_.data.get());
  }

 private:
  Memory memory_;
};

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_DEVICE_DEVICE_WORK_H_
