// Sums over rows.
//
//   // to[c] = sum over r of matrix[r, c]
//   SumRows(rows, columns, matrix, {.data = diff_bias, .add = false});
//
// Threads: pure functions.

#ifndef EVENKEEL_TRAINER_GPT_ROWS_H_
#define EVENKEEL_TRAINER_GPT_ROWS_H_

#include <cstdint>

#include "evenkeel/trainer/layers/gradient_sink.h"

namespace evenkeel {

// O is T or, for float, BFloat16; T is float or double.
template <typename T, typename O>
void SumRows(int64_t rows, int64_t columns, const O* matrix, GradTarget<T> to);

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_GPT_ROWS_H_
