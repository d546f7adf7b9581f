#include "evenkeel/trainer/layers/batch_norm_relu.h"

#include <algorithm>
#include <span>
#include <unordered_map>

namespace evenkeel {
namespace {

using Desc = dnnl::memory::desc;
using Flags = dnnl::normalization_flags;

constexpr float kEpsilon = 1e-5f;
constexpr float kMomentum = 0.1f;  // Weight of the new batch in the running statistics.

Flags FlagsFor(Mode mode) {
  const Flags flags = Flags::use_scale | Flags::use_shift | Flags::fuse_norm_relu;
  return mode == Mode::kTraining ? flags : flags | Flags::use_global_stats;
}

void Deliver(const dnnl::memory& gradient, int count, GradTarget<float> target) {
  if (!target) return;
  const float* from = static_cast<const float*>(gradient.get_data_handle());
  if (!target.add) std::fill_n(target.data, count, 0.0f);
  for (int i = 0; i < count; ++i) target.data[i] += from[i];
}

TensorView View(const dnnl::memory& memory) {
  const int64_t bytes = static_cast<int64_t>(memory.get_desc().get_size());
  return {memory.get_data_handle(), bytes / static_cast<int64_t>(sizeof(float)), DType::kFloat32};
}

}  // namespace

BatchNormRelu::BatchNormRelu(const OneDnn& dnn, const Desc& source_desc, Mode mode,
                             BatchNormSync* sync)
    : dnn_(dnn),
      mode_(mode),
      channels_(static_cast<int>(DimsOf(source_desc)[1])),
      samples_per_channel_(static_cast<double>(DimsOf(source_desc)[0] * DimsOf(source_desc)[2] *
                                               DimsOf(source_desc)[3])),
      channel_desc_({channels_}, dnnl::memory::data_type::f32, dnnl::memory::format_tag::a) {
  if (sync != nullptr && mode == Mode::kTraining) {
    const auto dims = DimsOf(source_desc);
    const Desc plain(dims, dnnl::memory::data_type::f32, dnnl::memory::format_tag::nchw);
    over_ranks_.emplace(OverRanks{
        .sync = sync,
        .norm = SyncBatchNorm({.channels = channels_, .epsilon = kEpsilon, .momentum = kMomentum}),
        .shape = {.samples = dims[0], .spatial = dims[2] * dims[3]},
        .source_to_plain = {dnn, source_desc, plain},
        .diff_to_plain = {dnn, source_desc, plain},
        .from_plain = {dnn, plain, source_desc},
        .output = dnn.Allocate(plain),
        .diff_output = dnn.Allocate(plain),
        .diff_source = dnn.Allocate(plain)});
    diff_weight_ = dnn.Allocate(channel_desc_);
    diff_bias_ = dnn.Allocate(channel_desc_);
    return;
  }
  output_ = dnn.Allocate(source_desc);
  if (mode == Mode::kEvaluation) {
    forward_ = dnnl::batch_normalization_forward(BatchNormPlan(
        dnn, dnnl::prop_kind::forward_inference, source_desc, kEpsilon, FlagsFor(mode)));
    return;
  }
  const auto plan =
      BatchNormPlan(dnn, dnnl::prop_kind::forward_training, source_desc, kEpsilon, FlagsFor(mode));
  forward_ = dnnl::batch_normalization_forward(plan);
  mean_ = dnn.Allocate(channel_desc_);
  variance_ = dnn.Allocate(channel_desc_);
  workspace_ = dnn.Allocate(plan.workspace_desc());
  backward_ = dnnl::batch_normalization_backward(
      BatchNormBackwardPlan(dnn, plan, source_desc, kEpsilon, FlagsFor(mode)));
  diff_source_ = dnn.Allocate(source_desc);
  diff_weight_ = dnn.Allocate(channel_desc_);
  diff_bias_ = dnn.Allocate(channel_desc_);
}

dnnl::memory BatchNormRelu::Forward(const dnnl::memory& source, const BatchNormState& state) {
  source_ = source;
  state_ = state;
  if (over_ranks_.has_value()) return ForwardOverRanks(source, state);
  const bool training = mode_ == Mode::kTraining;
  std::unordered_map<int, dnnl::memory> arguments = {
      {DNNL_ARG_SRC, source},
      {DNNL_ARG_SCALE, dnn_.Wrap(channel_desc_, state.weight)},
      {DNNL_ARG_SHIFT, dnn_.Wrap(channel_desc_, state.bias)},
      {DNNL_ARG_MEAN, training ? mean_ : dnn_.Wrap(channel_desc_, state.running_mean)},
      {DNNL_ARG_VARIANCE, training ? variance_ : dnn_.Wrap(channel_desc_, state.running_variance)},
      {DNNL_ARG_DST, output_}};
  if (training) arguments[DNNL_ARG_WORKSPACE] = workspace_;
  forward_.execute(dnn_.stream, arguments);
  if (training) UpdateRunning(state);
  return output_;
}

dnnl::memory BatchNormRelu::ForwardOverRanks(const dnnl::memory& source,
                                             const BatchNormState& state) {
  OverRanks& it = *over_ranks_;
  it.source = it.source_to_plain(dnn_, source);
  const auto channels = [&](const float* data) {
    return TensorView(const_cast<float*>(data), channels_, DType::kFloat32);
  };
  if (it.sync->status.ok()) {
    it.sync->status = it.norm.Forward(
        *it.sync->scope, it.shape, View(it.source), {channels(state.weight), channels(state.bias)},
        {channels(state.running_mean), channels(state.running_variance)}, View(it.output));
  }
  for (float& value : View(it.output).as<float>()) value = std::max(value, 0.0f);
  return it.from_plain(dnn_, it.output);
}

dnnl::memory BatchNormRelu::BackwardOverRanks(const dnnl::memory& diff_output) {
  OverRanks& it = *over_ranks_;
  const std::span<const float> output = View(it.output).as<float>();
  const dnnl::memory plain = it.diff_to_plain(dnn_, diff_output);
  const std::span<const float> from = View(plain).as<float>();
  const std::span<float> masked = View(it.diff_output).as<float>();
  for (size_t i = 0; i < masked.size(); ++i) masked[i] = output[i] > 0 ? from[i] : 0.0f;
  if (it.sync->status.ok()) {
    it.sync->status =
        it.norm.Backward(*it.sync->scope, View(it.diff_output),
                         TensorView(const_cast<float*>(state_.weight), channels_, DType::kFloat32),
                         {View(it.diff_source), View(diff_weight_), View(diff_bias_)});
  }
  return it.from_plain(dnn_, it.diff_source);
}

void BatchNormRelu::UpdateRunning(const BatchNormState& state) const {
  const float* mean = static_cast<const float*>(mean_.get_data_handle());
  const float* variance = static_cast<const float*>(variance_.get_data_handle());
  // One sample per channel has no unbiased variance; the biased one, zero, stands in.
  const float unbiased =
      static_cast<float>(samples_per_channel_ / std::max(1.0, samples_per_channel_ - 1));
  for (int i = 0; i < channels_; ++i) {
    state.running_mean[i] += kMomentum * (mean[i] - state.running_mean[i]);
    state.running_variance[i] += kMomentum * (variance[i] * unbiased - state.running_variance[i]);
  }
}

dnnl::memory BatchNormRelu::Backward(const dnnl::memory& diff_output, GradTarget<float> weight,
                                     GradTarget<float> bias) {
  if (over_ranks_.has_value()) {
    const dnnl::memory diff_source = BackwardOverRanks(diff_output);
    Deliver(diff_weight_, channels_, weight);
    Deliver(diff_bias_, channels_, bias);
    return diff_source;
  }
  std::unordered_map<int, dnnl::memory> arguments = {
      {DNNL_ARG_SRC, source_},           {DNNL_ARG_MEAN, mean_},
      {DNNL_ARG_VARIANCE, variance_},    {DNNL_ARG_SCALE, dnn_.Wrap(channel_desc_, state_.weight)},
      {DNNL_ARG_WORKSPACE, workspace_},  {DNNL_ARG_DIFF_DST, diff_output},
      {DNNL_ARG_DIFF_SRC, diff_source_}, {DNNL_ARG_DIFF_SCALE, diff_weight_},
      {DNNL_ARG_DIFF_SHIFT, diff_bias_}};
  // Version 2 refuses to run without this one, which no derivative depends on, and version 3 with
  // it.
  if (kIsOneDnn2) arguments[DNNL_ARG_SHIFT] = dnn_.Wrap(channel_desc_, state_.bias);
  backward_.execute(dnn_.stream, arguments);
  Deliver(diff_weight_, channels_, weight);
  Deliver(diff_bias_, channels_, bias);
  return diff_source_;
}

}  // namespace evenkeel
