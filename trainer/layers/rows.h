// Sums over rows, and operations element by element.
//
//   // to[c] = sum over r of matrix[r, c]
//   SumRows(rows, columns, matrix, {.data = diff_bias, .add = false});
//   ReluBackward<float>(hidden, diff);  // diff = 0 where hidden is 0
//   Add<float>(left, right, sum);
//
// Threads: pure functions.

#ifndef EVENKEEL_TRAINER_LAYERS_ROWS_H_
#define EVENKEEL_TRAINER_LAYERS_ROWS_H_

#include <cstdint>
#include <span>

#include "evenkeel/trainer/layers/grad_target.h"

namespace evenkeel {

// O is T or, for float, BFloat16; T is float or double.
template <typename T, typename O>
void SumRows(int64_t rows, int64_t columns, const O* matrix, GradTarget<T> to);

// Turns `diff` from the gradient of `output` = max(input, 0) into that of the input.
template <typename T>
void ReluBackward(std::span<const T> output, std::span<T> diff);

// Adds two arrays of one size; `sum` may be the memory of `left` or of `right`.
template <typename T>
void Add(std::span<const T> left, std::span<const T> right, std::span<T> sum);

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_LAYERS_ROWS_H_
