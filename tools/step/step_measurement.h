// Measures the cost of data parallelism in the steps of a model: several ways to train it, in
// blocks in turn, on one group.
//
//   EK_ASSIGN_OR_RETURN(PlanResult result,
//                       MeasurePlan(comm, {.training = {.model = "mlp"}, .rounds = 30}));
//   if (comm.rank() == 0) std::cout << ToJson(result).dump();
//
// A round runs one block of each row, in an order that changes from round to round; all ranks run
// the same row at the same time, the local one too, so that the cores are equally busy in all of
// them. A ratio is that of two rows within a round: the median over the rounds with its 95 %
// interval. Times are means over the ranks that have inputs of each rank's median step in a block,
// and of those the median over the blocks. What is counted is counted in blocks of its own, which
// are not timed.
//
// Threads: as the communicator.
// Errors:  those of training. Internal if the ranks have trained different parameters.

#ifndef EVENKEEL_TOOLS_STEP_STEP_MEASUREMENT_H_
#define EVENKEEL_TOOLS_STEP_STEP_MEASUREMENT_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/tools/measure/paired_ratio.h"
#include "evenkeel/tools/step/step_training.h"
#include "nlohmann/json.hpp"

namespace evenkeel {

struct Row {
  std::string name;
  SyncWay way = SyncWay::kReducer;
  BlockSettings block;
};

struct PlanSettings {
  TrainingSettings training;
  std::vector<Row> rows;   // The one that is kLocal and the first that is kReducer are what others
                           // are compared with.
  int rounds = 30;         // Blocks of each row, that is pairs for each ratio.
  int skewed_rounds = 10;  // For rows with a skew: their blocks are longer.
  int steps = 16;          // Per block; those with a skew have at least 14.
  int ranks_here = 1;      // That are threads of this process.
};

// Per step and rank, in a block of its own.
struct StepCounts {
  double collectives = 0;
  double copied_bytes = 0;      // By memcpy and memmove, at least 1 KiB at once; on all threads.
  double allocations = 0;       // Likewise.
  double control_messages = 0;  // Sent and received.
  double control_bytes = 0;
  double control_cpu_us = 0;  // The control plane's thread.
  double cpu_us = 0;          // All threads, user and system.
  double waits = 0;           // Times that a thread went to sleep: voluntary context switches.
};

struct RowResult {
  Row row;
  double step_ms = 0, backward_ms = 0, update_ms = 0;
  double samples_per_second = 0;  // Over all ranks.
  std::optional<PairedRatio> step_to_local, backward_to_local;
  std::optional<PairedRatio> step_to_reducer, update_to_reducer;
  std::vector<int64_t> bucket_bytes;
  std::vector<double> exposed_us;  // By bucket.
  StepCounts counts;
};

struct PlanResult {
  int64_t parameters = 0;
  std::vector<RowResult> rows;
};

// All ranks together; every one gets the result.
absl::StatusOr<PlanResult> MeasurePlan(Communicator& comm, const PlanSettings& settings);

nlohmann::json ToJson(const PlanResult& result);

}  // namespace evenkeel

#endif  // EVENKEEL_TOOLS_STEP_STEP_MEASUREMENT_H_
