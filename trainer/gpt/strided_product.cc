#include "evenkeel/trainer/gpt/strided_product.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <utility>

#include "absl/types/span.h"
#include "evenkeel/comm/arith/convert.h"
#include "evenkeel/comm/status.h"

namespace evenkeel {
namespace {

using Desc = dnnl::memory::desc;
using Dims = dnnl::memory::dims;
using Type = dnnl::memory::data_type;

// A model's products in both modes, with its usual batch and the last of an epoch.
constexpr size_t kPlansKept = 256;

template <typename T>
constexpr Type kTypeOf = std::is_same_v<T, BFloat16> ? Type::bf16 : Type::f32;

// Two dimensions for a single product: oneDNN has its fastest kernels for that.
Desc DescOf(const StridedShape& shape, Type type, int64_t rows, int64_t columns,
            const MatrixStrides& strides) {
  if (shape.outer * shape.heads == 1)
    return Desc(Dims{rows, columns}, type, Dims{strides.row, strides.column});
  return Desc(Dims{shape.outer, shape.heads, rows, columns}, type,
              Dims{strides.outer, strides.head, strides.row, strides.column});
}

Desc BiasDesc(const StridedShape& shape) {
  if (shape.outer * shape.heads == 1)
    return Desc(Dims{1, shape.columns}, Type::f32, Dims{shape.columns, 1});
  const int64_t n = shape.columns;
  return Desc(Dims{1, 1, 1, n}, Type::f32, Dims{n, n, n, 1});
}

template <typename T>
T* At(T* data, const MatrixStrides& strides, int64_t outer, int64_t head) {
  return data + outer * strides.outer + head * strides.head;
}

// One of the products, row by row; `sums` has room for a row.
void PlainProduct(const StridedShape& shape, const double* left, const double* right,
                  const double* bias, double* output, double* sums) {
  for (int64_t r = 0; r < shape.rows; ++r) {
    double* to = output + r * shape.output.row;
    for (int64_t c = 0; c < shape.columns; ++c)
      sums[c] = (bias == nullptr ? 0 : bias[c]) + (shape.add ? to[c * shape.output.column] : 0);
    for (int64_t i = 0; i < shape.inner; ++i) {
      const double factor = left[r * shape.left.row + i * shape.left.column];
      const double* from = right + i * shape.right.row;
      for (int64_t c = 0; c < shape.columns; ++c) sums[c] += factor * from[c * shape.right.column];
    }
    for (int64_t c = 0; c < shape.columns; ++c) to[c * shape.output.column] = sums[c];
  }
}

// The lines of a matrix, rows or columns, whose elements lie side by side.
struct Lines {
  Lines(int64_t rows, int64_t columns, const MatrixStrides& strides)
      : by_rows(strides.column == 1),
        count(by_rows ? rows : columns),
        length(by_rows ? columns : rows),
        stride(by_rows ? strides.row : strides.column) {}

  bool by_rows;
  int64_t count, length, stride;
};

template <typename From, typename To>
void ConvertLine(int64_t n, const From* from, To* to) {
  ConvertFloats(TensorView(absl::MakeSpan(const_cast<From*>(from), n)),
                TensorView(absl::MakeSpan(to, n)));
}

// Returns the strides of the matrix if its lines follow each other without gaps.
MatrixStrides PackedStrides(int64_t rows, int64_t columns, const MatrixStrides& strides) {
  const Lines lines(rows, columns, strides);
  return {.row = lines.by_rows ? lines.length : 1, .column = lines.by_rows ? 1 : lines.length};
}

// Widens a matrix into `to`, line after line without gaps, and returns its strides there.
MatrixStrides WidenMatrix(int64_t rows, int64_t columns, const MatrixStrides& strides,
                          const BFloat16* from, std::vector<float>& to) {
  const Lines lines(rows, columns, strides);
  to.resize(std::max<size_t>(to.size(), rows * columns));
  for (int64_t i = 0; i < lines.count; ++i)
    ConvertLine(lines.length, from + i * lines.stride, to.data() + i * lines.length);
  return PackedStrides(rows, columns, strides);
}

// Rounds the lines of a matrix without gaps into one of these strides.
void NarrowMatrix(int64_t rows, int64_t columns, const float* from, const MatrixStrides& strides,
                  BFloat16* to) {
  const Lines lines(rows, columns, strides);
  for (int64_t i = 0; i < lines.count; ++i)
    ConvertLine(lines.length, from + i * lines.length, to + i * lines.stride);
}

}  // namespace

template <typename Operand>
template <typename Result>
auto StridedProducts<Operand>::PlanFor(const StridedShape& shape, bool has_bias) -> Plan* {
  constexpr Type kResult = kTypeOf<Result>;
  const auto found = std::ranges::find_if(plans_, [&](const std::unique_ptr<Plan>& plan) {
    return plan->shape == shape && plan->result == kResult && plan->has_bias == has_bias;
  });
  if (found != plans_.end()) return (*found)->is_possible ? found->get() : nullptr;

  const Desc left = DescOf(shape, kTypeOf<Operand>, shape.rows, shape.inner, shape.left);
  const Desc right = DescOf(shape, kTypeOf<Operand>, shape.inner, shape.columns, shape.right);
  const Desc output = DescOf(shape, kResult, shape.rows, shape.columns, shape.output);
  const Desc bias = BiasDesc(shape);
  dnnl::post_ops ops;
  if (shape.add) ops.append_sum(1.0f);
  dnnl::primitive_attr attribute;
  attribute.set_post_ops(ops);
  auto plan = std::make_unique<Plan>(Plan{.shape = shape, .result = kResult, .has_bias = has_bias});
  try {
    const dnnl::primitive_attr in = SharedScratch::In(attribute);
    const dnnl::matmul::primitive_desc desc =
        has_bias ? ForwardPlan<dnnl::matmul>(dnn_, in, left, right, bias, output)
                 : ForwardPlan<dnnl::matmul>(dnn_, in, left, right, output);
    scratch_.Grow(dnn_, desc);
    plan->primitive = dnnl::matmul(desc);
    plan->left = dnn_.Wrap(left, nullptr);
    plan->right = dnn_.Wrap(right, nullptr);
    plan->bias = dnn_.Wrap(bias, nullptr);
    plan->output = dnn_.Wrap(output, nullptr);
  } catch (const dnnl::error& error) {
    if (error.status != dnnl_unimplemented) throw;
    plan->is_possible = false;
  }
  if (plans_.size() == kPlansKept) plans_.erase(plans_.begin());
  plans_.push_back(std::move(plan));
  return plans_.back()->is_possible ? plans_.back().get() : nullptr;
}

template <typename Operand>
template <typename Result>
absl::Status StridedProducts<Operand>::Run(const StridedShape& shape, const Operand* left,
                                           const Operand* right, const Sum* bias, Result* output) {
  if constexpr (!std::is_same_v<Operand, double>) {
    bool is_done = false;
    const absl::Status status = StatusFromOneDnn("matrix product", [&] {
      Plan* plan = PlanFor<Result>(shape, bias != nullptr);
      if (plan == nullptr) return absl::OkStatus();
      is_done = true;
      plan->left.set_data_handle(const_cast<Operand*>(left));
      plan->right.set_data_handle(const_cast<Operand*>(right));
      plan->bias.set_data_handle(const_cast<Sum*>(bias));
      plan->output.set_data_handle(output);
      // The form that takes an array: a map for each product would be memory that is allocated and
      // freed again.
      const std::array<dnnl_exec_arg_t, 5> arguments = {
          {{DNNL_ARG_SRC, plan->left.get()},
           {DNNL_ARG_WEIGHTS, plan->right.get()},
           {DNNL_ARG_DST, plan->output.get()},
           {DNNL_ARG_SCRATCHPAD, scratch_.memory().get()},
           {DNNL_ARG_BIAS, plan->bias.get()}}};
      return StatusFromOneDnnCode(
          "matrix product", dnnl_primitive_execute(plan->primitive.get(), dnn_.stream.get(),
                                                   bias == nullptr ? 4 : 5, arguments.data()));
    });
    if (is_done || !status.ok()) return status;
  }
  if constexpr (std::is_same_v<Operand, BFloat16>) {
    return RunWidened(shape, left, right, bias, output);
  } else if constexpr (std::is_same_v<Operand, double>) {
    row_.resize(std::max<size_t>(row_.size(), shape.columns));
    for (int64_t outer = 0; outer < shape.outer; ++outer) {
      for (int64_t head = 0; head < shape.heads; ++head) {
        PlainProduct(shape, At(left, shape.left, outer, head), At(right, shape.right, outer, head),
                     bias, At(output, shape.output, outer, head), row_.data());
      }
    }
    return absl::OkStatus();
  }
  return absl::InternalError("oneDNN has no product of floats for this shape");
}

// Multiplies one matrix after another, so that the copies are small. A result in BFloat16 is
// rounded from its sum.
template <typename Operand>
template <typename Result>
absl::Status StridedProducts<Operand>::RunWidened(const StridedShape& shape, const BFloat16* left,
                                                  const BFloat16* right, const float* bias,
                                                  Result* output) {
  if (floats_ == nullptr) floats_ = std::make_unique<StridedProducts<float>>();
  StridedShape one = shape;
  one.outer = one.heads = 1;
  for (int64_t outer = 0; outer < shape.outer; ++outer) {
    for (int64_t head = 0; head < shape.heads; ++head) {
      one.left = WidenMatrix(shape.rows, shape.inner, shape.left, At(left, shape.left, outer, head),
                             left_);
      one.right = WidenMatrix(shape.inner, shape.columns, shape.right,
                              At(right, shape.right, outer, head), right_);
      Result* to = At(output, shape.output, outer, head);
      if constexpr (std::is_same_v<Result, float>) {
        one.output = {.row = shape.output.row, .column = shape.output.column};
        EK_RETURN_IF_ERROR(floats_->Run(one, left_.data(), right_.data(), bias, to));
      } else {
        if (shape.add) {
          one.output = WidenMatrix(shape.rows, shape.columns, shape.output, to, output_);
        } else {
          one.output = PackedStrides(shape.rows, shape.columns, shape.output);
          output_.resize(std::max<size_t>(output_.size(), shape.rows * shape.columns));
        }
        EK_RETURN_IF_ERROR(floats_->Run(one, left_.data(), right_.data(), bias, output_.data()));
        NarrowMatrix(shape.rows, shape.columns, output_.data(), shape.output, to);
      }
    }
  }
  return absl::OkStatus();
}

template class StridedProducts<float>;
template class StridedProducts<BFloat16>;
template class StridedProducts<double>;
template absl::Status StridedProducts<float>::Run(const StridedShape&, const float*, const float*,
                                                  const float*, float*);
template absl::Status StridedProducts<BFloat16>::Run(const StridedShape&, const BFloat16*,
                                                     const BFloat16*, const float*, float*);
template absl::Status StridedProducts<BFloat16>::Run(const StridedShape&, const BFloat16*,
                                                     const BFloat16*, const float*, BFloat16*);
template absl::Status StridedProducts<double>::Run(const StridedShape&, const double*,
                                                   const double*, const double*, double*);

}  // namespace evenkeel
