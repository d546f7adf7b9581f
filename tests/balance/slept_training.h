// Training whose forward and backward sleep by a Workload, with Balance or with even shares.
//
//   EK_ASSIGN_OR_RETURN(auto training, SleptTraining::Create(&comm));
//   EK_ASSIGN_OR_RETURN(double rest_ms, training->MeasureRest());
//   // on all ranks
//   EK_ASSIGN_OR_RETURN(Outcome outcome, training->Try(workload, {.rest_ms = rest_ms}));
//   outcome.part_of_best;    // 0.97: the fraction of the best possible throughput
//
// Threads: as the communicator.

#ifndef EVENKEEL_TESTS_BALANCE_SLEPT_TRAINING_H_
#define EVENKEEL_TESTS_BALANCE_SLEPT_TRAINING_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "evenkeel/bucket/data_parallel.h"
#include "evenkeel/bucket/parameter_set.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/join/balance.h"
#include "evenkeel/join/scope.h"
#include "evenkeel/tests/balance/slept_cost.h"
#include "evenkeel/zero_optim/optimizer.h"

namespace evenkeel {

struct SleptStep {
  double end_ms = 0;  // Since the loop began.
  std::vector<int64_t> shares;
};

struct TryOptions {
  double rest_ms = 0;  // Of a step: the reduction, and all else that is not slept.
  double even_s = 1;   // The duration of the steps without Balance; 0: there are none.
  double balanced_s = 5.5;
  std::function<absl::Status(const ShareChange&)> on_change;  // BalanceOptions::on_change.
};

// Shares have settled when the costs of their ranks allow kSettledPart of the best throughput.
inline constexpr double kSettledPart = 0.95;
// Throughput is measured after so many steps, and so much time.
inline constexpr int kSettlingSteps = 50;
inline constexpr double kSettlingMs = 2000;

struct Outcome {
  int64_t batch = 0;
  int64_t quantum = 0;
  double even_ms = 0;      // The mean step with even shares; 0: not measured.
  double balanced_ms = 0;  // With Balance, once it had the time to settle.
  double best_ms = 0;      // The mean of the best division at the same times.
  double part_of_best = 0;
  double part_by_costs = 0;  // Likewise, if all steps had taken what was to be slept in them.
  int settled_step = -1;     // -1: never.
  double settled_s = 0;
  int changes_after = 0;  // Since it settled.
  // The steps in which a share differs from the even one by more than a quantum, as a part of all.
  double uneven_steps = 0;
  std::vector<int64_t> last_shares;
};

class SleptTraining {
 public:
  static absl::StatusOr<std::unique_ptr<SleptTraining>> Create(Communicator* comm);
  explicit SleptTraining(Communicator* comm) : comm_(comm) {}

  // All ranks call these together.

  // Returns the steps of a loop. `balance` may be null: shares are even.
  absl::StatusOr<std::vector<SleptStep>> Run(const Workload& workload, Balance* balance, int steps);
  // Returns the time of a step that is not slept, the median of the slowest rank's.
  absl::StatusOr<double> MeasureRest();
  // If ranks compute, the best division is found by times that are measured first, on all ranks at
  // once.
  absl::StatusOr<Outcome> Try(const Workload& workload, const TryOptions& options);

 private:
  absl::Status Step(JoinScope& scope, const Workload& workload, const StepCost& cost,
                    int64_t samples);
  // Sets workload.measured_ms, for these shares.
  absl::Status MeasureComputing(const std::vector<int64_t>& sizes, Workload& workload);

  Communicator* const comm_;
  std::vector<std::vector<float>> values_, gradients_;
  ParameterSet params_;
  std::unique_ptr<DataParallel> ddp_;
  std::unique_ptr<Optimizer> optimizer_;
};

}  // namespace evenkeel

#endif  // EVENKEEL_TESTS_BALANCE_SLEPT_TRAINING_H_
