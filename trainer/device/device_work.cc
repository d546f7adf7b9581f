#include "evenkeel/trainer/device/device_work.h"

#include <cstring>
#include <utility>
#include <variant>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "evenkeel/comm/base/clock.h"
#include "evenkeel/comm/status.h"

namespace evenkeel {
namespace {

constexpr int kSlots = 2;

}  // namespace

// One of the batches on their way.
struct DeviceWork::Slot {
  Memory pinned;
  DeviceBuffer here;
  Event copied;  // From `pinned`.
  Event used;    // The work that needs `here` has run.
};

// Pinned places for losses; a place is taken as long as a result may be asked for.
class DeviceWork::LossPool : public std::enable_shared_from_this<LossPool> {
 public:
  absl::StatusOr<std::shared_ptr<DeviceLoss>> Take(DeviceRuntime& runtime) {
    absl::MutexLock lock(&mutex_);
    if (free_.empty()) {
      constexpr int64_t kPlaces = 64;
      EK_ASSIGN_OR_RETURN(Memory block, runtime.AllocatePinned(kPlaces * sizeof(DeviceLoss)));
      auto* const first = static_cast<DeviceLoss*>(block.data.get());
      for (int64_t i = 0; i < kPlaces; ++i) free_.push_back(first + i);
      blocks_.push_back(std::move(block));
    }
    DeviceLoss* const place = free_.back();
    free_.pop_back();
    return std::shared_ptr<DeviceLoss>(place, [pool = shared_from_this()](DeviceLoss* unused) {
      absl::MutexLock lock(&pool->mutex_);
      pool->free_.push_back(unused);
    });
  }

 private:
  absl::Mutex mutex_;
  std::vector<Memory> blocks_ ABSL_GUARDED_BY(mutex_);
  std::vector<DeviceLoss*> free_ ABSL_GUARDED_BY(mutex_);
};

DeviceWork::DeviceWork(const DevicePlace& place)
    : place_(place),
      slots_(std::make_unique<Slot[]>(kSlots)),
      losses_(std::make_shared<LossPool>()) {}

// Memory outlives what uses it.
DeviceWork::~DeviceWork() {
  const absl::Time deadline = SteadyNow() + place_.timeout;
  runtime().Synchronize(stream(), deadline).IgnoreError();
  runtime().Synchronize(copies_.ref(), deadline).IgnoreError();
}

absl::StatusOr<std::unique_ptr<DeviceWork>> DeviceWork::Create(const DevicePlace& place) {
  EK_ASSIGN_OR_RETURN(Stream copies, place.runtime->CreateStream(place.device));
  EK_ASSIGN_OR_RETURN(Memory loss, place.runtime->Allocate(place.device, sizeof(DeviceLoss)));
  std::unique_ptr<DeviceWork> work(new DeviceWork(place));
  work->copies_ = std::move(copies);
  work->loss_ = std::move(loss);
  return work;
}

absl::StatusOr<DeviceBatch> DeviceWork::Upload(const Batch& batch,
                                               std::span<const std::byte> extra) {
  std::vector<std::span<const std::byte>> parts;
  if (const auto* const images = std::get_if<ImageBatch>(&batch)) {
    parts = {std::as_bytes(images->images), std::as_bytes(images->labels)};
  } else {
    const TokenBatch& tokens = std::get<TokenBatch>(batch);
    parts = {std::as_bytes(tokens.inputs), std::as_bytes(tokens.targets)};
  }
  const int64_t second = AlignedBytes(static_cast<int64_t>(parts[0].size()));
  const int64_t third = AlignedBytes(second + static_cast<int64_t>(parts[1].size()));
  const int64_t bytes = third + static_cast<int64_t>(extra.size());

  Slot& slot = slots_[uploads_ % kSlots];
  Slot& before = slots_[(uploads_ + 1) % kSlots];
  // All that has been put on the stream may still read the batch before.
  EK_ASSIGN_OR_RETURN(before.used, runtime().Record(stream()));
  EK_ASSIGN_OR_RETURN(const bool is_free, runtime().IsDone(slot.copied));
  if (!is_free)
    EK_RETURN_IF_ERROR(runtime().Synchronize(slot.copied, SteadyNow() + place_.timeout));
  if (slot.pinned.bytes < bytes) {
    EK_ASSIGN_OR_RETURN(slot.pinned, runtime().AllocatePinned(bytes));
  }
  EK_RETURN_IF_ERROR(slot.here.Need(*this, bytes));
  auto* const pinned = static_cast<std::byte*>(slot.pinned.data.get());
  std::memcpy(pinned, parts[0].data(), parts[0].size());
  std::memcpy(pinned + second, parts[1].data(), parts[1].size());
  if (!extra.empty()) std::memcpy(pinned + third, extra.data(), extra.size());

  EK_RETURN_IF_ERROR(runtime().Wait(copies_.ref(), slot.used));
  EK_RETURN_IF_ERROR(runtime().Copy(slot.here.as<std::byte>(), pinned, bytes, copies_.ref()));
  EK_ASSIGN_OR_RETURN(slot.copied, runtime().Record(copies_.ref()));
  EK_RETURN_IF_ERROR(runtime().Wait(stream(), slot.copied));
  ++uploads_;

  DeviceBatch here;
  const std::byte* const data = slot.here.as<std::byte>();
  if (std::holds_alternative<ImageBatch>(batch)) {
    here.images = reinterpret_cast<const float*>(data);
    here.labels = reinterpret_cast<const uint8_t*>(data + second);
  } else {
    here.inputs = reinterpret_cast<const int32_t*>(data);
    here.targets = reinterpret_cast<const int32_t*>(data + second);
  }
  if (!extra.empty()) here.extra = data + third;
  return here;
}

absl::StatusOr<PendingResult> DeviceWork::FetchLoss(int64_t predictions) {
  EK_ASSIGN_OR_RETURN(std::shared_ptr<DeviceLoss> place, losses_->Take(runtime()));
  EK_RETURN_IF_ERROR(runtime().Copy(place.get(), loss(), sizeof(DeviceLoss), stream()));
  EK_ASSIGN_OR_RETURN(Event event, runtime().Record(stream()));
  return PendingResult([runtime = &runtime(), place = std::move(place), event = std::move(event),
                        predictions](absl::Time deadline) -> absl::StatusOr<BatchResult> {
    EK_ASSIGN_OR_RETURN(const bool is_done, runtime->IsDone(event));
    if (!is_done) EK_RETURN_IF_ERROR(runtime->Synchronize(event, deadline));
    return BatchResult{.loss_mean = place->sum / static_cast<double>(predictions),
                       .correct = place->correct};
  });
}

absl::Status DeviceBuffer::Need(DeviceWork& work, int64_t bytes) {
  if (bytes <= memory_.bytes) return absl::OkStatus();
  if (memory_.bytes > 0) {
    // Both streams may still use it.
    const absl::Time deadline = SteadyNow() + work.place_.timeout;
    EK_RETURN_IF_ERROR(work.runtime().Synchronize(work.stream(), deadline));
    EK_RETURN_IF_ERROR(work.runtime().Synchronize(work.copies_.ref(), deadline));
  }
  work.held_bytes_ -= memory_.bytes;
  memory_ = {};
  EK_ASSIGN_OR_RETURN(memory_, work.runtime().Allocate(work.place_.device, bytes));
  work.held_bytes_ += bytes;
  return absl::OkStatus();
}

}  // namespace evenkeel
