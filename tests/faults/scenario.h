// One injected fault: what happens to which rank at which point of which training.
//
//   Scenario scenario = MakeScenario(/*seed=*/7, /*index=*/12);     // the same everywhere
//   // "tcp, 3 ranks, sharded, join 4,2,3: rank 1 is killed in step 1, backward after 2"
//   Describe(scenario)
//
// Indices go through all faults, over processes and over threads, in turn; the rest is drawn.
//
// Threads: pure functions of values.

#ifndef EVENKEEL_TESTS_FAULTS_SCENARIO_H_
#define EVENKEEL_TESTS_FAULTS_SCENARIO_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "evenkeel/comm/control/exchange_tree.h"
#include "evenkeel/tests/toy_training.h"

namespace evenkeel {

enum class Fault {
  kKilled,   // SIGKILL; a thread drops everything.
  kStopped,  // SIGSTOP; a thread blocks.
  kError,    // The loop's body returns one.
  kSlow,     // Longer than the stall warning: no fault, all must go well.
  // One collective of the user differs from the other ranks'.
  kOtherKind,
  kOtherSize,  // With the same number of bytes.
  kOtherDType,
  kOtherRoot,
  // The training differs.
  kOtherPlan,
  kOtherSync,
  kSkipsStep,
  kExtraStep,
  // A connection is cut; processes only.
  kStoreReset,   // To the store, which both ends see.
  kStoreSilent,  // To the store, which nobody sees.
  kDataCut,      // To the other ranks.
};
inline constexpr Fault kAllFaults[] = {
    Fault::kKilled,     Fault::kStopped,     Fault::kError,      Fault::kSlow,
    Fault::kOtherKind,  Fault::kOtherSize,   Fault::kOtherDType, Fault::kOtherRoot,
    Fault::kOtherPlan,  Fault::kOtherSync,   Fault::kSkipsStep,  Fault::kExtraStep,
    Fault::kStoreReset, Fault::kStoreSilent, Fault::kDataCut,
};
absl::string_view Name(Fault fault);  // "killed", "other_size", ...

enum class JoinForm { kNone, kEven, kUneven };

struct Scenario {
  uint64_t seed = 0;
  int index = 0;

  Fault fault = Fault::kKilled;
  bool as_processes =
      false;  // Over BackendOfProcesses(); else ranks are threads, over the local backend.
  bool rank0_hosts = false;  // The store; else a process that survives.
  bool is_sharded = false;
  bool verifies_every = false;  // Collective; else positions.
  JoinForm join = JoinForm::kNone;
  std::vector<int> inputs;  // Per rank.

  int victim = 0;
  int step = 0;
  StepPoint point = StepPoint::kBeforeRecord;
  int gradients = 0;  // For kBackward.
  int delay_micros =
      -1;  // If not negative: so long after the optimizer's step has begun, instead of at `point`.
  bool waits_later = false;  // For the user's collective: at the end of the step.
  int variant = 0;           // The fault's variant, 0 to 2.

  int world_size() const { return static_cast<int>(inputs.size()); }
  bool joins() const { return join != JoinForm::kNone; }
  // The collective that all ranks issue at this point, and the victim another one.
  bool has_collective() const { return fault >= Fault::kOtherKind && fault <= Fault::kOtherRoot; }
  bool cuts() const { return fault >= Fault::kStoreReset; }
  // Ranks that do not do the same; nobody is ill.
  bool disagrees() const { return fault >= Fault::kOtherKind && fault <= Fault::kExtraStep; }
  // Nothing is wrong: a slow rank, or a number of steps that join allows.
  bool must_succeed() const {
    return fault == Fault::kSlow ||
           (joins() && (fault == Fault::kSkipsStep || fault == Fault::kExtraStep));
  }
  // Whoever has nothing more to say to the others does not miss the connection; then all must
  // succeed. Below the first level of the tree of exchanges a rank sends the store only heartbeats.
  bool may_succeed() const {
    return must_succeed() || fault == Fault::kDataCut ||
           (fault == Fault::kStoreSilent && victim >= internal::kDefaultFanout);
  }
  // Returns each rank's batches, as they are really trained.
  std::vector<std::vector<int>> batches() const;
};

struct ScenarioOptions {
  std::vector<int> world_sizes = {2, 3, 5};
  bool with_threads = true;  // False: all ranks are processes.
};
Scenario MakeScenario(uint64_t seed, int index, const ScenarioOptions& options = {});
std::string Describe(const Scenario& scenario);

}  // namespace evenkeel

#endif  // EVENKEEL_TESTS_FAULTS_SCENARIO_H_
