#include "evenkeel/trainer/layers/matrix_product.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>

namespace evenkeel {
namespace {

using Desc = dnnl::memory::desc;
using Dims = dnnl::memory::dims;

constexpr auto kFloat = dnnl::memory::data_type::f32;
// A perceptron of some layers in both modes, with its usual batch and the last of an epoch.
constexpr size_t kPlansKept = 64;

Desc DescOf(int64_t rows, int64_t columns, const MatrixStrides& strides) {
  return Desc(Dims{rows, columns}, kFloat, Dims{strides.row, strides.column});
}

dnnl::primitive_attr AttributeOf(Activation then) {
  dnnl::post_ops ops;
  if (then == Activation::kRelu) AppendRelu(ops);
  dnnl::primitive_attr attribute;
  attribute.set_post_ops(ops);
  return attribute;
}

// The products of backward passes, whose right factor lies as it is used: matmul is no faster
// there, and for powers of two slower (a weight of 1024 x 1024 at batch 64: 1.6 ms, by BLAS 1.26).
// Where the right factor is transposed it is the other way round (1.5 and 1.9 ms).
absl::Status RunByBlas(const StridedShape& shape, const float* left, const float* right,
                       float* output) {
  // Where both strides are 1, a line has one element, and either way reads the same.
  const bool turns_left = shape.left.row == 1, turns_right = shape.right.column != 1;
  const int64_t left_line =
      turns_left ? std::max(shape.left.column, shape.rows) : std::max(shape.left.row, shape.inner);
  const int64_t right_line =
      turns_right ? shape.right.column : std::max(shape.right.row, shape.columns);
  return StatusFromOneDnnCode(
      "matrix product", dnnl_sgemm(turns_left ? 'T' : 'N', turns_right ? 'T' : 'N', shape.rows,
                                   shape.columns, shape.inner, 1.0f, left, left_line, right,
                                   right_line, shape.add ? 1.0f : 0.0f, output, shape.output.row));
}

}  // namespace

const MatrixProducts<float>::Plan& MatrixProducts<float>::PlanFor(const StridedShape& shape,
                                                                  Activation then) {
  auto found = std::ranges::find_if(
      plans_, [&](const Plan& plan) { return plan.shape == shape && plan.then == then; });
  if (found == plans_.end()) {
    Plan plan{.shape = shape,
              .then = then,
              .left = DescOf(shape.rows, shape.inner, shape.left),
              .right = DescOf(shape.inner, shape.columns, shape.right),
              .bias = DescOf(1, shape.columns, {.row = shape.columns}),
              .output = DescOf(shape.rows, shape.columns, shape.output)};
    const auto desc = ForwardPlan<dnnl::matmul>(dnn_, SharedScratch::In(AttributeOf(then)),
                                                plan.left, plan.right, plan.bias, plan.output);
    scratch_.Grow(dnn_, desc);
    plan.primitive = dnnl::matmul(desc);
    if (plans_.size() == kPlansKept) plans_.pop_back();
    plans_.push_back(std::move(plan));
    found = plans_.end() - 1;
  }
  std::rotate(plans_.begin(), found, found + 1);
  return plans_.front();
}

absl::Status MatrixProducts<float>::Run(const StridedShape& shape, const float* left,
                                        const float* right, const float* bias, float* output,
                                        Activation then) {
  if (bias == nullptr) return RunByBlas(shape, left, right, output);
  return StatusFromOneDnn("matrix product", [&] {
    const Plan& plan = PlanFor(shape, then);
    plan.primitive.execute(dnn_.stream, {{DNNL_ARG_SRC, dnn_.Wrap(plan.left, left)},
                                         {DNNL_ARG_WEIGHTS, dnn_.Wrap(plan.right, right)},
                                         {DNNL_ARG_BIAS, dnn_.Wrap(plan.bias, bias)},
                                         {DNNL_ARG_DST, dnn_.Wrap(plan.output, output)},
                                         {DNNL_ARG_SCRATCHPAD, scratch_.memory()}});
    return absl::OkStatus();
  });
}

absl::Status MatrixProducts<double>::Run(const StridedShape& shape, const double* left,
                                         const double* right, const double* bias, double* output,
                                         Activation then) {
  const auto at = [](const MatrixStrides& strides, int64_t row, int64_t column) {
    return row * strides.row + column * strides.column;
  };
  for (int64_t row = 0; row < shape.rows; ++row) {
    for (int64_t column = 0; column < shape.columns; ++column) {
      double& to = output[at(shape.output, row, column)];
      double sum = 0;
      for (int64_t i = 0; i < shape.inner; ++i)
        sum += left[at(shape.left, row, i)] * right[at(shape.right, i, column)];
      if (bias != nullptr) sum += bias[column];
      if (shape.add) sum += to;
      to = then == Activation::kRelu ? std::max(sum, 0.0) : sum;
    }
  }
  return absl::OkStatus();
}

}  // namespace evenkeel
