// Products of matrices for fully connected layers, with the next operation applied while the result
// is still in registers.
//
//   MatrixProducts<float> products;
//   // A layer of weight [outputs, inputs]: output = max(0, input * weight^T + bias), and its
//   // gradients, where diff_output is that of the rectifier's input (ReluBackward, rows.h).
//   const LinearShape shape = LinearShape::FromOutputs(batch, inputs, outputs);
//   EK_RETURN_IF_ERROR(products.Run(shape.BackwardInput(), input, weight, bias, output,
//                                   Activation::kRelu));
//   EK_RETURN_IF_ERROR(products.Run(shape.BackwardWeight(target.add), diff_output, input, nullptr,
//                                   target.data));
//   EK_RETURN_IF_ERROR(products.Run(shape.Forward(), diff_output, weight, nullptr, diff_input));
//
// float32 runs on oneDNN: with a bias on matmul, whose kernels are generated at the first product
// of a shape and kept for the next, else on its BLAS. float64, which oneDNN lacks, runs on plain
// loops and serves to check float32.
//
// Shapes:  those of strided_shape.h, for one product, without gaps; no dimension is 0. `bias` may
//          be null, and must be with `add`.
// Threads: thread-compatible. The arrays of a call must not overlap.
// Errors:  those of oneDNN.

#ifndef EVENKEEL_TRAINER_LAYERS_MATRIX_PRODUCT_H_
#define EVENKEEL_TRAINER_LAYERS_MATRIX_PRODUCT_H_

#include <vector>

#include "absl/status/status.h"
#include "evenkeel/trainer/layers/onednn.h"
#include "evenkeel/trainer/layers/strided_shape.h"

namespace evenkeel {

enum class Activation { kNone, kRelu };  // kRelu (with a bias only) sets negatives to 0.

template <typename T>
class MatrixProducts;  // float, double

template <>
class MatrixProducts<float> {
 public:
  absl::Status Run(const StridedShape& shape, const float* left, const float* right,
                   const float* bias, float* output, Activation then = Activation::kNone);

 private:
  struct Plan {
    StridedShape shape;
    Activation then;
    dnnl::memory::desc left, right, bias, output;
    dnnl::matmul primitive;
  };

  const Plan& PlanFor(const StridedShape& shape, Activation then);  // Throws dnnl::error.

  OneDnn dnn_;
  SharedScratch scratch_;
  std::vector<Plan> plans_;  // The most recently used first.
};

template <>
class MatrixProducts<double> {
 public:
  absl::Status Run(const StridedShape& shape, const double* left, const double* right,
                   const double* bias, double* output, Activation then = Activation::kNone);
};

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_LAYERS_MATRIX_PRODUCT_H_
