#include "evenkeel/trainer/models/model.h"

#include <algorithm>
#include <cstddef>
#include <functional>
#include <new>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "evenkeel/bucket/value_memory.h"
#include "evenkeel/comm/base/clock.h"
#include "evenkeel/comm/status.h"

namespace evenkeel {
namespace {

int64_t CountOf(std::span<const int64_t> shape) {
  return std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
}

// Returns the bytes of all values and buffers.
int64_t RoomForAll(const ParameterSet& parameters, std::span<const NamedBuffer> buffers) {
  int64_t bytes = 0;
  for (int i = 0; i < parameters.size(); ++i) bytes += AlignedBytes(parameters[i].value.bytes());
  for (const NamedBuffer& buffer : buffers) bytes += AlignedBytes(buffer.value.bytes());
  return bytes;
}

// Hands out parts of a block.
class Block {
 public:
  Block(void* data, Device device) : free_(static_cast<std::byte*>(data)), device_(device) {}
  TensorView Like(const TensorView& tensor) {
    const TensorView here(free_, tensor.count, tensor.dtype, device_);
    free_ += AlignedBytes(tensor.bytes());
    return here;
  }

 private:
  std::byte* free_;
  const Device device_;
};

absl::Status NotEnoughMemory(absl::string_view pass, const Model& model) {
  return absl::ResourceExhaustedError(absl::StrCat(pass,
                                                   ": not enough memory; activations have taken ",
                                                   model.ActivationBytes(), " bytes already"));
}

}  // namespace

TensorView Model::Allocate(DType dtype, int64_t count) {
  return is_plan_ ? TensorView(nullptr, count, dtype) : memory_.Allocate(dtype, count);
}

absl::Status Model::PlanPass(int64_t, Mode) {
  return absl::UnimplementedError("this model cannot compute the memory of its passes in advance");
}

int Model::AddParameter(std::string name, DType dtype, std::vector<int64_t> shape) {
  const int64_t count = CountOf(shape);
  const TensorView value = Allocate(dtype, count);
  return parameters_.Add(std::move(name), value, Allocate(dtype, count), std::move(shape));
}

std::span<float> Model::AddBuffer(std::string name, std::vector<int64_t> shape, float fill) {
  const TensorView value = Allocate(DType::kFloat32, CountOf(shape));
  buffers_.push_back({std::move(name), std::move(shape), value});
  if (!is_plan_) std::ranges::fill(value.as<float>(), fill);
  return value.as<float>();
}

absl::Status Model::InitOnDevice(const DevicePlace& place, const Model& host) {
  place_ = place;
  const ParameterSet& model = host.parameters();
  const int64_t bytes = RoomForAll(model, host.buffers()) + /*gradients*/ RoomForAll(model, {});
  EK_ASSIGN_OR_RETURN(device_memory_, place.runtime->Allocate(place.device, bytes));
  Block block(device_memory_.data.get(), place.device);
  for (int i = 0; i < model.size(); ++i) {
    parameters_.Add(model[i].name, block.Like(model[i].value), {},
                    {host.shape(i).begin(), host.shape(i).end()});
  }
  for (const NamedBuffer& buffer : host.buffers()) {
    buffers_.push_back({buffer.name, buffer.shape, block.Like(buffer.value)});
  }
  for (int i = 0; i < model.size(); ++i) parameters_.SetGradMemory(i, block.Like(model[i].value));
  EK_RETURN_IF_ERROR(parameters_.SetTrainable(model.mask()));
  parameters_.SetStream(place_.stream.ref());

  EK_ASSIGN_OR_RETURN(const HostTensors tensors, host.ToHost());
  return FromHost(tensors);
}

absl::StatusOr<HostTensors> Model::ToHost() const {
  HostTensors tensors;
  if (place_.is_host()) {
    for (int i = 0; i < parameters_.size(); ++i) tensors.values.push_back(parameters_[i].value);
    for (const NamedBuffer& buffer : buffers_) tensors.buffers.push_back(buffer.value);
    return tensors;
  }
  DeviceRuntime& runtime = *place_.runtime;
  const StreamRef stream = place_.stream.ref();
  EK_ASSIGN_OR_RETURN(tensors.copies, runtime.AllocatePinned(RoomForAll(parameters_, buffers_)));
  Block block(tensors.copies.data.get(), Device::Cpu());
  absl::Status status;
  const auto copy = [&](const TensorView& tensor, std::vector<TensorView>& to) {
    to.push_back(block.Like(tensor));
    if (status.ok()) status = runtime.Copy(to.back().data, tensor.data, tensor.bytes(), stream);
  };
  for (int i = 0; i < parameters_.size(); ++i) copy(parameters_[i].value, tensors.values);
  for (const NamedBuffer& buffer : buffers_) copy(buffer.value, tensors.buffers);
  // Also after an error: copies may be on their way into what is freed then.
  status.Update(runtime.Synchronize(stream, SteadyNow() + place_.timeout));
  EK_RETURN_IF_ERROR(status);
  return tensors;
}

absl::Status Model::FromHost(const HostTensors& tensors) {
  if (place_.is_host()) return absl::OkStatus();
  const StreamRef stream = place_.stream.ref();
  const auto copy = [&](const TensorView& from, const TensorView& to) {
    return place_.runtime->Copy(to.data, from.data, to.bytes(), stream);
  };
  for (int i = 0; i < parameters_.size(); ++i) {
    EK_RETURN_IF_ERROR(copy(tensors.values[i], parameters_[i].value));
  }
  for (size_t i = 0; i < buffers_.size(); ++i)
    EK_RETURN_IF_ERROR(copy(tensors.buffers[i], buffers_[i].value));
  return place_.runtime->Synchronize(stream, SteadyNow() + place_.timeout);
}

absl::Status Model::MoveValuesTo(Communicator& comm) {
  if (!place_.is_host()) return absl::OkStatus();
  std::vector<const void*> before;
  for (int i = 0; i < parameters_.size(); ++i) before.push_back(parameters_[i].value.data);
  EK_ASSIGN_OR_RETURN(Memory memory, MoveValues(comm, parameters_));
  for (int i = 0; i < parameters_.size(); ++i) {
    if (parameters_[i].value.data != before[i]) memory_.Free(before[i]);
  }
  value_memory_ = std::move(memory);
  return absl::OkStatus();
}

absl::StatusOr<BatchResult> Model::Forward(const Batch& batch, Mode mode,
                                           const PassOptions& options) {
  EK_ASSIGN_OR_RETURN(const PendingResult result, StartForward(batch, mode, options));
  return result.Wait(SteadyNow() + place_.timeout);
}

absl::StatusOr<PendingResult> Model::StartForward(const Batch& batch, Mode mode,
                                                  const PassOptions& options) {
  if (is_plan_)
    return absl::FailedPreconditionError(
        "forward: the model is a plan and has no memory; make it without is_plan");
  EK_RETURN_IF_ERROR(Check(batch));
  has_activations_ = false;
  PendingResult result;
  try {
    EK_ASSIGN_OR_RETURN(result, DoForward(batch, mode, options));
  } catch (const std::bad_alloc&) {
    return NotEnoughMemory("forward", *this);
  }
  result.SetPredictions(PredictionsOf(batch));
  has_activations_ = mode == Mode::kTraining;
  return result;
}

absl::Status Model::Backward(absl::FunctionRef<absl::Status(int)> on_gradient) {
  if (!std::exchange(has_activations_, false)) {
    return absl::FailedPreconditionError(
        "backward: requires a forward pass in training mode immediately before it");
  }
  GradientSink sink(parameters_, on_gradient);
  EK_RETURN_IF_ERROR(sink.Check());
  try {
    return DoBackward(sink);
  } catch (const std::bad_alloc&) {
    return NotEnoughMemory("backward", *this);
  }
}

}  // namespace evenkeel
