// A training loop that does more than call the library: between the calls it changes values and
// gradients, clears, freezes, omits and repeats steps. It runs in one process, and on the ranks of
// a group inside of RunJoined().
//
//   const Program program{.inputs = {1, 3},
//                         .placement = Slices{},
//                         .acts = {{.step = 1, .at = At::kBeforeStep, .act = Act::kFreeze}}};
//   const std::string values = RunAlone(program);                            // of one process
//   EK_ASSIGN_OR_RETURN(const std::string mine, RunRank(program, comm));     // of this rank
//   IsNear(values, mine);
//
// Threads: RunAlone() is a pure function; RunRank() is thread-compatible.
// Errors:  those of the libraries, as they are.

#ifndef EVENKEEL_TESTS_PROGRAMS_PROGRAM_H_
#define EVENKEEL_TESTS_PROGRAMS_PROGRAM_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/zero_optim/optimizer.h"
#include "evenkeel/zero_optim/step_options.h"
#include "evenkeel/zero_optim/update_rule.h"

namespace evenkeel {

inline constexpr int kProgramParams = 5;

// The place of an action in a step.
enum class At {
  kBeforeBegin,   // Before BeginStep().
  kBeforeStep,    // Between FinishStep() and the optimizer's Step().
  kBetweenSteps,  // Between Step() and a second one; before the second one.
  kAfterStep,     // After the last Step().
};

enum class Act {
  kChangeValue,
  kChangeGradient,  // Where the rank has the group's gradient.
  kClear,           // One gradient.
  kClearAll,
  kFreeze,
  kUnfreeze,
  kOmitStep,    // Step() is not called. At any place.
  kSkipStep,    // Step() is called with `skip`. At any place.
  kRepeatStep,  // Step() is called twice. At any place.
};

struct Action {
  int step = 0;
  At at = At::kBeforeStep;
  Act act = Act::kFreeze;
  int param = 2;
  std::vector<int> ranks = {};  // Empty: all that have input.

  bool IsOf(int rank) const;
};
std::string ToString(const Action& action);

struct Program {
  std::vector<int> inputs;  // By rank: its number of steps.
  Placement placement;
  UpdateRule rule = AdamW{.learning_rate = 0.05};
  StepOptions options;
  bool has_views = false;            // Gradients are views of buckets.
  bool lacks_gradients = false;      // Backward of a rank does not reach each parameter.
  bool has_function_before = false;  // It clips by value and adds noise.
  bool has_function_after = false;   // It clamps weights.
  bool is_without_reducer = false;   // WholeTensors reduces the gradients.
  std::vector<Action> acts;

  int steps() const;            // Of the rank with the most.
  bool IsEven(int step) const;  // All ranks have input in it.
};
std::string ToString(const Program& program);

// Returns all values after the loop. In one process the actions of any rank happen.
std::string RunAlone(const Program& program);
absl::StatusOr<std::string> RunRank(const Program& program, Communicator& comm);

// Values of float64 that differ by the order of additions at most.
bool IsNear(const std::string& a, const std::string& b);

}  // namespace evenkeel

#endif  // EVENKEEL_TESTS_PROGRAMS_PROGRAM_H_
