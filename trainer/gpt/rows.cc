#include "evenkeel/trainer/gpt/rows.h"

#include <algorithm>

#include "evenkeel/comm/types.h"
#include "evenkeel/trainer/gpt/vector_math.h"
#include "evenkeel/trainer/gpt/vectorised.h"

namespace evenkeel {
namespace {

// Four rows at a time: a quarter of the loads and stores of the sums.
struct SumRowsLoop {
  template <typename T, typename O>
  EK_ALWAYS_INLINE static void Run(int64_t rows, int64_t columns, const O* matrix, T* to) {
    int64_t row = 0;
    for (; row + 4 <= rows; row += 4) {
      const O* first = matrix + row * columns;
#pragma omp simd
      for (int64_t c = 0; c < columns; ++c) {
        to[c] += (Widen(first[c]) + Widen(first[c + columns])) +
                 (Widen(first[c + 2 * columns]) + Widen(first[c + 3 * columns]));
      }
    }
    for (; row < rows; ++row) {
#pragma omp simd
      for (int64_t c = 0; c < columns; ++c) to[c] += Widen(matrix[row * columns + c]);
    }
  }
};

}  // namespace

template <typename T, typename O>
void SumRows(int64_t rows, int64_t columns, const O* matrix, GradTarget<T> to) {
  if (!to.add) std::fill(to.data, to.data + columns, T{0});
  Vectorised<SumRowsLoop>(rows, columns, matrix, to.data);
}

template void SumRows(int64_t, int64_t, const float*, GradTarget<float>);
template void SumRows(int64_t, int64_t, const BFloat16*, GradTarget<float>);
template void SumRows(int64_t, int64_t, const double*, GradTarget<double>);

}  // namespace evenkeel
