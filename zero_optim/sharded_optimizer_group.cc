// A sharded optimizer among others: what a rank without inputs does, and how state moves to other owners and into another
// group.

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "evenkeel/comm/internal/bytes.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/work.h"
#include "evenkeel/zero_optim/internal/action_hook.h"
#include "evenkeel/zero_optim/internal/agree.h"
#include "evenkeel/zero_optim/internal/state_sync.h"
#include "evenkeel/zero_optim/internal/wait_for_all.h"
#include "evenkeel/zero_optim/sharded_optimizer.h"

namespace evenkeel {

using internal::WaitForAll;

// Join ---------------------------------------------------------------------------------------------------------------

absl::StatusOr<std::unique_ptr<JoinHook>> ShardedOptimizer::MakeJoinHook(const JoinOptions& /*options*/) {
  return std::make_unique<internal::ActionHook>(
      [this](const StepAnswer& step, absl::string_view payload) { return OnAction(step, payload); },
      [this](bool is_last_joiner) {
        return internal::AdoptFromLastJoiners(communicator(), join_name(), updater_.groups(), is_last_joiner);
      });
}

absl::Status ShardedOptimizer::OnAction(const StepAnswer& answer, absl::string_view payload) {
  if (payload.empty()) return absl::InvalidArgumentError("an action without a word");
  const auto action = static_cast<Action>(payload.front());
  payload.remove_prefix(1);
  if (action == Action::kStep || action == Action::kCheck) return RepeatStep(answer, action, payload);
  if (action == Action::kRebalance && payload.empty()) return RebalanceHere();
  if (action == Action::kSave) return SaveHere(std::string(payload));
  internal::ByteReader reader(payload);
  const int to = reader.I32();
  const Bytes chunk{action == Action::kStream ? reader.I64() : 0};
  if (!reader.Finish("an optimizer's action").ok() || to < kAllRanks || to >= communicator().world_size()) {
    return absl::InvalidArgumentError("an action that this optimizer doesn't know");
  }
  // A rank without inputs has no use for it.
  if (action == Action::kStream)
    return Stream(
        to, [](const StateChunk&) { return absl::OkStatus(); }, chunk);
  if (action != Action::kConsolidate) return absl::InvalidArgumentError("an action that this optimizer doesn't know");
  return Gather(to).status();
}

absl::Status ShardedOptimizer::AnnounceAfterStep(absl::string_view call, const std::string& payload) {
  if (!join_config().enable) return absl::OkStatus();
  if (last_step_ == nullptr || last_step_ != communicator().steps().current()) {
    return absl::FailedPreconditionError(
        absl::StrCat(join_name(), ": inside RunJoined() ", call, " comes after Step(), in the same step"));
  }
  return communicator().steps().Announce(join_name(), payload);
}

// Other owners -------------------------------------------------------------------------------------------------------

std::vector<std::vector<int>> ShardedOptimizer::ParamsByGroup() const {
  std::vector<std::vector<int>> params;
  for (const ParameterGroup& group : groups().groups()) params.push_back(group.params);
  return params;
}

double ShardedOptimizer::imbalance() const {
  const PlanPtr plan = this->plan();
  return plan->owners.Imbalance(plan->mask);
}

absl::Status ShardedOptimizer::Rebalance() {
  EK_RETURN_IF_ERROR(AnnounceAfterStep("Rebalance", std::string(1, static_cast<char>(Action::kRebalance))));
  return RebalanceHere();
}

absl::Status ShardedOptimizer::RebalanceHere() {
  const PlanPtr plan = this->plan();
  const std::optional<OwnerTable> better = plan->owners.Rebalanced(plan->mask, ParamsByGroup());
  return better.has_value() ? MoveTo(*better) : absl::OkStatus();
}

// Between two updates, so that all state is of the same step. What comes is put beside what is there until everybody
// has everything: a failure before that has changed nothing.
absl::Status ShardedOptimizer::MoveTo(const OwnerTable& owners) {
  const int rank = communicator().rank();
  const PlanPtr old = plan();
  EK_ASSIGN_OR_RETURN(const std::vector<int64_t> steps, GatherSteps());
  const auto moves = [&](int param) { return old->owners.owner(param) != owners.owner(param) && steps[param] > 0; };
  // All memory first: if there is not enough, nothing is under way that would write to the rest of it.
  std::map<int, std::vector<internal::HeldTensor>> arriving;
  for (int param = 0; param < params_->size(); ++param) {
    if (!moves(param) || owners.owner(param) != rank) continue;
    EK_ASSIGN_OR_RETURN(arriving[param], updater_.NewTensors(param));
  }
  std::vector<Work> works;
  for (int param = 0; param < params_->size(); ++param) {
    const int from = old->owners.owner(param), to = owners.owner(param);
    if (!moves(param) || (rank != from && rank != to)) continue;
    for (internal::HeldTensor& tensor : rank == to ? arriving[param] : updater_.tensors(param)) {
      const CallOptions options{.role = Role::kState, .after = updater_.stream()};
      works.push_back(rank == to ? channel_->Recv(tensor.view(), from, options)
                                 : channel_->Send(tensor.view(), to, options));
    }
  }
  EK_RETURN_IF_ERROR(WaitForAll(works));
  is_torn_ = true;
  EK_RETURN_IF_ERROR(channel_->Barrier({.role = Role::kState}).Wait());
  for (int param = 0; param < params_->size(); ++param) {
    if (old->owners.owner(param) == rank && owners.owner(param) != rank) {
      EK_RETURN_IF_ERROR(updater_.Prepare(param, 0));
    }
    if (old->owners.owner(param) == rank || owners.owner(param) != rank || steps[param] == 0) continue;
    EK_RETURN_IF_ERROR(updater_.Prepare(param, steps[param]));
    updater_.tensors(param) = std::move(arriving[param]);
  }
  is_torn_ = false;
  return SetPlan(owners, old->mask, old->generation + 1);
}

// Another group -------------------------------------------------------------------------------------------------------

void ShardedOptimizer::LeaveGroup(Communicator* old, const GroupChange& /*change*/) {
  if (is_registered_ && old != nullptr) old->steps().Unregister(this);
  is_registered_ = false;
  last_step_.reset();
  gradients_.reset();
  params_->ClearGradients();
  if (!open_.Wait().ok()) is_torn_ = true;  // The group failed before.
  open_.Clear();
  flags_.Forget();
}

internal::ShardFacts ShardedOptimizer::Facts() const {
  const PlanPtr plan = this->plan();
  internal::ShardFacts facts{.generation = plan->generation,
                             .old_rank = held_rank_,
                             .mask = plan->mask,
                             .steps_finished = steps_finished(),
                             .is_torn = is_torn_,
                             .may_lose = options_.lost_shard == LostShard::kFresh,
                             .checkpoint_hint = options_.checkpoint_hint,
                             .owners = plan->owners.owners(),
                             .was_updated = was_updated_};
  for (int i = 0; i < params_->size(); ++i) facts.held_steps.push_back(updater_.step(i));
  return facts;
}

absl::Status ShardedOptimizer::EnterGroup(const GroupChange& change) {
  EK_RETURN_IF_ERROR(TakeChannel());
  EK_RETURN_IF_ERROR(updater_.Refresh());
  EK_RETURN_IF_ERROR(internal::CheckSameOnAllRanks(communicator(), join_name(), absl::OkStatus(), *params_, groups(),
                                                   internal::SameIn::kShape));
  EK_ASSIGN_OR_RETURN(const ControlChannel::Parts parts,
                      communicator().control().Exchange(absl::StrCat("shards/", join_name()), Facts().Serialize(),
                                                        communicator().timeout()));
  std::vector<internal::ShardFacts> by_rank;
  for (const std::string& part : parts) {
    EK_ASSIGN_OR_RETURN(internal::ShardFacts facts, internal::ShardFacts::Parse(part, params_->size()));
    by_rank.push_back(std::move(facts));
  }
  EK_ASSIGN_OR_RETURN(const internal::ShardMove move, internal::PlanShardMove(by_rank, change.source));
  EK_RETURN_IF_ERROR(MoveState(move));
  communicator().steps().Register(this);
  is_registered_ = true;
  return absl::OkStatus();
}

absl::Status ShardedOptimizer::MoveState(const internal::ShardMove& move) {
  OwnerTable owners = NobodyOwns();
  EK_RETURN_IF_ERROR(owners.Assign(move.owned));
  const int rank = communicator().rank();
  std::vector<Work> works;
  for (int param = 0; param < params_->size(); ++param) {
    const int from = move.holder[param], to = owners.owner(param);
    was_updated_[param] = from >= 0;
    if (from < 0 || from == to || (rank != from && rank != to)) continue;
    if (rank == to) EK_RETURN_IF_ERROR(updater_.Prepare(param, move.steps[param]));
    for (internal::HeldTensor& tensor : updater_.tensors(param)) {
      const CallOptions options{.role = Role::kState, .after = updater_.stream()};
      works.push_back(rank == to ? channel_->Recv(tensor.view(), from, options)
                                 : channel_->Send(tensor.view(), to, options));
    }
  }
  EK_RETURN_IF_ERROR(WaitForAll(works));
  for (int param = 0; param < params_->size(); ++param) {
    if (owners.owner(param) != rank || move.holder[param] < 0) EK_RETURN_IF_ERROR(updater_.Prepare(param, 0));
  }
  is_torn_ = false;
  EK_RETURN_IF_ERROR(params_->SetTrainable(move.mask));
  seen_mask_version_ = params_->mask_version();
  held_rank_ = rank;
  return SetPlan(std::move(owners), move.mask, move.generation);
}

absl::Status ShardedOptimizer::CheckWhole() const {
  if (!is_torn_ && open_.Wait().ok()) return absl::OkStatus();
  return absl::AbortedError(absl::StrCat(join_name(), " was in the middle of an update"));
}

absl::Status ShardedOptimizer::TakeOver(StateTransfer& transfer) {
  const internal::StateSync sync{.comm = communicator(), .channel = *channel_, .name = join_name()};
  if (transfer.done.insert(params_).second) EK_RETURN_IF_ERROR(sync.BroadcastValues(*params_, transfer.source));
  return sync.BroadcastSettings(updater_, transfer.source);
}

}  // namespace evenkeel
