// The state as a whole. The table `holders_`, which is equal on all ranks, has the holders of each
// parameter's state; slices of a new plan are made from it in the next reduction.

#include <map>
#include <utility>
#include <vector>

#include "evenkeel/comm/status.h"
#include "evenkeel/zero_optim/internal/placement/slices.h"

namespace evenkeel::internal {

int64_t SlicesOptimizer::state_bytes() const {
  absl::MutexLock lock(&mutex_);
  return updater_.state_bytes();
}

// Also after the group has failed: what is in flight has ended then.
OptimizerState SlicesOptimizer::state() {
  (void)WaitForState();
  absl::MutexLock lock(&mutex_);
  return updater_.Export().value_or(OptimizerState());
}

absl::Status SlicesOptimizer::WaitForState() {
  EK_RETURN_IF_ERROR(WaitForAll());
  return WaitUntilSettled();
}

Holders SlicesOptimizer::HoldersOf(int param) const {
  absl::MutexLock lock(&mutex_);
  return holders_[param];
}

absl::Status SlicesOptimizer::KeepOnly(int param, const Holders& holders) {
  const HeldRange range = RangeOf(holders, communicator().rank());
  EK_ASSIGN_OR_RETURN(ParameterUpdater::Part old,
                      updater_.SetPart(param, range.begin, range.end - range.begin));
  std::vector<HeldTensor>& now = updater_.tensors(param);
  absl::Status status;
  for (size_t t = 0; t < now.size(); ++t) {
    const TensorView to = now[t].view();
    if (to.count == 0) continue;
    status.Update(
        updater_.Copy(to, old.tensors[t].view().Slice(range.begin - old.begin, to.count)));
  }
  updater_.Drop(std::move(old));
  holders_[param] = holders;
  return status;
}

std::vector<Holders> SlicesOptimizer::HoldersFor(absl::FunctionRef<bool(int)> has_state) const {
  const int world_size = communicator().world_size();
  std::vector<Holders> holders(params_->size());
  for (int param = 0; param < params_->size();
       ++param) {  // Outside of buckets: frozen, or no plan yet.
    if (has_state(param))
      holders[param] = HoldersOfAlone((*params_)[param].value.count, world_size);
  }
  const SlicePlan* const plan = next_plan_ != nullptr ? next_plan_.get() : plan_.get();
  for (size_t b = 0; plan != nullptr && b < plan->buckets.size(); ++b) {
    const SlicedBucket& layout = plan->buckets[b].layout;
    for (size_t i = 0; i < layout.params.size(); ++i) {
      holders[layout.params[i]] = HoldersIn(layout, i, world_size);
    }
  }
  return holders;
}

absl::StatusOr<StatePieces> SlicesOptimizer::Pieces() {
  EK_RETURN_IF_ERROR(WaitForState());
  absl::MutexLock lock(&mutex_);
  if (!awaits_step() && !is_torn_) return updater_.Pieces();
  return Refusal(": a step has updated parameters in backward, and Step() was not called yet");
}

PlacedOptimizer::Ranges SlicesOptimizer::RangesToLoad() const {
  absl::MutexLock lock(&mutex_);
  Ranges ranges;
  for (const Holders& holders : HoldersFor([](int) { return true; })) {
    const HeldRange range = RangeOf(holders, communicator().rank());
    ranges.push_back(StateRange{range.begin, range.end - range.begin});
  }
  return ranges;
}

absl::Status SlicesOptimizer::TakeState(const OptimizerState& state,
                                        const std::map<int, int64_t>& steps, const Ranges& ranges,
                                        OptimizerState* movable) {
  absl::MutexLock lock(&mutex_);
  move_.reset();
  is_torn_ = false;
  std::vector<Holders> holders = HoldersFor([&](int param) { return steps.contains(param); });
  for (int param = 0; param < params_->size(); ++param) {
    const HeldRange range = RangeOf(holders[param], communicator().rank());
    EK_RETURN_IF_ERROR(updater_.Prepare(param, 0));
    EK_RETURN_IF_ERROR(updater_.SetPart(param, range.begin, range.end - range.begin).status());
  }
  holders_ = std::move(holders);
  return updater_.Import(state, ranges, movable, [](int) { return true; });
}

absl::Status SlicesOptimizer::TakeGroups(ParameterGroups groups) {
  absl::MutexLock lock(&mutex_);
  updater_.groups() = groups;
  groups_ = std::move(groups);
  return absl::OkStatus();
}

}  // namespace evenkeel::internal
