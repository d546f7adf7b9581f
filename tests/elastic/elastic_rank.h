// A rank of a training that loses ranks and goes on, with newcomers in their places or without.
//
//   std::vector<Loss> losses = {{.rank = 0, .step = 3, .point = StepPoint::kBackward}};
//   absl::StatusOr<ElasticReport> report =
//       TrainElastically(std::move(comm), {.inputs = {6, 6, 4, 6}, .losses = losses}, {.die =
//       die});
//
// Threads: as the communicator.

#ifndef EVENKEEL_TESTS_ELASTIC_ELASTIC_RANK_H_
#define EVENKEEL_TESTS_ELASTIC_ELASTIC_RANK_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/tests/toy_training.h"

namespace evenkeel {

struct Loss {
  int rank = 0;  // In the first group.
  int step = 0;
  StepPoint point = StepPoint::kBackward;  // There, when two gradients have been announced.
};

struct ElasticTraining {
  std::vector<int> inputs;  // By rank, in steps.
  bool joins = false;
  std::vector<Loss> losses;  // One after the other. Others may be lost from outside.
  // True: each step is an exchange over the control plane, and no data is moved.
  bool is_counted = false;
  bool is_exact = false;   // ToySettings::is_exact.
  bool is_misfit = false;  // This rank's model differs from that of the others.
  absl::Duration wait_for_replacement = absl::ZeroDuration();
  absl::Duration timeout = absl::Seconds(20);
};
// "4,4,4,4 join 0:2:2" and back: inputs, whether they join, and rank:step:point of each loss.
std::string ToText(const ElasticTraining& training);
absl::StatusOr<ElasticTraining> TrainingFromText(absl::string_view text);

struct Continuation {
  int step = 0;           // From which the survivors went on.
  std::vector<int> lost;  // Ranks of the first group whose places are left out, in ascending order.

  friend bool operator==(const Continuation&, const Continuation&) = default;
};

struct ElasticReport {
  int rank = -1;  // In the first group.
  std::vector<Continuation> continuations;
  double seconds_without_group =
      0;  // The longest, from an error to the first step of the next group.
  ToyState ended;
};
std::string ToLine(const ElasticReport& report);
absl::StatusOr<ElasticReport> ElasticReportFromLine(absl::string_view line);

// Called on the rank's thread.
struct ElasticHooks {
  // Ends the rank without a word to the others; does not return.
  std::function<void()> die;
  // Training has begun; there is no recovery from an earlier loss.
  std::function<void()> begin = [] {};
  std::function<void(StepPoint point, int step)> at = [](StepPoint, int) {};
  // A step has ended: so many are finished now.
  std::function<void(int64_t steps, const ToyState& state)> finished = [](int64_t,
                                                                          const ToyState&) {};
  // The loop has ended with an error when so many steps were finished.
  std::function<void(int64_t steps, const ToyState& state)> fails = [](int64_t, const ToyState&) {};
  // Training goes on: at first in the job's first group, from step 0 and its own state. `source`
  // is the rank that had that state.
  std::function<void(const Communicator& comm, int64_t step, int source, const ToyState& state)>
      goes_on = [](const Communicator&, int64_t, int, const ToyState&) {};
};
// A newcomer (Communicator::waiting()) enters first. It has none of the losses.
absl::StatusOr<ElasticReport> TrainElastically(std::unique_ptr<Communicator> comm,
                                               const ElasticTraining& training,
                                               const ElasticHooks& hooks);

// Returns the state that all survivors must end with. A rank that was replaced is not lost.
ToyState TrainElasticallyAlone(const ElasticTraining& training,
                               const std::vector<Continuation>& continuations);

// Return a sentence for each thing that is wrong in the reports of the survivors: whether they
// continued in the same way, and ended with the same and right state; whether they lost the ranks
// of training.losses, one after the other, and went on from steps that were possible.
std::vector<std::string> WrongIn(const ElasticTraining& training,
                                 const std::vector<ElasticReport>& survivors);
std::vector<std::string> UnlikePlanned(const ElasticTraining& training,
                                       const ElasticReport& survivor);

}  // namespace evenkeel

#endif  // EVENKEEL_TESTS_ELASTIC_ELASTIC_RANK_H_
