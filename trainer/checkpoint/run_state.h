// The state of a run in a checkpoint besides weights and the optimizer's state, and the list of its
// files: state.json.
//
//   EK_ASSIGN_OR_RETURN(const RunState state, RunState::Parse(text));
//   state.steps, state.at            // 412, {.epoch = 1, .step = 412, .samples = 6336}
//
// Threads: a value.
// Errors:  InvalidArgument for malformed or damaged text, which has a checksum of its own.

#ifndef EVENKEEL_TRAINER_CHECKPOINT_RUN_STATE_H_
#define EVENKEEL_TRAINER_CHECKPOINT_RUN_STATE_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "evenkeel/files/file_sums.h"
#include "evenkeel/trainer/checkpoint/run_settings.h"
#include "evenkeel/trainer/data/step_plan.h"
#include "evenkeel/trainer/models/evaluate.h"

namespace evenkeel {

struct RunState {
  int64_t steps = 0;  // Finished steps of the group.
  EpochPosition at;   // After them.
  int world_size = 1;
  EpochPosition plan_begin;  // The beginning of the plan that assigned samples to these ranks.
  std::string
      bucket_plan;  // DataParallel::ExportPlan(): it sets the order in which gradients are added.
  std::vector<Evaluation> trained;  // By rank: results of its batches of epoch at.epoch.
  std::string loss_scale;           // LossScalerState::Serialize(); empty: losses are not scaled.
  bool last_overflowed =
      false;      // Gradients of the last step did; the scale is not updated for it yet.
  BestTest best;  // Until then.
  RunSettings settings;
  std::map<std::string, FileSums> files;  // By name: the weights and the ranks' own files.

  std::string Serialize() const;
  static absl::StatusOr<RunState> Parse(absl::string_view json);
};

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_CHECKPOINT_RUN_STATE_H_
