#include "evenkeel/tests/faults/scenario.h"

#include <algorithm>
#include <iterator>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "evenkeel/comm/testing/tested_group.h"
#include "evenkeel/tests/simulation/draws.h"

namespace evenkeel {
namespace {

constexpr int kSteps = 4;
constexpr int kMaxDelayMicros =
    400;  // A sharded optimizer's step over processes takes about as long.

// Every fault, over processes, and over threads if they have it.
std::vector<std::pair<Fault, bool>> AllPairs(bool with_threads) {
  std::vector<std::pair<Fault, bool>> pairs;
  for (Fault fault : kAllFaults) {
    pairs.emplace_back(fault, true);
    if (with_threads && fault < Fault::kStoreReset) pairs.emplace_back(fault, false);
  }
  return pairs;
}

absl::string_view Does(Fault fault) {
  switch (fault) {
    case Fault::kKilled:
      return "is killed";
    case Fault::kStopped:
      return "is stopped";
    case Fault::kError:
      return "has an error";
    case Fault::kSlow:
      return "is slow";
    case Fault::kOtherKind:
      return "calls another collective";
    case Fault::kOtherSize:
      return "gives another size of the same bytes";
    case Fault::kOtherDType:
      return "gives another dtype";
    case Fault::kOtherRoot:
      return "names another root";
    case Fault::kOtherPlan:
      return "has another bucket plan";
    case Fault::kOtherSync:
      return "does not synchronise";
    case Fault::kSkipsStep:
      return "skips a step";
    case Fault::kExtraStep:
      return "does a step more";
    case Fault::kStoreReset:
      return "loses the store";
    case Fault::kStoreSilent:
      return "hears nothing from the store";
    case Fault::kDataCut:
      return "loses its connections to the other ranks";
  }
  return "?";
}

std::string At(const Scenario& scenario) {
  switch (scenario.point) {
    case StepPoint::kBeforeRecord:
      return "before its record";
    case StepPoint::kForward:
      return "in forward";
    case StepPoint::kBackward:
      return absl::StrCat("in backward, after ", scenario.gradients, " gradients");
    case StepPoint::kReduced:
      return "between reduction and optimizer";
    case StepPoint::kStepped:
      return "after the optimizer";
    case StepPoint::kLoopEnd:
      return "after the loop";
  }
  return "?";
}

std::string Where(const Scenario& scenario) {
  const std::string where = At(scenario);
  return scenario.delay_micros < 0
             ? where
             : absl::StrCat(scenario.delay_micros, " us after it was ", where);
}

}  // namespace

absl::string_view Name(Fault fault) {
  static constexpr absl::string_view kNames[] = {
      "killed",     "stopped",     "error",       "slow",         "other_kind",
      "other_size", "other_dtype", "other_root",  "other_plan",   "other_sync",
      "skips_step", "extra_step",  "store_reset", "store_silent", "data_cut"};
  static_assert(std::size(kNames) == std::size(kAllFaults));
  return kNames[static_cast<int>(fault)];
}

std::vector<std::vector<int>> Scenario::batches() const {
  std::vector<std::vector<int>> batches(inputs.size());
  for (int rank = 0; rank < world_size(); ++rank) {
    batches[rank].resize(inputs[rank] + (rank == victim && fault == Fault::kExtraStep ? 1 : 0));
    std::iota(batches[rank].begin(), batches[rank].end(), 0);
    if (rank == victim && fault == Fault::kSkipsStep)
      batches[rank].erase(batches[rank].begin() + step);
  }
  return batches;
}

Scenario MakeScenario(uint64_t seed, int index, const ScenarioOptions& options) {
  const std::vector<std::pair<Fault, bool>> pairs = AllPairs(options.with_threads);
  Draws draws(seed * 0x100000 + static_cast<uint64_t>(index));
  Scenario scenario{.seed = seed, .index = index};
  std::tie(scenario.fault, scenario.as_processes) =
      pairs[(seed + static_cast<uint64_t>(index)) % pairs.size()];
  const int sizes = static_cast<int>(options.world_sizes.size());
  const int world_size = options.world_sizes[draws.Below(sizes)];
  scenario.victim = draws.Below(world_size);
  scenario.is_sharded = draws.OneIn(2);
  scenario.verifies_every = draws.OneIn(4);
  scenario.join = static_cast<JoinForm>(draws.Below(3));
  scenario.variant = draws.Below(3);
  scenario.waits_later = draws.OneIn(2);
  scenario.rank0_hosts = scenario.as_processes && !scenario.cuts() && draws.OneIn(3);

  scenario.inputs.assign(world_size, kSteps);
  if (scenario.join == JoinForm::kUneven) {
    for (int& n : scenario.inputs) n = 2 + draws.Below(kSteps);
  }
  // Where all ranks have something to say, all must have an input.
  const int limit = scenario.disagrees()
                        ? *std::min_element(scenario.inputs.begin(), scenario.inputs.end())
                        : scenario.inputs[scenario.victim];
  scenario.step = draws.Below(limit);
  if (scenario.disagrees() && !scenario.has_collective()) return scenario;

  scenario.point = static_cast<StepPoint>(draws.Below(scenario.has_collective() ? 5 : 6));
  if (scenario.point == StepPoint::kBackward) scenario.gradients = draws.Below(kToyGradients + 1);
  if (scenario.point == StepPoint::kLoopEnd) scenario.step = scenario.inputs[scenario.victim];
  const bool is_signal = scenario.fault == Fault::kKilled || scenario.fault == Fault::kStopped;
  const bool is_long =
      scenario.point == StepPoint::kReduced || scenario.point == StepPoint::kLoopEnd;
  if (scenario.as_processes && is_signal && is_long && draws.OneIn(2)) {
    scenario.delay_micros = draws.Below(kMaxDelayMicros);
  }
  return scenario;
}

std::string Describe(const Scenario& scenario) {
  std::string text =
      absl::StrCat(scenario.as_processes ? BackendOfProcesses() : "local",
                   scenario.rank0_hosts ? " (rank 0 hosts the store)" : "", ", ",
                   scenario.is_sharded ? "sharded" : "unsharded",
                   scenario.verifies_every ? ", verifies every collective, " : ", ",
                   scenario.joins() ? "join " : "inputs ", absl::StrJoin(scenario.inputs, ","),
                   ": rank ", scenario.victim, " ", Does(scenario.fault));
  if (scenario.fault == Fault::kExtraStep || scenario.fault == Fault::kOtherPlan) return text;
  absl::StrAppend(&text, " in step ", scenario.step);
  if (scenario.disagrees() && !scenario.has_collective()) return text;
  return absl::StrCat(text, " ", Where(scenario),
                      scenario.has_collective() && scenario.waits_later ? ", waits later" : "");
}

}  // namespace evenkeel
