#include "evenkeel/trainer/layers/average_pool.h"

namespace evenkeel {
namespace {

using Desc = dnnl::memory::desc;
using Dims = dnnl::memory::dims;
using Tag = dnnl::memory::format_tag;

Desc MeansDesc(const Desc& source, Tag tag) {
  return Desc({DimsOf(source)[0], DimsOf(source)[1], 1, 1}, dnnl::memory::data_type::f32, tag);
}

}  // namespace

AveragePool::AveragePool(const OneDnn& dnn, const Desc& source_desc, Mode mode)
    : dnn_(dnn), plain_desc_(MeansDesc(source_desc, Tag::nchw)) {
  const bool training = mode == Mode::kTraining;
  const auto algorithm = dnnl::algorithm::pooling_avg_exclude_padding;
  const Dims window = {DimsOf(source_desc)[2], DimsOf(source_desc)[3]};
  const Dims none = {0, 0};
  const Desc means = MeansDesc(source_desc, Tag::any);
  const auto plan = ForwardPlan<PoolingForward>(
      dnn, {}, training ? dnnl::prop_kind::forward_training : dnnl::prop_kind::forward_inference,
      algorithm, source_desc, means, window, window, none, none, none);
  forward_ = PoolingForward(plan);
  output_ = dnn.Allocate(plan.dst_desc());
  means_out_ = LayoutAdapter(dnn, plan.dst_desc(), plain_desc_);
  if (!training) return;

  backward_ = PoolingBackward(BackwardPlan<PoolingBackward>(
      dnn, plan, algorithm, source_desc, plan.dst_desc(), window, window, none, none, none));
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
