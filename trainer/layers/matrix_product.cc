#include "evenkeel/trainer/layers/matrix_product.h"

#include <algorithm>
#include <cstddef>
#include <utility>

namespace evenkeel {
namespace {

using Desc = dnnl::memory::desc;
using Tag = dnnl::memory::format_tag;

constexpr auto kFloat = dnnl::memory::data_type::f32;
// A perceptron of some layers in both modes, with its usual batch and the last of an epoch.
constexpr size_t kPlansKept = 64;

Desc FactorDesc(int64_t rows, int64_t columns, Transposed transposed) {
  return Desc({rows, columns}, kFloat, transposed == Transposed::kYes ? Tag::ba : Tag::ab);
}

bool HasBias(Epilogue then) { return then == Epilogue::kBias || then == Epilogue::kBiasAndRelu; }

dnnl::primitive_attr AttributeOf(Epilogue then) {
  dnnl::post_ops ops;
  if (then == Epilogue::kBiasAndRelu) AppendRelu(ops);
  dnnl::primitive_attr attribute;
  attribute.set_post_ops(ops);
  return attribute;
}

// The products of backward passes, whose right factor lies as it is used: matmul is no faster
// there, and for powers of two slower (a weight of 1024 x 1024 at batch 64: 1.6 ms, by BLAS 1.26).
// Where the right factor is transposed it is the other way round (1.5 and 1.9 ms).
absl::Status RunByBlas(const ProductShape& shape, const float* left, const float* right,
                       float* output) {
  const auto letter = [](Transposed transposed) {
    return transposed == Transposed::kYes ? 'T' : 'N';
  };
  return StatusFromOneDnnCode(
      "matrix product",
      dnnl_sgemm(letter(shape.left), letter(shape.right), shape.rows, shape.columns, shape.inner,
                 1.0f, left, shape.left == Transposed::kYes ? shape.rows : shape.inner, right,
                 shape.right == Transposed::kYes ? shape.inner : shape.columns,
                 shape.then == Epilogue::kAdd ? 1.0f : 0.0f, output, shape.columns));
}

}  // namespace

const MatrixProducts<float>::Plan& MatrixProducts<float>::PlanFor(const ProductShape& shape) {
  auto found = std::ranges::find(plans_, shape, &Plan::shape);
  if (found == plans_.end()) {
    Plan plan{.shape = shape,
              .left = FactorDesc(shape.rows, shape.inner, shape.left),
              .right = FactorDesc(shape.inner, shape.columns, shape.right),
              .bias = Desc({1, shape.columns}, kFloat, Tag::ab),
              .output = Desc({shape.rows, shape.columns}, kFloat, Tag::ab)};
    const auto desc = ForwardPlan<dnnl::matmul>(dnn_, SharedScratch::In(AttributeOf(shape.then)),
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

absl::Status MatrixProducts<float>::Run(const ProductShape& shape, const float* left,
                                        const float* right, const float* bias, float* output) {
  if (!HasBias(shape.then)) return RunByBlas(shape, left, right, output);
  return StatusFromOneDnn("matrix product", [&] {
    const Plan& plan = PlanFor(shape);
    plan.primitive.execute(dnn_.stream, {{DNNL_ARG_SRC, dnn_.Wrap(plan.left, left)},
                                         {DNNL_ARG_WEIGHTS, dnn_.Wrap(plan.right, right)},
                                         {DNNL_ARG_BIAS, dnn_.Wrap(plan.bias, bias)},
                                         {DNNL_ARG_DST, dnn_.Wrap(plan.output, output)},
                                         {DNNL_ARG_SCRATCHPAD, scratch_.memory()}});
    return absl::OkStatus();
  });
}

absl::Status MatrixProducts<double>::Run(const ProductShape& shape, const double* left,
                                         const double* right, const double* bias, double* output) {
  const auto at = [](const double* data, Transposed transposed, int64_t rows, int64_t columns,
                     int64_t row, int64_t column) {
    return transposed == Transposed::kYes ? data[column * rows + row]
                                          : data[row * columns + column];
  };
  for (int64_t row = 0; row < shape.rows; ++row) {
    for (int64_t column = 0; column < shape.columns; ++column) {
      double& to = output[row * shape.columns + column];
      double sum = 0;
      for (int64_t i = 0; i < shape.inner; ++i) {
        sum += at(left, shape.left, shape.rows, shape.inner, row, i) *
               at(right, shape.right, shape.inner, shape.columns, i, column);
      }
      if (HasBias(shape.then)) sum += bias[column];
      if (shape.then == Epilogue::kAdd) sum += to;
      to = shape.then == Epilogue::kBiasAndRelu ? std::max(sum, 0.0) : sum;
    }
  }
  return absl::OkStatus();
}

}  // namespace evenkeel
