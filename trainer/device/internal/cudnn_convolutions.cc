// Convolutions through cuDNN, by the calls that it has had since its first version. What a shape
// needs (descriptors, algorithms) is found once and kept; algorithms are chosen by cuDNN's own
// rules, without trying, among those that give the same bits each time.

#include <cudnn.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "evenkeel/comm/base/clock.h"
#include "evenkeel/comm/device/cuda_context.h"
#include "evenkeel/comm/device/kernel.h"
#include "evenkeel/comm/device/shared_library.h"
#include "evenkeel/comm/memory.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/trainer/device/convolution_kernels_image.h"
#include "evenkeel/trainer/device/cuda_parts.h"
#include "evenkeel/trainer/device/internal/convolution_kernels.cuh"

// cuDNN 9 calls them deprecated, and has them.
#pragma GCC diagnostic ignored "-Wdeprecated-declarations"

namespace evenkeel::internal {
namespace {

constexpr size_t kMostWorkspace = size_t{512} << 20;
// So much at once, so that a batch of another size seldom needs more, which would be waited for.
constexpr size_t kLeastWorkspace = size_t{16} << 20;
// For cuDNN's inputs and outputs: allocators guarantee it, and its fastest kernels assume it.
constexpr uintptr_t kAlignment = 16;
constexpr int kAlgorithms = 16;  // More than cuDNN has of each kind.
constexpr absl::Duration kTimeout = absl::Minutes(2);

const auto kWiden = MakeKernel<&ek_widen>("ek_widen", convolution_kernels_image);

#define EK_CUDNN_FUNCTIONS(X)                       \
  X(cudnnConvolutionBackwardData)                   \
  X(cudnnConvolutionBackwardFilter)                 \
  X(cudnnConvolutionForward)                        \
  X(cudnnCreate)                                    \
  X(cudnnCreateConvolutionDescriptor)               \
  X(cudnnCreateFilterDescriptor)                    \
  X(cudnnCreateTensorDescriptor)                    \
  X(cudnnDestroy)                                   \
  X(cudnnDestroyConvolutionDescriptor)              \
  X(cudnnDestroyFilterDescriptor)                   \
  X(cudnnDestroyTensorDescriptor)                   \
  X(cudnnGetConvolutionBackwardDataAlgorithm_v7)    \
  X(cudnnGetConvolutionBackwardDataWorkspaceSize)   \
  X(cudnnGetConvolutionBackwardFilterAlgorithm_v7)  \
  X(cudnnGetConvolutionBackwardFilterWorkspaceSize) \
  X(cudnnGetConvolutionForwardAlgorithm_v7)         \
  X(cudnnGetConvolutionForwardWorkspaceSize)        \
  X(cudnnGetErrorString)                            \
  X(cudnnSetConvolution2dDescriptor)                \
  X(cudnnSetConvolutionMathType)                    \
  X(cudnnSetFilter4dDescriptor)                     \
  X(cudnnSetStream)                                 \
  X(cudnnSetTensor4dDescriptor)

struct Cudnn {
  EK_CUDNN_FUNCTIONS(EK_DECLARE_FUNCTION)
  void (*cudnnGetLastErrorString)(char* text, size_t size) = nullptr;  // Null before cuDNN 9.
};

#define EK_CUDNN_FILE "libcudnn.so." EK_EXPANDED_TEXT(CUDNN_MAJOR)
// tools/package.sh finds the file's number here.
constexpr char kAdvice[] = "install cuDNN, or set LD_LIBRARY_PATH to the folder of " EK_CUDNN_FILE;

absl::StatusOr<Cudnn> Load() {
  EK_ASSIGN_OR_RETURN(SharedLibrary library,
                      SharedLibrary::Load("cuDNN", FilesOfCuda(EK_CUDNN_FILE), kAdvice));
  Cudnn cudnn;
  EK_FIND_FUNCTIONS(EK_CUDNN_FUNCTIONS, library, cudnn);
  library.FindOptional("cudnnGetLastErrorString", cudnn.cudnnGetLastErrorString);
  EK_RETURN_IF_ERROR(library.Keep(library.Name()));
  return cudnn;
}

const absl::StatusOr<Cudnn>& Loaded() {
  static const auto* const cudnn = new absl::StatusOr<Cudnn>(Load());
  return *cudnn;
}
// For code that runs only once Loaded() was OK.
const Cudnn& Dnn() { return *Loaded(); }

absl::Status FromCudnn(absl::string_view call, cudnnStatus_t status) {
  if (status == CUDNN_STATUS_SUCCESS) return absl::OkStatus();
  std::string text = absl::StrCat(call, ": ", Dnn().cudnnGetErrorString(status));
  char why[512] = "";
  if (Dnn().cudnnGetLastErrorString != nullptr) Dnn().cudnnGetLastErrorString(why, sizeof(why));
  if (why[0] != 0) absl::StrAppend(&text, ": ", why);
#ifdef CUDNN_STATUS_CATEGORY  // Since cuDNN 9 there are several of a kind.
  status = static_cast<cudnnStatus_t>(CUDNN_STATUS_CATEGORY(status));
#endif
  if (status == CUDNN_STATUS_NOT_SUPPORTED) return absl::UnimplementedError(text);
  return absl::InternalError(text);
}

// Calls a function of cuDNN.
#define EK_CUDNN(call, ...) FromCudnn(#call, Dnn().call(__VA_ARGS__))

cudnnDataType_t TypeOf(DType dtype) {
  switch (dtype) {
    case DType::kBFloat16:
      return CUDNN_DATA_BFLOAT16;
    case DType::kFloat16:
      return CUDNN_DATA_HALF;
    default:
      return CUDNN_DATA_FLOAT;
  }
}

// Descriptors of a shape, and how each of the three is computed.
struct Plan {
  DeviceConvolution shape;
  cudnnTensorDescriptor_t images = nullptr, output = nullptr;
  cudnnFilterDescriptor_t weight = nullptr;
  cudnnConvolutionDescriptor_t convolution = nullptr;
  cudnnConvolutionFwdAlgoPerf_t forward = {};
  cudnnConvolutionBwdDataAlgoPerf_t backward_images = {};
  cudnnConvolutionBwdFilterAlgoPerf_t backward_weight = {};

  Plan() = default;
  Plan(const Plan&) = delete;
  Plan& operator=(const Plan&) = delete;
  ~Plan() {
    if (images != nullptr) Dnn().cudnnDestroyTensorDescriptor(images);
    if (output != nullptr) Dnn().cudnnDestroyTensorDescriptor(output);
    if (weight != nullptr) Dnn().cudnnDestroyFilterDescriptor(weight);
    if (convolution != nullptr) Dnn().cudnnDestroyConvolutionDescriptor(convolution);
  }

  absl::Status Describe() {
    const auto type = TypeOf(shape.dtype);
    const int n = static_cast<int>(shape.batch), in = static_cast<int>(shape.inputs),
              out = static_cast<int>(shape.outputs), side = static_cast<int>(shape.side),
              kernel = static_cast<int>(shape.kernel), stride = static_cast<int>(shape.stride);
    const int padding = (kernel - 1) / 2, out_side = static_cast<int>(shape.out_side());
    EK_RETURN_IF_ERROR(EK_CUDNN(cudnnCreateTensorDescriptor, &images));
    EK_RETURN_IF_ERROR(EK_CUDNN(cudnnCreateTensorDescriptor, &output));
    EK_RETURN_IF_ERROR(EK_CUDNN(cudnnCreateFilterDescriptor, &weight));
    EK_RETURN_IF_ERROR(EK_CUDNN(cudnnCreateConvolutionDescriptor, &convolution));
    EK_RETURN_IF_ERROR(
        EK_CUDNN(cudnnSetTensor4dDescriptor, images, CUDNN_TENSOR_NCHW, type, n, in, side, side));
    EK_RETURN_IF_ERROR(EK_CUDNN(cudnnSetTensor4dDescriptor, output, CUDNN_TENSOR_NCHW, type, n, out,
                                out_side, out_side));
    EK_RETURN_IF_ERROR(EK_CUDNN(cudnnSetFilter4dDescriptor, weight, type, CUDNN_TENSOR_NCHW, out,
                                in, kernel, kernel));
    EK_RETURN_IF_ERROR(EK_CUDNN(cudnnSetConvolution2dDescriptor, convolution, padding, padding,
                                stride, stride, 1, 1, CUDNN_CROSS_CORRELATION, CUDNN_DATA_FLOAT));
    // float32 stays float32: no TF32.
    return EK_CUDNN(cudnnSetConvolutionMathType, convolution,
                    shape.dtype == DType::kFloat32 ? CUDNN_FMA_MATH : CUDNN_TENSOR_OP_MATH);
  }
};

class CudnnConvolutions : public ConvolutionLibrary {
 public:
  CudnnConvolutions(DeviceRuntime& runtime, Device device, cudnnHandle_t handle)
      : runtime_(runtime), device_(device), handle_(handle) {}
  ~CudnnConvolutions() override {
    const ScopedCudaDevice scope(device_);
    plans_.clear();
    Dnn().cudnnDestroy(handle_);
  }

  absl::Status Convolve(ConvolutionPass pass, const DeviceConvolution& shape,
                        const ConvolutionTensors& tensors, StreamRef stream) override {
    const ScopedCudaDevice scope(device_);
    EK_RETURN_IF_ERROR(scope.status());
    const absl::Status status = Run(pass, shape, tensors, stream);
    return status.ok() ? status : Annotate(status, ToString(shape));
  }

 private:
  static constexpr float kOne = 1, kZero = 0;

  absl::Status Run(ConvolutionPass pass, const DeviceConvolution& shape,
                   const ConvolutionTensors& tensors, StreamRef stream) {
    EK_RETURN_IF_ERROR(EK_CUDNN(cudnnSetStream, handle_, static_cast<cudaStream_t>(stream.handle)));
    EK_ASSIGN_OR_RETURN(const Plan* const found, PlanFor(shape));
    const Plan& plan = *found;
    if (pass == ConvolutionPass::kForward) {
      const auto& how = plan.forward;
      EK_RETURN_IF_ERROR(Need(workspace_, how.memory, stream));
      return EK_CUDNN(cudnnConvolutionForward, handle_, &kOne, plan.images, tensors.images(),
                      plan.weight, tensors.weight(), plan.convolution, how.algo,
                      workspace_.data.get(), workspace_.bytes, &kZero, plan.output,
                      tensors.written(pass));
    }
    if (pass == ConvolutionPass::kBackwardImages) {
      const auto& how = plan.backward_images;
      EK_RETURN_IF_ERROR(Need(workspace_, how.memory, stream));
      return EK_CUDNN(cudnnConvolutionBackwardData, handle_, &kOne, plan.weight, tensors.weight(),
                      plan.output, tensors.output(), plan.convolution, how.algo,
                      workspace_.data.get(), workspace_.bytes, &kZero, plan.images,
                      tensors.written(pass));
    }
    // cuDNN sums in float32, and answers in the type of the images. A gradient may lie anywhere in
    // a bucket.
    auto* const diff_weight = static_cast<float*>(tensors.written(pass));
    const bool is_direct = shape.dtype == DType::kFloat32 &&
                           reinterpret_cast<uintptr_t>(diff_weight) % kAlignment == 0;
    const auto& how = plan.backward_weight;
    const int64_t count = shape.counts()[static_cast<size_t>(pass)];
    EK_RETURN_IF_ERROR(Need(workspace_, how.memory, stream));
    if (!is_direct) EK_RETURN_IF_ERROR(Need(answer_, count * SizeOf(shape.dtype), stream));
    void* const to = is_direct ? diff_weight : answer_.data.get();
    EK_RETURN_IF_ERROR(EK_CUDNN(cudnnConvolutionBackwardFilter, handle_, &kOne, plan.images,
                                tensors.images(), plan.output, tensors.output(), plan.convolution,
                                how.algo, workspace_.data.get(), workspace_.bytes,
                                is_direct && tensors.add ? &kOne : &kZero, plan.weight, to));
    if (is_direct) return absl::OkStatus();
    return Launch(runtime_, kWiden, ShapeFor(count), stream, to, shape.dtype, count, diff_weight,
                  tensors.add ? 1 : 0);
  }

  absl::StatusOr<const Plan*> PlanFor(const DeviceConvolution& shape) {
    for (const auto& plan : plans_) {
      if (plan->shape == shape) return plan.get();
    }
    auto plan = std::make_unique<Plan>();
    plan->shape = shape;
    EK_RETURN_IF_ERROR(plan->Describe());
    const Plan& p = *plan;
    EK_RETURN_IF_ERROR(Choose("cudnnGetConvolutionForwardAlgorithm_v7",
                              Dnn().cudnnGetConvolutionForwardAlgorithm_v7,
                              Dnn().cudnnGetConvolutionForwardWorkspaceSize, p.images, p.weight,
                              p.convolution, p.output, plan->forward));
    EK_RETURN_IF_ERROR(Choose("cudnnGetConvolutionBackwardDataAlgorithm_v7",
                              Dnn().cudnnGetConvolutionBackwardDataAlgorithm_v7,
                              Dnn().cudnnGetConvolutionBackwardDataWorkspaceSize, p.weight,
                              p.output, p.convolution, p.images, plan->backward_images));
    EK_RETURN_IF_ERROR(Choose("cudnnGetConvolutionBackwardFilterAlgorithm_v7",
                              Dnn().cudnnGetConvolutionBackwardFilterAlgorithm_v7,
                              Dnn().cudnnGetConvolutionBackwardFilterWorkspaceSize, p.images,
                              p.output, p.convolution, p.weight, plan->backward_weight));
    return plans_.emplace_back(std::move(plan)).get();
  }

  // The first, that is the fastest by cuDNN's rules, that fits and gives the same bits each time.
  // Each may be listed twice, for both kinds of arithmetic: how much memory it takes is asked for
  // the one that was set.
  template <typename Found, typename Ask, typename AskBytes, typename X, typename Y, typename Z>
  absl::Status Choose(absl::string_view call, Ask ask, AskBytes ask_bytes, X x, Y y,
                      cudnnConvolutionDescriptor_t convolution, Z z, Found& chosen) {
    Found found[kAlgorithms] = {};
    int count = 0;
    EK_RETURN_IF_ERROR(
        FromCudnn(call, ask(handle_, x, y, convolution, z, kAlgorithms, &count, found)));
    for (int i = 0; i < count; ++i) {
      if (found[i].status != CUDNN_STATUS_SUCCESS || found[i].determinism != CUDNN_DETERMINISTIC)
        continue;
      size_t bytes = 0;
      if (ask_bytes(handle_, x, y, convolution, z, found[i].algo, &bytes) != CUDNN_STATUS_SUCCESS)
        continue;
      found[i].memory = std::max(found[i].memory, bytes);
      if (found[i].memory > kMostWorkspace) continue;
      chosen = found[i];
      return absl::OkStatus();
    }
    return absl::UnimplementedError(
        absl::StrCat(call, ": none of ", count, " algorithms supports this shape"));
  }

  absl::Status Need(Memory& memory, size_t bytes, StreamRef stream) {
    if (static_cast<int64_t>(bytes) <= memory.bytes) return absl::OkStatus();
    bytes = std::max(bytes, kLeastWorkspace);
    // In the first step only. What is on the stream may still use the smaller one.
    if (memory.bytes > 0) EK_RETURN_IF_ERROR(runtime_.Synchronize(stream, SteadyNow() + kTimeout));
    memory = {};
    EK_ASSIGN_OR_RETURN(memory, runtime_.Allocate(device_, static_cast<int64_t>(bytes)));
    return absl::OkStatus();
  }

  DeviceRuntime& runtime_;
  const Device device_;
  const cudnnHandle_t handle_;
  Memory workspace_;  // For the one stream of a place.
  Memory answer_;  // A gradient of 16-bit weights, or one that lies where cuDNN writes nothing; for
                   // that stream, too.
  std::vector<std::unique_ptr<Plan>> plans_;
};

}  // namespace

absl::Status LoadCudnn() { return Loaded().status(); }

absl::StatusOr<std::unique_ptr<ConvolutionLibrary>> MakeCudaConvolutions(DeviceRuntime& runtime,
                                                                         Device device) {
  EK_RETURN_IF_ERROR(LoadCudnn());
  const ScopedCudaDevice scope(device);
  EK_RETURN_IF_ERROR(scope.status());
  cudnnHandle_t handle = nullptr;
  EK_RETURN_IF_ERROR(EK_CUDNN(cudnnCreate, &handle));
  return std::make_unique<CudnnConvolutions>(runtime, device, handle);
}

}  // namespace evenkeel::internal
