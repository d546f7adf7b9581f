// Lists of views that together behave like one tensor: pieces of them, and copies.
//
//   TensorList shares = {};
//   // elements [2n, 3n) of `output`, wherever its views have them
//   AppendRange(output, 2 * n, n, shares);
//
// Units:   elements.
// Threads: pure functions on the caller's memory.

#ifndef EVENKEEL_COMM_ARITH_VIEW_LISTS_H_
#define EVENKEEL_COMM_ARITH_VIEW_LISTS_H_

#include <cstdint>

#include "evenkeel/comm/backend.h"
#include "evenkeel/comm/types.h"

namespace evenkeel::internal {

int64_t CountOf(const TensorList& views);

// Elements [begin, begin + count) of `views`, which has them, behind those that `to` has. A piece
// that continues what was cut from the same view last is joined to it, and nothing else is,
// wherever it lies: so lists that are cut alike from lists with equal parts have equal parts on all
// ranks.
void AppendRange(const TensorList& views, int64_t begin, int64_t count, TensorList& to);
TensorList Range(const TensorList& views, int64_t begin, int64_t count);

// The memory at `data` in parts like those of `views`.
TensorList LaidOutLike(const TensorList& views, void* data);

// The same bytes as elements of another type of that size.
TensorList As(DType dtype, TensorList views);

bool Overlap(const TensorList& a, const TensorList& b);

// Copies all elements; both lists have as many. They may not overlap, unless they are the same.
void Copy(const TensorList& from, const TensorList& to);

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_ARITH_VIEW_LISTS_H_
