#include "evenkeel/bucket/reducer/device_side.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "evenkeel/comm/base/clock.h"
#include "evenkeel/comm/status.h"

namespace evenkeel {

absl::StatusOr<std::unique_ptr<DeviceSide>> DeviceSide::Create(const Communicator& comm,
                                                               const ParameterSet& params) {
  if (comm.device().is_cpu()) return nullptr;
  return std::unique_ptr<DeviceSide>(new DeviceSide(comm, params.stream()));
}

void DeviceSide::ReplaceGroup(const Communicator& comm) {
  runtime_ = comm.runtime();
  timeout_ = comm.timeout();
  open_.clear();
  ended_.clear();
}

absl::Time DeviceSide::deadline() const { return SteadyNow() + timeout_; }

absl::StatusOr<std::vector<StreamRef>> DeviceSide::SideStreams(int count) {
  std::vector<StreamRef> streams;
  for (int i = 0; i < count; ++i) {
    if (static_cast<int>(side_.size()) <= i) {
      // They have little to do, and collectives wait for it.
      EK_ASSIGN_OR_RETURN(Stream stream,
                          runtime_->CreateStream(stream_.device, StreamPriority::kHigh));
      side_.push_back(std::move(stream));
    }
    streams.push_back(side_[i].ref());
  }
  return streams;
}

absl::Status DeviceSide::Join() {
  absl::Status first;
  for (const Stream& side : side_) {
    const absl::StatusOr<Event> event = runtime_->Record(side.ref());
    first.Update(event.ok() ? runtime_->Wait(stream_, *event) : event.status());
  }
  return first;
}

absl::Status DeviceSide::Drain() {
  absl::Status first;
  for (const Stream& side : side_) first.Update(runtime_->Synchronize(side.ref(), deadline()));
  first.Update(runtime_->Synchronize(stream_, deadline()));
  return first;
}

absl::StatusOr<absl::Span<const std::byte>> DeviceSide::Read(absl::Span<const TensorView> tensors) {
  int64_t bytes = 0;
  for (const TensorView& tensor : tensors) bytes += tensor.bytes();
  if (pinned_.bytes < bytes) {
    EK_ASSIGN_OR_RETURN(pinned_, runtime_->AllocatePinned(bytes));
  }
  auto* const data = static_cast<std::byte*>(pinned_.data.get());
  int64_t at = 0;
  for (const TensorView& tensor : tensors) {
    EK_RETURN_IF_ERROR(runtime_->Copy(data + at, tensor.data, tensor.bytes(), stream_));
    at += tensor.bytes();
  }
  EK_RETURN_IF_ERROR(runtime_->Synchronize(stream_, deadline()));
  return absl::Span<const std::byte>(data, bytes);
}

void DeviceSide::Keep(std::vector<Work> works) {
  std::ranges::move(works, std::back_inserter(open_));
}

void DeviceSide::EndStep() {
  std::ranges::move(open_, std::back_inserter(ended_));
  open_.clear();
}

absl::Status DeviceSide::Confirm() {
  absl::Status first;
  for (std::vector<Work>* const works : {&ended_, &open_}) {
    std::erase_if(*works, [&](const Work& work) {
      if (!work.IsDone()) return false;
      const absl::Status status = work.Wait();
      first.Update(status);
      return status.ok();
    });
  }
  return first;
}

absl::Status DeviceSide::CheckEnded() const {
  absl::Status first;
  for (const Work& work : ended_) first.Update(work.Wait());
  return first;
}

}  // namespace evenkeel
