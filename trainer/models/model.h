// A model whose forward and backward passes the caller runs: a classifier of images, or a language
// model.
//
//   EK_ASSIGN_OR_RETURN(std::unique_ptr<Model> model, MakeMlp({.hidden = {64}}));
//   model->parameters().ClearGradients();
//   EK_ASSIGN_OR_RETURN(BatchResult result, model->Forward(images, labels, Mode::kTraining));
//   EK_RETURN_IF_ERROR(model->Backward([&](int index) { return ddp->GradientReady(index); }));
//
// Backward announces each gradient the moment it is final, last layer first. A gradient is written
// to `parameters()[index].grad` as set when Backward reaches it and is added to the present values
// unless its state is none; its state becomes local. A frozen parameter gets no gradient and is not
// announced; below the lowest trained parameter nothing is computed.
//
// On a device (place()) a pass only enqueues work on the place's stream: StartForward() returns the
// result for which Forward() would wait, and Backward() announces gradients that are complete after
// the work enqueued so far.
//
// A plan (`is_plan` of a model's options) has the names, shapes and types of the tensors and takes
// no memory: it serves to compute the memory of a run in advance. It has no passes.
//
// Shapes:    those of the batch (batch.h); its size may differ from call to call.
// Gradients: of the mean loss over the batch, times PassOptions::weight: the number of samples for
//            a sum over them.
// Order:     parameters are numbered in forward order, so that announcements come in falling order
//            of the index.
// Ownership: the model owns values, buffers and default memory for the gradients, each at a
//            multiple of 64 bytes. After a training Forward the batch's data must stay unchanged
//            until Backward is done (a model on a device has copied it when Forward returns).
// Threads:   thread-compatible.
// Errors:    InvalidArgument for sizes or labels that do not fit, before anything is changed;
//            FailedPrecondition for a Backward without a training Forward before it;
//            ResourceExhausted if memory for activations runs out; the status of `on_gradient`,
//            which ends Backward.

#ifndef EVENKEEL_TRAINER_MODELS_MODEL_H_
#define EVENKEEL_TRAINER_MODELS_MODEL_H_

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "evenkeel/bucket/parameter_set.h"
#include "evenkeel/comm/backend.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/types.h"
#include "evenkeel/join/scope.h"
#include "evenkeel/trainer/data/batch.h"
#include "evenkeel/trainer/layers/gradient_sink.h"
#include "evenkeel/trainer/layers/mode.h"
#include "evenkeel/trainer/layers/tensor_memory.h"
#include "evenkeel/trainer/models/batch_result.h"
#include "evenkeel/trainer/models/place.h"

namespace evenkeel {

struct PassOptions {
  double weight = 1;         // Factor of the gradients.
  uint64_t noise = 0;        // Seed of dropout in training: equal seeds give equal results.
  int64_t first_sample = 0;  // The place of the pass's first sample in the batch for which the seed
                             // is: each sample's noise is that of its place.
};

// State that is not trained but belongs to the model, such as running statistics.
struct NamedBuffer {
  std::string name;
  std::vector<int64_t> shape;
  TensorView value;
};

// Values and buffers in the host's memory, in their order.
struct HostTensors {
  std::vector<TensorView> values;
  std::vector<TensorView> buffers;
  Memory copies;  // Memory of the copies, for a model on a device.
};

class Model {
 public:
  virtual ~Model() = default;
  Model(const Model&) = delete;
  Model& operator=(const Model&) = delete;

  ParameterSet& parameters() { return parameters_; }
  const ParameterSet& parameters() const { return parameters_; }
  std::span<const int64_t> shape(int index) const { return parameters_.shape(index); }
  std::span<const NamedBuffer> buffers() const { return buffers_; }
  // Returns settings that the tensors' shapes do not show; they are written to the model's files
  // (model_file.h).
  virtual std::map<std::string, std::string> metadata() const { return {}; }
  // Returns the contents of files that other software needs beside the weights, by name.
  virtual std::map<std::string, std::string> companions() const { return {}; }

  // Returns the place of the tensors and of the work.
  const DevicePlace& place() const { return place_; }
  // Returns the tensors themselves on the host; for a device waits for the work on the stream and
  // returns copies.
  absl::StatusOr<HostTensors> ToHost() const;
  // Copies changed tensors back to the device; does nothing on the host.
  absl::Status FromHost(const HostTensors& tensors);

  // Moves the parameters' values to memory that the group's transport uses without a copy
  // (bucket/value_memory.h); on a device it moves nothing. Before Forward, and before a reducer or
  // an optimizer is made. The model keeps that memory; the group may go first.
  absl::Status MoveValuesTo(Communicator& comm);

  // Returns the bytes of activations, their gradients and workspaces, which are allocated in the
  // first pass of a size and kept; of a plan those of the passes of PlanPass(). oneDNN's own memory
  // is not counted.
  virtual int64_t ActivationBytes() const = 0;

  // Passes of training send collectives in this scope of a training loop; null after the loop. For
  // models without such collectives it does nothing.
  virtual void SetScope(JoinScope* /*scope*/) {}

  bool is_plan() const { return is_plan_; }
  // In a plan on the host: counts what a pass of so many samples would allocate, with the backward
  // pass after it in training.
  virtual absl::Status PlanPass(int64_t samples, Mode mode);

  absl::StatusOr<BatchResult> Forward(const Batch& batch, Mode mode,
                                      const PassOptions& options = {});
  absl::StatusOr<BatchResult> Forward(std::span<const float> images,
                                      std::span<const uint8_t> labels, Mode mode) {
    return Forward(ImageBatch{images, labels}, mode);
  }
  // Does not wait for a device.
  absl::StatusOr<PendingResult> StartForward(const Batch& batch, Mode mode,
                                             const PassOptions& options = {});
  absl::Status Backward(absl::FunctionRef<absl::Status(int)> on_gradient);

 protected:
  explicit Model(bool is_plan = false) : is_plan_(is_plan) {}

  int AddParameter(std::string name, DType dtype, std::vector<int64_t> shape);
  // Returns the elements of a parameter, to be initialized; in a plan none.
  template <typename T>
  std::span<T> Initial(int index) {
    return is_plan_ ? std::span<T>() : parameters_[index].value.as<T>();
  }
  // `fill` is the initial value of all elements.
  std::span<float> AddBuffer(std::string name, std::vector<int64_t> shape, float fill);

  // For a model on a device, instead of the two above: the parameters and buffers of `host`, with
  // its values and its mask, in one block there; gradients have memory beside them.
  absl::Status InitOnDevice(const DevicePlace& place, const Model& host);

  // Returns an error for a batch that the model cannot take (CheckImages, CheckTokens).
  virtual absl::Status Check(const Batch& batch) const = 0;
  // Follows a successful Check(). The number of predictions is filled in.
  virtual absl::StatusOr<PendingResult> DoForward(const Batch& batch, Mode mode,
                                                  const PassOptions& options) = 0;
  // Follows a successful DoForward in training mode.
  virtual absl::Status DoBackward(GradientSink& sink) = 0;

 private:
  TensorView Allocate(DType dtype, int64_t count);

  const bool is_plan_;
  DevicePlace place_;
  TensorMemory memory_;
  Memory device_memory_;
  Memory value_memory_;  // From the group's transport.
  ParameterSet parameters_;
  std::vector<NamedBuffer> buffers_;
  bool has_activations_ = false;  // From a training Forward that no Backward has used yet.
};

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_MODELS_MODEL_H_
