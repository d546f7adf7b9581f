// A residual block with pre-activation, for one batch size: h = norm1(x), output =
// conv2(norm2(conv1(h))) + skip, where skip is x itself, or a 1x1 convolution of h when the block
// changes the size. `norm` is batch normalisation followed by a rectifier.
//
//   ResidualBlock block(dnn, {.batch = 64, .inputs = 16, .outputs = 32, .side = 28, .stride = 2},
//                       indices, source_desc, Mode::kTraining);
//   dnnl::memory output = block.Forward(source, parameters);
//   EK_ASSIGN_OR_RETURN(dnnl::memory diff_source, block.Backward(diff_output, sink));
//
// Order:     indices grow in the order of `ResidualBlockIndices`; Backward announces them from the
//            last to the first.
// Ownership: results are the block's memory, valid until its next call; `source` must outlive
//            Backward.
// Errors:    throws dnnl::error; returns the sink's status. In evaluation mode there is no
//            backward.
// Source:    He et al., "Identity mappings in deep residual networks", ECCV 2016.

#ifndef EVENKEEL_TRAINER_LAYERS_RESIDUAL_BLOCK_H_
#define EVENKEEL_TRAINER_LAYERS_RESIDUAL_BLOCK_H_

#include <optional>

#include "absl/status/statusor.h"
#include "evenkeel/bucket/parameter_set.h"
#include "evenkeel/trainer/layers/batch_norm_relu.h"
#include "evenkeel/trainer/layers/convolution.h"
#include "evenkeel/trainer/layers/gradient_sink.h"
#include "evenkeel/trainer/layers/mode.h"
#include "evenkeel/trainer/layers/onednn.h"

namespace evenkeel {

// The indices of a batch norm's parameters in the parameter set, and its running statistics.
struct BatchNormIndices {
  int weight = -1;
  int bias = -1;
  float* running_mean = nullptr;
  float* running_variance = nullptr;
};

// Returns the state that a BatchNormRelu takes.
BatchNormState StateOf(const BatchNormIndices& indices, const ParameterSet& parameters);
// Runs the backward pass of `norm` and announces bias and weight.
absl::StatusOr<dnnl::memory> BackwardNorm(BatchNormRelu& norm, const BatchNormIndices& indices,
                                          const dnnl::memory& diff_output, GradientSink& sink);

struct ResidualBlockShape {
  int batch = 0;
  int inputs = 0;   // Channels.
  int outputs = 0;  // Channels.
  int side = 0;     // Side of the source images, in pixels.
  int stride = 1;

  bool changes_size() const { return inputs != outputs || stride != 1; }
};

struct ResidualBlockIndices {
  BatchNormIndices norm1;
  int shortcut = -1;  // Only if the block changes the size.
  int conv1 = -1;
  BatchNormIndices norm2;
  int conv2 = -1;
};

class ResidualBlock {
 public:
  ResidualBlock(const OneDnn& dnn, const ResidualBlockShape& shape,
                const ResidualBlockIndices& indices, const dnnl::memory::desc& source_desc,
                Mode mode, BatchNormSync* sync = nullptr);

  dnnl::memory::desc output_desc() const { return conv2_.output_desc(); }

  dnnl::memory Forward(const dnnl::memory& source, const ParameterSet& parameters);
  // Returns the source's gradient; empty if neither the first norm nor anything before the block is
  // trained.
  absl::StatusOr<dnnl::memory> Backward(const dnnl::memory& diff_output, GradientSink& sink);

 private:
  const OneDnn& dnn_;
  const ResidualBlockIndices indices_;
  BatchNormRelu norm1_;
  Convolution conv1_;
  BatchNormRelu norm2_;
  Convolution conv2_;
  std::optional<Convolution> shortcut_;
  LayoutAdapter skip_in_;   // From the skip's layout to the output's ...
  LayoutAdapter skip_out_;  // ... and back, for the gradient.
};

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_LAYERS_RESIDUAL_BLOCK_H_
