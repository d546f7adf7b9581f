// The state of a SlicedOptimizer as a whole: gathered, saved, loaded. Who holds what is the table `holders_`, which is
// equal on all ranks; slices of a new plan are made from it in the next reduction.

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "evenkeel/bucket/planner.h"
#include "evenkeel/comm/collective.h"
#include "evenkeel/comm/internal/bytes.h"
#include "evenkeel/comm/memory.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/zero_optim/checkpoint.h"
#include "evenkeel/zero_optim/internal/action_hook.h"
#include "evenkeel/zero_optim/internal/agree.h"
#include "evenkeel/zero_optim/sliced_optimizer.h"

namespace evenkeel {
namespace {

using internal::HeldRange;
using internal::Holders;
using internal::ParameterUpdater;

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

absl::StatusOr<OptimizerState> SlicedOptimizer::Consolidate(int to) {
  if (to != kAllRanks && (to < 0 || to >= communicator().world_size())) {
    return absl::InvalidArgumentError(
        absl::StrCat(join_name(), ": Consolidate to rank ", to, " of ", communicator().world_size()));
  }
  EK_RETURN_IF_ERROR(AnnounceAfterStep(
      "Consolidate", internal::ByteWriter().U8(static_cast<uint8_t>(Action::kConsolidate)).I32(to).Take()));
  return Gather(to);
}

absl::Status SlicedOptimizer::Save(const std::string& folder) {
  EK_RETURN_IF_ERROR(AnnounceAfterStep("Save", absl::StrCat(std::string(1, static_cast<char>(Action::kSave)), folder)));
  return SaveHere(folder);
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

}  // namespace evenkeel
