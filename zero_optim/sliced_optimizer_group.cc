// A SlicedOptimizer among others: what a rank without inputs does, and how the state goes on in another group.

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "evenkeel/comm/internal/bytes.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/zero_optim/internal/agree.h"
#include "evenkeel/zero_optim/internal/state_sync.h"
#include "evenkeel/zero_optim/sliced_optimizer.h"

namespace evenkeel {

using internal::SliceFacts;

// Join ---------------------------------------------------------------------------------------------------------------

class SlicedOptimizer::Hook : public JoinHook {
 public:
  explicit Hook(SlicedOptimizer* owner) : owner_(owner) {}
  absl::Status OnDry() override { return owner_->WaitForAll(); }
  absl::Status OnAction(const StepAnswer& /*step*/, absl::string_view payload) override {
    return owner_->OnAction(payload);
  }
  absl::Status PostHook(bool is_last_joiner) override {
    return internal::AdoptFromLastJoiners(owner_->communicator(), owner_->join_name(), owner_->groups_, is_last_joiner);
  }

 private:
  SlicedOptimizer* const owner_;
};

absl::StatusOr<std::unique_ptr<JoinHook>> SlicedOptimizer::MakeJoinHook(const JoinOptions& /*options*/) {
  return std::make_unique<Hook>(this);
}

absl::Status SlicedOptimizer::OnAction(absl::string_view payload) {
  if (payload.empty()) return absl::InvalidArgumentError("an action without a word");
  const auto action = static_cast<Action>(payload.front());
  payload.remove_prefix(1);
  if (action == Action::kStep) return RepeatStep(payload);
  if (action == Action::kSave) return SaveHere(std::string(payload));
  internal::ByteReader reader(payload);
  const int to = reader.I32();
  if (action != Action::kConsolidate || !reader.Finish("a consolidation").ok()) {
    return absl::InvalidArgumentError("an action that this optimizer doesn't know");
  }
  return Gather(to).status();
}

absl::Status SlicedOptimizer::AnnounceAfterStep(absl::string_view call, const std::string& payload) {
  if (!join_config().enable) return absl::OkStatus();
  if (last_step_ == nullptr || last_step_ != communicator().steps().current()) {
    return absl::FailedPreconditionError(
        absl::StrCat(join_name(), ": inside RunJoined() ", call, " comes after Step(), in the same step"));
  }
  return communicator().steps().Announce(join_name(), payload);
}

// Another group ------------------------------------------------------------------------------------------------------

void SlicedOptimizer::LeaveGroup(Communicator* old, const GroupChange& /*change*/) {
  if (is_registered_ && old != nullptr) old->steps().Unregister(this);
  is_registered_ = false;
  last_step_.reset();
  params_->ClearGradients();
  (void)WaitUntilSettled();  // Not, if the group failed before: the update stays torn.
  absl::MutexLock lock(&mutex_);
  const auto is_open = [](const Work& work) { return !work.IsDone(); };
  if (old != nullptr && std::any_of(gathers_.begin(), gathers_.end(), is_open)) {
    old->Abort(absl::CancelledError(absl::StrCat(join_name(), " left the group before WaitForAll()")));
  }
  // A move that some rank may not have finished is undone on all; one that an update followed has been finished by all
  // that come to it, or nobody can go on with their state.
  if (move_ != nullptr && !is_torn_) {
    move_->Undo();
    for (const auto& [param, before] : move_->before()) holders_[param] = before;
  }
  move_.reset();
  plan_.reset();
  if (reducers_group_ == &communicator()) next_plan_.reset();  // Of the group that is left.
  gathers_.clear();
  settling_.Clear();
  flag_works_.clear();
  device_flags_.Forget();
  reduced_.clear();
  gradients_are_lost_ = false;
  awaits_step_ = false;
}

std::vector<int64_t> SlicedOptimizer::Sizes() const {
  std::vector<int64_t> sizes;
  for (int i = 0; i < params_->size(); ++i) sizes.push_back((*params_)[i].value.count);
  return sizes;
}

SliceFacts SlicedOptimizer::Facts() const {
  SliceFacts facts{.standing = {.steps_finished = steps_finished(),
                                .is_torn = is_torn_,
                                .may_lose = options_.lost_shard == LostShard::kFresh,
                                .checkpoint_hint = options_.checkpoint_hint},
                   .old_rank = held_rank_,
                   .old_world_size = held_world_size_};
  for (int i = 0; i < params_->size(); ++i) {
    const StateRange range = updater_.range(i);
    facts.held.push_back({.step = updater_.step(i), .begin = range.begin, .count = range.count});
    if (updater_.step(i) > 0 && range.count > 0) facts.standing.holds_state = true;
  }
  return facts;
}

absl::Status SlicedOptimizer::EnterGroup(const GroupChange& /*change*/) {
  EK_RETURN_IF_ERROR(TakeChannels());
  EK_RETURN_IF_ERROR(internal::CheckSameOnAllRanks(communicator(), join_name(), absl::OkStatus(), *params_, groups_,
                                                   internal::SameIn::kShape));
  std::string mine;
  {
    absl::MutexLock lock(&mutex_);
    EK_RETURN_IF_ERROR(updater_.Refresh());
    mine = Facts().Serialize();
  }
  EK_ASSIGN_OR_RETURN(
      const ControlChannel::Parts parts,
      communicator().control().Exchange(absl::StrCat("slices/", join_name()), mine, communicator().timeout()));
  std::vector<SliceFacts> by_rank;
  for (const std::string& part : parts) {
    EK_ASSIGN_OR_RETURN(SliceFacts facts, SliceFacts::Parse(part, Sizes()));
    by_rank.push_back(std::move(facts));
  }
  EK_ASSIGN_OR_RETURN(const internal::SliceStart start, internal::PlanSliceStart(by_rank, Sizes()));
  absl::MutexLock lock(&mutex_);
  for (int param = 0; param < params_->size(); ++param) {
    EK_RETURN_IF_ERROR(updater_.Prepare(param, start.steps[param]));
    EK_RETURN_IF_ERROR(KeepOnly(param, start.holders[param]));
  }
  is_torn_ = false;
  held_rank_ = communicator().rank();
  held_world_size_ = communicator().world_size();
  communicator().steps().Register(this);
  is_registered_ = true;
  return absl::OkStatus();
}

absl::Status SlicedOptimizer::CheckWhole() const {
  internal::OpenWorks settling;
  {
    absl::MutexLock lock(&mutex_);
    if (!is_torn_) return absl::OkStatus();
    if (gathers_.empty()) settling = settling_;
  }
  if (!settling.empty() && settling.Wait().ok()) return absl::OkStatus();
  return absl::AbortedError(absl::StrCat(join_name(), " was in the middle of an update"));
}

absl::Status SlicedOptimizer::TakeOver(StateTransfer& transfer) {
  const internal::StateSync sync{.comm = communicator(), .channel = *channel_, .name = join_name()};
  if (transfer.done.insert(params_).second) EK_RETURN_IF_ERROR(sync.BroadcastValues(*params_, transfer.source));
  absl::MutexLock lock(&mutex_);
  EK_RETURN_IF_ERROR(sync.BroadcastSettings(updater_, transfer.source));
  groups_ = updater_.groups();
  return absl::OkStatus();
}

}  // namespace evenkeel
