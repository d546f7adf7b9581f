// The calls of StateAccess, in terms of a placement's holders and ranges.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "evenkeel/comm/collective.h"
#include "evenkeel/comm/memory.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/work.h"
#include "evenkeel/join/action_hook.h"
#include "evenkeel/zero_optim/checkpoint/checkpoint.h"
#include "evenkeel/zero_optim/checkpoint/checkpoint_writer.h"
#include "evenkeel/zero_optim/internal/placement/placed_optimizer.h"

namespace evenkeel::internal {
namespace {

// The memory in which chunks of state arrive, one after the other; from a device they are copied to
// the host.
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

// The state of all ranks --------------------------------------------------------------------------

absl::StatusOr<std::vector<int64_t>> PlacedOptimizer::CountSteps() {
  EK_RETURN_IF_ERROR(updater_.Refresh());
  std::vector<int64_t> steps;
  for (int i = 0; i < params_->size(); ++i) steps.push_back(updater_.step(i));
  EK_RETURN_IF_ERROR(AddUpSteps(steps));
  return steps;
}

absl::Status PlacedOptimizer::CheckReceiver(absl::string_view call, int to) const {
  if (to == kAllRanks || (to >= 0 && to < communicator().world_size())) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(join_name(), ": ", call, " to rank ", to, " of ", communicator().world_size()));
}

absl::StatusOr<OptimizerState> PlacedOptimizer::Consolidate(int to) {
  OptimizerState state;
  const auto collect = [&](const StateChunk& chunk) {
    ParameterState& entry = state.params[chunk.param];
    entry.step = chunk.step;
    if (chunk.tensor.empty()) return absl::OkStatus();
    StateTensor& tensor = entry.tensors[std::string(chunk.tensor)];
    if (chunk.begin == 0) tensor = StateTensor(chunk.data.dtype, chunk.count);
    if (chunk.data.count == 0) return absl::OkStatus();
    std::memcpy(tensor.view().Slice(chunk.begin, chunk.data.count).data, chunk.data.data,
                chunk.data.bytes());
    return absl::OkStatus();
  };
  EK_RETURN_IF_ERROR(Visit("Consolidate", to, collect, Bytes{int64_t{64} << 20}));
  return state;
}

absl::Status PlacedOptimizer::VisitState(int to, StateSink sink, Bytes chunk) {
  return Visit("VisitState", to, sink, chunk);
}

absl::Status PlacedOptimizer::Visit(absl::string_view call, int to, StateSink sink, Bytes chunk) {
  EK_RETURN_IF_ERROR(CheckReceiver(call, to));
  if (is_split()) {
    EK_RETURN_IF_ERROR(AnnounceAfterStep(call, VisitAction{.to = to, .chunk_bytes = chunk.value}));
  }
  return Stream(to, sink, chunk);
}

// One chunk is under way at a time.
absl::Status PlacedOptimizer::Stream(int to, StateSink sink, Bytes chunk) {
  const int rank = communicator().rank();
  const bool receives = to == kAllRanks || to == rank;
  EK_RETURN_IF_ERROR(WaitForState());
  EK_ASSIGN_OR_RETURN(const std::vector<int64_t> steps, CountSteps());
  Arrival arrival(updater_, communicator());
  absl::Status of_sink;
  const auto pass_on = [&](const StateChunk& what) {
    if (receives && of_sink.ok()) of_sink = sink(what);
  };
  for (int param = 0; param < params_->size(); ++param) {
    if (steps[param] == 0) continue;
    const TensorView& value = (*params_)[param].value;
    const DType dtype = StateDType(value.dtype);
    const auto names = StateTensorNames(groups().rule_of(param), value.dtype);
    const int64_t most = std::max<int64_t>(1, chunk.value / SizeOf(dtype));
    const Holders holders = HoldersOf(param);
    if (names.empty()) pass_on({.param = param, .step = steps[param]});
    for (size_t t = 0; t < names.size(); ++t) {
      StateChunk what{
          .param = param, .step = steps[param], .tensor = names[t], .count = value.count};
      what.data = TensorView(nullptr, 0, dtype);
      if (value.count == 0) pass_on(what);
      for (const HeldRange& range : holders) {
        const bool is_own = range.rank == rank || range.rank == kAllRanks;
        const bool travels = range.rank != kAllRanks && range.rank != to;
        for (int64_t begin = range.begin; begin < range.end; begin += most) {
          const int64_t count = std::min(most, range.end - begin);
          TensorView data;
          if (is_own) {
            data =
                updater_.tensors(param)[t].view().Slice(begin - updater_.range(param).begin, count);
          } else if (receives) {
            EK_ASSIGN_OR_RETURN(data, arrival.Take(dtype, count));
          }
          const CallOptions options{.role = Role::kState, .after = updater_.stream()};
          Work work;
          if (travels && to == kAllRanks) {
            work = channel_->Broadcast(data, range.rank, options);
          } else if (travels && rank == to) {
            work = channel_->Recv(data, range.rank, options);
          } else if (travels && rank == range.rank) {
            work = channel_->Send(data, to, options);
          }
          EK_RETURN_IF_ERROR(work.Wait());
          if (!receives || !of_sink.ok()) continue;
          what.begin = begin;
          EK_ASSIGN_OR_RETURN(what.data, arrival.ToHost(data));
          pass_on(what);
        }
      }
    }
  }
  return of_sink;
}

absl::Status PlacedOptimizer::LoadState(const OptimizerState& state) {
  if (join_config().enable) return InsideJoinError(join_name(), "LoadState");
  EK_RETURN_IF_ERROR(WaitForState());
  const Ranges ranges = WholeRanges();
  EK_RETURN_IF_ERROR(Annotate(updater_.CheckState(state, ranges), join_name()));
  std::map<int, int64_t> steps;
  for (const auto& [param, entry] : state.params) steps[param] = entry.step;
  return TakeState(state, steps, ranges, /*movable=*/nullptr);
}

PlacedOptimizer::Ranges PlacedOptimizer::WholeRanges() const {
  Ranges ranges;
  for (int i = 0; i < params_->size(); ++i) ranges.push_back(WholeOf(i));
  return ranges;
}

// Checkpoints -------------------------------------------------------------------------------------

absl::Status PlacedOptimizer::Save(const std::string& folder) {
  if (!is_split() && join_config().enable) return InsideJoinError(join_name(), "Save");
  EK_RETURN_IF_ERROR(Annotate(communicator().status(), absl::StrCat(join_name(), ": Save()")));
  EK_RETURN_IF_ERROR(AnnounceAfterStep("Save", SaveAction{.folder = folder}));
  return SaveNow(folder);
}

absl::StatusOr<PendingSave> PlacedOptimizer::SaveAsync(const std::string& folder) {
  if (!is_split() && join_config().enable) return InsideJoinError(join_name(), "SaveAsync");
  EK_RETURN_IF_ERROR(Annotate(communicator().status(), absl::StrCat(join_name(), ": SaveAsync()")));
  EK_RETURN_IF_ERROR(
      AnnounceAfterStep("SaveAsync", SaveAction{.is_async = true, .folder = folder}));
  return StartSave(folder);
}

CheckpointToWrite PlacedOptimizer::ToSave(const std::string& folder) {
  return {
      .folder = folder, .name = join_name(), .state = Pieces(), .steps_finished = steps_finished()};
}

absl::Status PlacedOptimizer::SaveNow(const std::string& folder) {
  FinishSave(communicator().timeout());
  EK_RETURN_IF_ERROR(WriteCheckpoint(communicator(), *params_, ToSave(folder)));
  SetCheckpointHint(folder);
  return absl::OkStatus();
}

PendingSave PlacedOptimizer::StartSave(const std::string& folder) {
  FinishSave(communicator().timeout() / 2);
  saving_ = folder;
  return writer_.Start(communicator(), *params_, ToSave(folder));
}

void PlacedOptimizer::FinishSave(absl::Duration timeout) {
  if (saving_.empty()) return;
  if (writer_.last().Wait(timeout).ok()) SetCheckpointHint(saving_);
  saving_.clear();
}

absl::Status PlacedOptimizer::Load(const std::string& folder) {
  if (join_config().enable) return InsideJoinError(join_name(), "Load");
  EK_RETURN_IF_ERROR(WaitForState());
  const Ranges ranges = RangesToLoad();
  EK_ASSIGN_OR_RETURN(LoadedCheckpoint loaded,
                      ReadCheckpoint(folder, join_name(), communicator(), *params_,
                                     [&](int param) { return ranges[param]; }));
  EK_RETURN_IF_ERROR(CheckSame(updater_.CheckState(loaded.state, ranges)));
  EK_RETURN_IF_ERROR(TakeState(loaded.state, loaded.steps, ranges, &loaded.state));
  SetStepsFinished(loaded.steps_finished);
  SetCheckpointHint(folder);
  return absl::OkStatus();
}

}  // namespace evenkeel::internal
