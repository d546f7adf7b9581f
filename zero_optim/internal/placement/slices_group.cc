// The state's move into another group.

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/zero_optim/internal/placement/slices.h"

namespace evenkeel::internal {

void SlicesOptimizer::OnLeave(Communicator* old) {
  params_->ClearGradients();
  (void)WaitUntilSettled();  // Not, if the group failed before: the update stays torn.
  absl::MutexLock lock(&mutex_);
  const auto is_open = [](const Work& work) { return !work.IsDone(); };
  if (old != nullptr && std::any_of(gathers_.begin(), gathers_.end(), is_open)) {
    old->Abort(
        absl::CancelledError(absl::StrCat(join_name(), " left the group before WaitForAll()")));
  }
  // A move that some rank may not have finished is undone on all. A move before an update has been
  // finished by all ranks that enter the next group, or their state cannot be used.
  if (move_ != nullptr && !is_torn_) {
    move_->Undo();
    for (const auto& [param, before] : move_->before()) holders_[param] = before;
  }
  move_.reset();
  plan_.reset();
  // The plan of the group that is left. Of two groups that live the addresses differ.
  if (reducers_group_lives_.expired() || reducers_group_ == old) next_plan_.reset();
  gathers_.clear();
  settling_.Clear();
  flag_works_.clear();
  // As before a first step: all ranks of the next group begin a reduction.
  MoveTo(Phase::kReduced);
  ForgetSlices();
  reduced_.clear();
  notes_.clear();
}

std::vector<int64_t> SlicesOptimizer::Sizes() const {
  std::vector<int64_t> sizes;
  for (int i = 0; i < params_->size(); ++i) sizes.push_back((*params_)[i].value.count);
  return sizes;
}

SliceFacts SlicesOptimizer::Facts() const {
  SliceFacts facts{
      .standing = StandingOf(is_torn_), .old_rank = held_rank_, .old_world_size = held_world_size_};
  for (int i = 0; i < params_->size(); ++i) {
    const StateRange range = updater_.range(i);
    facts.held.push_back({.step = updater_.step(i), .begin = range.begin, .count = range.count});
    if (updater_.step(i) > 0 && range.count > 0) facts.standing.holds_state = true;
  }
  return facts;
}

absl::Status SlicesOptimizer::OnEnter(const GroupChange& /*change*/) {
  EK_RETURN_IF_ERROR(CheckSame(absl::OkStatus()));
  std::string mine;
  {
    absl::MutexLock lock(&mutex_);
    EK_RETURN_IF_ERROR(updater_.Refresh());
    mine = Facts().Serialize();
  }
  EK_ASSIGN_OR_RETURN(const ControlChannel::Parts parts, Exchange("slices", std::move(mine)));
  std::vector<SliceFacts> by_rank;
  for (const std::string& part : parts) {
    EK_ASSIGN_OR_RETURN(by_rank.emplace_back(), SliceFacts::Parse(part, Sizes()));
  }
  EK_ASSIGN_OR_RETURN(const SliceStart start, PlanSliceStart(by_rank, Sizes()));
  absl::MutexLock lock(&mutex_);
  for (int param = 0; param < params_->size(); ++param) {
    EK_RETURN_IF_ERROR(updater_.Prepare(param, start.steps[param]));
    EK_RETURN_IF_ERROR(KeepOnly(param, start.holders[param]));
  }
  is_torn_ = false;
  held_rank_ = communicator().rank();
  held_world_size_ = communicator().world_size();
  return absl::OkStatus();
}

HeldState SlicesOptimizer::CheckState() const {
  OpenWorks settling;
  {
    absl::MutexLock lock(&mutex_);
    if (!is_torn_) return {};
    if (gathers_.empty() && !awaits_step()) settling = settling_;
  }
  if (!settling.empty() && settling.Wait().ok()) return {};
  return {StateKind::kPatched, absl::StrCat(join_name(), " was in the middle of an update")};
}

absl::Status SlicesOptimizer::TakeOverState(Channel& /*channel*/, StateTransfer& transfer) {
  absl::MutexLock lock(&mutex_);
  EK_RETURN_IF_ERROR(AdoptSettingsOf(transfer.source));
  groups_ = updater_.groups();
  return absl::OkStatus();
}

}  // namespace evenkeel::internal
