#include "evenkeel/bucket/hooks/low_rank.h"

#include <algorithm>
#include <cmath>

#include "evenkeel/comm/collective.h"

namespace evenkeel::internal {
namespace {

constexpr int kLanes = 16;  // Sums that the compiler keeps side by side in vector registers.

// Computes in the type of the sum.
template <typename Sum>
Sum Dot(const float* a, const float* b, int64_t n) {
  Sum lanes[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane)
      lanes[lane] += static_cast<Sum>(a[i + lane]) * b[i + lane];
  }
  Sum sum = 0;
  for (; i < n; ++i) sum += static_cast<Sum>(a[i]) * b[i];
  for (Sum lane : lanes) sum += lane;
  return sum;
}

}  // namespace

void TimesColumns(const MatrixView& m, const float* q, int64_t rank, float* p) {
  for (int64_t row = 0; row < m.rows; ++row) {
    for (int64_t k = 0; k < rank; ++k)
      p[k * m.rows + row] = Dot<float>(m.data + row * m.cols, q + k * m.cols, m.cols);
  }
}

void TransposedTimesColumns(const MatrixView& m, const float* p, int64_t rank, float* q) {
  std::fill_n(q, rank * m.cols, 0.0f);
  for (int64_t row = 0; row < m.rows; ++row) {
    const float* const from = m.data + row * m.cols;
    for (int64_t k = 0; k < rank; ++k) {
      const float factor = p[k * m.rows + row];
      float* const to = q + k * m.cols;
      for (int64_t col = 0; col < m.cols; ++col) to[col] += factor * from[col];
    }
  }
}

void AddProduct(const float* p, const float* q, int64_t rank, float factor, const MatrixView& m) {
  for (int64_t row = 0; row < m.rows; ++row) {
    float* const to = m.data + row * m.cols;
    for (int64_t k = 0; k < rank; ++k) {
      const float scaled = factor * p[k * m.rows + row];
      const float* const from = q + k * m.cols;
      for (int64_t col = 0; col < m.cols; ++col) to[col] += scaled * from[col];
    }
  }
}

void Orthonormalize(float* columns, int64_t rows, int64_t rank, double epsilon) {
  for (int64_t k = 0; k < rank; ++k) {
    float* const column = columns + k * rows;
    const double before = std::sqrt(Dot<double>(column, column, rows));
    for (int pass = 0; pass < 2; ++pass) {
      for (int64_t other = 0; other < k; ++other) {
        const float* const base = columns + other * rows;
        const double along = Dot<double>(base, column, rows);
        for (int64_t i = 0; i < rows; ++i)
          column[i] = static_cast<float>(column[i] - along * base[i]);
      }
      // The second pass works on a unit vector, so that what rounding left along the others is
      // removed.
      const double rest = std::sqrt(Dot<double>(column, column, rows));
      if (!(rest > (pass == 0 ? epsilon * before : 0.5))) {
        std::fill_n(column, rows, 0.0f);
        break;
      }
      for (int64_t i = 0; i < rows; ++i) column[i] = static_cast<float>(column[i] / rest);
    }
  }
}

bool Normalize(std::span<float> column) {
  const double length =
      std::sqrt(Dot<double>(column.data(), column.data(), static_cast<int64_t>(column.size())));
  if (!(length > 0)) return false;
  for (float& value : column) value = static_cast<float>(value / length);
  return true;
}

void FillRandom(std::span<float> column, uint64_t seed) {
  for (float& value : column) {
    seed = StableHash(seed, 1);
    value = static_cast<float>(static_cast<int32_t>(seed >> 32)) / 2147483648.0f;
  }
}

bool IsFinite(std::span<const float> values) {
  return std::ranges::all_of(values, [](float value) { return std::isfinite(value); });
}

}  // namespace evenkeel::internal
