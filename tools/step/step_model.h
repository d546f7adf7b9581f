// The trainer's models with a batch of noise, whose steps are measured.
//
//   EK_ASSIGN_OR_RETURN(const StepModel step, MakeStepModel("mlp"));
//   step.model->parameters().ClearGradients();
//   EK_RETURN_IF_ERROR(step.model->Forward(step.batch(), Mode::kTraining).status());
//
// "mlp":  784-1024-1024-10 with 64 samples; 1.9 M parameters.
// "gpt":  the preset mini, 4 layers of width 128, with 8 sequences of 128 bytes; 0.84 M parameters.
// "tiny": an mlp 784-32-10 with 4 samples, for tests.
//
// All compute in float32; set their threads first (trainer/layers/compute_threads.h). Parameters
// are equal in all models of one name. Gradients have memory of their own until a reducer points
// them into its buckets.
//
// Threads: thread-compatible.
// Errors:  InvalidArgument for another name; those of the models.

#ifndef EVENKEEL_TOOLS_STEP_STEP_MODEL_H_
#define EVENKEEL_TOOLS_STEP_STEP_MODEL_H_

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "evenkeel/trainer/data/batch.h"
#include "evenkeel/trainer/models/model.h"

namespace evenkeel {

struct StepModel {
  std::unique_ptr<Model> model;
  BatchMemory memory;
  int64_t context = 0;  // The length of sequences; 0: the batch has images.

  Batch batch() const {
    if (context == 0) return ImageBatch{memory.images, memory.labels};
    return TokenBatch{memory.inputs, memory.targets, context};
  }
};

absl::StatusOr<StepModel> MakeStepModel(absl::string_view name);

}  // namespace evenkeel

#endif  // EVENKEEL_TOOLS_STEP_STEP_MODEL_H_
