#include "evenkeel/bucket/tensor_snapshot.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "absl/time/time.h"
#include "evenkeel/comm/base/clock.h"
#include "evenkeel/comm/status.h"

namespace evenkeel {
namespace {

constexpr int64_t kAlignment = 16;  // The bytes that a device moves at once.
constexpr absl::Duration kDrainTimeout = absl::Minutes(1);

}  // namespace

absl::Status TensorSnapshot::Take(absl::Span<const TensorView> tensors, DeviceRuntime* runtime,
                                  StreamRef stream) {
  size_ = 0;  // Until there is all of it.
  if (runtime == nullptr) {
    bytes_.resize(tensors.size());
    for (size_t i = 0; i < tensors.size(); ++i) {
      const auto* data = static_cast<const std::byte*>(tensors[i].data);
      bytes_[i].assign(data, data + tensors[i].bytes());
    }
    size_ = tensors.size();
    return absl::OkStatus();
  }
  if (tensors.empty()) return absl::OkStatus();
  if (!std::equal(tensors.begin(), tensors.end(), taken_from_.begin(), taken_from_.end())) {
    EK_RETURN_IF_ERROR(runtime->Synchronize(
        stream, SteadyNow() + kDrainTimeout));  // The memory before may be in use.
    taken_from_.clear();
    int64_t bytes = 0;
    std::vector<CopySegment> take;
    kept_.clear();
    const auto room = [](const TensorView& tensor) {
      return (tensor.bytes() + kAlignment - 1) / kAlignment * kAlignment;
    };
    for (const TensorView& tensor : tensors) bytes += room(tensor);
    EK_ASSIGN_OR_RETURN(memory_, runtime->Allocate(tensors[0].device, bytes));
    auto* free = static_cast<std::byte*>(memory_.data.get());
    for (const TensorView& tensor : tensors) {
      kept_.emplace_back(free, tensor.count, tensor.dtype, tensor.device);
      take.push_back({.to = kept_.back(), .from = tensor});
      free += room(tensor);
    }
    EK_ASSIGN_OR_RETURN(take_, SegmentCopy::Create(*runtime, tensors[0].device, take));
    taken_from_.assign(tensors.begin(), tensors.end());
  }
  EK_RETURN_IF_ERROR(take_->Run(stream));
  size_ = tensors.size();
  return absl::OkStatus();
}

absl::Status TensorSnapshot::Restore(absl::Span<const TensorView> tensors, DeviceRuntime* runtime,
                                     StreamRef stream) const {
  if (size_ == 0) return absl::OkStatus();
  for (size_t i = 0; i < size_ && runtime != nullptr; ++i) {
    if (tensors[i].count == 0) continue;
    EK_RETURN_IF_ERROR(runtime->Copy(tensors[i].data, kept_[i].data, kept_[i].bytes(), stream));
  }
  if (runtime != nullptr) return absl::OkStatus();
  for (size_t i = 0; i < size_; ++i) {
    if (!bytes_[i].empty()) std::memcpy(tensors[i].data, bytes_[i].data(), bytes_[i].size());
  }
  return absl::OkStatus();
}

}  // namespace evenkeel
