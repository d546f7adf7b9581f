#include "evenkeel/trainer/gpt/block.h"

#include <span>
#include <type_traits>

#include "evenkeel/comm/status.h"
#include "evenkeel/comm/types.h"
#include "evenkeel/trainer/gpt/dropout.h"
#include "evenkeel/trainer/gpt/gelu.h"
#include "evenkeel/trainer/gpt/rows.h"
#include "evenkeel/trainer/layers/elementwise.h"

namespace evenkeel {
namespace {

DropoutMatrix Whole(int64_t rows, int64_t width) { return {.rows = rows, .columns = width, .stride = width}; }

// `values` themselves where products take them as they are.
template <typename T, typename O>
const O* AsOperand(int64_t n, const T* values, Buffer<O>& memory) {
  if constexpr (std::is_same_v<T, O>) {
    return values;
  } else {
    Round(n, values, memory.Resize(n));
    return memory.data();
  }
}

}  // namespace

template <typename T, typename O>
absl::Status NormBackward(BlockTools<T, O>& tools, int64_t rows, int64_t width, const WeightAndBias& norm,
                          const T* input, RowStatistics<T> statistics, const T* diff_output, GradientSink& sink,
                          T* diff_input) {
  T* weight_sum = tools.norm_sums.Resize(2 * width);
  T* bias_sum = weight_sum + width;
  LayerNormBackward(rows, width, input, statistics, tools.operands.Vector(norm.weight), diff_output, weight_sum,
                    bias_sum, sink.AnyTrainedBefore(norm.weight) ? diff_input : nullptr);
  const auto write = [&](int index, const T* sum) {
    return sink.Write<T>(index, [&](GradTarget<T> target) {
      WriteGradient(width, sum, target);
      return absl::OkStatus();
    });
  };
  EK_RETURN_IF_ERROR(write(norm.bias, bias_sum));
  return write(norm.weight, weight_sum);
}

template <typename T, typename O>
void Block<T, O>::EndPart(const GptPass& pass, uint64_t stream, const T* around, T* part) const {
  const int64_t rows = pass.rows();
  if (pass.dropout > 0) Dropout(pass.Noise(stream), Whole(rows, width_), part, part);
  const std::span<T> sum(part, rows * width_);
  Add<T>(std::span(around, sum.size()), sum, sum);
}

template <typename T, typename O>
absl::Status Block<T, O>::Forward(BlockTools<T, O>& tools, const GptPass& pass, const T* input,
                                  BlockMemory<T, O>& memory) const {
  const int64_t rows = pass.rows(), size = rows * width_;
  const Operands<T, O>& operands = tools.operands;
  const BlockParameters& p = parameters_;
  memory.statistics.Resize(4 * rows);

  O* norm_1 = memory.norm_1.Resize(size);
  LayerNormForward(rows, width_, input, operands.Vector(p.ln_1.weight), operands.Vector(p.ln_1.bias), norm_1,
                   Statistics(pass, memory, 0));
  O* qkv = memory.qkv.Resize(3 * size);
  EK_RETURN_IF_ERROR(LinearForward(tools.products, Linear(pass, width_, 3 * width_), norm_1,
                                   operands.Matrix(p.c_attn.weight), operands.Vector(p.c_attn.bias), qkv));
  O* mixed = memory.mixed.Resize(size);
  EK_RETURN_IF_ERROR(tools.attention.Forward(Attention(pass), pass.Noise(first_stream_), qkv,
                                             memory.probabilities.Resize(rows * heads_ * pass.context), mixed));
  T* middle = memory.middle.Resize(size);
  EK_RETURN_IF_ERROR(LinearForward(tools.products, Linear(pass, width_, width_), mixed,
                                   operands.Matrix(p.attn_c_proj.weight), operands.Vector(p.attn_c_proj.bias), middle));
  EndPart(pass, first_stream_ + 1, input, middle);

  O* norm_2 = memory.norm_2.Resize(size);
  LayerNormForward(rows, width_, middle, operands.Vector(p.ln_2.weight), operands.Vector(p.ln_2.bias), norm_2,
                   Statistics(pass, memory, 1));
  T* hidden = memory.hidden.Resize(4 * size);
  EK_RETURN_IF_ERROR(LinearForward(tools.products, Linear(pass, width_, 4 * width_), norm_2,
                                   operands.Matrix(p.c_fc.weight), operands.Vector(p.c_fc.bias), hidden));
  O* activated = memory.activated.Resize(4 * size);
  GeluForward(4 * size, hidden, activated);
  T* output = memory.output.Resize(size);
  EK_RETURN_IF_ERROR(LinearForward(tools.products, Linear(pass, 4 * width_, width_), activated,
                                   operands.Matrix(p.mlp_c_proj.weight), operands.Vector(p.mlp_c_proj.bias), output));
  EndPart(pass, first_stream_ + 2, middle, output);
  return absl::OkStatus();
}

template <typename T, typename O>
const O* Block<T, O>::BeginPart(BlockTools<T, O>& tools, const GptPass& pass, uint64_t stream, const T* diff) const {
  const int64_t rows = pass.rows();
  if (pass.dropout == 0) return AsOperand(rows * width_, diff, tools.narrow_operand);
  O* operand = tools.narrow_operand.Resize(rows * width_);
  Dropout(pass.Noise(stream), Whole(rows, width_), diff, operand);
  return operand;
}

template <typename T, typename O>
absl::Status Block<T, O>::WriteLinear(BlockTools<T, O>& tools, const LinearShape& shape, const WeightAndBias& linear,
                                      const O* input, const O* diff_output, GradientSink& sink) const {
  EK_RETURN_IF_ERROR(sink.Write<T>(linear.bias, [&](GradTarget<T> target) {
    SumRows(shape.rows, shape.outputs, diff_output, target);
    return absl::OkStatus();
  }));
  return sink.Write<T>(linear.weight, [&](GradTarget<T> target) {
    return LinearBackwardWeight(tools.products, shape, input, diff_output, target);
  });
}

template <typename T, typename O>
absl::Status Block<T, O>::PerceptronBackward(BlockTools<T, O>& tools, const GptPass& pass,
                                             const BlockMemory<T, O>& memory, GradientSink& sink, T* diff) const {
  const BlockParameters& p = parameters_;
  const int64_t wide = 4 * width_ * pass.rows();
  const LinearShape narrowing = Linear(pass, 4 * width_, width_), widening = Linear(pass, width_, 4 * width_);
  const O* diff_end = BeginPart(tools, pass, first_stream_ + 2, diff);
  T* diff_activated = tools.wide.Resize(wide);
  EK_RETURN_IF_ERROR(LinearBackwardInput(tools.products, narrowing, tools.operands.Matrix(p.mlp_c_proj.weight),
                                         diff_end, diff_activated));
  EK_RETURN_IF_ERROR(WriteLinear(tools, narrowing, p.mlp_c_proj, memory.activated.data(), diff_end, sink));
  if (!sink.AnyTrainedBefore(p.mlp_c_proj.weight)) return absl::OkStatus();

  O* diff_hidden;
  if constexpr (std::is_same_v<T, O>) {
    diff_hidden = diff_activated;
  } else {
    diff_hidden = tools.wide_operand.Resize(wide);
  }
  GeluBackward(wide, memory.hidden.data(), diff_activated, diff_hidden);
  T* diff_norm = tools.norm_diff.Resize(pass.rows() * width_);
  EK_RETURN_IF_ERROR(
      LinearBackwardInput(tools.products, widening, tools.operands.Matrix(p.c_fc.weight), diff_hidden, diff_norm));
  EK_RETURN_IF_ERROR(WriteLinear(tools, widening, p.c_fc, memory.norm_2.data(), diff_hidden, sink));
  if (!sink.AnyTrainedBefore(p.c_fc.weight)) return absl::OkStatus();

  return NormBackward(tools, pass.rows(), width_, p.ln_2, memory.middle.data(), Statistics(pass, memory, 1), diff_norm,
                      sink, diff);
}

template <typename T, typename O>
absl::Status Block<T, O>::AttentionBackward(BlockTools<T, O>& tools, const GptPass& pass, const T* input,
                                            const BlockMemory<T, O>& memory, GradientSink& sink, T* diff) const {
  const BlockParameters& p = parameters_;
  const int64_t size = width_ * pass.rows();
  const LinearShape projection = Linear(pass, width_, width_), widening = Linear(pass, width_, 3 * width_);
  const O* diff_end = BeginPart(tools, pass, first_stream_ + 1, diff);
  O* diff_mixed = tools.wide_operand.Resize(4 * size);
  EK_RETURN_IF_ERROR(LinearBackwardInput(tools.products, projection, tools.operands.Matrix(p.attn_c_proj.weight),
                                         diff_end, diff_mixed));
  EK_RETURN_IF_ERROR(WriteLinear(tools, projection, p.attn_c_proj, memory.mixed.data(), diff_end, sink));
  if (!sink.AnyTrainedBefore(p.attn_c_proj.weight)) return absl::OkStatus();

  T* diff_qkv = tools.wide.Resize(4 * size);
  EK_RETURN_IF_ERROR(tools.attention.Backward(Attention(pass), pass.Noise(first_stream_), memory.qkv.data(),
                                              memory.probabilities.data(), diff_mixed, diff_qkv));
  const O* diff_operand = AsOperand(3 * size, diff_qkv, tools.wide_operand);
  T* diff_norm = tools.norm_diff.Resize(size);
  EK_RETURN_IF_ERROR(
      LinearBackwardInput(tools.products, widening, tools.operands.Matrix(p.c_attn.weight), diff_operand, diff_norm));
  EK_RETURN_IF_ERROR(WriteLinear(tools, widening, p.c_attn, memory.norm_1.data(), diff_operand, sink));
  if (!sink.AnyTrainedBefore(p.c_attn.weight)) return absl::OkStatus();

  return NormBackward(tools, pass.rows(), width_, p.ln_1, input, Statistics(pass, memory, 0), diff_norm, sink, diff);
}

template <typename T, typename O>
absl::Status Block<T, O>::Backward(BlockTools<T, O>& tools, const GptPass& pass, const T* input,
                                   const BlockMemory<T, O>& memory, GradientSink& sink, T* diff) const {
  EK_RETURN_IF_ERROR(PerceptronBackward(tools, pass, memory, sink, diff));
  if (!sink.AnyTrainedBefore(parameters_.ln_2.weight)) return absl::OkStatus();
  return AttentionBackward(tools, pass, input, memory, sink, diff);
}

#define EK_INSTANTIATE(T, O)                                                                              \
  template class Block<T, O>;                                                                             \
  template absl::Status NormBackward(BlockTools<T, O>&, int64_t, int64_t, const WeightAndBias&, const T*, \
                                     RowStatistics<T>, const T*, GradientSink&, T*);

EK_INSTANTIATE(float, float)
EK_INSTANTIATE(float, BFloat16)
EK_INSTANTIATE(double, double)

}  // namespace evenkeel
