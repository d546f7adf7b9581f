// Measures the cost of data parallelism in the steps of a model: several ways to train it, in
// blocks in turn, on one group.
//
//   EK_ASSIGN_OR_RETURN(nlohmann::json result,
//                       MeasurePlan(comm, {.training = {.model = "mlp"}, .rows = rows}));
//   if (comm.rank() == 0) std::cout << result.dump();
//
// A round has a block of each row (tools/measure/rounds.h); all ranks run the same row at the same
// time, the local one too, so that the cores are equally busy in all of them. The time of a block
// is the mean over the ranks of each rank's median step; that of a row is the median over its
// blocks. A ratio compares two rows within a round: the median over the rounds with its 95 %
// interval.
//
// Shape:   {"parameters", "rows": [{"name", "step_ms", "update_ms", "step_to_local",
//          "step_to_reducer", "update_to_reducer", "bucket_bytes", "exposed_us", "collectives"}]};
//          a ratio is {"median", "low", "high", "pairs"}, or null without another row to compare
//          with; exposed_us has an entry for each bucket; collectives are those of a step.
// Threads: as the communicator.
// Errors:  those of training. Internal if the ranks have trained different parameters.

#ifndef EVENKEEL_TOOLS_STEP_STEP_MEASUREMENT_H_
#define EVENKEEL_TOOLS_STEP_STEP_MEASUREMENT_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/tools/step/step_training.h"
#include "nlohmann/json.hpp"

namespace evenkeel {

struct StepRow {
  std::string name;
  SyncWay way = SyncWay::kReducer;
  bool joins = false;
};

struct PlanSettings {
  TrainingSettings training;
  std::vector<StepRow> rows;  // Others are compared with the one that is kLocal, and with the first
                              // that is kReducer and does not join.
  int rounds = 30;            // Blocks of each row, that is pairs for each ratio.
  int steps = 8;              // Per block.
};

// All ranks call it together, and each gets the result.
absl::StatusOr<nlohmann::json> MeasurePlan(Communicator& comm, const PlanSettings& settings);

}  // namespace evenkeel

#endif  // EVENKEEL_TOOLS_STEP_STEP_MEASUREMENT_H_
