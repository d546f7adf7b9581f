// Lists of views that together behave like one tensor: iteration, ranges and copies.
//
//   TensorList shares = {};
//   // elements [2n, 3n) of `output`, in whichever of its views they lie
//   AppendRange(output, 2 * n, n, shares);
//
//   for (ViewCursor at(operation.in, begin); length > 0;) {
//     const int64_t n = std::min(length, at.contiguous());
//     ... n elements at at.data() ...
//     at.Advance(n);
//     length -= n;
//   }
//
// Units:   elements.
// Threads: pure functions on the caller's memory.

#ifndef EVENKEEL_COMM_ARITH_VIEW_LISTS_H_
#define EVENKEEL_COMM_ARITH_VIEW_LISTS_H_

#include <cstdint>

#include "evenkeel/comm/backend.h"
#include "evenkeel/comm/types.h"

namespace evenkeel::internal {

// A position in a list of views that is read as one sequence.
class ViewCursor {
 public:
  ViewCursor(const TensorList& list, int64_t element)
      : view_(list.data()), end_(view_ + list.size()) {
    Advance(element);
  }

  // Returns the number of elements that are contiguous from here on; 0 at the end.
  int64_t contiguous() const { return view_ == end_ ? 0 : view_->count - offset_; }
  void* data() const { return static_cast<char*>(view_->data) + bytes(offset_); }
  // Returns the size of `elements` in bytes. Must not be called at the end.
  int64_t bytes(int64_t elements) const { return elements * SizeOf(view_->dtype); }
  void Advance(int64_t elements) {
    offset_ += elements;
    for (; view_ != end_ && offset_ >= view_->count; ++view_) offset_ -= view_->count;
  }

 private:
  const TensorView* view_;
  const TensorView* end_;
  int64_t offset_ = 0;
};

int64_t CountOf(const TensorList& views);

// Appends elements [begin, begin + count) of `views`, which must exist, to `to`. A piece is joined
// to the last one of `to` only if both were cut from one view and the piece continues it: so lists
// that are cut alike from lists with equal parts have equal parts on all ranks.
void AppendRange(const TensorList& views, int64_t begin, int64_t count, TensorList& to);
TensorList Range(const TensorList& views, int64_t begin, int64_t count);

// Returns the memory at `data`, divided like `views`.
TensorList LaidOutLike(const TensorList& views, void* data);

// Returns the same bytes as elements of another type of equal size.
TensorList As(DType dtype, TensorList views);

bool Overlap(const TensorView& a, const TensorView& b);
bool Overlap(const TensorList& a, const TensorList& b);

// Returns whether writing the output could destroy input before it is read. It could not if each
// element is read before it is written: in-place all_reduce, reduce and broadcast; the rank's own
// share of all_gather, all_gather_v and reduce_scatter.
bool OutputEndangersInput(const Operation& operation, int rank);

// Copies all elements; both lists have equally many. They must not overlap, unless they are the
// same.
void Copy(const TensorList& from, const TensorList& to);
// Copies `count` elements, starting at the given ones, but none beyond the end of a list.
void CopyRange(const TensorList& from, int64_t from_begin, const TensorList& to, int64_t to_begin,
               int64_t count);

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_ARITH_VIEW_LISTS_H_
