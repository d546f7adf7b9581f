#include "evenkeel/trainer/model.h"

#include <algorithm>
#include <functional>
#include <new>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "evenkeel/bucket/value_memory.h"
#include "evenkeel/comm/status.h"

namespace evenkeel {
namespace {

int64_t CountOf(std::span<const int64_t> shape) {
  return std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
}

absl::Status NotEnoughMemory(absl::string_view pass, const Model& model) {
  return absl::ResourceExhaustedError(
      absl::StrCat(pass, ": not enough memory; activations have taken ", model.ActivationBytes(), " bytes already"));
}

}  // namespace

int Model::AddParameter(std::string name, DType dtype, std::vector<int64_t> shape) {
  const int64_t count = CountOf(shape);
  shapes_.push_back(std::move(shape));
  const TensorView value = memory_.Allocate(dtype, count);
  return parameters_.Add(std::move(name), value, memory_.Allocate(dtype, count));
}

std::span<float> Model::AddBuffer(std::string name, std::vector<int64_t> shape, float fill) {
  const TensorView value = memory_.Allocate(DType::kFloat32, CountOf(shape));
  buffers_.push_back({std::move(name), std::move(shape), value});
  std::ranges::fill(value.as<float>(), fill);
  return value.as<float>();
}

absl::Status Model::MoveValuesTo(Communicator& comm) {
  std::vector<const void*> before;
  for (int i = 0; i < parameters_.size(); ++i) before.push_back(parameters_[i].value.data);
  EK_ASSIGN_OR_RETURN(Memory memory, MoveValues(comm, parameters_));
  for (int i = 0; i < parameters_.size(); ++i) {
    if (parameters_[i].value.data != before[i]) memory_.Free(before[i]);
  }
  value_memory_ = std::move(memory);
  return absl::OkStatus();
}

absl::StatusOr<BatchResult> Model::Forward(const Batch& batch, Mode mode, const PassOptions& options) {
  EK_RETURN_IF_ERROR(Check(batch));
  has_activations_ = false;
  BatchResult result;
  try {
    EK_ASSIGN_OR_RETURN(result, DoForward(batch, mode, options));
  } catch (const std::bad_alloc&) {
    return NotEnoughMemory("forward", *this);
  }
  result.predictions = PredictionsOf(batch);
  has_activations_ = mode == Mode::kTraining;
  return result;
}

absl::Status Model::Backward(absl::FunctionRef<absl::Status(int)> on_gradient) {
  if (!std::exchange(has_activations_, false)) {
    return absl::FailedPreconditionError("backward: needs a forward pass in training mode right before it");
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
