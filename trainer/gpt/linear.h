// A fully connected layer whose weight lies as [inputs, outputs]: output = input * weight + bias.
//
//   const LinearShape shape{.rows = 1024, .inputs = 128, .outputs = 384};
//   EK_RETURN_IF_ERROR(LinearForward(products, shape, input, weight, bias, output));
//   EK_RETURN_IF_ERROR(LinearBackwardInput(products, shape, weight, diff_output, diff_input));
//   EK_RETURN_IF_ERROR(LinearBackwardWeight(products, shape, input, diff_output, weight_target));
//   SumRows(rows, outputs, diff_output, bias_target);                          // rows.h
//
// Shapes:  input [rows, inputs], weight [inputs, outputs], bias [outputs] or null, output [rows,
//          outputs].
// Types:   O is what products take, Result and T what they give (strided_product.h).
// Threads: thread-compatible by `products`; memory of different arguments must not overlap.
// Errors:  those of StridedProducts.

#ifndef EVENKEEL_TRAINER_GPT_LINEAR_H_
#define EVENKEEL_TRAINER_GPT_LINEAR_H_

#include <cstdint>

#include "absl/status/status.h"
#include "evenkeel/trainer/gpt/strided_product.h"
#include "evenkeel/trainer/layers/gradient_sink.h"
#include "evenkeel/trainer/layers/strided_shape.h"

namespace evenkeel {

template <typename O, typename Result>
absl::Status LinearForward(StridedProducts<O>& products, const LinearShape& shape, const O* input,
                           const O* weight, const typename StridedProducts<O>::Sum* bias,
                           Result* output) {
  return products.Run(shape.Forward(), input, weight, bias, output);
}

template <typename O, typename Result>
absl::Status LinearBackwardInput(StridedProducts<O>& products, const LinearShape& shape,
                                 const O* weight, const O* diff_output, Result* diff_input) {
  return products.Run(shape.BackwardInput(), diff_output, weight, nullptr, diff_input);
}

template <typename O, typename T>
absl::Status LinearBackwardWeight(StridedProducts<O>& products, const LinearShape& shape,
                                  const O* input, const O* diff_output, GradTarget<T> weight) {
  return products.Run(shape.BackwardWeight(weight.add), input, diff_output, nullptr, weight.data);
}

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_GPT_LINEAR_H_
