// The trainer's models with a batch of noise, whose steps are measured.
//
//   EK_ASSIGN_OR_RETURN(std::unique_ptr<StepModel> model, MakeStepModel("mlp"));
//   model->parameters().ClearGradients();
//   EK_RETURN_IF_ERROR(model->Forward());
//   EK_RETURN_IF_ERROR(model->Backward([&](int param) { return ddp->GradientReady(param); }));
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
#include <utility>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "evenkeel/bucket/parameter_set.h"
#include "evenkeel/trainer/data/batch.h"
#include "evenkeel/trainer/models/model.h"

namespace evenkeel {

class StepModel {
 public:
  // `context` is the length of sequences; 0: `batch` has images.
  StepModel(std::unique_ptr<Model> model, BatchMemory batch, int64_t context)
      : model_(std::move(model)), memory_(std::move(batch)), context_(context) {}

  ParameterSet& parameters() { return model_->parameters(); }

  absl::Status Forward() { return model_->Forward(batch(), Mode::kTraining).status(); }
  absl::Status Backward(absl::FunctionRef<absl::Status(int)> on_gradient) {
    return model_->Backward(on_gradient);
  }

 private:
  Batch batch() const {
    if (context_ == 0) return ImageBatch{memory_.images, memory_.labels};
    return TokenBatch{memory_.inputs, memory_.targets, context_};
  }

  const std::unique_ptr<Model> model_;
  const BatchMemory memory_;
  const int64_t context_;
};

absl::StatusOr<std::unique_ptr<StepModel>> MakeStepModel(absl::string_view name);

}  // namespace evenkeel

#endif  // EVENKEEL_TOOLS_STEP_STEP_MODEL_H_
