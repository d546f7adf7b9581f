// A fully connected layer: output = activation(input * weight^T + bias).
//
//   MatrixProducts<float> products;
//   const DenseShape shape{.batch = 64, .inputs = 784, .outputs = 10};
//   EK_RETURN_IF_ERROR(DenseForward<float>(products, shape, Activation::kNone, input, weight, bias,
//                                          output));
//   SumRows(shape.batch, shape.outputs, diff_output, bias_target);  // rows.h
//   EK_RETURN_IF_ERROR(DenseBackwardWeight<float>(products, shape, input, diff_output,
//                                                 weight_target));
//   EK_RETURN_IF_ERROR(DenseBackwardInput<float>(products, shape, weight, diff_output,
//                                                diff_input));
//
// The backward functions take the gradient of the activation's input: see ReluBackward (rows.h).
//
// Shapes:  row-major; input [batch, inputs], weight [outputs, inputs], bias [outputs], output
//          [batch, outputs].
// Threads: thread-compatible by `products`; memory of different calls must not overlap.
// Errors:  those of MatrixProducts.

#ifndef EVENKEEL_TRAINER_LAYERS_DENSE_H_
#define EVENKEEL_TRAINER_LAYERS_DENSE_H_

#include <cstdint>

#include "absl/status/status.h"
#include "evenkeel/trainer/layers/gradient_sink.h"
#include "evenkeel/trainer/layers/matrix_product.h"

namespace evenkeel {

struct DenseShape {
  int64_t batch = 0;
  int64_t inputs = 0;
  int64_t outputs = 0;
};

enum class Activation { kNone, kRelu };

// T is float or double in all functions.
template <typename T>
absl::Status DenseForward(MatrixProducts<T>& products, const DenseShape& shape,
                          Activation activation, const T* input, const T* weight, const T* bias,
                          T* output) {
  return products.Run(
      {.rows = shape.batch,
       .columns = shape.outputs,
       .inner = shape.inputs,
       .right = Transposed::kYes,
       .then = activation == Activation::kRelu ? Epilogue::kBiasAndRelu : Epilogue::kBias},
      input, weight, bias, output);
}

template <typename T>
absl::Status DenseBackwardWeight(MatrixProducts<T>& products, const DenseShape& shape,
                                 const T* input, const T* diff_output, GradTarget<T> weight) {
  return products.Run({.rows = shape.outputs,
                       .columns = shape.inputs,
                       .inner = shape.batch,
                       .left = Transposed::kYes,
                       .then = weight.add ? Epilogue::kAdd : Epilogue::kNone},
                      diff_output, input, nullptr, weight.data);
}

template <typename T>
absl::Status DenseBackwardInput(MatrixProducts<T>& products, const DenseShape& shape,
                                const T* weight, const T* diff_output, T* diff_input) {
  return products.Run({.rows = shape.batch, .columns = shape.inputs, .inner = shape.outputs},
                      diff_output, weight, nullptr, diff_input);
}

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_LAYERS_DENSE_H_
