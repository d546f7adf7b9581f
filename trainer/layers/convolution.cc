#include "evenkeel/trainer/layers/convolution.h"

namespace evenkeel {
namespace {

using Desc = dnnl::memory::desc;
using Dims = dnnl::memory::dims;
using Tag = dnnl::memory::format_tag;

constexpr auto kFloat = dnnl::memory::data_type::f32;
constexpr auto kAlgorithm = dnnl::algorithm::convolution_direct;

int OutputSide(const ConvolutionShape& shape) { return (shape.side - 1) / shape.stride + 1; }

Dims Padding(const ConvolutionShape& shape) { return Dims(2, (shape.kernel - 1) / 2); }

// Returns the used part of the far border when the stride does not meet the last pixel.
Dims FarPadding(const ConvolutionShape& shape) {
  const int covered = (OutputSide(shape) - 1) * shape.stride + shape.kernel;
  return Dims(2, covered - shape.side - (shape.kernel - 1) / 2);
}

// The three tensors of a convolution in layouts of oneDNN's choice.
struct FreeDescs {
  explicit FreeDescs(const ConvolutionShape& s)
      : source({s.batch, s.inputs, s.side, s.side}, kFloat, Tag::any),
        weight({s.outputs, s.inputs, s.kernel, s.kernel}, kFloat, Tag::any),
        output({s.batch, s.outputs, OutputSide(s), OutputSide(s)}, kFloat, Tag::any) {}
  Desc source, weight, output;
};

Desc PlainWeightDesc(const ConvolutionShape& s) {
  return Desc({s.outputs, s.inputs, s.kernel, s.kernel}, kFloat, Tag::oihw);
}

dnnl::primitive_attr AddingAttribute() {
  dnnl::post_ops ops;
  ops.append_sum(1.0f);
  dnnl::primitive_attr attribute;
  attribute.set_post_ops(ops);
  return attribute;
}

}  // namespace

Convolution::Convolution(const OneDnn& dnn, const ConvolutionShape& shape, const Desc& source_desc,
                         Mode mode)
    : dnn_(dnn), shape_(shape) {
  const FreeDescs descs(shape);
  const auto kind = mode == Mode::kTraining ? dnnl::prop_kind::forward_training
                                            : dnnl::prop_kind::forward_inference;
  const auto plan = ForwardPlan<dnnl::convolution_forward>(
      dnn, {}, kind, kAlgorithm, descs.source, descs.weight, descs.output, Dims(2, shape.stride),
      Padding(shape), FarPadding(shape));
  forward_ = dnnl::convolution_forward(plan);
  source_in_ = LayoutAdapter(dnn, source_desc, plan.src_desc());
  weight_in_ = LayoutAdapter(dnn, PlainWeightDesc(shape), plan.weights_desc());
  output_ = dnn.Allocate(plan.dst_desc());
  if (mode == Mode::kTraining) PlanBackward(plan, source_desc);
}

void Convolution::PlanBackward(const dnnl::convolution_forward::primitive_desc& forward,
                               const Desc& source_desc) {
  const FreeDescs descs(shape_);
  const Desc plain_weight = PlainWeightDesc(shape_);
  const Dims stride(2, shape_.stride);

  const auto weight_plan = BackwardPlan<dnnl::convolution_backward_weights>(
      dnn_, forward, kAlgorithm, descs.source, descs.weight, descs.output, stride, Padding(shape_),
      FarPadding(shape_));
  backward_weight_ = dnnl::convolution_backward_weights(weight_plan);
  weight_source_in_ = LayoutAdapter(dnn_, source_desc, weight_plan.src_desc());
  weight_diff_in_ = LayoutAdapter(dnn_, output_desc(), weight_plan.diff_dst_desc());
  diff_weight_ = dnn_.Allocate(weight_plan.diff_weights_desc());
  weight_out_ =
      dnnl::reorder({dnn_.engine, weight_plan.diff_weights_desc(), dnn_.engine, plain_weight});
  weight_out_added_ = dnnl::reorder(
      {dnn_.engine, weight_plan.diff_weights_desc(), dnn_.engine, plain_weight, AddingAttribute()});

  const auto source_plan = BackwardPlan<dnnl::convolution_backward_data>(
      dnn_, forward, kAlgorithm, descs.source, descs.weight, descs.output, stride, Padding(shape_),
      FarPadding(shape_));
  backward_source_ = dnnl::convolution_backward_data(source_plan);
  source_weight_in_ = LayoutAdapter(dnn_, plain_weight, source_plan.weights_desc());
  source_diff_in_ = LayoutAdapter(dnn_, output_desc(), source_plan.diff_dst_desc());
  diff_source_ = dnn_.Allocate(source_plan.diff_src_desc());
  source_diff_out_ = LayoutAdapter(dnn_, source_plan.diff_src_desc(), source_desc);
}

dnnl::memory Convolution::Forward(const dnnl::memory& source, const float* weight) {
  source_ = source;
  weight_ = weight;
  forward_.execute(dnn_.stream, {{DNNL_ARG_SRC, source_in_(dnn_, source)},
                                 {DNNL_ARG_WEIGHTS,
                                  weight_in_(dnn_, dnn_.Wrap(PlainWeightDesc(shape_), weight))},
                                 {DNNL_ARG_DST, output_}});
  return output_;
}

void Convolution::BackwardWeight(const dnnl::memory& diff_output, GradTarget<float> target) {
  backward_weight_.execute(dnn_.stream, {{DNNL_ARG_SRC, weight_source_in_(dnn_, source_)},
                                         {DNNL_ARG_DIFF_DST, weight_diff_in_(dnn_, diff_output)},
                                         {DNNL_ARG_DIFF_WEIGHTS, diff_weight_}});
  dnnl::memory plain = dnn_.Wrap(PlainWeightDesc(shape_), target.data);
  (target.add ? weight_out_added_ : weight_out_).execute(dnn_.stream, diff_weight_, plain);
}

dnnl::memory Convolution::BackwardSource(const dnnl::memory& diff_output) {
  backward_source_.execute(
      dnn_.stream,
      {{DNNL_ARG_DIFF_DST, source_diff_in_(dnn_, diff_output)},
       {DNNL_ARG_WEIGHTS, source_weight_in_(dnn_, dnn_.Wrap(PlainWeightDesc(shape_), weight_))},
       {DNNL_ARG_DIFF_SRC, diff_source_}});
  return source_diff_out_(dnn_, diff_source_);
}

}  // namespace evenkeel
