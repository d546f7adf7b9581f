// Layer norm: each row less its mean, divided by its standard deviation, times `weight`, plus
//             `bias`.
//
//   LayerNormForward(rows, width, input, weight, bias, output, {mean, inverse_deviation});
//   LayerNormBackward(rows, width, input, {mean, inverse_deviation}, weight, diff_output,
//                     diff_weight, diff_bias, diff_input);
//
// Shapes:    input, output, diff_output, diff_input [rows, width]; weight, bias and their gradients
//            [width]; mean and inverse deviation [rows].
// Gradients: those of weight and bias overwrite; that of the input is *added* to diff_input, where
//            the gradient of the path around the layer lies already. Null: not wanted.
// Precision: the variance is that of the elements less their mean, plus 1e-5. O is T or, for float,
//            BFloat16.
// Threads:   pure functions.
// Source:    Ba, Kiros, Hinton, "Layer normalization", 2016.

#ifndef EVENKEEL_TRAINER_GPT_LAYER_NORM_H_
#define EVENKEEL_TRAINER_GPT_LAYER_NORM_H_

#include <cstdint>

namespace evenkeel {

inline constexpr double kLayerNormEpsilon = 1e-5;

template <typename T>
struct RowStatistics {
  T* mean = nullptr;
  T* inverse_deviation = nullptr;
};

template <typename T, typename O>
void LayerNormForward(int64_t rows, int64_t width, const T* input, const T* weight, const T* bias,
                      O* output, RowStatistics<T> statistics);

template <typename T>
void LayerNormBackward(int64_t rows, int64_t width, const T* input, RowStatistics<T> statistics,
                       const T* weight, const T* diff_output, T* diff_weight, T* diff_bias,
                       T* diff_input);

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_GPT_LAYER_NORM_H_
