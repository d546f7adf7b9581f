// Products of matrices, with the next operation applied while the result is still in registers.
//
//   MatrixProducts<float> products;
//   EK_RETURN_IF_ERROR(products.Run({
//   .rows = 64, .columns = 1024, .inner = 784, .right = Transposed::kYes,
//                                   .then = Epilogue::kBiasAndRelu}, input, weight, bias, output));
//
// float32 runs on oneDNN: with a bias on matmul, whose kernels are generated at the first product
// of a shape and kept for the next, else on its BLAS. float64, which oneDNN lacks, runs on plain
// loops and serves to check float32.
//
// Shapes:  row-major; output [rows, columns] = left [rows, inner] * right [inner, columns]. A
//          transposed factor lies in memory as [inner, rows] or [columns, inner]. Nothing is empty.
//          bias [columns], or null if the epilogue uses none.
// Threads: thread-compatible. The arrays of a call must not overlap.
// Errors:  the errors of oneDNN.

#ifndef EVENKEEL_TRAINER_LAYERS_MATRIX_PRODUCT_H_
#define EVENKEEL_TRAINER_LAYERS_MATRIX_PRODUCT_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "evenkeel/trainer/layers/onednn.h"

namespace evenkeel {

enum class Transposed : bool { kNo, kYes };

enum class Epilogue {
  kNone,         // The output is overwritten.
  kAdd,          // The product is added to it.
  kBias,         // The bias is added to each row.
  kBiasAndRelu,  // As kBias; then negative elements become 0.
};

struct ProductShape {
  int64_t rows = 0;
  int64_t columns = 0;
  int64_t inner = 0;
  Transposed left = Transposed::kNo;
  Transposed right = Transposed::kNo;
  Epilogue then = Epilogue::kNone;

  bool operator==(const ProductShape&) const = default;
};

template <typename T>
class MatrixProducts;  // float, double

template <>
class MatrixProducts<float> {
 public:
  absl::Status Run(const ProductShape& shape, const float* left, const float* right,
                   const float* bias, float* output);

 private:
  struct Plan {
    ProductShape shape;
    dnnl::memory::desc left, right, bias, output;
    dnnl::matmul primitive;
  };

  const Plan& PlanFor(const ProductShape& shape);  // Throws dnnl::error.

  OneDnn dnn_;
  SharedScratch scratch_;
  std::vector<Plan> plans_;  // The most recently used first.
};

template <>
class MatrixProducts<double> {
 public:
  absl::Status Run(const ProductShape& shape, const double* left, const double* right,
                   const double* bias, double* output);
};

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_LAYERS_MATRIX_PRODUCT_H_
