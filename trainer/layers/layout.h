// Moves a tensor into the memory layout that a primitive requires.
//
//   LayoutAdapter to_plain(dnn, blocked_desc, plain_desc);
//   dnnl::memory plain = to_plain(dnn, blocked);    // `blocked` itself if the layouts are the same
//
// oneDNN's convolutions choose blocked layouts (such as nChw16c); adjacent layers mostly agree, so
// adapters have a cost only where a plain tensor enters or leaves.
//
// Ownership: the result is the adapter's own memory (valid until its next call), or the argument.
// Errors:    throws dnnl::error.

#ifndef EVENKEEL_TRAINER_LAYERS_LAYOUT_H_
#define EVENKEEL_TRAINER_LAYERS_LAYOUT_H_

#include "evenkeel/trainer/layers/onednn.h"

namespace evenkeel {

class LayoutAdapter {
 public:
  LayoutAdapter() = default;  // Returns its argument.
  LayoutAdapter(const OneDnn& dnn, const dnnl::memory::desc& from, const dnnl::memory::desc& to) {
    if (from == to) return;
    moved_ = dnn.Allocate(to);
    reorder_ = dnnl::reorder(dnnl::reorder::primitive_desc(dnn.engine, from, dnn.engine, to));
  }

  dnnl::memory operator()(const OneDnn& dnn, const dnnl::memory& source) const {
    if (!moved_) return source;
    dnnl::memory from = source;
    dnnl::memory to = moved_;
    reorder_.execute(dnn.stream, from, to);
    return moved_;
  }

 private:
  dnnl::memory moved_;  // Empty if the layouts are the same.
  dnnl::reorder reorder_;
};

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_LAYERS_LAYOUT_H_
