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
  std::vector<Loss> losses;  // One after the other.
};
// "4,4,4,4 join 0:2:2" and back: inputs, whether they join, and rank:step:point of each loss.
std::string ToText(const ElasticTraining& training);
absl::StatusOr<ElasticTraining> TrainingFromText(absl::string_view text);

struct ElasticReport {
  int rank = -1;                  // In the first group.
  std::vector<int> went_on_from;  // Which step, for each loss.
  double seconds_without_group =
      0;  // The longest, from an error to the first step of the next group.
  ToyState ended;
};
std::string ToLine(const ElasticReport& report);
absl::StatusOr<ElasticReport> ElasticReportFromLine(absl::string_view line);

absl::StatusOr<ElasticReport> TrainElastically(std::unique_ptr<Communicator> comm,
                                               const ElasticTraining& training,
                                               absl::FunctionRef<void()> die);

// Returns the state that all survivors must end with, given the steps from which they continued.
ToyState TrainElasticallyAlone(const ElasticTraining& training,
                               const std::vector<int>& went_on_from);

// Returns a sentence for each thing that is wrong in the reports of the survivors: whether they
// went on from the same steps, which were possible, and ended with the same and right state.
std::vector<std::string> WrongIn(const ElasticTraining& training,
                                 const std::vector<ElasticReport>& survivors);

}  // namespace evenkeel

#endif  // EVENKEEL_TESTS_ELASTIC_ELASTIC_RANK_H_
