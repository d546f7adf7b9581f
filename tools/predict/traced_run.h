// The steps of a run, read from its trace: train --trace=FILE.json, or predict --replay=FILE.json.
//
//   EK_ASSIGN_OR_RETURN(TracedRun run, ParseTrace("run.json", text));
//   run.steps.front().buckets.front().ready;  // seconds after the step began on that rank
//
// Units:   seconds.
// Threads: pure function.
// Errors:  InvalidArgument, with the file's name and what to do, for text that is not a trace, and
//          for a run that the model does not cover: steps timed by a device's clock, an optimizer
//          that owns whole tensors, gradients that are compressed.

#ifndef EVENKEEL_TOOLS_PREDICT_TRACED_RUN_H_
#define EVENKEEL_TOOLS_PREDICT_TRACED_RUN_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace evenkeel {

struct TracedBucket {
  int64_t bytes = 0;
  double ready = 0, start = 0, reduced = 0;  // Since the step began.
};

// A step on one rank.
struct TracedStep {
  int64_t number = 0;
  int rank = 0;
  double at = 0;       // Since the run began, by a clock that the ranks share.
  double seconds = 0;  // The whole step.
  double begin = 0;    // Its parts, in their order. BeginStep(), with the broadcast of buffers;
  double compute = 0;  // data, forward and backward;
  double wait = 0;     // FinishStep();
  double optimizer = 0;
  double last_gradient = 0;  // Since the step began.
  std::vector<TracedBucket> buckets;
};

struct TracedRun {
  std::string name;   // The name of its file.
  std::string title;  // "mlp on fashion-mnist, 2 ranks"
  std::string backend;
  int ranks = 0;
  bool is_sliced = false;    // Buckets are reduce-scattered; the optimizer gathers values.
  int64_t buffer_bytes = 0;  // Broadcast when a step begins.
  std::vector<TracedStep> steps;

  double MedianStep() const;
};

absl::StatusOr<TracedRun> ParseTrace(std::string name, absl::string_view text);

}  // namespace evenkeel

#endif  // EVENKEEL_TOOLS_PREDICT_TRACED_RUN_H_
