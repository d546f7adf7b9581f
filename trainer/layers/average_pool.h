// The mean over each channel's whole image, for one batch size.
//
//   AveragePool pool(dnn, source_desc, Mode::kTraining);
//   const float* means = pool.Forward(source);                   // [batch, channels], plain
//   dnnl::memory diff_source = pool.Backward(diff_means);        // the same shape
//
// Shapes:    source [batch, channels, height, width] in any layout of float32.
// Ownership: results are the layer's memory, valid until its next call.
// Errors:    throws dnnl::error. In evaluation mode there is no backward.

#ifndef EVENKEEL_TRAINER_LAYERS_AVERAGE_POOL_H_
#define EVENKEEL_TRAINER_LAYERS_AVERAGE_POOL_H_

#include "evenkeel/trainer/layers/mode.h"
#include "evenkeel/trainer/layers/onednn.h"

namespace evenkeel {

class AveragePool {
 public:
  AveragePool(const OneDnn& dnn, const dnnl::memory::desc& source_desc, Mode mode);

  const float* Forward(const dnnl::memory& source);
  dnnl::memory Backward(const float* diff_means);

 private:
  const OneDnn& dnn_;
  const dnnl::memory::desc plain_desc_;

  PoolingForward forward_;
  dnnl::memory output_;
  LayoutAdapter means_out_;
  dnnl::memory means_;  // Keeps the result of Forward alive.

  PoolingBackward backward_;
  LayoutAdapter diff_in_;
  dnnl::memory diff_source_;
};

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_LAYERS_AVERAGE_POOL_H_
