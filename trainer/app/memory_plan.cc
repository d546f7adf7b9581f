#include "evenkeel/trainer/app/memory_plan.h"

#include <algorithm>
#include <fstream>
#include <iterator>
#include <limits>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "evenkeel/bucket/parameter_set.h"
#include "evenkeel/comm/base/available_memory.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/trainer/app/freeze_schedule.h"
#include "evenkeel/trainer/data/sampler.h"
#include "evenkeel/trainer/models/evaluate.h"
#include "evenkeel/trainer/models/model.h"
#include "evenkeel/trainer/report/gather_records.h"
#include "evenkeel/zero_optim/partition.h"
#include "evenkeel/zero_optim/update_rule.h"

namespace evenkeel {
namespace {

constexpr double kTolerance = 1.05;  // A run is refused only if it would not fit at all.
constexpr double kClose = 0.9;       // A larger share of the memory left is a warning.

// Returns the bytes of the optimizer's state on a rank.
absl::StatusOr<int64_t> StateBytes(const TrainOptions& options, const ParameterSet& parameters,
                                   int rank, int world_size) {
  std::vector<int64_t> sizes;
  std::vector<int> trained;
  int64_t all = 0;
  for (int i = 0; i < parameters.size(); ++i) {
    const TensorView& value = parameters[i].value;
    const auto tensors = StateTensorNames(options.rule, value.dtype).size();
    sizes.push_back(static_cast<int64_t>(tensors) * value.bytes());
    if (!parameters.trainable(i)) continue;
    trained.push_back(i);
    all += sizes.back();
  }
  if (options.sharding == Sharding::kNone) return all;
  if (options.sharding == Sharding::kSlices) return (all + world_size - 1) / world_size;
  OwnerTable owners(std::move(sizes), world_size);
  EK_RETURN_IF_ERROR(owners.Assign(trained));
  return owners.loads()[rank];
}

// Counts the passes of an epoch and of its evaluation.
absl::Status PlanPasses(const TrainOptions& options, int rank, int world_size, RankSetup& setup) {
  const int64_t batch = options.batch_size;
  const int64_t steps = std::min(setup.plan.batches[rank], setup.plan.total_steps);
  const int64_t trained = SampleCount({.samples = setup.data->train->size(),
                                       .batch_size = options.samples_per_step(),
                                       .rank = rank,
                                       .world_size = world_size,
                                       .max_batches = steps});
  const int64_t test = setup.data->test->size();
  const int64_t tested = test * (rank + 1) / world_size - test * rank / world_size;
  const int64_t largest = std::min(batch, kLargestEvaluationBatch);
  const int64_t quantum = options.pass_quantum();
  // The last one of each may be smaller.
  std::vector<std::pair<int64_t, Mode>> passes = {{std::min(batch, trained), Mode::kTraining},
                                                  {trained % batch, Mode::kTraining},
                                                  {std::min(largest, tested), Mode::kEvaluation},
                                                  {tested % largest, Mode::kEvaluation}};
  if (options.flags.balance && world_size > 1) {
    // The largest of the sizes that a rank's passes may have: as many as a model keeps, for steps
    // without an evaluation between them. The evaluation's pass is smaller, and is forgotten first.
    passes = {passes[2]};
    for (int64_t less = 3; less >= 0; --less)
      passes.push_back({batch + (batch / quantum - less) * quantum, Mode::kTraining});
  }
  for (const auto& [samples, mode] : passes) {
    if (samples > 0) EK_RETURN_IF_ERROR(setup.model->PlanPass(samples, mode));
  }
  return absl::OkStatus();
}

// Returns, for example, "1.5 KiB".
std::string FormatBytes(int64_t bytes) {
  if (bytes < 1024) return absl::StrCat(bytes, " B");
  double value = static_cast<double>(bytes) / 1024;
  const char* const units[] = {"KiB", "MiB", "GiB", "TiB"};
  size_t unit = 0;
  for (; value >= 1023.95 && unit + 1 < std::size(units); ++unit) value /= 1024;
  return absl::StrFormat(value >= 99.95 ? "%.0f %s" : "%.1f %s", value, units[unit]);
}

// Returns an id that differs between hosts of equal names.
std::string BootId() {
  std::string id;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> id;
  return id;
}

// Returns a batch size that needs no more than `bytes` on a rank; 0: none.
int64_t SmallerBatch(TrainOptions options, const std::shared_ptr<const TrainingData>& data,
                     int rank, int world_size, int64_t bytes) {
  while ((options.batch_size /= 2) > 0) {
    absl::StatusOr<RankSetup> setup = CheckRank(options, data, rank, world_size);
    if (!setup.ok()) return 0;
    const absl::StatusOr<RankMemory> memory = PlanMemory(options, rank, world_size, *setup);
    if (!memory.ok()) return 0;
    const bool is_device = options.device == DeviceKind::kCuda;
    if (NeedsOf(*memory, {}, is_device).bytes <= bytes) return options.batch_size;
  }
  return 0;
}

}  // namespace

std::string DescribeMemory(int rank, const RankMemory& memory, absl::string_view verb) {
  std::string text = absl::StrCat("rank ", rank, " ", verb, " ", FormatBytes(TotalOf(memory)), ":");
  absl::string_view comma = " ";
  for (const MemoryPart& part : kMemoryParts) {
    if (memory.*part.bytes == 0) continue;
    absl::StrAppend(&text, comma, part.name, " ", FormatBytes(memory.*part.bytes));
    comma = ", ";
  }
  if (memory.peak_resident > 0) {
    absl::StrAppend(&text, "; its process used at most ", FormatBytes(memory.peak_resident),
                    ", including libraries");
  }
  return text;
}

absl::StatusOr<RankMemory> PlanMemory(const TrainOptions& options, int rank, int world_size,
                                      RankSetup& setup) {
  ParameterSet& parameters = setup.model->parameters();
  ApplyFreezeSchedule(options.freeze, 0, parameters);
  RankMemory memory{.data = setup.data->train->held_bytes() + setup.data->test->held_bytes()};
  for (int i = 0; i < parameters.size(); ++i) {
    memory.parameters += parameters[i].value.bytes();
    if (parameters.trainable(i)) memory.buckets += parameters[i].value.bytes();
  }
  memory.gradients = memory.parameters;
  EK_ASSIGN_OR_RETURN(memory.optimizer, StateBytes(options, parameters, rank, world_size));
  if (!options.checkpoints.folder.empty()) {
    // One rank saves the parameters, and rank 0 the state that all ranks have.
    if (rank == options.ModelRank(world_size)) memory.copies = memory.parameters;
    if (rank == 0 || options.sharding != Sharding::kNone) memory.copies += memory.optimizer;
  }
  EK_RETURN_IF_ERROR(PlanPasses(options, rank, world_size, setup));
  memory.activations = setup.model->ActivationBytes();
  return memory;
}

MemoryNeeds NeedsOf(const RankMemory& memory, const MemoryPlace& place, bool is_device) {
  if (!is_device) return {place, TotalOf(memory), TotalOf(memory)};
  const int64_t bytes = TotalOf(memory) - memory.data - memory.copies;  // Those are on the host.
  return {place, bytes, bytes - memory.activations};
}

MemoryPlace HostMemory() {
  const internal::AvailableMemory left = internal::ReadAvailableMemory();
  const bool is_known = left.bytes != std::numeric_limits<int64_t>::max();
  return {absl::StrCat(left.of, left.of == "the host" ? " " : " on ", HostName()),
          is_known ? left.bytes : -1, left.swap_bytes, BootId()};
}

MemoryPlace DeviceMemory(Device device, const absl::StatusOr<DeviceFacts>& facts) {
  return {absl::StrCat(ToString(device), " of ", HostName()), facts.ok() ? facts->free_bytes : -1,
          /*swap=*/0, BootId()};
}

MemoryVerdict JudgeMemory(const std::vector<MemoryNeeds>& needs) {
  std::map<std::string, std::vector<MemoryNeeds>> places;
  for (const MemoryNeeds& one : needs) places[one.place.name + " " + one.place.boot].push_back(one);
  MemoryVerdict worst;
  double highest = -1;
  for (const auto& [key, of_place] : places) {
    MemoryNeeds sum{.place = of_place[0].place};
    const auto ranks = static_cast<int64_t>(of_place.size());
    for (const MemoryNeeds& one : of_place) {
      sum.bytes += one.bytes;
      sum.certain_bytes += one.certain_bytes;
      sum.place.available = std::min(sum.place.available, one.place.available);
    }
    const int64_t available = sum.place.available;
    if (available < 0) continue;
    const double share = static_cast<double>(sum.bytes) / std::max<double>(1, available);
    if (share <= highest) continue;
    highest = share;
    const double all = static_cast<double>(available + sum.place.swap);
    worst.kind = static_cast<double>(sum.certain_bytes) > kTolerance * all
                     ? MemoryVerdict::kTooMuch
                     : (share > kClose ? MemoryVerdict::kClose : MemoryVerdict::kFits);
    worst.text =
        absl::StrCat(ranks, ranks == 1 ? " rank needs " : " ranks need ", FormatBytes(sum.bytes),
                     ", and ", sum.place.name, " has ", FormatBytes(available), " left");
    worst.ranks = ranks;
    worst.available = available;
  }
  return worst;
}

absl::Status RefuseTooMuch(const MemoryVerdict& verdict, const RankMemory& memory,
                           const TrainOptions& options,
                           const std::shared_ptr<const TrainingData>& data, int rank,
                           int world_size) {
  if (verdict.kind != MemoryVerdict::kTooMuch) return absl::OkStatus();
  const int64_t batch =
      SmallerBatch(options, data, rank, world_size, verdict.available / verdict.ranks);
  std::string advice =
      absl::StrCat("--batch_size=", batch, " with --accumulate=",
                   batch > 0 ? (options.samples_per_step() + batch - 1) / batch : 0, " fits");
  if (batch == 0) {
    advice = absl::StrCat("no --batch_size fits; use a smaller model",
                          verdict.ranks > 1 ? ", fewer ranks on this host" : "",
                          options.sharding == Sharding::kNone ? ", or --zero" : ", or more hosts");
  }
  return absl::ResourceExhaustedError(absl::StrCat("not enough memory: ", verdict.text, " (",
                                                   DescribeMemory(rank, memory, "needs"), "); ",
                                                   advice));
}

absl::StatusOr<std::string> DescribeDryRun(const TrainOptions& options,
                                           const std::shared_ptr<const TrainingData>& data,
                                           int world_size, int ranks, const MemoryPlace& place) {
  std::vector<MemoryNeeds> needs;
  RankMemory first;
  StepPlan plan;
  for (int rank = 0; rank < ranks; ++rank) {
    EK_ASSIGN_OR_RETURN(RankSetup setup, CheckRank(options, data, rank, world_size));
    EK_ASSIGN_OR_RETURN(RankMemory memory, PlanMemory(options, rank, world_size, setup));
    // Ranks that are threads have the same data.
    if (rank > 0 && options.backend == BackendKind::kLocal) memory.data = 0;
    needs.push_back(NeedsOf(memory, place, options.device == DeviceKind::kCuda));
    if (rank > 0) continue;
    first = memory;
    plan = setup.plan;
  }
  const MemoryVerdict verdict = JudgeMemory(needs);
  EK_RETURN_IF_ERROR(RefuseTooMuch(verdict, first, options, data, 0, world_size));
  const std::string judged =
      verdict.text.empty()
          ? ""
          : absl::StrCat(verdict.text, ": it ",
                         verdict.kind == MemoryVerdict::kFits ? "fits" : "may not fit", "\n");
  return absl::StrCat(DescribeMemory(0, first, "needs"), "\n", judged, plan.total_steps,
                      " steps in ", plan.epochs(), plan.epochs() == 1 ? " epoch" : " epochs",
                      "\na dry run: no memory was taken, nothing was written\n");
}

}  // namespace evenkeel
