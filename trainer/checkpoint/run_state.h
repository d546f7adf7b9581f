// What a checkpoint says of a run besides weights and the optimizer's state, and which files it has: state.json.
//
//   EK_ASSIGN_OR_RETURN(const RunState state, RunState::Parse(text));
//   state.steps, state.at            // 412, {.epoch = 1, .step = 412, .samples = 6336}
//
// Threads: a value.
// Errors:  InvalidArgument for text that is not one, or was damaged: it has a checksum of its own.

#ifndef EVENKEEL_TRAINER_CHECKPOINT_RUN_STATE_H_
#define EVENKEEL_TRAINER_CHECKPOINT_RUN_STATE_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "evenkeel/trainer/checkpoint/run_settings.h"
#include "evenkeel/trainer/evaluate.h"
#include "evenkeel/trainer/step_plan.h"
#include "evenkeel/zero_optim/file_sums.h"

namespace evenkeel {

struct RunState {
  int64_t steps = 0;  // Of the group, that are finished.
  EpochPosition at;   // After them.
  int world_size = 1;
  EpochPosition plan_begin;         // Where the plan began by which samples went to these ranks.
  std::string bucket_plan;          // DataParallel::ExportPlan(): it decides in which order gradients are added.
  std::vector<Evaluation> trained;  // By rank: its batches of the epoch at.epoch, as they were trained on.
  std::string loss_scale;           // LossScalerState::Serialize(); empty: losses are not scaled.
  bool last_overflowed = false;     // Gradients of the last step, which the scale has not followed yet.
  RunSettings settings;
  std::map<std::string, FileSums> files;  // By name: the weights, and what ranks have for themselves.

  std::string Serialize() const;
  static absl::StatusOr<RunState> Parse(absl::string_view json);
};

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_CHECKPOINT_RUN_STATE_H_
