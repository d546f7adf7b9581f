// The Gaussian error linear unit in the form of GPT-2: x / 2 * (1 + tanh(sqrt(2 / pi) * (x +
// 0.044715 x^3))).
//
//   GeluForward(n, input, output);
//   // the derivative at `input`, times diff_output
//   GeluBackward(n, input, diff_output, diff_input);
//
// Precision: T is float or double; O, what the next matrix product takes, is T or, for float,
//            BFloat16. float: within 4e-7 of the largest magnitude around.
// Threads:   pure functions. diff_input may be the memory of diff_output.
// Source:    Hendrycks, Gimpel, "Gaussian error linear units", 2016.

#ifndef EVENKEEL_TRAINER_GPT_GELU_H_
#define EVENKEEL_TRAINER_GPT_GELU_H_

#include <cstdint>

namespace evenkeel {

template <typename T, typename O>
void GeluForward(int64_t n, const T* input, O* output);

template <typename T, typename O>
void GeluBackward(int64_t n, const T* input, const T* diff_output, O* diff_input);

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_GPT_GELU_H_
