// The state's moves to other owners and into another group, and the state as a whole.

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "evenkeel/comm/memory.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/work.h"
#include "evenkeel/zero_optim/internal/open_works.h"
#include "evenkeel/zero_optim/internal/placement/whole_tensors.h"

namespace evenkeel::internal {

// Other owners ------------------------------------------------------------------------------------

std::vector<std::vector<int>> WholeTensorsOptimizer::ParamsByGroup() const {
  std::vector<std::vector<int>> params;
  for (const ParameterGroup& group : groups().groups()) params.push_back(group.params);
  return params;
}

double WholeTensorsOptimizer::imbalance() const {
  const PlanPtr plan = this->plan();
  return plan->owners.Imbalance(plan->mask);
}

absl::Status WholeTensorsOptimizer::Rebalance() {
  EK_RETURN_IF_ERROR(AnnounceAfterStep("Rebalance", RebalanceAction()));
  return RebalanceNow();
}

absl::Status WholeTensorsOptimizer::RebalanceNow() {
  const PlanPtr plan = this->plan();
  const std::optional<OwnerTable> better = plan->owners.Rebalanced(plan->mask, ParamsByGroup());
  return better.has_value() ? MoveTo(*better) : absl::OkStatus();
}

absl::StatusOr<WholeTensorsOptimizer::Arrivals> WholeTensorsOptimizer::Bring(
    const OwnerMove& move) {
  const int rank = communicator().rank();
  // All memory first: if there is not enough, nothing is in flight that writes to it.
  Arrivals arrivals;
  for (int param = 0; param < params_->size(); ++param) {
    if (!move.Moves(param) || move.to.owner(param) != rank) continue;
    EK_ASSIGN_OR_RETURN(arrivals[param], updater_.NewTensors(param));
  }
  const CallOptions options{.role = Role::kState, .after = updater_.stream()};
  std::vector<Work> works;
  for (int param = 0; param < params_->size(); ++param) {
    const int from = move.from[param], to = move.to.owner(param);
    if (!move.Moves(param) || (rank != from && rank != to)) continue;
    for (HeldTensor& tensor : rank == to ? arrivals[param] : updater_.tensors(param)) {
      works.push_back(rank == to ? channel()->Recv(tensor.view(), from, options)
                                 : channel()->Send(tensor.view(), to, options));
    }
  }
  EK_RETURN_IF_ERROR(internal::WaitForAll(works));
  return arrivals;
}

absl::Status WholeTensorsOptimizer::Adopt(const OwnerMove& move, Arrivals arrivals) {
  EK_RETURN_IF_ERROR(channel()->Barrier({.role = Role::kState}).Wait());
  is_torn_ = true;
  const int rank = communicator().rank();
  for (int param = 0; param < params_->size(); ++param) {
    if (move.to.owner(param) != rank || move.from[param] < 0) {
      EK_RETURN_IF_ERROR(updater_.Prepare(param, 0));
    } else if (move.from[param] != rank) {
      EK_RETURN_IF_ERROR(updater_.Prepare(param, move.steps[param]));
      updater_.tensors(param) = std::move(arrivals[param]);
    }
  }
  is_torn_ = false;
  return absl::OkStatus();
}

// Between two updates, so that all state is of the same step.
absl::Status WholeTensorsOptimizer::MoveTo(const OwnerTable& owners) {
  const PlanPtr old = plan();
  EK_ASSIGN_OR_RETURN(std::vector<int64_t> steps, CountSteps());
  OwnerMove move{.from = old->owners.owners(), .to = owners, .steps = std::move(steps)};
  for (int param = 0; param < params_->size(); ++param) {
    if (move.steps[param] == 0) move.from[param] = -1;
  }
  EK_ASSIGN_OR_RETURN(Arrivals arrivals, Bring(move));
  is_torn_ = true;
  EK_RETURN_IF_ERROR(Adopt(move, std::move(arrivals)));
  return SetPlan(owners, old->mask, old->generation + 1);
}

// Another group -----------------------------------------------------------------------------------

void WholeTensorsOptimizer::OnLeave(Communicator* /*old*/) {
  gradients_.reset();
  params_->ClearGradients();
  if (!open_.Wait().ok()) is_torn_ = true;  // The group failed before.
  open_.Clear();
}

ShardFacts WholeTensorsOptimizer::Facts() const {
  const PlanPtr plan = this->plan();
  ShardFacts facts{.standing = StandingOf(is_torn_),
                   .generation = plan->generation,
                   .old_rank = held_rank_,
                   .mask = plan->mask,
                   .owners = plan->owners.owners(),
                   .was_updated = was_updated_};
  for (int i = 0; i < params_->size(); ++i) {
    facts.held_steps.push_back(updater_.step(i));
    if (updater_.step(i) > 0) facts.standing.holds_state = true;
  }
  return facts;
}

absl::Status WholeTensorsOptimizer::OnEnter(const GroupChange& change) {
  EK_RETURN_IF_ERROR(updater_.Refresh());
  EK_RETURN_IF_ERROR(CheckSame(absl::OkStatus()));
  EK_ASSIGN_OR_RETURN(const ControlChannel::Parts parts, Exchange("shards", Facts().Serialize()));
  std::vector<ShardFacts> by_rank;
  for (const std::string& part : parts) {
    EK_ASSIGN_OR_RETURN(by_rank.emplace_back(), ShardFacts::Parse(part, params_->size()));
  }
  EK_ASSIGN_OR_RETURN(const ShardMove move, PlanShardMove(by_rank, change.source));
  return MoveState(move);
}

absl::Status WholeTensorsOptimizer::MoveState(const ShardMove& move) {
  OwnerTable owners = NobodyOwns();
  EK_RETURN_IF_ERROR(owners.Assign(move.owned));
  const OwnerMove states{.from = move.holder, .to = owners, .steps = move.steps};
  EK_ASSIGN_OR_RETURN(Arrivals arrivals, Bring(states));
  EK_RETURN_IF_ERROR(Adopt(states, std::move(arrivals)));
  for (int param = 0; param < params_->size(); ++param)
    was_updated_[param] = move.holder[param] >= 0;
  EK_RETURN_IF_ERROR(params_->SetTrainable(move.mask));
  seen_mask_version_ = params_->mask_version();
  held_rank_ = communicator().rank();
  return SetPlan(std::move(owners), move.mask, move.generation);
}

HeldState WholeTensorsOptimizer::CheckState() const {
  if (!is_torn_ && open_.Wait().ok()) return {};
  return {StateKind::kPatched, absl::StrCat(join_name(), " was in the middle of an update")};
}

// The state of all ranks --------------------------------------------------------------------------

absl::StatusOr<StatePieces> WholeTensorsOptimizer::Pieces() {
  if (const HeldState held = CheckState(); held.kind != StateKind::kWhole)
    return absl::AbortedError(held.why);
  return updater_.Pieces();
}

// Only the owner of a parameter has its count.
absl::Status WholeTensorsOptimizer::AddUpSteps(std::vector<int64_t>& steps) {
  const TensorView here(absl::MakeSpan(steps));
  TensorView data = here;
  Memory there;
  if (updater_.is_on_device()) {
    EK_ASSIGN_OR_RETURN(there, communicator().Allocate(here.bytes()));
    data = TensorView(there.data.get(), here.count, here.dtype, communicator().device());
    EK_RETURN_IF_ERROR(updater_.CopyNow(data, here));
  }
  EK_RETURN_IF_ERROR(channel()->AllReduce(data, ReduceOp::kSum, {.role = Role::kState}).Wait());
  return updater_.is_on_device() ? updater_.CopyNow(here, data) : absl::OkStatus();
}

// All ranks read the state of parameters without owner, and the new owner keeps it.
PlacedOptimizer::Ranges WholeTensorsOptimizer::RangesToLoad() const {
  Ranges ranges(params_->size());
  for (int param = 0; param < params_->size(); ++param) {
    const int from = owner(param);
    if (from == communicator().rank() || from == kNoOwner) ranges[param] = WholeOf(param);
  }
  return ranges;
}

absl::Status WholeTensorsOptimizer::TakeState(const OptimizerState& state,
                                              const std::map<int, int64_t>& steps,
                                              const Ranges& ranges, OptimizerState* movable) {
  const PlanPtr old = plan();
  std::set<int> to_own;  // Trained in the past, but not since this optimizer was made.
  for (const auto& [param, step] : steps) {
    if (old->owners.owner(param) == kNoOwner) to_own.insert(param);
  }
  if (!to_own.empty()) EK_RETURN_IF_ERROR(AdoptMask(old->mask, to_own));
  was_updated_.assign(was_updated_.size(), 0);
  for (const auto& [param, step] : steps) was_updated_[param] = 1;
  is_torn_ = false;
  return updater_.Import(state, ranges, movable,
                         [this](int param) { return owner(param) == communicator().rank(); });
}

}  // namespace evenkeel::internal
