// What a sharded optimizer does with its state beside steps: collecting it, saving it, loading it.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "evenkeel/comm/internal/bytes.h"
#include "evenkeel/comm/memory.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/work.h"
#include "evenkeel/zero_optim/checkpoint.h"
#include "evenkeel/zero_optim/internal/action_hook.h"
#include "evenkeel/zero_optim/internal/agree.h"
#include "evenkeel/zero_optim/internal/shard_plan.h"
#include "evenkeel/zero_optim/internal/wait_for_all.h"
#include "evenkeel/zero_optim/sharded_optimizer.h"

namespace evenkeel {

using internal::ParameterUpdater;
using internal::ShardBucket;
using internal::WaitForAll;

namespace {

// Where a chunk of state comes to, one after the other; on a device it goes on to the host.
class Arrival {
 public:
  Arrival(ParameterUpdater& updater, Communicator& comm) : updater_(updater), comm_(comm) {}

  absl::StatusOr<TensorView> Take(DType dtype, int64_t count) {
    if (!updater_.is_on_device()) return Host(dtype, count);
    if (there_.bytes < count * SizeOf(dtype)) {
      EK_ASSIGN_OR_RETURN(there_, comm_.Allocate(count * SizeOf(dtype)));
    }
    return TensorView(there_.data.get(), count, dtype, comm_.device());
  }
  // `data`, of Take() or this rank's own, where the host can read it; the host waits.
  absl::StatusOr<TensorView> ToHost(const TensorView& data) {
    if (!updater_.is_on_device()) return data;
    const TensorView here = Host(data.dtype, data.count);
    EK_RETURN_IF_ERROR(updater_.CopyNow(here, data));
    return here;
  }

 private:
  TensorView Host(DType dtype, int64_t count) {
    if (here_.dtype() != dtype || here_.count() < count) here_ = StateTensor(dtype, count);
    return here_.view().Slice(0, count);
  }

  ParameterUpdater& updater_;
  Communicator& comm_;
  Memory there_;
  StateTensor here_;
};

}  // namespace

absl::StatusOr<OptimizerState> ShardedOptimizer::Consolidate(int to) {
  EK_RETURN_IF_ERROR(CheckReceiver("Consolidate", to));
  EK_RETURN_IF_ERROR(AnnounceAfterStep(
      "Consolidate", internal::ByteWriter().U8(static_cast<uint8_t>(Action::kConsolidate)).I32(to).Take()));
  return Gather(to);
}

absl::Status ShardedOptimizer::CheckReceiver(absl::string_view call, int to) const {
  if (to == kAllRanks || (to >= 0 && to < communicator().world_size())) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(join_name(), ": ", call, " to rank ", to, " of ", communicator().world_size()));
}

absl::Status ShardedOptimizer::ForEachState(int to, StateSink sink, Bytes chunk) {
  EK_RETURN_IF_ERROR(CheckReceiver("ForEachState", to));
  EK_RETURN_IF_ERROR(AnnounceAfterStep(
      "ForEachState",
      internal::ByteWriter().U8(static_cast<uint8_t>(Action::kStream)).I32(to).I64(chunk.value).Take()));
  return Stream(to, sink, chunk);
}

// One chunk is under way at a time.
absl::Status ShardedOptimizer::Stream(int to, StateSink sink, Bytes chunk) {
  const int rank = communicator().rank();
  const bool receives = to == kAllRanks || to == rank;
  const PlanPtr plan = this->plan();
  EK_ASSIGN_OR_RETURN(const std::vector<int64_t> steps, GatherSteps());
  Arrival arrival(updater_, communicator());
  absl::Status of_sink;
  for (int param = 0; param < params_->size(); ++param) {
    if (steps[param] == 0) continue;
    const TensorView& value = (*params_)[param].value;
    const DType dtype = StateDType(value.dtype);
    const int owner = plan->owners.owner(param);
    const auto names = StateTensorNames(groups().rule_of(param), value.dtype);
    const int64_t most = std::max<int64_t>(1, chunk.value / SizeOf(dtype));
    if (names.empty() && receives) of_sink.Update(sink({.param = param, .step = steps[param]}));
    for (size_t t = 0; t < names.size(); ++t) {
      int64_t begin = 0;
      do {
        const int64_t count = std::min(most, value.count - begin);
        TensorView data;
        if (owner == rank) {
          data = updater_.tensors(param)[t].view().Slice(begin, count);
        } else if (receives) {
          EK_ASSIGN_OR_RETURN(data, arrival.Take(dtype, count));
        }
        const CallOptions options{.role = Role::kState, .after = updater_.stream()};
        Work work;
        if (to == kAllRanks) {
          work = channel_->Broadcast(data, owner, options);
        } else if (to != owner && rank == to) {
          work = channel_->Recv(data, owner, options);
        } else if (to != owner && rank == owner) {
          work = channel_->Send(data, to, options);
        }
        EK_RETURN_IF_ERROR(work.Wait());
        if (receives && of_sink.ok()) {
          EK_ASSIGN_OR_RETURN(data, arrival.ToHost(data));
          of_sink = sink({.param = param,
                          .step = steps[param],
                          .tensor = names[t],
                          .count = value.count,
                          .begin = begin,
                          .data = data});
        }
        begin += count;
      } while (begin < value.count);
    }
  }
  return of_sink;
}

absl::Status ShardedOptimizer::Save(const std::string& folder) {
  EK_RETURN_IF_ERROR(AnnounceAfterStep("Save", absl::StrCat(std::string(1, static_cast<char>(Action::kSave)), folder)));
  return SaveHere(folder);
}

absl::Status ShardedOptimizer::SaveHere(const std::string& folder) {
  EK_ASSIGN_OR_RETURN(const StatePieces mine, Pieces());
  EK_RETURN_IF_ERROR(WriteCheckpoint(folder, join_name(), communicator(), *params_, mine, steps_finished()));
  SetCheckpointHint(folder);
  return absl::OkStatus();
}

absl::StatusOr<StatePieces> ShardedOptimizer::Pieces() {
  EK_RETURN_IF_ERROR(CheckWhole());
  return updater_.Pieces();
}

absl::Status ShardedOptimizer::Load(const std::string& folder) {
  if (join_config().enable) return internal::InsideJoinError(join_name(), "Load");
  const int rank = communicator().rank();
  const PlanPtr old = plan();
  // What nobody owns yet is read by all, and kept by the one who gets it.
  const auto may_own = [&](int param) -> std::optional<StateRange> {
    const int owner = old->owners.owner(param);
    if (owner != rank && owner != kNoOwner) return std::nullopt;
    return StateRange{0, (*params_)[param].value.count};
  };
  EK_ASSIGN_OR_RETURN(const LoadedCheckpoint loaded,
                      ReadCheckpoint(folder, join_name(), communicator(), *params_, may_own));
  EK_RETURN_IF_ERROR(internal::CheckSameOnAllRanks(communicator(), join_name(), updater_.CheckState(loaded.state),
                                                   *params_, groups(), internal::SameIn::kShape));
  EK_RETURN_IF_ERROR(OwnLoaded(loaded.steps));
  const PlanPtr now = plan();
  EK_RETURN_IF_ERROR(updater_.Import(loaded.state, [&](int param) { return now->owners.owner(param) == rank; }));
  SetStepsFinished(loaded.steps_finished);
  SetCheckpointHint(folder);
  return absl::OkStatus();
}

// How often each parameter was updated, which only its owner knows.
absl::StatusOr<std::vector<int64_t>> ShardedOptimizer::GatherSteps() {
  EK_RETURN_IF_ERROR(updater_.Refresh());
  std::vector<int64_t> steps;
  for (int i = 0; i < params_->size(); ++i) steps.push_back(updater_.step(i));
  const TensorView here(absl::MakeSpan(steps));
  TensorView data = here;
  Memory there;
  if (updater_.is_on_device()) {
    EK_ASSIGN_OR_RETURN(there, communicator().Allocate(here.bytes()));
    data = TensorView(there.data.get(), here.count, here.dtype, communicator().device());
    EK_RETURN_IF_ERROR(updater_.CopyNow(data, here));
  }
  EK_RETURN_IF_ERROR(channel_->AllReduce(data, ReduceOp::kSum, {.role = Role::kState}).Wait());
  if (updater_.is_on_device()) EK_RETURN_IF_ERROR(updater_.CopyNow(here, data));
  return steps;
}

absl::StatusOr<OptimizerState> ShardedOptimizer::GatherThere(int to) {
  OptimizerState state;
  const auto collect = [&](const StateChunk& chunk) {
    ParameterState& entry = state.params[chunk.param];
    entry.step = chunk.step;
    if (chunk.tensor.empty()) return absl::OkStatus();
    StateTensor& tensor = entry.tensors[std::string(chunk.tensor)];
    if (chunk.begin == 0) tensor = StateTensor(chunk.data.dtype, chunk.count);
    if (chunk.data.count == 0) return absl::OkStatus();
    std::memcpy(tensor.view().Slice(chunk.begin, chunk.data.count).data, chunk.data.data, chunk.data.bytes());
    return absl::OkStatus();
  };
  EK_RETURN_IF_ERROR(Stream(to, collect, Bytes{int64_t{64} << 20}));
  return state;
}

absl::StatusOr<OptimizerState> ShardedOptimizer::Gather(int to) {
  if (updater_.is_on_device()) return GatherThere(to);
  const int rank = communicator().rank();
  const bool receives = to == kAllRanks || to == rank;
  EK_ASSIGN_OR_RETURN(const std::vector<int64_t> steps, GatherSteps());
  OptimizerState state;
  std::vector<int> updated;
  for (int i = 0; i < params_->size(); ++i) {
    if (steps[i] == 0) continue;
    updated.push_back(i);
    if (receives) state.params[i].step = steps[i];
  }
  EK_ASSIGN_OR_RETURN(const std::vector<ShardBucket> buckets,
                      internal::BucketsByOwner(specs_, plan()->owners, updated, options_.bucket_cap));

  // Straight from the owner's memory into that of the result.
  std::vector<Work> works;
  for (const ShardBucket& bucket : buckets) {
    for (size_t t = 0; t < kMaxStateTensors; ++t) {
      TensorList parts;
      for (int param : bucket.params) {
        const auto names = StateTensorNames(groups().rule_of(param));
        if (t >= names.size()) continue;
        StateTensor* const own = bucket.owner == rank ? &updater_.tensors(param)[t].here() : nullptr;
        if (receives) {
          StateTensor& result = state.params[param].tensors[std::string(names[t])];
          result = own != nullptr ? *own : StateTensor(bucket.dtype, specs_[param].count);
          parts.push_back(result.view());
        } else if (own != nullptr) {
          parts.push_back(own->view());
        }
      }
      if (to == kAllRanks && !parts.empty()) {
        works.push_back(channel_->Broadcast(absl::MakeConstSpan(parts), bucket.owner, {.role = Role::kState}));
      } else if (to != kAllRanks && to != bucket.owner) {
        for (const TensorView& part : parts) {
          works.push_back(rank == to ? channel_->Recv(part, bucket.owner, {.role = Role::kState})
                                     : channel_->Send(part, to, {.role = Role::kState}));
        }
      }
    }
  }
  EK_RETURN_IF_ERROR(WaitForAll(works));
  return state;
}

absl::Status ShardedOptimizer::LoadState(const OptimizerState& state) {
  if (join_config().enable) return internal::InsideJoinError(join_name(), "LoadState");
  EK_RETURN_IF_ERROR(Annotate(updater_.CheckState(state), join_name()));
  std::map<int, int64_t> steps;
  for (const auto& [param, entry] : state.params) steps[param] = entry.step;
  EK_RETURN_IF_ERROR(OwnLoaded(steps));
  const PlanPtr now = plan();
  return updater_.Import(state, [&](int param) { return now->owners.owner(param) == communicator().rank(); });
}

absl::Status ShardedOptimizer::OwnLoaded(const std::map<int, int64_t>& steps) {
  const PlanPtr old = plan();
  std::set<int> to_own;  // Trained in the past, but not since this optimizer was made.
  for (const auto& [param, step] : steps) {
    if (old->owners.owner(param) == kNoOwner) to_own.insert(param);
  }
  if (!to_own.empty()) EK_RETURN_IF_ERROR(AdoptMask(old->mask, to_own));
  was_updated_.assign(was_updated_.size(), 0);
  for (const auto& [param, step] : steps) was_updated_[param] = 1;
  is_torn_ = false;
  return absl::OkStatus();
}

}  // namespace evenkeel
