#include "evenkeel/trainer/layers/residual_block.h"

#include <span>

#include "evenkeel/comm/status.h"
#include "evenkeel/trainer/layers/rows.h"

namespace evenkeel {
namespace {

const float* Value(const ParameterSet& parameters, int index) {
  return static_cast<const float*>(parameters[index].value.data);
}

// The first convolution's, or with a kernel of 1 the shortcut's.
ConvolutionShape FirstConvolution(const ResidualBlockShape& s, int kernel = 3) {
  return {s.batch, s.inputs, s.outputs, s.side, kernel, s.stride};
}

ConvolutionShape SecondConvolution(const ResidualBlockShape& s) {
  return {s.batch, s.outputs, s.outputs, (s.side - 1) / s.stride + 1};
}

// All elements as they lie in memory, padding included; the order is the layout's.
std::span<float> Elements(const dnnl::memory& memory) {
  return {static_cast<float*>(memory.get_data_handle()),
          memory.get_desc().get_size() / sizeof(float)};
}

void AddTo(const dnnl::memory& sum, const dnnl::memory& addend) {
  Add<float>(Elements(sum), Elements(addend), Elements(sum));
}

}  // namespace

BatchNormState StateOf(const BatchNormIndices& indices, const ParameterSet& parameters) {
  return {.weight = Value(parameters, indices.weight),
          .bias = Value(parameters, indices.bias),
          .running_mean = indices.running_mean,
          .running_variance = indices.running_variance};
}

absl::StatusOr<dnnl::memory> BackwardNorm(BatchNormRelu& norm, const BatchNormIndices& indices,
                                          const dnnl::memory& diff_output, GradientSink& sink) {
  dnnl::memory diff_source = norm.Backward(diff_output, sink.Target<float>(indices.weight),
                                           sink.Target<float>(indices.bias));
  EK_RETURN_IF_ERROR(sink.Announce(indices.bias));
  EK_RETURN_IF_ERROR(sink.Announce(indices.weight));
  return diff_source;
}

ResidualBlock::ResidualBlock(const OneDnn& dnn, const ResidualBlockShape& shape,
                             const ResidualBlockIndices& indices,
                             const dnnl::memory::desc& source_desc, Mode mode, BatchNormSync* sync)
    : dnn_(dnn),
      indices_(indices),
      norm1_(dnn, source_desc, mode, sync),
      conv1_(dnn, FirstConvolution(shape), source_desc, mode),
      norm2_(dnn, conv1_.output_desc(), mode, sync),
      conv2_(dnn, SecondConvolution(shape), conv1_.output_desc(), mode) {
  if (shape.changes_size()) shortcut_.emplace(dnn, FirstConvolution(shape, 1), source_desc, mode);
  const dnnl::memory::desc skip_desc = shortcut_ ? shortcut_->output_desc() : source_desc;
  skip_in_ = LayoutAdapter(dnn, skip_desc, output_desc());
  skip_out_ = LayoutAdapter(dnn, output_desc(), skip_desc);
}

dnnl::memory ResidualBlock::Forward(const dnnl::memory& source, const ParameterSet& parameters) {
  const dnnl::memory normed1 = norm1_.Forward(source, StateOf(indices_.norm1, parameters));
  const dnnl::memory skip =
      shortcut_ ? shortcut_->Forward(normed1, Value(parameters, indices_.shortcut)) : source;
  const dnnl::memory middle = conv1_.Forward(normed1, Value(parameters, indices_.conv1));
  const dnnl::memory normed2 = norm2_.Forward(middle, StateOf(indices_.norm2, parameters));
  dnnl::memory output = conv2_.Forward(normed2, Value(parameters, indices_.conv2));
  AddTo(output, skip_in_(dnn_, skip));
  return output;
}

absl::StatusOr<dnnl::memory> ResidualBlock::Backward(const dnnl::memory& diff_output,
                                                     GradientSink& sink) {
  const auto write_weight = [&](Convolution& convolution, int index, const dnnl::memory& diff) {
    return sink.Write<float>(index, [&](GradTarget<float> target) {
      convolution.BackwardWeight(diff, target);
      return absl::OkStatus();
    });
  };
  EK_RETURN_IF_ERROR(write_weight(conv2_, indices_.conv2, diff_output));
  if (!sink.AnyTrainedBefore(indices_.conv2)) return dnnl::memory();

  const dnnl::memory diff_normed2 = conv2_.BackwardSource(diff_output);
  EK_ASSIGN_OR_RETURN(dnnl::memory diff_middle,
                      BackwardNorm(norm2_, indices_.norm2, diff_normed2, sink));
  EK_RETURN_IF_ERROR(write_weight(conv1_, indices_.conv1, diff_middle));
  const dnnl::memory diff_skip = skip_out_(dnn_, diff_output);
  if (shortcut_) EK_RETURN_IF_ERROR(write_weight(*shortcut_, indices_.shortcut, diff_skip));
  if (!sink.AnyTrainedBefore(indices_.norm1.bias + 1)) return dnnl::memory();

  const dnnl::memory diff_normed1 = conv1_.BackwardSource(diff_middle);
  if (shortcut_) AddTo(diff_normed1, shortcut_->BackwardSource(diff_skip));
  EK_ASSIGN_OR_RETURN(dnnl::memory diff_source,
                      BackwardNorm(norm1_, indices_.norm1, diff_normed1, sink));
  if (!shortcut_) AddTo(diff_source, diff_skip);
  return diff_source;
}

}  // namespace evenkeel
