#include "evenkeel/bucket/layers/internal/device_batch_norm.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "evenkeel/bucket/layers/batch_norm.cuh"
#include "evenkeel/bucket/layers/batch_norm_kernels_image.h"
#include "evenkeel/comm/base/clock.h"
#include "evenkeel/comm/device/kernel.h"
#include "evenkeel/comm/status.h"

namespace evenkeel::internal {
namespace {

using batch_norm::kThreads;
using batch_norm::Sizes;

const auto kMoments = MakeKernel<&ek_batch_norm_moments>(
    "ek_batch_norm_moments", batch_norm_kernels_image, KernelKind::kSynchronises);
const auto kOwn = MakeKernel<&ek_batch_norm_own>("ek_batch_norm_own", batch_norm_kernels_image);
const auto kStatistics =
    MakeKernel<&ek_batch_norm_statistics>("ek_batch_norm_statistics", batch_norm_kernels_image);
const auto kNormalize =
    MakeKernel<&ek_batch_norm_normalize>("ek_batch_norm_normalize", batch_norm_kernels_image);
const auto kProducts = MakeKernel<&ek_batch_norm_products>(
    "ek_batch_norm_products", batch_norm_kernels_image, KernelKind::kSynchronises);
const auto kSums = MakeKernel<&ek_batch_norm_sums>("ek_batch_norm_sums", batch_norm_kernels_image);
const auto kPassBack =
    MakeKernel<&ek_batch_norm_pass_back>("ek_batch_norm_pass_back", batch_norm_kernels_image);

// Enough blocks of the kernels that add up for any device, and so much for each thread to do.
constexpr int64_t kEnoughBlocks = 1024;
constexpr int64_t kMostParts = 256;
constexpr int64_t kValuesOfThread = 8;
constexpr absl::Duration kDrainTimeout = absl::Minutes(1);

}  // namespace

absl::StatusOr<std::unique_ptr<DeviceBatchNorm>> DeviceBatchNorm::Create(
    const JoinScope& scope, const SyncBatchNormOptions& options) {
  Communicator& comm = scope.communicator();
  std::unique_ptr<DeviceBatchNorm> norm(
      new DeviceBatchNorm(comm.runtime(), options, comm.world_size()));
  const int64_t channels = options.channels;
  const auto allocate = [&](int64_t numbers) {
    return comm.runtime()->Allocate(comm.device(), numbers * static_cast<int64_t>(sizeof(double)));
  };
  EK_ASSIGN_OR_RETURN(norm->parts_, allocate(2 * channels * norm->most_parts_));
  EK_ASSIGN_OR_RETURN(norm->own_, allocate(1 + 2 * channels));
  EK_ASSIGN_OR_RETURN(norm->all_, allocate(comm.world_size() * (1 + 2 * channels)));
  EK_ASSIGN_OR_RETURN(norm->statistics_, allocate(2 * channels + 2));
  EK_ASSIGN_OR_RETURN(norm->sums_, allocate(2 * channels));
  EK_ASSIGN_OR_RETURN(norm->least_, comm.runtime()->AllocatePinned(sizeof(double)));
  return norm;
}

DeviceBatchNorm::DeviceBatchNorm(DeviceRuntime* runtime, const SyncBatchNormOptions& options,
                                 int world_size)
    : runtime_(runtime),
      options_(options),
      stream_(options.stream),
      most_parts_(std::clamp<int64_t>(kEnoughBlocks / options.channels, 1, kMostParts)),
      world_size_(world_size) {}

DeviceBatchNorm::~DeviceBatchNorm() {
  (void)runtime_->Synchronize(stream_, SteadyNow() + kDrainTimeout);
}

absl::Status DeviceBatchNorm::CheckCounts() {
  if (!counted_) return absl::OkStatus();
  EK_ASSIGN_OR_RETURN(const bool is_known, runtime_->IsDone(counted_));
  if (!is_known) return absl::OkStatus();
  counted_ = Event();
  const double least = *Numbers(least_);
  if (least >= batch_norm::kFewestValues) return absl::OkStatus();
  forgets_ = true;
  return absl::FailedPreconditionError(
      absl::StrCat("SyncBatchNorm: in a Forward() before, all ranks together had ", least,
                   " values per channel; a variance needs two"));
}

int64_t DeviceBatchNorm::PartsOf(const Shape& shape) const {
  return std::clamp<int64_t>(shape.samples * shape.spatial / (kThreads * kValuesOfThread), 1,
                             most_parts_);
}

TensorView DeviceBatchNorm::View(const Memory& memory, int64_t count) const {
  return TensorView(memory.data.get(), count, DType::kFloat64, stream_.device);
}

absl::Status DeviceBatchNorm::Forward(JoinScope& scope, const Shape& shape, const TensorView& input,
                                      const SyncBatchNorm::Affine& affine,
                                      const SyncBatchNorm::Running& running,
                                      const TensorView& output) {
  EK_RETURN_IF_ERROR(CheckCounts());
  const int64_t channels = options_.channels, numbers = 1 + 2 * channels;
  const Sizes sizes{shape.samples, channels, shape.spatial, PartsOf(shape)};
  const bool is_double = input.dtype == DType::kFloat64;
  const LaunchShape each_part{.blocks = channels, .threads = kThreads, .rows = sizes.parts};
  EK_RETURN_IF_ERROR(Launch(*runtime_, kMoments, each_part, stream_, input.data, is_double, sizes,
                            Numbers(parts_)));
  EK_RETURN_IF_ERROR(
      Launch(*runtime_, kOwn, ShapeFor(channels), stream_, Numbers(parts_), sizes, Numbers(own_)));
  EK_RETURN_IF_ERROR(
      scope.AllGather(View(own_, numbers), View(all_, world_size_ * numbers), {.stream = stream_}));
  EK_RETURN_IF_ERROR(Launch(*runtime_, kStatistics, ShapeFor(channels), stream_, Numbers(all_),
                            world_size_, channels, options_.epsilon, options_.momentum,
                            running.mean.data, running.variance.data, is_double, forgets_,
                            Numbers(statistics_)));
  forgets_ = false;
  if (!counted_) {
    EK_RETURN_IF_ERROR(runtime_->Copy(least_.data.get(), Numbers(statistics_) + 2 * channels + 1,
                                      sizeof(double), stream_));
    EK_ASSIGN_OR_RETURN(counted_, runtime_->Record(stream_));
  }
  return Launch(*runtime_, kNormalize, ShapeFor(input.count, kValuesOfThread), stream_, input.data,
                affine.gamma.data, affine.beta.data, is_double, Numbers(statistics_), sizes,
                output.data);
}

absl::Status DeviceBatchNorm::Backward(JoinScope& scope, const Shape& shape,
                                       const TensorView& input, const TensorView& grad_output,
                                       const TensorView& gamma,
                                       const SyncBatchNorm::Gradients& gradients) {
  EK_RETURN_IF_ERROR(CheckCounts());
  const int64_t channels = options_.channels;
  const Sizes sizes{shape.samples, channels, shape.spatial, PartsOf(shape)};
  const bool is_double = input.dtype == DType::kFloat64;
  const LaunchShape each_part{.blocks = channels, .threads = kThreads, .rows = sizes.parts};
  EK_RETURN_IF_ERROR(Launch(*runtime_, kProducts, each_part, stream_, input.data, grad_output.data,
                            is_double, Numbers(statistics_), sizes, Numbers(parts_)));
  EK_RETURN_IF_ERROR(Launch(*runtime_, kSums, ShapeFor(channels), stream_, Numbers(parts_), sizes,
                            Numbers(sums_), gradients.gamma.data, gradients.beta.data, is_double));
  EK_RETURN_IF_ERROR(
      scope.AllReduce(View(sums_, 2 * channels), ReduceOp::kSum, {.stream = stream_}));
  return Launch(*runtime_, kPassBack, ShapeFor(input.count, kValuesOfThread), stream_, input.data,
                grad_output.data, gamma.data, is_double, Numbers(statistics_), Numbers(sums_),
                sizes, gradients.input.data);
}

}  // namespace evenkeel::internal
