// A two-dimensional convolution without bias, for one batch size.
//
//   const ConvolutionShape shape{
//       .batch = 64, .inputs = 16, .outputs = 32, .side = 28, .kernel = 3, .stride = 2};
//   Convolution conv(dnn, shape, source_desc, Mode::kTraining);
//   dnnl::memory output = conv.Forward(source, weight);
//   conv.BackwardWeight(diff_output, weight_target);
//   dnnl::memory diff_source = conv.BackwardSource(diff_output);
//
// Images are square, the border is padded with zeros by (kernel - 1) / 2.
//
// Shapes:    source [batch, inputs, side, side] in any layout; weight and its gradient plain
//            [outputs, inputs, kernel, kernel]; results in the layout that `output_desc()` and
//            `source_desc` say.
// Ownership: results are the layer's memory, valid until its next call; `source` and `weight` must
//            outlive the backward calls that follow.
// Errors:    throws dnnl::error. In evaluation mode there is no backward.

#ifndef EVENKEEL_TRAINER_LAYERS_CONVOLUTION_H_
#define EVENKEEL_TRAINER_LAYERS_CONVOLUTION_H_

#include "evenkeel/trainer/layers/gradient_sink.h"
#include "evenkeel/trainer/layers/mode.h"
#include "evenkeel/trainer/layers/onednn.h"

namespace evenkeel {

struct ConvolutionShape {
  int batch = 0;
  int inputs = 0;   // Channels.
  int outputs = 0;  // Channels.
  int side = 0;     // Side of the source images, in pixels.
  int kernel = 3;   // Odd.
  int stride = 1;
};

class Convolution {
 public:
  Convolution(const OneDnn& dnn, const ConvolutionShape& shape,
              const dnnl::memory::desc& source_desc, Mode mode);

  dnnl::memory::desc output_desc() const { return output_.get_desc(); }

  dnnl::memory Forward(const dnnl::memory& source, const float* weight);
  void BackwardWeight(const dnnl::memory& diff_output, GradTarget<float> target);
  dnnl::memory BackwardSource(const dnnl::memory& diff_output);

 private:
  void PlanBackward(const dnnl::convolution_forward::primitive_desc& forward,
                    const dnnl::memory::desc& source_desc);

  const OneDnn& dnn_;
  const ConvolutionShape shape_;

  dnnl::convolution_forward forward_;
  LayoutAdapter source_in_;
  LayoutAdapter weight_in_;
  dnnl::memory output_;

  dnnl::convolution_backward_weights backward_weight_;
  LayoutAdapter weight_source_in_;
  LayoutAdapter weight_diff_in_;
  dnnl::memory diff_weight_;
  dnnl::reorder weight_out_;
  dnnl::reorder weight_out_added_;

  dnnl::convolution_backward_data backward_source_;
  LayoutAdapter source_weight_in_;
  LayoutAdapter source_diff_in_;
  dnnl::memory diff_source_;
  LayoutAdapter source_diff_out_;

  dnnl::memory source_;  // The argument of the last Forward.
  const float* weight_ = nullptr;
};

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_LAYERS_CONVOLUTION_H_
