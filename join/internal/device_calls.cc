#include "evenkeel/join/internal/device_calls.h"

#include <algorithm>
#include <utility>

#include "evenkeel/comm/base/clock.h"
#include "evenkeel/comm/status.h"

namespace evenkeel::internal {

absl::StatusOr<std::unique_ptr<DeviceCalls>> DeviceCalls::Create(const Communicator& comm) {
  EK_ASSIGN_OR_RETURN(Stream stream, comm.runtime()->CreateStream(comm.device()));
  return std::unique_ptr<DeviceCalls>(new DeviceCalls(comm, std::move(stream)));
}

DeviceCalls::DeviceCalls(const Communicator& comm, Stream stream)
    : runtime_(comm.runtime()),
      device_(comm.device()),
      timeout_(comm.timeout()),
      stream_(std::move(stream)) {}

DeviceCalls::~DeviceCalls() { (void)Drain(); }

absl::StatusOr<TensorView> DeviceCalls::Scratch(Slot slot, int64_t count, DType dtype,
                                                StreamRef stream) {
  Piece& piece = pieces_[slot];
  const int64_t bytes = count * SizeOf(dtype);
  if (piece.memory.bytes < bytes) {
    // Memory of the device's, not the group's: what the other ranks pass is theirs, which mostly is
    // that, too, and a transport does without copies where all pass the same kind.
    absl::StatusOr<Memory> larger =
        runtime_->Allocate(device_, std::max(bytes, 2 * piece.memory.bytes));
    if (absl::IsResourceExhausted(larger.status())) larger = runtime_->Allocate(device_, bytes);
    EK_RETURN_IF_ERROR(larger.status());
    // Kept until Drain(): to free it would wait for all that the device does.
    if (piece.memory.data != nullptr) outgrown_.push_back(std::move(piece));
    piece = {.memory = *std::move(larger)};
  }
  EK_RETURN_IF_ERROR(runtime_->Wait(stream, piece.used));
  piece.is_taken = true;
  return TensorView(piece.memory.data.get(), count, dtype, device_);
}

void DeviceCalls::Release(StreamRef stream) {
  absl::StatusOr<Event> now = Event();
  for (Piece& piece : pieces_) {
    if (!piece.is_taken) continue;
    if (now.ok() && !*now) now = runtime_->Record(stream);
    if (now.ok()) piece.used = *now;
    piece.is_taken = false;
  }
  failure_.Update(now.status());
}

absl::Status DeviceCalls::Follow(const Work& work, StreamRef stream) {
  works_.push_back(work);
  const absl::Status ordered = work.OrderBefore(stream);
  if (ordered.ok()) return ordered;
  const absl::Status why = work.Wait();  // Knows more.
  return why.ok() ? ordered : why;
}

absl::Status DeviceCalls::Confirm() {
  absl::Status first = failure_;
  std::erase_if(works_, [&](const Work& work) {
    if (!work.IsDone()) return false;
    const absl::Status status = work.Wait();
    first.Update(status);
    return status.ok();
  });
  return first;
}

absl::Status DeviceCalls::Drain() {
  absl::Status first = failure_;
  for (const Work& work : works_) first.Update(work.Wait());
  works_.clear();
  const absl::Time deadline = SteadyNow() + timeout_;
  const auto wait = [&](Piece& piece) {
    if (piece.used) first.Update(runtime_->Synchronize(piece.used, deadline));
    piece.used = Event();
  };
  for (Piece& piece : pieces_) wait(piece);
  for (Piece& piece : outgrown_) wait(piece);
  outgrown_.clear();
  first.Update(runtime_->Synchronize(stream_.ref(), deadline));
  return first;
}

}  // namespace evenkeel::internal
