#include "evenkeel/trainer/layers/dense.h"

#include <algorithm>

#include "evenkeel/trainer/layers/onednn.h"

namespace evenkeel {
namespace {

enum class Transposed : bool { kNo, kYes };

// A row-major matrix as it lies in memory, and whether the product sees it transposed.
template <typename T>
struct Factor {
  const T* data;
  int64_t columns;  // In memory.
  Transposed transposed = Transposed::kNo;
};

// output [rows, columns] = left [rows, inner] * right [inner, columns], added to output if `add`.
absl::Status Multiply(int64_t rows, int64_t columns, int64_t inner, Factor<float> left, Factor<float> right, bool add,
                      float* output) {
  const auto letter = [](Transposed transposed) { return transposed == Transposed::kYes ? 'T' : 'N'; };
  return StatusFromOneDnnCode(
      "dense", dnnl_sgemm(letter(left.transposed), letter(right.transposed), rows, columns, inner, 1.0f, left.data,
                          left.columns, right.data, right.columns, add ? 1.0f : 0.0f, output, columns));
}

absl::Status Multiply(int64_t rows, int64_t columns, int64_t inner, Factor<double> left, Factor<double> right, bool add,
                      double* output) {
  const auto at = [](const Factor<double>& factor, int64_t row, int64_t column) {
    return factor.transposed == Transposed::kYes ? factor.data[column * factor.columns + row]
                                                 : factor.data[row * factor.columns + column];
  };
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t column = 0; column < columns; ++column) {
      double sum = 0;
      for (int64_t i = 0; i < inner; ++i) sum += at(left, row, i) * at(right, i, column);
      double& to = output[row * columns + column];
      to = add ? to + sum : sum;
    }
  }
  return absl::OkStatus();
}

}  // namespace

template <typename T>
absl::Status DenseForward(const DenseShape& shape, const T* input, const T* weight, const T* bias, T* output) {
  for (int64_t row = 0; row < shape.batch; ++row) std::copy_n(bias, shape.outputs, output + row * shape.outputs);
  return Multiply(shape.batch, shape.outputs, shape.inputs, Factor<T>{input, shape.inputs},
                  Factor<T>{weight, shape.inputs, Transposed::kYes}, /*add=*/true, output);
}

template <typename T>
void DenseBackwardBias(const DenseShape& shape, const T* diff_output, GradTarget<T> bias) {
  if (!bias.add) std::fill_n(bias.data, shape.outputs, T{0});
  for (int64_t row = 0; row < shape.batch; ++row) {
    for (int64_t i = 0; i < shape.outputs; ++i) bias.data[i] += diff_output[row * shape.outputs + i];
  }
}

template <typename T>
absl::Status DenseBackwardWeight(const DenseShape& shape, const T* input, const T* diff_output, GradTarget<T> weight) {
  return Multiply(shape.outputs, shape.inputs, shape.batch, Factor<T>{diff_output, shape.outputs, Transposed::kYes},
                  Factor<T>{input, shape.inputs}, weight.add, weight.data);
}

template <typename T>
absl::Status DenseBackwardInput(const DenseShape& shape, const T* weight, const T* diff_output, T* diff_input) {
  return Multiply(shape.batch, shape.inputs, shape.outputs, Factor<T>{diff_output, shape.outputs},
                  Factor<T>{weight, shape.inputs}, /*add=*/false, diff_input);
}

template absl::Status DenseForward(const DenseShape&, const float*, const float*, const float*, float*);
template absl::Status DenseForward(const DenseShape&, const double*, const double*, const double*, double*);
template void DenseBackwardBias(const DenseShape&, const float*, GradTarget<float>);
template void DenseBackwardBias(const DenseShape&, const double*, GradTarget<double>);
template absl::Status DenseBackwardWeight(const DenseShape&, const float*, const float*, GradTarget<float>);
template absl::Status DenseBackwardWeight(const DenseShape&, const double*, const double*, GradTarget<double>);
template absl::Status DenseBackwardInput(const DenseShape&, const float*, const float*, float*);
template absl::Status DenseBackwardInput(const DenseShape&, const double*, const double*, double*);

}  // namespace evenkeel
