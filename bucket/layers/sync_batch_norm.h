// Batch normalisation with the statistics of all ranks' samples, also where ranks become exhausted.
//
//   SyncBatchNorm norm({.channels = 16});
//   // in the loop
//   EK_RETURN_IF_ERROR(norm.Forward(scope, shape, input, {gamma, beta}, running, output));
//   ...
//   EK_RETURN_IF_ERROR(norm.Backward(scope, grad_output, gamma,
//                                    {grad_input, grad_gamma, grad_beta}));
//
// Each rank has a batch of its own size, also none. Statistics count every sample once, so N ranks
// compute what one process does with their batches one after the other; ranks without inputs
// contribute nothing. One all-gather forward, one all-reduce backward, each of two numbers per
// channel, through the scope.
//
// Shapes:   input, output and their gradients [samples, channels, spatial]; all else [channels].
// Types:    float32 or float64, the same for all tensors of a call; statistics are computed in
//           float64.
// Devices:  tensors lie on the group's; there SyncBatchNormOptions::stream is where they are
//           computed, and a call puts its work there and waits for no device. Sums are added in
//           another order than on the CPU, always the same.
// Gradients of gamma and beta are sums over this rank's own samples, like those of any other
//           parameter: DataParallel adds them up. grad_input is that of the sum of all ranks'
//           losses.
// Running statistics become momentum * batch's + (1 - momentum) * before, with the unbiased
// variance. They are equal on
//           the ranks with inputs; an exhausted rank gets them as a buffer of DataParallel.
// Memory:   `input` stays as it is until Backward() has returned; on a device, until the stream has
//           passed it, as all tensors of a call do. The stream outlives this, whose end waits for
//           it.
// Threads:  thread-compatible.
// Errors:   InvalidArgument for a shape or type. FailedPrecondition on all ranks with inputs if
//           together they have one value per channel (without any, the layer does nothing), or
//           Backward() comes without Forward(). Errors of the scope. On a device one value shows in
//           a later call, as soon as it is known; it changes no running statistics.
// Source:   Ioffe and Szegedy, "Batch Normalization", 2015; merging of partial variances: Chan,
//           Golub, LeVeque, 1979.

#ifndef EVENKEEL_BUCKET_LAYERS_SYNC_BATCH_NORM_H_
#define EVENKEEL_BUCKET_LAYERS_SYNC_BATCH_NORM_H_

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "evenkeel/comm/types.h"
#include "evenkeel/join/scope.h"

namespace evenkeel {

namespace internal {
class DeviceBatchNorm;
}  // namespace internal

struct SyncBatchNormOptions {
  int64_t channels = 1;
  double epsilon = 1e-5;
  double momentum = 0.1;
  StreamRef stream;  // Not on the CPU.
};

class SyncBatchNorm {
 public:
  struct Shape {
    int64_t samples = 0;
    int64_t spatial = 1;  // Values of a channel in a sample: height * width.
  };
  struct Affine {
    TensorView gamma, beta;
  };
  struct Running {
    TensorView mean, variance;
  };
  struct Gradients {
    TensorView input, gamma, beta;  // Written, not added to.
  };

  explicit SyncBatchNorm(SyncBatchNormOptions options);
  ~SyncBatchNorm();
  SyncBatchNorm(SyncBatchNorm&&) noexcept;

  absl::Status Forward(JoinScope& scope, const Shape& shape, TensorView input, const Affine& affine,
                       const Running& running, TensorView output);
  absl::Status Backward(JoinScope& scope, TensorView grad_output, TensorView gamma,
                        const Gradients& gradients);

 private:
  // The statistics of one channel over some samples.
  struct Moments {
    double count = 0, mean = 0, squares = 0;  // Squares: of the deviations from the mean, summed.
    void Add(const Moments& other);
  };

  absl::Status CheckDevice(const JoinScope& scope) const;
  absl::Status CheckTensors(Device device, std::initializer_list<TensorView> batches,
                            std::initializer_list<TensorView> per_channel, DType dtype) const;
  template <typename T>
  void FindMoments(std::vector<double>& mine) const;
  template <typename T>
  void Normalize(const Affine& affine, const Running& running, TensorView output) const;
  template <typename T>
  void FindSums(TensorView grad_output, std::vector<double>& sums) const;
  template <typename T>
  void PassBack(TensorView grad_output, TensorView gamma, const std::vector<double>& own,
                const std::vector<double>& all, const Gradients& gradients) const;

  const SyncBatchNormOptions options_;
  // The state of the last Forward().
  Shape shape_;
  TensorView input_;
  bool has_run_ = false;
  std::vector<Moments> moments_;  // By channel, of all ranks.
  std::vector<double> inverse_deviation_;
  std::unique_ptr<internal::DeviceBatchNorm> on_device_;  // From the first Forward() there on.
};

}  // namespace evenkeel

#endif  // EVENKEEL_BUCKET_LAYERS_SYNC_BATCH_NORM_H_
