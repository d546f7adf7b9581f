// A gradient that consists of some rows of a parameter, as that of an embedding does.
//
//   SparseRows rows =
//       CoalesceRows(DType::kFloat32, {.rows = {6, 0, 6}, .values = ...}, /*row_size=*/3);
//   // rows.rows == {0, 6}; the two values of row 6 have been added up
//
// Threads: immutable values and a pure function.

#ifndef EVENKEEL_BUCKET_SPARSE_ROWS_H_
#define EVENKEEL_BUCKET_SPARSE_ROWS_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "evenkeel/comm/types.h"

namespace evenkeel {

struct SparseRows {
  std::vector<int64_t> rows;
  std::vector<std::byte> values;  // Row after row, in the parameter's element type.
};

// Returns the rows in ascending order, each once: values of equal rows are added in the given
// order, and the sums are multiplied by `scale`. `dtype` is a float type; 16-bit floats are added
// as float32 and rounded once.
SparseRows CoalesceRows(DType dtype, const SparseRows& given, int64_t row_size, double scale = 1.0);

}  // namespace evenkeel

#endif  // EVENKEEL_BUCKET_SPARSE_ROWS_H_
