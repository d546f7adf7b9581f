#include "evenkeel/comm/shm/transfer.h"

#include "evenkeel/comm/status.h"

namespace evenkeel::internal {

ShmTransfer::ShmTransfer(ShmLane& lane, const Operation& operation)
    : task_(lane, operation), arrival_(task_), way_(MakeShmWay(task_, arrival_)) {}

absl::Status ShmTransfer::Arrive() {
  task_.SetAsideEndangeredInput();
  arrival_.Describe();
  // So that the last rank finds all that it needs.
  if (way_ != nullptr && !arrival_.is_registered()) EK_RETURN_IF_ERROR(way_->PublishEarly());
  arrival_.Announce();
  return absl::OkStatus();
}

absl::Status ShmTransfer::BeginWay() {
  if (way_ == nullptr) return absl::OkStatus();
  if (arrival_.AreAllWritable()) way_ = MakeShmDirect(task_, arrival_);
  return way_->Begin();
}

bool ShmTransfer::HasAnotherGivenUp() const {
  for (int seat = 0; seat < task_.size(); ++seat) {
    if (!task_.IsMine(seat) && task_.lane.HasEnded(seat)) return true;
  }
  return false;
}

absl::StatusOr<ShmProgress> ShmTransfer::Advance(int64_t budget, const std::atomic<bool>& stop) {
  ShmLane& lane = task_.lane;
  auto blocked = ShmProgress::kBlocked;
  if (state_ == State::kComing) {
    if (!arrival_.MayDescribe()) return blocked;
    EK_RETURN_IF_ERROR(Arrive());
    state_ = State::kArrived;
    if (lane.has_tags) lane.Notify();
    blocked = ShmProgress::kMoved;
  }
  if (state_ == State::kArrived) {
    EK_ASSIGN_OR_RETURN(const bool all_are_here, arrival_.Meet());
    if (!all_are_here) return blocked;
    if (const absl::Status begun = BeginWay(); !begun.ok()) {
      // A rank that has given up may have freed its memory: blocked until the group ends here, too.
      if (HasAnotherGivenUp()) return blocked;
      return begun;
    }
    state_ = State::kMoving;
    // This rank came last, and the others may sleep.
    if (blocked == ShmProgress::kMoved) lane.Notify();
    blocked = ShmProgress::kMoved;
  }
  if (way_ != nullptr) {
    EK_ASSIGN_OR_RETURN(const ShmProgress progress, way_->Advance(budget, stop));
    if (progress == ShmProgress::kBlocked) return blocked;
    if (progress != ShmProgress::kEnded) return progress;
  }
  if (arrival_.MayBeGarbage()) return ShmProgress::kBlocked;  // Until the group ends here as well.
  if (way_ != nullptr) way_->CountIn();
  ++lane.operations;
  lane.mine().done.store(lane.operations, std::memory_order_release);
  lane.Notify();
  return ShmProgress::kEnded;
}

}  // namespace evenkeel::internal
