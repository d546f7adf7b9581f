// The toy model (toy_model.h) on a device: the same arithmetic in kernels, on a stream of its own,
// so that a run there must end with the very bits of one on the CPU.
//
//   EK_ASSIGN_OR_RETURN(auto model, DeviceToyModel::Create(comm, {3, 5, 2}));
//   model->Forward(rank, batch);
//   model->Backward(rank, batch, [&](int i) { return ddp->GradientReady(i); });
//   model->Descend();                                     // parameters with a gradient
//   EK_ASSIGN_OR_RETURN(auto values, model->Values());    // the host waits
//
// HostToyModel is the other one with the same calls, so that a test's body is written once.
//
// Threads: thread-compatible. Errors of the device end the test's process.

#ifndef EVENKEEL_BUCKET_TESTING_DEVICE_TOY_MODEL_H_
#define EVENKEEL_BUCKET_TESTING_DEVICE_TOY_MODEL_H_

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "evenkeel/bucket/parameter_set.h"
#include "evenkeel/bucket/testing/toy_model.h"
#include "evenkeel/comm/base/clock.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/device/kernel.h"
#include "evenkeel/comm/device/runtime.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/types.h"

namespace evenkeel {

inline constexpr float kToyRate = 0.5f;

// ToyModel::Noise() in a kernel.
EK_DEVICE float ToyNoise(int a, int b, int c, int64_t d) {
  uint64_t x = (static_cast<uint64_t>(a) << 48) ^ (static_cast<uint64_t>(b) << 32) ^
               (static_cast<uint64_t>(c) << 16) ^ static_cast<uint64_t>(d);
  x = (x + 0x9e3779b97f4a7c15) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 29)) * 0x94d049bb133111eb;
  return static_cast<float>(static_cast<int32_t>(x >> 32)) / 2147483648.0f;
}
EK_KERNEL(256, ek_toy_forward)(float* buffer, int64_t count, int rank, int batch) {
  for (int64_t j = kernel::GlobalIndex(); j < count; j += kernel::GlobalThreads())
    buffer[j] = 0.9f * buffer[j] + ToyNoise(rank, batch, 99, j);
}
EK_KERNEL(256, ek_toy_backward)
(const float* value, const float* buffer, int64_t buffers, float* grad, int64_t count, int rank,
 int batch, int param, bool add) {
  for (int64_t j = kernel::GlobalIndex(); j < count; j += kernel::GlobalThreads()) {
    const float gradient =
        0.25f * value[j] + ToyNoise(rank, batch, param, j) + 0.125f * buffer[j % buffers];
    grad[j] = add ? grad[j] + gradient : gradient;
  }
}
EK_KERNEL(256, ek_toy_descend)(float* value, const float* grad, int64_t count) {
  for (int64_t j = kernel::GlobalIndex(); j < count; j += kernel::GlobalThreads())
    value[j] -= kToyRate * grad[j];
}

class DeviceToyModel {
 public:
  using Announce = absl::FunctionRef<absl::Status(int)>;

  static absl::StatusOr<std::unique_ptr<DeviceToyModel>> Create(Communicator& comm,
                                                                const std::vector<int>& sizes,
                                                                int seed = 0) {
    std::unique_ptr<DeviceToyModel> model(new DeviceToyModel(comm, ToyModel(sizes, seed)));
    EK_ASSIGN_OR_RETURN(model->stream_, comm.runtime()->CreateStream(comm.device()));
    for (int p = 0; p < model->host_.params().size(); ++p) {
      const Parameter& like = model->host_.params()[p];
      EK_ASSIGN_OR_RETURN(const TensorView value, model->Upload(like.value));
      EK_ASSIGN_OR_RETURN(const TensorView grad, model->Upload(like.grad));
      model->params_.Add(like.name, value, grad);
    }
    EK_ASSIGN_OR_RETURN(model->buffer_, model->Upload(model->host_.buffers()[0]));
    model->params_.SetStream(model->stream_.ref());
    return model;
  }

  ParameterSet& params() { return params_; }
  std::vector<TensorView> buffers() { return {buffer_}; }
  StreamRef stream() const { return stream_.ref(); }

  void Forward(int rank, int batch) {
    Must(Launch(*runtime_, Kernels().forward, ShapeFor(buffer_.count), stream(), Data(buffer_),
                buffer_.count, rank, batch));
  }
  absl::Status Backward(int rank, int batch, Announce announce) {
    for (int p = params_.size() - 1; p >= 0; --p)
      EK_RETURN_IF_ERROR(BackwardOf(p, rank, batch, announce));
    return absl::OkStatus();
  }
  absl::Status BackwardOf(int param, int rank, int batch, Announce announce) {
    if (!params_.trainable(param)) return absl::OkStatus();
    const Parameter& at = params_[param];
    const bool add = params_.grad_state(param) != GradState::kNone;
    EK_RETURN_IF_ERROR(Launch(*runtime_, Kernels().backward, ShapeFor(at.value.count), stream(),
                              Data(at.value), Data(buffer_), buffer_.count, Data(at.grad),
                              at.value.count, rank, batch, param, add));
    params_.SetGradState(param, GradState::kLocal);
    return announce(param);
  }
  void Descend() {
    for (int p = 0; p < params_.size(); ++p) {
      if (params_.grad_state(p) == GradState::kNone) continue;
      const Parameter& at = params_[p];
      Must(Launch(*runtime_, Kernels().descend, ShapeFor(at.value.count), stream(), Data(at.value),
                  Data(at.grad), at.value.count));
    }
  }

  // Moves all memory, as a tensor library's to() does, and clears what it was. A reducer is
  // attached, whose buffer is to be rebound to buffers()[0].
  absl::Status Move() {
    for (int p = 0; p < params_.size(); ++p) {
      EK_ASSIGN_OR_RETURN(const TensorView value, Moved(params_[p].value));
      EK_ASSIGN_OR_RETURN(const TensorView grad, Moved(params_.own_grad(p)));
      EK_RETURN_IF_ERROR(params_.Rebind(p, value, grad));
    }
    EK_ASSIGN_OR_RETURN(buffer_, Moved(buffer_));
    return absl::OkStatus();
  }

  // The host waits.
  absl::StatusOr<std::vector<float>> Read(const TensorView& view) {
    std::vector<float> host(view.count);
    EK_RETURN_IF_ERROR(runtime_->Copy(host.data(), view.data, view.bytes(), stream()));
    EK_RETURN_IF_ERROR(runtime_->Synchronize(stream(), SteadyNow() + absl::Seconds(60)));
    return host;
  }
  absl::StatusOr<std::vector<std::vector<float>>> Values() {
    std::vector<std::vector<float>> values;
    for (int p = 0; p < params_.size(); ++p) {
      EK_ASSIGN_OR_RETURN(values.emplace_back(), Read(params_[p].value));
    }
    EK_ASSIGN_OR_RETURN(values.emplace_back(), Read(buffer_));
    return values;
  }

 private:
  struct KernelSet {
    decltype(MakeKernel<&ek_toy_forward>("", std::declval<DeviceImage&>())) forward;
    decltype(MakeKernel<&ek_toy_backward>("", std::declval<DeviceImage&>())) backward;
    decltype(MakeKernel<&ek_toy_descend>("", std::declval<DeviceImage&>())) descend;
  };
  // For simulated devices only: there is no image.
  static const KernelSet& Kernels() {
    static const DeviceImage no_image;
    static const KernelSet kernels = {MakeKernel<&ek_toy_forward>("ek_toy_forward", no_image),
                                      MakeKernel<&ek_toy_backward>("ek_toy_backward", no_image),
                                      MakeKernel<&ek_toy_descend>("ek_toy_descend", no_image)};
    return kernels;
  }

  DeviceToyModel(Communicator& comm, ToyModel host)
      : runtime_(comm.runtime()), device_(comm.device()), host_(std::move(host)) {}
  static void Must(const absl::Status& status) {
    if (status.ok()) return;
    std::fprintf(stderr, "%s\n", status.ToString().c_str());
    std::abort();
  }
  static float* Data(const TensorView& view) { return static_cast<float*>(view.data); }

  absl::StatusOr<TensorView> Upload(const TensorView& from) {
    EK_ASSIGN_OR_RETURN(Memory memory, runtime_->Allocate(device_, from.bytes()));
    const TensorView view(memory.data.get(), from.count, from.dtype, device_);
    memory_.push_back(std::move(memory));
    EK_RETURN_IF_ERROR(runtime_->Copy(view.data, from.data, from.bytes(), stream()));
    return view;
  }

  absl::StatusOr<TensorView> Moved(const TensorView& from) {
    EK_ASSIGN_OR_RETURN(const TensorView to, Upload(from));
    EK_RETURN_IF_ERROR(runtime_->Zero(from.data, from.bytes(), stream()));
    return to;
  }

  DeviceRuntime* const runtime_;
  const Device device_;
  ToyModel host_;  // The uploaded model.
  std::vector<Memory> memory_;
  TensorView buffer_;
  ParameterSet params_;
  Stream stream_;  // Last: its end waits for what uses the rest.
};

class HostToyModel {
 public:
  static absl::StatusOr<std::unique_ptr<HostToyModel>> Create(Communicator&,
                                                              const std::vector<int>& sizes,
                                                              int seed = 0) {
    return std::unique_ptr<HostToyModel>(new HostToyModel(sizes, seed));
  }

  ParameterSet& params() { return model_.params(); }
  std::vector<TensorView> buffers() { return model_.buffers(); }
  absl::Status Move() { return absl::OkStatus(); }  // It stays.
  void Forward(int rank, int batch) { model_.Forward(rank, batch); }
  absl::Status Backward(int rank, int batch, DeviceToyModel::Announce announce) {
    return model_.Backward(rank, batch, announce);
  }
  absl::Status BackwardOf(int param, int rank, int batch, DeviceToyModel::Announce announce) {
    return model_.BackwardOf(param, rank, batch, announce);
  }
  void Descend() {
    for (int p = 0; p < params().size(); ++p) {
      if (params().grad_state(p) == GradState::kNone) continue;
      const auto value = params()[p].value.as<float>(), grad = params()[p].grad.as<float>();
      for (size_t j = 0; j < value.size(); ++j) value[j] -= kToyRate * grad[j];
    }
  }
  absl::StatusOr<std::vector<std::vector<float>>> Values() {
    std::vector<std::vector<float>> values = model_.values();
    values.push_back(model_.buffer());
    return values;
  }

 private:
  HostToyModel(const std::vector<int>& sizes, int seed) : model_(sizes, seed) {}
  ToyModel model_;
};

}  // namespace evenkeel

#endif  // EVENKEEL_BUCKET_TESTING_DEVICE_TOY_MODEL_H_
