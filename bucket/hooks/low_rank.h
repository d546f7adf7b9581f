// The matrix arithmetic of low-rank compression: M ~ P Q^T with few columns.
//
//   MatrixView m{data, rows, cols};
//   TimesColumns(m, q, rank, p);                 // P = M Q
//   Orthonormalize(p, rows, rank);               // of P's columns
//   TransposedTimesColumns(m, p, rank, q);       // Q = M^T P
//   AddProduct(p, q, rank, -1.0f, m);            // M -= P Q^T
//
// Shapes:  M is row-major [rows, cols]; P and Q are stored column after column, [rank][rows] and
//          [rank][cols].
// Order:   of additions is fixed, so that equal inputs give equal bits on all ranks.
// Threads: pure functions on the caller's memory.

#ifndef EVENKEEL_BUCKET_HOOKS_LOW_RANK_H_
#define EVENKEEL_BUCKET_HOOKS_LOW_RANK_H_

#include <cstdint>
#include <span>

#include "evenkeel/comm/base/cpp20.h"

namespace evenkeel::internal {

struct MatrixView {
  float* data = nullptr;
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t count() const { return rows * cols; }
};

void TimesColumns(const MatrixView& m, const float* q, int64_t rank, float* p);
void TransposedTimesColumns(const MatrixView& m, const float* p, int64_t rank, float* q);
void AddProduct(const float* p, const float* q, int64_t rank, float factor, const MatrixView& m);

// Gram-Schmidt, twice, in float64. A column that is a combination of those before it, up to a
// relative rest of `epsilon`, becomes zero, rather than noise that is orthogonal to nothing.
void Orthonormalize(float* columns, int64_t rows, int64_t rank, double epsilon);

// Divides a column by its length; false, and it is left alone, if that is zero.
bool Normalize(std::span<float> column);

// Fills with numbers in [-1, 1) that depend on the seed alone.
void FillRandom(std::span<float> column, uint64_t seed);

bool IsFinite(std::span<const float> values);

}  // namespace evenkeel::internal

#endif  // EVENKEEL_BUCKET_HOOKS_LOW_RANK_H_
