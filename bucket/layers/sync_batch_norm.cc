#include "evenkeel/bucket/layers/sync_batch_norm.h"

#include <cmath>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "evenkeel/bucket/layers/internal/device_batch_norm.h"
#include "evenkeel/comm/status.h"

namespace evenkeel {
namespace {

// Calls visit(channel, index) for each value of [samples, channels, spatial].
template <typename Visit>
void ForEach(const SyncBatchNorm::Shape& shape, int64_t channels, Visit visit) {
  int64_t index = 0;
  for (int64_t sample = 0; sample < shape.samples; ++sample) {
    for (int64_t channel = 0; channel < channels; ++channel) {
      for (int64_t place = 0; place < shape.spatial; ++place) visit(channel, index++);
    }
  }
}

template <typename T>
T* Data(const TensorView& view) {
  return static_cast<T*>(view.data);
}

}  // namespace

SyncBatchNorm::SyncBatchNorm(SyncBatchNormOptions options) : options_(options) {}
SyncBatchNorm::~SyncBatchNorm() = default;
SyncBatchNorm::SyncBatchNorm(SyncBatchNorm&&) noexcept = default;

void SyncBatchNorm::Moments::Add(const Moments& other) {
  if (other.count == 0) return;
  const double both = count + other.count;
  const double apart = other.mean - mean;
  mean += apart * other.count / both;
  squares += other.squares + apart * apart * count * other.count / both;
  count = both;
}

absl::Status SyncBatchNorm::CheckDevice(const JoinScope& scope) const {
  const Device device = scope.communicator().device();
  const bool has_stream = options_.stream.handle != nullptr;
  if (has_stream ? options_.stream.device == device : device.is_cpu()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "SyncBatchNorm on ", ToString(device), ": ",
      has_stream ? absl::StrCat("a stream of ", ToString(options_.stream.device)) : "no stream"));
}

absl::Status SyncBatchNorm::CheckTensors(Device device, std::initializer_list<TensorView> batches,
                                         std::initializer_list<TensorView> per_channel,
                                         DType dtype) const {
  if (dtype != DType::kFloat32 && dtype != DType::kFloat64) {
    return absl::InvalidArgumentError(
        absl::StrCat("SyncBatchNorm: of ", ToString(dtype), "; it is for floats"));
  }
  auto check = [&](const TensorView& tensor, int64_t count) -> absl::Status {
    if (tensor.dtype == dtype && tensor.count == count && (tensor.data != nullptr || count == 0) &&
        tensor.device == device) {
      return absl::OkStatus();
    }
    return absl::InvalidArgumentError(
        absl::StrCat("SyncBatchNorm with ", options_.channels, " channels: ", ToString(tensor),
                     ", expected ", ToString(TensorView(nullptr, count, dtype, device))));
  };
  for (const TensorView& tensor : batches) {
    EK_RETURN_IF_ERROR(check(tensor, shape_.samples * options_.channels * shape_.spatial));
  }
  for (const TensorView& tensor : per_channel) EK_RETURN_IF_ERROR(check(tensor, options_.channels));
  return absl::OkStatus();
}

absl::Status SyncBatchNorm::Forward(JoinScope& scope, const Shape& shape, TensorView input,
                                    const Affine& affine, const Running& running,
                                    TensorView output) {
  has_run_ = false;
  if (shape.samples < 0 || shape.spatial < 1 || options_.channels < 1) {
    return absl::InvalidArgumentError(absl::StrCat("SyncBatchNorm of [", shape.samples, ", ",
                                                   options_.channels, ", ", shape.spatial, "]"));
  }
  shape_ = shape;
  input_ = input;
  EK_RETURN_IF_ERROR(CheckDevice(scope));
  const Device device = scope.communicator().device();
  EK_RETURN_IF_ERROR(CheckTensors(device, {input, output},
                                  {affine.gamma, affine.beta, running.mean, running.variance},
                                  input.dtype));
  if (!device.is_cpu()) {
    if (on_device_ == nullptr || !on_device_->IsFor(scope)) {
      EK_ASSIGN_OR_RETURN(on_device_, internal::DeviceBatchNorm::Create(scope, options_));
    }
    EK_RETURN_IF_ERROR(on_device_->Forward(scope, shape, input, affine, running, output));
    has_run_ = true;
    return absl::OkStatus();
  }

  // Its count, then the mean and the squares of each channel.
  std::vector<double> mine(1 + 2 * options_.channels);
  input.dtype == DType::kFloat32 ? FindMoments<float>(mine) : FindMoments<double>(mine);
  const int world_size = scope.communicator().world_size();
  std::vector<double> all(world_size * mine.size());
  EK_RETURN_IF_ERROR(scope.AllGather(absl::MakeSpan(mine), absl::MakeSpan(all)));

  moments_.assign(options_.channels, Moments());
  for (int rank = 0; rank < world_size; ++rank) {
    const double* theirs = all.data() + rank * mine.size();
    for (int64_t c = 0; c < options_.channels; ++c) {
      moments_[c].Add(
          {.count = theirs[0], .mean = theirs[1 + 2 * c], .squares = theirs[2 + 2 * c]});
    }
  }
  inverse_deviation_.assign(options_.channels, 0);
  has_run_ = moments_[0].count == 0;  // Then the layer does nothing, as in other frameworks.
  if (has_run_) return absl::OkStatus();
  if (moments_[0].count < 2) {
    return absl::FailedPreconditionError(absl::StrCat("SyncBatchNorm: all ranks together have ",
                                                      moments_[0].count,
                                                      " values per channel; a variance needs two"));
  }
  for (int64_t c = 0; c < options_.channels; ++c) {
    inverse_deviation_[c] =
        1.0 / std::sqrt(moments_[c].squares / moments_[c].count + options_.epsilon);
  }
  input.dtype == DType::kFloat32 ? Normalize<float>(affine, running, output)
                                 : Normalize<double>(affine, running, output);
  has_run_ = true;
  return absl::OkStatus();
}

template <typename T>
void SyncBatchNorm::FindMoments(std::vector<double>& mine) const {
  const T* input = Data<T>(input_);
  const double count = static_cast<double>(shape_.samples * shape_.spatial);
  mine[0] = count;
  if (count == 0) return;
  ForEach(shape_, options_.channels, [&](int64_t c, int64_t i) { mine[1 + 2 * c] += input[i]; });
  for (int64_t c = 0; c < options_.channels; ++c) mine[1 + 2 * c] /= count;
  ForEach(shape_, options_.channels, [&](int64_t c, int64_t i) {
    const double deviation = input[i] - mine[1 + 2 * c];
    mine[2 + 2 * c] += deviation * deviation;
  });
}

template <typename T>
void SyncBatchNorm::Normalize(const Affine& affine, const Running& running,
                              TensorView output) const {
  const T *input = Data<T>(input_), *gamma = Data<T>(affine.gamma), *beta = Data<T>(affine.beta);
  T* out = Data<T>(output);
  ForEach(shape_, options_.channels, [&](int64_t c, int64_t i) {
    const double normal = (input[i] - moments_[c].mean) * inverse_deviation_[c];
    out[i] = static_cast<T>(gamma[c] * normal + beta[c]);
  });
  for (int64_t c = 0; c < options_.channels; ++c) {
    const Moments& moments = moments_[c];
    auto follow = [&](TensorView statistic, double now) {
      T& value = Data<T>(statistic)[c];
      value = static_cast<T>(options_.momentum * now + (1 - options_.momentum) * value);
    };
    follow(running.mean, moments.mean);
    follow(running.variance, moments.squares / (moments.count - 1));
  }
}

absl::Status SyncBatchNorm::Backward(JoinScope& scope, TensorView grad_output, TensorView gamma,
                                     const Gradients& gradients) {
  if (!has_run_)
    return absl::FailedPreconditionError("SyncBatchNorm: Backward() without Forward()");
  has_run_ = false;
  EK_RETURN_IF_ERROR(CheckTensors(input_.device, {grad_output, gradients.input},
                                  {gamma, gradients.gamma, gradients.beta}, input_.dtype));
  if (!input_.device.is_cpu())
    return on_device_->Backward(scope, shape_, input_, grad_output, gamma, gradients);
  const bool is_single = input_.dtype == DType::kFloat32;
  // Per channel: the gradients, and their products with the normalised values.
  std::vector<double> own(2 * options_.channels);
  is_single ? FindSums<float>(grad_output, own) : FindSums<double>(grad_output, own);
  std::vector<double> all = own;
  EK_RETURN_IF_ERROR(scope.AllReduce(absl::MakeSpan(all), ReduceOp::kSum));
  is_single ? PassBack<float>(grad_output, gamma, own, all, gradients)
            : PassBack<double>(grad_output, gamma, own, all, gradients);
  return absl::OkStatus();
}

template <typename T>
void SyncBatchNorm::FindSums(TensorView grad_output, std::vector<double>& sums) const {
  const T *input = Data<T>(input_), *grad = Data<T>(grad_output);
  ForEach(shape_, options_.channels, [&](int64_t c, int64_t i) {
    sums[2 * c] += grad[i];
    sums[2 * c + 1] += grad[i] * ((input[i] - moments_[c].mean) * inverse_deviation_[c]);
  });
}

template <typename T>
void SyncBatchNorm::PassBack(TensorView grad_output, TensorView gamma,
                             const std::vector<double>& own, const std::vector<double>& all,
                             const Gradients& gradients) const {
  const T *input = Data<T>(input_), *grad = Data<T>(grad_output), *scale = Data<T>(gamma);
  T* out = Data<T>(gradients.input);
  ForEach(shape_, options_.channels, [&](int64_t c, int64_t i) {
    const double normal = (input[i] - moments_[c].mean) * inverse_deviation_[c];
    const double centred = grad[i] - (all[2 * c] + normal * all[2 * c + 1]) / moments_[c].count;
    out[i] = static_cast<T>(scale[c] * inverse_deviation_[c] * centred);
  });
  for (int64_t c = 0; c < options_.channels; ++c) {
    Data<T>(gradients.beta)[c] = static_cast<T>(own[2 * c]);
    Data<T>(gradients.gamma)[c] = static_cast<T>(own[2 * c + 1]);
  }
}

}  // namespace evenkeel
