// Helpers for an operation's views, for backends that move data through memory.
//
//   for (ViewCursor at(operation.in, begin); length > 0;) {
//     const int64_t n = std::min(length, at.contiguous());
//     ... n elements at at.data() ...
//     at.Advance(n);
//     length -= n;
//   }
//
// Units:   elements.
// Threads: plain values.

#ifndef EVENKEEL_COMM_ARITH_OPERATION_VIEWS_H_
#define EVENKEEL_COMM_ARITH_OPERATION_VIEWS_H_

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

  // Elements that lie in one piece from here on.
  int64_t contiguous() const { return view_ == end_ ? 0 : view_->count - offset_; }
  void* data() const { return static_cast<char*>(view_->data) + offset_ * SizeOf(view_->dtype); }
  void Advance(int64_t elements) {
    offset_ += elements;
    for (; view_ != end_ && offset_ >= view_->count; ++view_) offset_ -= view_->count;
  }

 private:
  const TensorView* view_;
  const TensorView* end_;
  int64_t offset_ = 0;
};

// Whether writing the output could destroy input that is still to be read. Not if each element is
// read before it is written: in-place all_reduce, reduce and broadcast; the rank's own share of
// all_gather, all_gather_v and reduce_scatter.
bool OutputEndangersInput(const Operation& operation, int rank);

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_ARITH_OPERATION_VIEWS_H_
