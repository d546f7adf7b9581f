// Runs steps that sleep in place of computation, with real communication, and records them as the
// trainer does: a check of the model for more ranks than the machine has processors.
//
//   EK_RETURN_IF_ERROR(Replay(comm, model.parts(), {.steps = 30, .title = "mlp"}, "run.json"));
//
// Each rank sleeps until its gradients are ready, that is for the median times of the parts plus a
// normal deviation with their spread, and then for the time of the optimizer. An optimizer of
// slices then runs a real SGD update and gathers the values. Gradients lie in the buckets and are
// not written, so a rank needs a processor for communication alone.
//
// Order:   all ranks call it together; rank 0 writes the trace.
// Threads: as the communicator.
// Errors:  those of DataParallel, and of the file.

#ifndef EVENKEEL_TOOLS_PREDICT_REPLAY_H_
#define EVENKEEL_TOOLS_PREDICT_REPLAY_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/tools/predict/speed_model.h"

namespace evenkeel {

struct ReplayOptions {
  int64_t steps = 30;
  std::string title;
};

absl::Status Replay(Communicator& comm, const StepParts& parts, const ReplayOptions& options,
                    const std::string& path);

}  // namespace evenkeel

#endif  // EVENKEEL_TOOLS_PREDICT_REPLAY_H_
