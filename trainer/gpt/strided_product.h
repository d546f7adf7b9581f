// Products of many matrices at once, each seen through strides: parts of wider matrices, transposed
// or not.
//
//   StridedProducts<float> products;
//   const StridedShape shape{.rows = 1024, .columns = 384, .inner = 128,
//                            .left = {.row = 128}, .right = {.row = 384}, .output = {.row = 384}};
//   EK_RETURN_IF_ERROR(products.Run(shape, input, weight, bias, output));
//
// output = left * right, plus `bias` if it is not null, plus what lies there if `add`. float and
// BFloat16 run on oneDNN, whose kernels are generated at the first product of a shape and kept for
// the next. Where oneDNN has no kernel for BFloat16 on this processor, the factors are widened and
// multiplied as floats. double runs on plain loops.
//
// Shapes:    left [outer, heads, rows, inner], right [outer, heads, inner, columns], bias
//            [columns], shared by all; output [outer, heads, rows, columns]. Element (o, h, r, c)
//            lies at o * outer + h * head + r * row + c * column of its strides. Nothing is empty;
//            `row` or `column` is 1; an output's elements don't overlap.
// Precision: sums are float for BFloat16, else as the operand; an output in BFloat16 is rounded
//            once.
// Threads:   thread-compatible. The output must not overlap the factors.
// Errors:    the errors of oneDNN.

#ifndef EVENKEEL_TRAINER_GPT_STRIDED_PRODUCT_H_
#define EVENKEEL_TRAINER_GPT_STRIDED_PRODUCT_H_

#include <memory>
#include <type_traits>
#include <vector>

#include "absl/status/status.h"
#include "evenkeel/comm/types.h"
#include "evenkeel/trainer/layers/onednn.h"
#include "evenkeel/trainer/layers/strided_shape.h"

namespace evenkeel {

// Operand: float, BFloat16, double.
template <typename Operand>
class StridedProducts {
 public:
  // The type of sums.
  using Sum = std::conditional_t<std::is_same_v<Operand, double>, double, float>;

  // Result: the operand's type, or float.
  template <typename Result>
  absl::Status Run(const StridedShape& shape, const Operand* left, const Operand* right,
                   const Sum* bias, Result* output);

 private:
  struct Plan {
    StridedShape shape;
    dnnl::memory::data_type result;
    bool has_bias;
    bool is_possible = true;
    dnnl::matmul primitive;
    dnnl::memory left, right, bias, output;
  };

  // Null: oneDNN has no kernel for it.
  template <typename Result>
  Plan* PlanFor(const StridedShape& shape, bool has_bias);  // Throws dnnl::error.

  template <typename Result>
  absl::Status RunWidened(const StridedShape& shape, const BFloat16* left, const BFloat16* right,
                          const float* bias, Result* output);

  OneDnn dnn_;
  SharedScratch scratch_;
  std::vector<std::unique_ptr<Plan>> plans_;  // The most recently made last.
  std::vector<Sum> row_;                      // For the plain loops.
  // Products of widened factors; null: not needed so far.
  std::unique_ptr<StridedProducts<float>> floats_;
  std::vector<float> left_, right_, output_;
};

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_GPT_STRIDED_PRODUCT_H_
