#include "evenkeel/trainer/layers/rows.h"

#include <algorithm>

#include "evenkeel/comm/types.h"
#include "evenkeel/trainer/layers/vector_math.h"
#include "evenkeel/trainer/layers/vectorised.h"

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

// Without a branch for each element, which no processor could predict.
struct ReluBackwardLoop {
  template <typename T>
  EK_ALWAYS_INLINE static void Run(int64_t n, const T* output, T* diff) {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) {
      const T before = diff[i];
      diff[i] = output[i] > T{0} ? before : T{0};
    }
  }
};

struct AddLoop {
  template <typename T>
  EK_ALWAYS_INLINE static void Run(int64_t n, const T* left, const T* right, T* sum) {
#pragma omp simd
    for (int64_t i = 0; i < n; ++i) sum[i] = left[i] + right[i];
  }
};

}  // namespace

template <typename T, typename O>
void SumRows(int64_t rows, int64_t columns, const O* matrix, GradTarget<T> to) {
  if (!to.add) std::fill(to.data, to.data + columns, T{0});
  Vectorised<SumRowsLoop>(rows, columns, matrix, to.data);
}

template <typename T>
void ReluBackward(std::span<const T> output, std::span<T> diff) {
  Vectorised<ReluBackwardLoop>(static_cast<int64_t>(diff.size()), output.data(), diff.data());
}

template <typename T>
void Add(std::span<const T> left, std::span<const T> right, std::span<T> sum) {
  Vectorised<AddLoop>(static_cast<int64_t>(sum.size()), left.data(), right.data(), sum.data());
}

template void SumRows(int64_t, int64_t, const float*, GradTarget<float>);
template void SumRows(int64_t, int64_t, const BFloat16*, GradTarget<float>);
template void SumRows(int64_t, int64_t, const double*, GradTarget<double>);
template void ReluBackward(std::span<const float>, std::span<float>);
template void ReluBackward(std::span<const double>, std::span<double>);
template void Add(std::span<const float>, std::span<const float>, std::span<float>);
template void Add(std::span<const double>, std::span<const double>, std::span<double>);

}  // namespace evenkeel
