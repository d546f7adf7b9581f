#include "evenkeel/trainer/layers/average_pool.h"

namespace evenkeel {
namespace {

using Desc = dnnl::memory::desc;
using Dims = dnnl::memory::dims;
using Tag = dnnl::memory::format_tag;

Desc MeansDesc(const Desc& source, Tag tag) {
  return Desc({source.dims()[0], source.dims()[1], 1, 1}, dnnl::memory::data_type::f32, tag);
}

}  // namespace

AveragePool::AveragePool(const OneDnn& dnn, const Desc& source_desc, Mode mode)
    : dnn_(dnn), plain_desc_(MeansDesc(source_desc, Tag::nchw)) {
  const bool training = mode == Mode::kTraining;
  const auto algorithm = dnnl::algorithm::pooling_avg_exclude_padding;
  const Dims window = {source_desc.dims()[2], source_desc.dims()[3]};
  const Dims none = {0, 0};
  const Desc means = MeansDesc(source_desc, Tag::any);
  const dnnl::pooling_forward::primitive_desc plan(
      {training ? dnnl::prop_kind::forward_training : dnnl::prop_kind::forward_inference, algorithm,
       source_desc, means, window, window, none, none},
      dnn.engine);
  forward_ = dnnl::pooling_forward(plan);
  output_ = dnn.Allocate(plan.dst_desc());
  means_out_ = LayoutAdapter(dnn, plan.dst_desc(), plain_desc_);
  if (!training) return;

  const dnnl::pooling_backward::primitive_desc backward_plan(
      {algorithm, source_desc, plan.dst_desc(), window, window, none, none}, dnn.engine, plan);
  backward_ = dnnl::pooling_backward(backward_plan);
  diff_in_ = LayoutAdapter(dnn, plain_desc_, plan.dst_desc());
  diff_source_ = dnn.Allocate(source_desc);
}

const float* AveragePool::Forward(const dnnl::memory& source) {
  forward_.execute(dnn_.stream, {{DNNL_ARG_SRC, source}, {DNNL_ARG_DST, output_}});
  means_ = means_out_(dnn_, output_);
  return static_cast<const float*>(means_.get_data_handle());
}

dnnl::memory AveragePool::Backward(const float* diff_means) {
  backward_.execute(dnn_.stream,
                    {{DNNL_ARG_DIFF_DST, diff_in_(dnn_, dnn_.Wrap(plain_desc_, diff_means))},
                     {DNNL_ARG_DIFF_SRC, diff_source_}});
  return diff_source_;
}

}  // namespace evenkeel
