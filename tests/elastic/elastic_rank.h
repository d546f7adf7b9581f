// A rank of a training that loses ranks and goes on.
//
//   Losses losses = {{.rank = 0, .step = 3, .point = StepPoint::kBackward}};
//   absl::StatusOr<ElasticReport> report =
//       TrainElastically(std::move(comm), {.inputs = {6, 6, 4, 6}, .losses = losses}, die);
//
// `die` ends the rank without a word to the others; it does not return.
//
// Threads: as the communicator.

#ifndef EVENKEEL_TESTS_ELASTIC_ELASTIC_RANK_H_
#define EVENKEEL_TESTS_ELASTIC_ELASTIC_RANK_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
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
};
// "4,4,4,4 join 0:2:2" and back: inputs, whether they join, and rank:step:point of each loss.
std::string ToText(const ElasticTraining& training);
absl::StatusOr<ElasticTraining> TrainingFromText(absl::string_view text);

struct Continuation {
  int step = 0;           // From which the survivors went on.
  std::vector<int> lost;  // Ranks of the first group, in ascending order.

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

// Calls `begin` once training has begun; there is no recovery from an earlier loss.
absl::StatusOr<ElasticReport> TrainElastically(
    std::unique_ptr<Communicator> comm, const ElasticTraining& training,
    absl::FunctionRef<void()> die, absl::FunctionRef<void()> begin = [] {});

// Returns the state that all survivors must end with.
ToyState TrainElasticallyAlone(const std::vector<int>& inputs,
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
