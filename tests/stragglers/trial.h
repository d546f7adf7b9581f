// A trial: a job in which one rank has a delay, and how its ranks' findings are judged.
//
//   Trial trial = DrawTrial({.seed = 1}, /*index=*/17);
//   Verdict verdict = Judge(trial, {.stragglers = {3}, .phase = StepPhase::kInput});
//   scores.Add(trial, verdict);
//   std::cout << scores.Table();
//
// Pure functions and values.

#ifndef EVENKEEL_TESTS_STRAGGLERS_TRIAL_H_
#define EVENKEEL_TESTS_STRAGGLERS_TRIAL_H_

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "evenkeel/join/phase.h"
#include "evenkeel/tests/stragglers/delayed_training.h"

namespace evenkeel {

struct Trial {
  int world_size = 2;
  std::string backend;
  Delay delay = Delay::kNone;
  int rank = 0;
  double fraction = 0;  // Of a step.
  int save_every = 25;
  int64_t steps = 540;

  std::string Description() const;
};

struct TrialRange {
  uint64_t seed = 1;
  std::vector<int> worlds = {2, 4, 8};
  std::vector<std::string> backends = {"shm", "tcp", "hierarchical"};
  std::vector<Delay> delays;
  int cores = 2;  // Delays of a core are drawn for worlds that have a core for each rank.
};

// Returns the same trial for the same range and index.
Trial DrawTrial(const TrialRange& range, int index);

// The findings of a job's ranks.
struct Found {
  std::set<int> stragglers;               // At the end.
  StepPhase phase = StepPhase::kOutside;  // That of the lowest.
  std::set<int> ever;                     // The stragglers at any time.

  std::string Text() const;
  static absl::StatusOr<Found> Parse(absl::string_view text);
};

struct Verdict {
  bool is_rank = false;          // The slow rank was found, and no other.
  std::optional<bool> is_phase;  // And in its phase; nothing if that is not known.
  bool is_false = false;         // Another rank was a straggler at some time.
};
Verdict Judge(const Trial& trial, const Found& found);

class Scores {
 public:
  struct Score {
    int runs = 0, ranks = 0, known_phases = 0, phases = 0, false_accusations = 0;
  };
  void Add(const Trial& trial, const Verdict& verdict);
  const Score& all() const { return all_; }
  // Returns a row for each kind of delay, number of ranks and backend.
  std::string Table() const;

 private:
  Score all_;
  std::map<std::string, Score> by_row_;
};

}  // namespace evenkeel

#endif  // EVENKEEL_TESTS_STRAGGLERS_TRIAL_H_
