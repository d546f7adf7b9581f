// The state of a SlicedOptimizer as a whole: gathered, loaded, brought into another group. Who holds what is the table
// `holders_`, which is equal on all ranks; slices of a new plan are made from it in the next reduction.

#include <algorithm>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "evenkeel/bucket/planner.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/zero_optim/checkpoint.h"
#include "evenkeel/zero_optim/internal/action_hook.h"
#include "evenkeel/zero_optim/internal/agree.h"
#include "evenkeel/zero_optim/internal/state_sync.h"
#include "evenkeel/zero_optim/sliced_optimizer.h"

namespace evenkeel {
namespace {

using internal::HeldRange;
using internal::Holders;
using internal::ParameterUpdater;
using internal::SliceFacts;

// Tensors of one rank and type that travel together, in the order that all ranks put them in.
struct Parcel {
  std::vector<TensorView> parts;
  Bytes size;
  // On a device: what comes lies there first, and goes on to the host.
  struct Arrival {
    TensorView to;
    TensorView there;
    Memory memory;
  };
  std::vector<Arrival> arrivals;
};

}  // namespace

int64_t SlicedOptimizer::state_bytes() const {
  absl::MutexLock lock(&mutex_);
  return updater_.state_bytes();
}

absl::StatusOr<OptimizerState> SlicedOptimizer::Gather(int to) {
  EK_RETURN_IF_ERROR(WaitForAll());
  EK_RETURN_IF_ERROR(WaitUntilSettled());
  absl::MutexLock lock(&mutex_);
  EK_RETURN_IF_ERROR(updater_.Refresh());
  const int rank = communicator().rank();
  const bool receives = to == kAllRanks || to == rank;
  OptimizerState state;
  std::vector<Work> works;
  std::map<std::pair<int, DType>, Parcel> parcels;  // By who holds them.
  const auto send = [&](int holder, DType dtype, Parcel& parcel) -> absl::Status {
    Collective what{.kind = CollectiveKind::kBroadcast, .dtype = dtype, .root = holder, .role = Role::kState};
    for (const TensorView& part : parcel.parts) what.count += part.count;
    TensorList in(parcel.parts.begin(), parcel.parts.end()), out = in;
    if (to != kAllRanks) {
      what.kind = rank == to ? CollectiveKind::kRecv : CollectiveKind::kSend;
      if (rank == to) in.clear();
      if (rank == holder) {
        what.root = to;
        out.clear();
      }
    }
    if (what.count > 0 && (receives || rank == holder)) {
      works.push_back(channel_->Issue(what, in, out, {.after = updater_.stream()}));
    }
    const Parcel sent = std::exchange(parcel, Parcel());
    if (!is_on_device() || works.empty()) return absl::OkStatus();
    absl::Status status = works.back().Wait();
    for (const Parcel::Arrival& arrival : sent.arrivals) {
      if (status.ok()) status = updater_.Copy(arrival.to, arrival.there);
    }
    status.Update(updater_.Synchronize());
    return status;
  };

  for (int param = 0; param < params_->size(); ++param) {
    if (updater_.step(param) == 0) continue;
    const TensorView& value = (*params_)[param].value;
    const DType dtype = StateDType(value.dtype);
    const auto names = StateTensorNames(groups_.rule_of(param), value.dtype);
    ParameterState* const entry = receives ? &state.params[param] : nullptr;
    if (receives) entry->step = updater_.step(param);
    for (size_t t = 0; t < names.size(); ++t) {
      StateTensor* whole = nullptr;
      if (receives) {
        whole = &entry->tensors.emplace(std::string(names[t]), StateTensor(dtype, value.count)).first->second;
      }
      for (const HeldRange& range : holders_[param]) {
        Parcel& parcel = parcels[{range.rank, dtype}];
        TensorView part(nullptr, range.end - range.begin, dtype);
        if (receives) part = whole->view().Slice(range.begin, part.count);
        if (range.rank == rank) {
          const TensorView own = updater_.tensors(param)[t].view();
          if (receives) EK_RETURN_IF_ERROR(updater_.Copy(part, own));
          part = own;
        } else if (receives && is_on_device()) {
          EK_ASSIGN_OR_RETURN(Memory memory, communicator().Allocate(part.bytes()));
          const TensorView there(memory.data.get(), part.count, dtype, communicator().device());
          parcel.arrivals.push_back({part, there, std::move(memory)});
          part = there;
        }
        if (part.data != nullptr && range.rank != to) parcel.parts.push_back(part);
        parcel.size.value += part.bytes();
        if (parcel.size >= kDefaultCap) EK_RETURN_IF_ERROR(send(range.rank, dtype, parcel));
      }
    }
  }
  for (auto& [key, parcel] : parcels) EK_RETURN_IF_ERROR(send(key.first, key.second, parcel));
  absl::Status status = updater_.Synchronize();  // What this rank has itself is copied.
  for (const Work& work : works) status.Update(work.Wait());
  if (!status.ok()) return status;
  return state;
}

absl::Status SlicedOptimizer::KeepOnly(int param, const Holders& holders) {
  const HeldRange range = internal::RangeOf(holders, communicator().rank());
  EK_ASSIGN_OR_RETURN(ParameterUpdater::Part old, updater_.SetPart(param, range.begin, range.end - range.begin));
  std::vector<internal::HeldTensor>& now = updater_.tensors(param);
  absl::Status status;
  for (size_t t = 0; t < now.size(); ++t) {
    const TensorView to = now[t].view();
    if (to.count == 0) continue;
    status.Update(updater_.Copy(to, old.tensors[t].view().Slice(range.begin - old.begin, to.count)));
  }
  updater_.Drop(std::move(old));
  holders_[param] = holders;
  return status;
}

std::vector<Holders> SlicedOptimizer::HoldersFor(absl::FunctionRef<bool(int)> has_state) const {
  const int world_size = communicator().world_size();
  std::vector<Holders> holders(params_->size());
  for (int param = 0; param < params_->size(); ++param) {  // What is in no bucket is frozen, or there is no plan yet.
    if (has_state(param)) holders[param] = internal::HoldersOfAlone((*params_)[param].value.count, world_size);
  }
  const internal::SlicePlan* const plan = next_plan_ != nullptr ? next_plan_.get() : plan_.get();
  for (size_t b = 0; plan != nullptr && b < plan->buckets.size(); ++b) {
    const internal::SlicedBucket& layout = plan->buckets[b].layout;
    for (size_t i = 0; i < layout.params.size(); ++i) {
      holders[layout.params[i]] = internal::HoldersIn(layout, i, world_size);
    }
  }
  return holders;
}

absl::Status SlicedOptimizer::LoadState(const OptimizerState& state) {
  if (join_config().enable) return internal::InsideJoinError(join_name(), "LoadState");
  EK_RETURN_IF_ERROR(WaitForAll());
  EK_RETURN_IF_ERROR(WaitUntilSettled());
  absl::MutexLock lock(&mutex_);
  EK_RETURN_IF_ERROR(Annotate(updater_.CheckState(state), join_name()));
  move_.reset();
  is_torn_ = false;
  std::vector<Holders> holders = HoldersFor([&](int param) { return state.params.contains(param); });
  for (int param = 0; param < params_->size(); ++param) {
    const HeldRange range = internal::RangeOf(holders[param], communicator().rank());
    EK_RETURN_IF_ERROR(updater_.Prepare(param, 0));
    EK_RETURN_IF_ERROR(updater_.SetPart(param, range.begin, range.end - range.begin).status());
  }
  holders_ = std::move(holders);
  return updater_.Import(state, [](int) { return true; });
}

absl::StatusOr<StatePieces> SlicedOptimizer::Pieces() {
  EK_RETURN_IF_ERROR(WaitForAll());
  EK_RETURN_IF_ERROR(WaitUntilSettled());
  absl::MutexLock lock(&mutex_);
  if (!awaits_step_ && !is_torn_) return updater_.Pieces();
  return absl::FailedPreconditionError(
      absl::StrCat(join_name(), ": a step has updated parameters in backward, and Step() was not called yet"));
}

absl::Status SlicedOptimizer::SaveHere(const std::string& folder) {
  EK_ASSIGN_OR_RETURN(const StatePieces mine, Pieces());
  EK_RETURN_IF_ERROR(WriteCheckpoint(folder, join_name(), communicator(), *params_, mine, steps_finished()));
  SetCheckpointHint(folder);
  return absl::OkStatus();
}

absl::Status SlicedOptimizer::Load(const std::string& folder) {
  if (join_config().enable) return internal::InsideJoinError(join_name(), "Load");
  EK_RETURN_IF_ERROR(WaitForAll());
  EK_RETURN_IF_ERROR(WaitUntilSettled());
  std::vector<Holders> holders;
  {
    absl::MutexLock lock(&mutex_);
    holders = HoldersFor([](int) { return true; });
  }
  const auto range_of = [&](int param) {
    const HeldRange range = internal::RangeOf(holders[param], communicator().rank());
    return StateRange{range.begin, range.end - range.begin};
  };
  EK_ASSIGN_OR_RETURN(LoadedCheckpoint loaded, ReadCheckpoint(folder, join_name(), communicator(), *params_, range_of));
  absl::MutexLock lock(&mutex_);
  EK_RETURN_IF_ERROR(internal::CheckSameOnAllRanks(communicator(), join_name(),
                                                   updater_.CheckParts(loaded.state, range_of), *params_, groups_,
                                                   internal::SameIn::kShape));
  holders = HoldersFor([&](int param) { return loaded.steps.contains(param); });
  move_.reset();
  is_torn_ = false;
  EK_RETURN_IF_ERROR(updater_.ImportParts(std::move(loaded.state), range_of));
  holders_ = std::move(holders);
  SetStepsFinished(loaded.steps_finished);
  SetCheckpointHint(folder);
  return absl::OkStatus();
}

absl::Status SlicedOptimizer::AddGroup(ParameterGroup group) {
  if (join_config().enable) return internal::InsideJoinError(join_name(), "AddGroup");
  absl::MutexLock lock(&mutex_);
  updater_.groups() = groups_;
  EK_RETURN_IF_ERROR(internal::AddGroupOnAllRanks(communicator(), join_name(), *params_, std::move(group), updater_));
  groups_ = updater_.groups();
  return absl::OkStatus();
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
  settling_.clear();
  flag_works_.clear();
  flags_there_.clear();
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
  std::vector<Work> settling;
  {
    absl::MutexLock lock(&mutex_);
    if (!is_torn_) return absl::OkStatus();
    if (gathers_.empty()) settling = settling_;
  }
  absl::Status last = settling.empty() ? absl::AbortedError("") : absl::OkStatus();
  for (const Work& work : settling) last.Update(work.Wait());
  if (last.ok()) return absl::OkStatus();
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
