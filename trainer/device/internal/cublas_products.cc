// Products through cuBLASLt. It sees matrices by columns: output^T = right^T * left^T, so its A is
// our right factor. What a shape needs (descriptors, an algorithm) is found once and kept.

#include <cublasLt.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "evenkeel/comm/device/cuda_context.h"
#include "evenkeel/comm/device/kernel.h"
#include "evenkeel/comm/device/shared_library.h"
#include "evenkeel/comm/memory.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/trainer/device/cuda_parts.h"
#include "evenkeel/trainer/device/internal/math_kernels.cuh"
#include "evenkeel/trainer/device/math_kernels_image.h"

namespace evenkeel::internal {
namespace {

const auto kAddBias = MakeKernel<&ek_add_bias>("ek_add_bias", math_kernels_image);

constexpr int64_t kWorkspaceBytes = int64_t{32} << 20;  // As NVIDIA advises for Hopper.

// The library is loaded when it is first used: that takes 0.4 s and 200 MB, which processes that
// compute on the CPU should not pay for.
#define EK_CUBLASLT_FUNCTIONS(X)          \
  X(cublasLtCreate)                       \
  X(cublasLtDestroy)                      \
  X(cublasLtGetStatusString)              \
  X(cublasLtMatmul)                       \
  X(cublasLtMatmulAlgoGetHeuristic)       \
  X(cublasLtMatmulDescCreate)             \
  X(cublasLtMatmulDescDestroy)            \
  X(cublasLtMatmulDescSetAttribute)       \
  X(cublasLtMatmulPreferenceCreate)       \
  X(cublasLtMatmulPreferenceDestroy)      \
  X(cublasLtMatmulPreferenceSetAttribute) \
  X(cublasLtMatrixLayoutCreate)           \
  X(cublasLtMatrixLayoutDestroy)          \
  X(cublasLtMatrixLayoutSetAttribute)

struct CublasLt {
  EK_CUBLASLT_FUNCTIONS(EK_DECLARE_FUNCTION)
};

#define EK_CUBLASLT_FILE "libcublasLt.so." EK_EXPANDED_TEXT(CUBLAS_VER_MAJOR)
// tools/package.sh finds the file's number here.
constexpr char kAdvice[] =
    "install cuBLAS, or set LD_LIBRARY_PATH to the folder of " EK_CUBLASLT_FILE;

absl::StatusOr<CublasLt> Load() {
  EK_ASSIGN_OR_RETURN(SharedLibrary library,
                      SharedLibrary::Load("cuBLAS", FilesOfCuda(EK_CUBLASLT_FILE), kAdvice));
  CublasLt lt;
  EK_FIND_FUNCTIONS(EK_CUBLASLT_FUNCTIONS, library, lt);
  EK_RETURN_IF_ERROR(library.Keep(library.Name()));
  return lt;
}

const absl::StatusOr<CublasLt>& Loaded() {
  static const auto* const lt = new absl::StatusOr<CublasLt>(Load());
  return *lt;
}
// For code that runs only once Loaded() was OK.
const CublasLt& Lt() { return *Loaded(); }

absl::Status FromLt(absl::string_view call, cublasStatus_t status) {
  if (status == CUBLAS_STATUS_SUCCESS) return absl::OkStatus();
  const std::string text = absl::StrCat(call, ": ", Lt().cublasLtGetStatusString(status));
  if (status == CUBLAS_STATUS_ALLOC_FAILED) return absl::ResourceExhaustedError(text);
  if (status == CUBLAS_STATUS_NOT_SUPPORTED) return absl::UnimplementedError(text);
  return absl::InternalError(text);
}

// Calls a function of cuBLASLt.
#define EK_LT(call, ...) FromLt("cublasLt" #call, Lt().cublasLt##call(__VA_ARGS__))

cudaDataType_t TypeOf(DType dtype) {
  switch (dtype) {
    case DType::kBFloat16:
      return CUDA_R_16BF;
    case DType::kFloat16:
      return CUDA_R_16F;
    default:
      return CUDA_R_32F;
  }
}

std::string Describe(const StridedShape& s, DType factors, DType output) {
  return absl::StrCat("product of ", s.outer * s.heads, " x [", s.rows, ",", s.inner, "] [",
                      s.inner, ",", s.columns, "], ", ToString(factors), " to ", ToString(output),
                      ", strides of row and column ", s.left.row, ",", s.left.column, " and ",
                      s.right.row, ",", s.right.column, " to ", s.output.row, ",", s.output.column);
}

// The largest power of two up to 256 that divides the address.
uint32_t AlignmentOf(const void* data) {
  const auto address = reinterpret_cast<uintptr_t>(data);
  return address == 0 ? 256
                      : static_cast<uint32_t>(std::min<uintptr_t>(256, address & ~(address - 1)));
}

// A matrix as cuBLASLt sees it: rows, columns, leading dimension, and whether it is to be
// transposed.
struct Layout {
  bool is_transposed = false;
  int64_t rows = 0;
  int64_t columns = 0;
  int64_t leading = 0;
};

// The factor is [rows, columns] to us; to cuBLASLt, before transposition, it is by columns.
Layout LayoutOf(const MatrixStrides& strides, int64_t rows, int64_t columns) {
  if (strides.column == 1) return {false, columns, rows, std::max(strides.row, columns)};
  return {true, rows, columns, std::max(strides.column, rows)};
}

// From one matrix of a batch to the next; math.h says why one stride is enough.
int64_t BatchStride(const StridedShape& shape, const MatrixStrides& strides) {
  return shape.heads > 1 ? strides.head : strides.outer;
}

struct Key {
  StridedShape shape;
  DType factors = DType::kFloat32;
  DType output = DType::kFloat32;
  bool has_bias = false;
  // For left, right; for output and bias, which are read and written alike.
  std::array<uint32_t, 3> alignment = {};
  bool operator==(const Key&) const = default;
};

struct Plan {
  Key key;
  cublasLtMatmulDesc_t product = nullptr;
  cublasLtMatrixLayout_t a = nullptr, b = nullptr, d = nullptr;
  cublasLtMatmulAlgo_t algorithm = {};
  uint64_t used = 0;  // When it was last.

  Plan() = default;
  Plan(const Plan&) = delete;
  Plan& operator=(const Plan&) = delete;
  ~Plan() {
    if (a != nullptr) Lt().cublasLtMatrixLayoutDestroy(a);
    if (b != nullptr) Lt().cublasLtMatrixLayoutDestroy(b);
    if (d != nullptr) Lt().cublasLtMatrixLayoutDestroy(d);
    if (product != nullptr) Lt().cublasLtMatmulDescDestroy(product);
  }
};

template <typename Value>
absl::Status Set(cublasLtMatmulDesc_t desc, cublasLtMatmulDescAttributes_t attribute, Value value) {
  return EK_LT(MatmulDescSetAttribute, desc, attribute, &value, sizeof(value));
}
template <typename Value>
absl::Status Set(cublasLtMatrixLayout_t layout, cublasLtMatrixLayoutAttribute_t attribute,
                 Value value) {
  return EK_LT(MatrixLayoutSetAttribute, layout, attribute, &value, sizeof(value));
}
template <typename Value>
absl::Status Set(cublasLtMatmulPreference_t preference,
                 cublasLtMatmulPreferenceAttributes_t attribute, Value value) {
  return EK_LT(MatmulPreferenceSetAttribute, preference, attribute, &value, sizeof(value));
}

absl::Status MakeLayout(const Layout& layout, DType dtype, const StridedShape& shape,
                        const MatrixStrides& strides, cublasLtMatrixLayout_t& made) {
  EK_RETURN_IF_ERROR(
      EK_LT(MatrixLayoutCreate, &made, TypeOf(dtype), layout.rows, layout.columns, layout.leading));
  const int64_t batch = shape.outer * shape.heads;
  if (batch == 1) return absl::OkStatus();
  EK_RETURN_IF_ERROR(Set(made, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, static_cast<int32_t>(batch)));
  return Set(made, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, BatchStride(shape, strides));
}

class CublasProducts : public ProductLibrary {
 public:
  CublasProducts(DeviceRuntime& runtime, Device device, cublasLtHandle_t handle, Memory workspace)
      : runtime_(runtime), device_(device), handle_(handle), workspace_(std::move(workspace)) {}
  ~CublasProducts() override {
    const ScopedCudaDevice scope(device_);
    plans_.clear();
    Lt().cublasLtDestroy(handle_);
  }

  absl::Status Product(const StridedShape& shape, TypedPointer left, const void* right,
                       const float* bias, TypedPointer output, StreamRef stream) override {
    if (shape.outer * shape.heads * shape.rows * shape.columns == 0) return absl::OkStatus();
    const ScopedCudaDevice scope(device_);
    EK_RETURN_IF_ERROR(scope.status());
    // cuBLASLt's bias has the output's type. Where it has no algorithm that adds one, that is done
    // afterwards.
    if (bias != nullptr && output.dtype == DType::kFloat32) {
      const absl::Status status =
          Product(shape, left, right, bias, /*fuses_bias=*/true, output, stream);
      if (!absl::IsUnimplemented(status)) return status;
    }
    return Product(shape, left, right, bias, /*fuses_bias=*/false, output, stream);
  }

 private:
  static constexpr size_t kPlansKept = 512;  // Shapes of a model, for a few batch sizes.

  absl::Status Product(const StridedShape& shape, TypedPointer left, const void* right,
                       const float* bias, bool fuses_bias, TypedPointer output, StreamRef stream) {
    const Key key{.shape = shape,
                  .factors = left.dtype,
                  .output = output.dtype,
                  .has_bias = fuses_bias,
                  .alignment = {AlignmentOf(left.data), AlignmentOf(right),
                                std::min(AlignmentOf(output.data),
                                         AlignmentOf(fuses_bias ? bias : nullptr))}};
    const absl::StatusOr<Plan*> found = PlanFor(key);
    if (!found.ok()) return Annotate(found.status(), Describe(shape, left.dtype, output.dtype));
    Plan& plan = **found;
    if (fuses_bias) EK_RETURN_IF_ERROR(Set(plan.product, CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias));
    const float one = 1, beta = shape.add ? 1 : 0;
    EK_RETURN_IF_ERROR(EK_LT(Matmul, handle_, plan.product, &one, right, plan.a, left.data, plan.b,
                             &beta, output.data, plan.d, output.data, plan.d, &plan.algorithm,
                             workspace_.data.get(), workspace_.bytes,
                             static_cast<cudaStream_t>(stream.handle)));
    return bias == nullptr || fuses_bias ? absl::OkStatus() : AddBias(shape, bias, output, stream);
  }

  absl::StatusOr<Plan*> PlanFor(const Key& key) {
    for (const auto& plan : plans_) {
      if (plan->key != key) continue;
      plan->used = ++uses_;
      return plan.get();
    }
    EK_ASSIGN_OR_RETURN(std::unique_ptr<Plan> plan, MakePlan(key));
    plan->used = ++uses_;
    if (plans_.size() == kPlansKept) {
      plans_.erase(std::ranges::min_element(plans_, {}, [](const auto& old) { return old->used; }));
    }
    return plans_.emplace_back(std::move(plan)).get();
  }

  absl::StatusOr<std::unique_ptr<Plan>> MakePlan(const Key& key) {
    const StridedShape& s = key.shape;
    auto plan = std::make_unique<Plan>();
    plan->key = key;
    const Layout a = LayoutOf(s.right, s.inner, s.columns);
    const Layout b = LayoutOf(s.left, s.rows, s.inner);
    const Layout d{false, s.columns, s.rows, std::max(s.output.row, s.columns)};
    EK_RETURN_IF_ERROR(EK_LT(MatmulDescCreate, &plan->product, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    EK_RETURN_IF_ERROR(Set(plan->product, CUBLASLT_MATMUL_DESC_TRANSA,
                           a.is_transposed ? CUBLAS_OP_T : CUBLAS_OP_N));
    EK_RETURN_IF_ERROR(Set(plan->product, CUBLASLT_MATMUL_DESC_TRANSB,
                           b.is_transposed ? CUBLAS_OP_T : CUBLAS_OP_N));
    if (key.has_bias) {
      EK_RETURN_IF_ERROR(Set(plan->product, CUBLASLT_MATMUL_DESC_EPILOGUE, CUBLASLT_EPILOGUE_BIAS));
      EK_RETURN_IF_ERROR(Set(plan->product, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE,
                             static_cast<int32_t>(CUDA_R_32F)));
    }
    EK_RETURN_IF_ERROR(MakeLayout(a, key.factors, s, s.right, plan->a));
    EK_RETURN_IF_ERROR(MakeLayout(b, key.factors, s, s.left, plan->b));
    EK_RETURN_IF_ERROR(MakeLayout(d, key.output, s, s.output, plan->d));
    EK_RETURN_IF_ERROR(ChooseAlgorithm(*plan));
    return plan;
  }

  absl::Status ChooseAlgorithm(Plan& plan) {
    cublasLtMatmulPreference_t preference = nullptr;
    EK_RETURN_IF_ERROR(EK_LT(MatmulPreferenceCreate, &preference));
    cublasLtMatmulHeuristicResult_t best = {};
    int count = 0;
    const absl::Status status = [&]() -> absl::Status {
      const auto& [left, right, output] = plan.key.alignment;
      EK_RETURN_IF_ERROR(Set(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                             static_cast<uint64_t>(workspace_.bytes)));
      EK_RETURN_IF_ERROR(Set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, right));
      EK_RETURN_IF_ERROR(Set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, left));
      EK_RETURN_IF_ERROR(Set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, output));
      EK_RETURN_IF_ERROR(Set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, output));
      return EK_LT(MatmulAlgoGetHeuristic, handle_, plan.product, plan.a, plan.b, plan.d, plan.d,
                   preference, /*requestedAlgoCount=*/1, &best, &count);
    }();
    Lt().cublasLtMatmulPreferenceDestroy(preference);
    EK_RETURN_IF_ERROR(status);
    if (count == 0) return absl::UnimplementedError("cuBLASLt has no algorithm");
    plan.algorithm = best.algo;
    return absl::OkStatus();
  }

  absl::Status AddBias(const StridedShape& shape, const float* bias, TypedPointer output,
                       StreamRef stream) {
    const int64_t stride = BatchStride(shape, shape.output) * SizeOf(output.dtype);
    for (int64_t i = 0; i < shape.outer * shape.heads; ++i) {
      void* const data = static_cast<char*>(output.data) + i * stride;
      EK_RETURN_IF_ERROR(Launch(runtime_, kAddBias, ShapeFor(shape.rows * shape.columns), stream,
                                data, output.dtype, shape.rows, shape.columns, shape.output.row,
                                bias));
    }
    return absl::OkStatus();
  }

  DeviceRuntime& runtime_;
  const Device device_;
  const cublasLtHandle_t handle_;
  const Memory workspace_;  // For the one stream of a place.
  std::vector<std::unique_ptr<Plan>> plans_;
  uint64_t uses_ = 0;
};

}  // namespace

absl::Status LoadCublas() { return Loaded().status(); }

absl::StatusOr<std::unique_ptr<ProductLibrary>> MakeCudaProducts(DeviceRuntime& runtime,
                                                                 Device device) {
  EK_RETURN_IF_ERROR(LoadCublas());
  EK_ASSIGN_OR_RETURN(Memory workspace, runtime.Allocate(device, kWorkspaceBytes));
  const ScopedCudaDevice scope(device);
  EK_RETURN_IF_ERROR(scope.status());
  cublasLtHandle_t handle = nullptr;
  EK_RETURN_IF_ERROR(EK_LT(Create, &handle));
  return std::make_unique<CublasProducts>(runtime, device, handle, std::move(workspace));
}

}  // namespace evenkeel::internal
