// Models whose steps are measured: real shapes, real products, each gradient announced as it
// becomes final.
//
//   EK_ASSIGN_OR_RETURN(std::unique_ptr<StepModel> model, MakeStepModel("mlp"));
//   model->parameters().ClearGradients();
//   EK_RETURN_IF_ERROR(model->Forward());
//   EK_RETURN_IF_ERROR(model->Backward([&](int param) { return ddp->GradientReady(param); }));
//
// "mlp": 784-1024-1024-10 with rectified units and softmax, 64 samples of noise; 1.9 M parameters.
// "gpt": the products, norms and embeddings of a GPT with 4 layers of width 128 (0.84 M parameters)
// on 896 tokens.
//         Each product has inputs of its own, and attention between them is left out: it has no
//         parameters.
// "tiny": an mlp 784-32-10 on 4 samples, for tests.
//
// All compute in float32 with the trainer's kernels; set their threads first
// (trainer/layers/compute_threads.h). Parameters are equal in all models of one name. Gradients
// have memory of their own until a reducer points them into its buckets.
//
// Threads: thread-compatible.
// Errors:  InvalidArgument for another name.

#ifndef EVENKEEL_TOOLS_STEP_STEP_MODEL_H_
#define EVENKEEL_TOOLS_STEP_STEP_MODEL_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "evenkeel/bucket/parameter_set.h"
#include "evenkeel/tools/measure/gpt_shapes.h"
#include "evenkeel/trainer/layers/gradient_sink.h"

namespace evenkeel {

class StepModel {
 public:
  // A part of the model; gradients of its parameters go to the sink.
  class Layer {
   public:
    virtual ~Layer() = default;
    virtual absl::Status Forward() = 0;
    virtual absl::Status Backward(GradientSink& sink) = 0;
  };

  StepModel(const std::vector<NamedShape>& shapes, int64_t samples);

  ParameterSet& parameters() { return parameters_; }
  int64_t samples() const { return samples_; }  // Per step.
  const float* Value(int param) const {
    return static_cast<const float*>(parameters_[param].value.data);
  }

  void Add(std::unique_ptr<Layer> layer) { layers_.push_back(std::move(layer)); }

  absl::Status Forward();
  absl::Status Backward(absl::FunctionRef<absl::Status(int)> on_gradient);

 private:
  const int64_t samples_;
  std::vector<std::vector<float>> values_, gradients_;
  ParameterSet parameters_;
  std::vector<std::unique_ptr<Layer>> layers_;
};

absl::StatusOr<std::unique_ptr<StepModel>> MakeStepModel(absl::string_view name);

}  // namespace evenkeel

#endif  // EVENKEEL_TOOLS_STEP_STEP_MODEL_H_
