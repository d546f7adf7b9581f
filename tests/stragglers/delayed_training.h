// Training with a known cause of delay on one rank, to test whether the group finds it.
//
//   EK_ASSIGN_OR_RETURN(auto training, DelayedTraining::Create(&comm, {.delay = Delay::kLoader}));
//   EK_RETURN_IF_ERROR(training->Calibrate(40));  // optional: a step as it is, not setting.step
//   EK_RETURN_IF_ERROR(training->Run(520));
//   RecentStragglersOf(comm).Stragglers();
//
// Forward and backward sleep, so that more ranks than cores are as fast as few; or compute, which
// is needed where a neighbour takes the core.
//
// Threads: thread-compatible.

#ifndef EVENKEEL_TESTS_STRAGGLERS_DELAYED_TRAINING_H_
#define EVENKEEL_TESTS_STRAGGLERS_DELAYED_TRAINING_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "evenkeel/bucket/data_parallel.h"
#include "evenkeel/bucket/parameter_set.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/join/phase.h"
#include "evenkeel/zero_optim/optimizer.h"

namespace evenkeel {

enum class Delay {
  kNone,
  kLoader,          // A slow loader, in a loop that marks its input;
  kUnmarkedLoader,  // in one that does not.
  kForward,
  kBackward,
  kPageFaults,  // In forward: memory that is returned and touched again.
  kSaving,      // A slow disk, at intervals of several steps.
  // The caller slows down the rank's core; only if ranks compute:
  kNeighbour,  // another process uses it;
  kThrottled,  // a control group limits the rank.
};
inline constexpr int kDelays = 9;
const char* NameOf(Delay delay);
// Returns the phase that the group should find; nothing if several are right.
std::optional<StepPhase> PhaseOf(Delay delay);
// Returns whether the ranks must compute for this delay to have an effect.
bool Computes(Delay delay);

// Returns the processor time of this thread.
absl::Duration CpuTime();

struct DelaySetting {
  Delay delay = Delay::kNone;
  int rank = 0;           // The slow one.
  double fraction = 0.2;  // The delay of a step, as a fraction of its time without delay.
  absl::Duration step = absl::Milliseconds(3);
  bool computes = false;
  int save_every = 25;  // Steps.
  Placement placement = Replicated{};
};

class DelayedTraining {
 public:
  static constexpr int kLayers = 6;

  static absl::StatusOr<std::unique_ptr<DelayedTraining>> Create(Communicator* comm,
                                                                 const DelaySetting& setting);
  DelayedTraining(Communicator* comm, const DelaySetting& setting);

  // That many steps with gradients, without RunJoined().
  absl::Status Run(int steps);
  absl::Status Step();
  // Runs steps without the delay. From then on the delay is a fraction of the time that the second
  // half of them took.
  absl::Status Calibrate(int steps);
  // Returns setting.step, or as Calibrate() has measured it.
  absl::Duration step_time() const { return step_time_; }

  DataParallel& ddp() { return *ddp_; }
  Optimizer& optimizer() { return *optimizer_; }

 private:
  void Work(absl::Duration time) const;
  // The delay, if it is this rank's, and of that kind.
  void DelayIf(Delay delay, double steps = 1);

  Communicator* const comm_;
  const DelaySetting setting_;
  int64_t steps_ = 0;
  absl::Duration step_time_ = setting_.step;
  bool is_calibrating_ = false;
  std::vector<std::vector<float>> values_, gradients_;
  ParameterSet params_;
  std::unique_ptr<DataParallel> ddp_;
  std::unique_ptr<Optimizer> optimizer_;
};

}  // namespace evenkeel

#endif  // EVENKEEL_TESTS_STRAGGLERS_DELAYED_TRAINING_H_
