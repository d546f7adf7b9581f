// A training whose global batches Balance divides, on ranks of changing speed.
//
//   BalancedRun run(DrawBalanced(draws, /*world_size=*/4));
//   run.Train(comm, awake_since)     // on each rank, with the time at which it last ended a sleep
//   run.Wrong(/*is_complete=*/true)  // when all have ended: "rank 2 has other shares in step 31"
//
// Computing is a sleep. A gradient has an element for each place of a batch, with a number that
// depends on the sample there: a sample that is missing, or computed twice, changes it.
//
// Threads: Train() on a thread of the rank, in a world; the rest anywhere.

#ifndef EVENKEEL_TESTS_SIMULATION_BALANCED_TRAINING_H_
#define EVENKEEL_TESTS_SIMULATION_BALANCED_TRAINING_H_

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/join/balance.h"
#include "evenkeel/join/scope.h"
#include "evenkeel/tests/simulation/draws.h"
#include "evenkeel/tests/simulation/world.h"

namespace evenkeel::simulation {

struct RankSpeed {
  enum class Kind { kConstant, kNoisy, kStalls, kComesAndGoes };
  Kind kind = Kind::kConstant;
  Nanos per_sample = 0, per_step = 0;
  double factor = 1;  // By which it is slower at times;
  Nanos period = 0;   // how long these are, and the times between them.
};

struct BalancedTraining {
  uint64_t seed = 0;
  int64_t batch = 0, quantum = 0;
  int64_t rest = 0;  // The samples of an epoch's last batch, if it is a short one.
  int batches = 1;   // Whole ones of an epoch.
  int epochs = 1;
  int accumulated = 1;           // Batches of a reduction.
  std::vector<RankSpeed> ranks;  // By rank.
  // Its ranks have constant speeds, and it has the time to find them.
  bool is_steady = false;

  int64_t all_batches() const { return batches + (rest > 0 ? 1 : 0); }
  int64_t samples(int64_t of_batch) const { return of_batch < batches ? batch : rest; }
};

BalancedTraining DrawBalanced(Draws& draws, int world_size);
std::string Describe(const BalancedTraining& training);

class BalancedRun {
 public:
  explicit BalancedRun(BalancedTraining training)
      : training_(std::move(training)), ranks_(training_.ranks.size()) {}

  absl::Status Train(Communicator& comm, Nanos& awake_since);
  // Returns the first error that the ranks' numbers show, or "". `is_complete`: no rank was lost.
  std::string Wrong(bool is_complete) const;

 private:
  class Model;
  // A result of Balance::Next().
  struct Step {
    Share mine;
    std::vector<int64_t> shares;
  };
  struct Rank {
    std::vector<Step> steps;
    std::vector<int64_t> sizes;
    Nanos planned = 0, took = 0;  // Of computing: a disturbance makes it longer.
    std::string wrong;            // The first wrong gradient.
  };

  std::string WrongIn(size_t step) const;
  std::string TooSlow() const;

  const BalancedTraining training_;
  std::vector<Rank> ranks_;
};

}  // namespace evenkeel::simulation

#endif  // EVENKEEL_TESTS_SIMULATION_BALANCED_TRAINING_H_
