// A training program small enough that a plain loop in one process says what any group of ranks
// must end with.
//
//   ToyResult result = TrainToy(comm, {.batches = {0, 1, 2}, .joins = true});      // on each rank
//   // alone[k]: after k steps
//   std::vector<ToyState> alone = TrainToyAlone(GroupSteps({{0, 1, 2}, {0, 1}}));
//   IsClose(result.last, alone[result.steps]);
//
// DataParallel and SGD with momentum, unsharded or sharded, over several buckets. What happens at
// the points of a step is the caller's: barriers, faults, counting. On a simulated device the
// model's arithmetic is the host's.
//
// Threads: as the communicator; what needs none is a pure function.
// Errors:  those of the libraries, as they are.

#ifndef EVENKEEL_TESTS_TOY_TRAINING_H_
#define EVENKEEL_TESTS_TOY_TRAINING_H_

#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "evenkeel/bucket/plan/planner.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/join/joinable.h"
#include "evenkeel/join/scope.h"

namespace evenkeel {

// Where in its step a rank is.
enum class StepPoint {
  kBeforeRecord,  // Before BeginStep(): the other ranks do not know of the step yet.
  kForward,
  kBackward,  // Before each gradient, and after the last one; `gradients` says how many have been
              // announced.
  kReduced,   // Between FinishStep() and the optimizer.
  kStepped,   // The last thing in the loop's body.
  kLoopEnd,   // No input is left: once, `step` is the number of steps.
};

// The number of parameters; as many gradients are announced in each step.
inline constexpr int kToyGradients = 5;

// The contents of RunJoined()'s list, in this order.
enum class ToyList { kGradientsFirst, kOptimizerFirst, kOptimizerAlone };

struct ToySettings {
  std::vector<int> batches;                 // This rank's, one per step.
  bool joins = false;                       // The loop runs in RunJoined().
  ToyList list = ToyList::kGradientsFirst;  // Alone: there is no DataParallel; needs is_sharded.
  std::vector<int> even_batches;  // A second loop's, without RunJoined(): as many on each rank.
  bool is_sharded = false;        // The optimizer.
  int accumulating_step = -1;     // This one does not synchronise.
  std::vector<Bytes> caps = {Bytes{8}, Bytes{24}};
  int data_rank = -1;  // Whose data this is; -1: the rank's in the group.
  // The bits of the state depend on no order of additions, in groups of 2, 4, 8, ... ranks.
  bool is_exact = false;
  bool is_misfit = false;  // The first parameter has one element more.
  JoinOptions join_options;
  // The scope in which the loop runs, before it begins.
  std::function<void(JoinScope&)> on_scope;
  // An error ends the loop with it.
  std::function<absl::Status(StepPoint point, int step, int gradients)> at;
};

struct ToyState {
  std::vector<float> weights, momentum;  // All parameters, one after the other.
};

struct ToyResult {
  absl::Status status;
  int steps = 0;   // Optimizer steps that this rank's loop has finished.
  ToyState last;   // Weights after the last of them; momentum only if all went well.
  ToyState ended;  // Weights when the loop had ended, with what other ranks did after this one;
                   // momentum likewise.
};

// A rank's model, with what trains it. Ownership: the group outlives its use; Recover() may give it
// another one.
class ToyTrainer {
 public:
  // All ranks together.
  static absl::StatusOr<std::unique_ptr<ToyTrainer>> Create(Communicator* comm,
                                                            const ToySettings& settings);
  ~ToyTrainer();

  // The loop, from this step on. Whatever its end, result() has it.
  absl::Status Train(int first_step = 0);
  const ToyResult& result() const { return result_; }
  std::vector<Joinable*> joinables() const;
  // This rank's at the moment, of an optimizer that is not sharded.
  ToyState state() const;

 private:
  class Parts;

  ToyTrainer(const ToySettings& settings, const Communicator& comm);
  absl::Status Init(Communicator* comm);
  absl::Status Loop(int first_step);
  absl::Status Step(int step, int batch);
  absl::Status TakeState();
  absl::Status At(StepPoint point, int step, int gradients = 0) const;

  const ToySettings settings_;
  const int data_rank_;
  const std::unique_ptr<Parts> parts_;
  ToyResult result_;
};

// The whole of it. After an error it ends the group: whoever destroys a DataParallel inside a step
// without a word to the others leaves them with nothing but that.
ToyResult TrainToy(Communicator& comm, const ToySettings& settings);

// One step of a group: whose batches go into it, and by what the sum is divided.
struct ToyStep {
  std::vector<std::pair<int, int>> inputs;  // (data rank, batch)
  int divisor = 1;
};
// The steps of ranks that have these batches: in each, all that still have one take part.
std::vector<ToyStep> GroupSteps(const std::vector<std::vector<int>>& batches);
// [0]: at the start; [k]: after k steps. No library of ours computes it, apart from the model's
// gradient.
std::vector<ToyState> TrainToyAlone(const std::vector<ToyStep>& steps, bool is_exact = false);

// Returns true if they differ by no more than another order of additions can explain.
bool IsClose(const std::vector<float>& a, const std::vector<float>& b);

}  // namespace evenkeel

#endif  // EVENKEEL_TESTS_TOY_TRAINING_H_
