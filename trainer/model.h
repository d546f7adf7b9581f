// A model with a forward and a backward pass that one calls by hand: a classifier of images, or a language model.
//
//   EK_ASSIGN_OR_RETURN(std::unique_ptr<Model> model, MakeMlp({.hidden = {64}}));
//   model->parameters().ClearGradients();
//   EK_ASSIGN_OR_RETURN(BatchResult result, model->Forward(images, labels, Mode::kTraining));
//   EK_RETURN_IF_ERROR(model->Backward([&](int index) { return ddp->GradientReady(index); }));
//
// Backward announces each gradient the moment it is final, last layer first. A gradient is written to
// `parameters()[index].grad` as that is when Backward comes to it, added to what lies there unless its state is none,
// and its state becomes local. A frozen parameter gets no gradient and is not announced; below the lowest trained
// parameter nothing is computed.
//
// On a device (place()) a pass only puts work on the place's stream: StartForward() answers what Forward() would wait
// for, Backward() announces gradients that are complete after what is on the stream by then.
//
// Shapes:    those of the batch (batch.h); its size may differ from call to call.
// Gradients: of the mean loss over the batch, times PassOptions::weight: the number of samples for a sum over them.
// Order:     parameters are numbered in forward order, so that announcements come in falling order of the index.
// Ownership: the model owns values, buffers and default memory for the gradients, each at a multiple of 64 bytes.
//            After a training Forward what the batch shows must stay as it is until Backward is done (a model on a
//            device has copied it when Forward returns).
// Threads:   thread-compatible.
// Errors:    InvalidArgument for sizes or labels that do not fit, before anything is changed; FailedPrecondition for
//            a Backward without a training Forward before it; ResourceExhausted where memory for activations is
//            lacking; the status of `on_gradient`, which ends Backward.

#ifndef EVENKEEL_TRAINER_MODEL_H_
#define EVENKEEL_TRAINER_MODEL_H_

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
#include "evenkeel/trainer/batch.h"
#include "evenkeel/trainer/batch_result.h"
#include "evenkeel/trainer/device/place.h"
#include "evenkeel/trainer/gradient_sink.h"
#include "evenkeel/trainer/tensor_memory.h"

namespace evenkeel {

enum class Mode {
  kTraining,    // Keeps what Backward needs; batch norm uses the batch's statistics and updates the running ones.
  kEvaluation,  // Batch norm uses the running statistics; nothing in the model changes.
};

struct PassOptions {
  double weight = 1;   // What gradients are multiplied by.
  uint64_t noise = 0;  // Of what is random in training (dropout): equal seeds give equal results.
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
  Memory copies;  // Where they lie, of a model on a device.
};

class Model {
 public:
  virtual ~Model() = default;
  Model(const Model&) = delete;
  Model& operator=(const Model&) = delete;

  ParameterSet& parameters() { return parameters_; }
  const ParameterSet& parameters() const { return parameters_; }
  std::span<const int64_t> shape(int index) const { return shapes_[index]; }
  std::span<const NamedBuffer> buffers() const { return buffers_; }
  // What one has to know to use its tensors and can't see in them; goes into its files (model_file.h).
  virtual std::map<std::string, std::string> metadata() const { return {}; }

  // Where its tensors lie and its work runs.
  const DevicePlace& place() const { return place_; }
  // The tensors themselves on the host; of a device copies as they are after what is on the stream, waited for.
  absl::StatusOr<HostTensors> ToHost() const;
  // The way back, for what was changed there; nothing on the host.
  absl::Status FromHost(const HostTensors& tensors);

  // Moves the parameters' values to memory that the group's transport uses without a copy (bucket/value_memory.h); on a
  // device it moves nothing. Before Forward, and before a reducer or an optimizer is made. The model keeps that memory;
  // the group may go first.
  absl::Status MoveValuesTo(Communicator& comm);

  // What it holds besides values and gradients: activations and their gradients, workspaces. It is taken in the first
  // pass of a size, and kept. oneDNN's own memory is not in it.
  virtual int64_t ActivationBytes() const = 0;

  absl::StatusOr<BatchResult> Forward(const Batch& batch, Mode mode, const PassOptions& options = {});
  absl::StatusOr<BatchResult> Forward(std::span<const float> images, std::span<const uint8_t> labels, Mode mode) {
    return Forward(ImageBatch{images, labels}, mode);
  }
  // Does not wait for a device.
  absl::StatusOr<PendingResult> StartForward(const Batch& batch, Mode mode, const PassOptions& options = {});
  absl::Status Backward(absl::FunctionRef<absl::Status(int)> on_gradient);

 protected:
  Model() = default;

  int AddParameter(std::string name, DType dtype, std::vector<int64_t> shape);
  // `fill` is the value all elements start with.
  std::span<float> AddBuffer(std::string name, std::vector<int64_t> shape, float fill);

  // For a model on a device, instead of the two above: the parameters and buffers of `host`, with its values and its
  // mask, in one block there; gradients have memory beside them.
  absl::Status InitOnDevice(const DevicePlace& place, const Model& host);

  // Whether the model can take it (CheckImages, CheckTokens).
  virtual absl::Status Check(const Batch& batch) const = 0;
  // Follows a successful Check(). The number of predictions is filled in.
  virtual absl::StatusOr<PendingResult> DoForward(const Batch& batch, Mode mode, const PassOptions& options) = 0;
  // Follows a successful DoForward in training mode.
  virtual absl::Status DoBackward(GradientSink& sink) = 0;

 private:
  DevicePlace place_;
  TensorMemory memory_;
  Memory device_memory_;
  Memory value_memory_;  // Of the group's transport.
  ParameterSet parameters_;
  std::vector<std::vector<int64_t>> shapes_;
  std::vector<NamedBuffer> buffers_;
  bool has_activations_ = false;  // From a training Forward that no Backward has used yet.
};

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_MODEL_H_
