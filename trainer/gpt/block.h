// One layer of a GPT: x += attention(norm(x)), then x += perceptron(norm(x)).
//
//   Block<float, float> block({.ln_1 = {4, 5}, ...}, width, heads);
//   // memory.output is the next one's input
//   EK_RETURN_IF_ERROR(block.Forward(tools, pass, input, memory));
//   EK_RETURN_IF_ERROR(block.Backward(tools, pass, input, memory, sink, diff));
//
// Backward turns `diff` from the gradient of the output into that of the input. It ends where
// nothing below is trained; then `diff` is unspecified. Gradients are announced from the last
// parameter to the first, each after the last use of the parameter's value.
//
// Shapes:  input and diff [pass.rows(), width].
// Types:   T is float or double; O, the operand type of products, is T or, for float, BFloat16.
// Threads: thread-compatible, together with `tools`.
// Errors:  those of StridedProducts and of the sink.

#ifndef EVENKEEL_TRAINER_GPT_BLOCK_H_
#define EVENKEEL_TRAINER_GPT_BLOCK_H_

#include <cstdint>
#include <span>

#include "absl/status/status.h"
#include "evenkeel/bucket/parameter_set.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/trainer/gpt/attention.h"
#include "evenkeel/trainer/gpt/attention_rows.h"
#include "evenkeel/trainer/gpt/buffer.h"
#include "evenkeel/trainer/gpt/dropout.h"
#include "evenkeel/trainer/gpt/gelu.h"
#include "evenkeel/trainer/gpt/gpt_pass.h"
#include "evenkeel/trainer/gpt/layer_norm.h"
#include "evenkeel/trainer/gpt/operands.h"
#include "evenkeel/trainer/gpt/strided_product.h"
#include "evenkeel/trainer/layers/gradient_sink.h"
#include "evenkeel/trainer/layers/rows.h"

namespace evenkeel {

// The results of a layer's forward pass that its backward pass uses.
template <typename T, typename O>
struct BlockMemory {
  explicit BlockMemory(int64_t* held) : held(held) {}

  int64_t* const held;
  Buffer<O> norm_1{held};      // [rows, width]
  Buffer<O> qkv{held};         // [rows, 3 width]
  Buffer<O> mixed{held};       // [rows, width]: the heads' means
  Buffer<T> middle{held};      // [rows, width]: the sum after attention
  Buffer<O> norm_2{held};      // [rows, width]
  Buffer<T> hidden{held};      // [rows, 4 width]
  Buffer<O> activated{held};   // [rows, 4 width]
  Buffer<T> output{held};      // [rows, width]
  Buffer<T> statistics{held};  // [4, rows]: of both norms
};

// Workspaces that all layers share: no content outlives the pass of one layer.
template <typename T, typename O>
struct BlockTools {
  BlockTools(const ParameterSet* parameters, int64_t* held)
      : held(held), operands(parameters, held), attention(&products, held) {}

  int64_t* const held;
  StridedProducts<O> products;
  Operands<T, O> operands;
  CausalAttention<T, O> attention;
  Buffer<T> wide{held};            // [rows, 4 width]: gradients within a part
  Buffer<O> wide_operand{held};    // The same, as products take it; unused where T is O.
  Buffer<O> narrow_operand{held};  // [rows, width]: gradients that go into a part
  Buffer<T> norm_diff{held};       // [rows, width]: of a norm's output
  Buffer<T> norm_sums{held};       // [2, width]: of its weight and bias
};

// Backward through a layer norm, its parameters' gradients included.
template <typename T, typename O>
absl::Status NormBackward(BlockTools<T, O>& tools, int64_t rows, int64_t width,
                          const WeightAndBias& norm, const T* input, RowStatistics<T> statistics,
                          const T* diff_output, GradientSink& sink, T* diff_input) {
  T* weight_sum = tools.norm_sums.Resize(2 * width);
  T* bias_sum = weight_sum + width;
  LayerNormBackward(rows, width, input, statistics, tools.operands.Vector(norm.weight), diff_output,
                    weight_sum, bias_sum,
                    sink.AnyTrainedBefore(norm.weight) ? diff_input : nullptr);
  const auto write = [&](int index, const T* sum) {
    return sink.Write<T>(index, [&](GradTarget<T> target) {
      SumRows(1, width, sum, target);
      return absl::OkStatus();
    });
  };
  EK_RETURN_IF_ERROR(write(norm.bias, bias_sum));
  return write(norm.weight, weight_sum);
}

template <typename T, typename O>
class Block {
 public:
  Block(const BlockParameters& parameters, int64_t width, int64_t heads, int layer)
      : parameters_(parameters), width_(width), heads_(heads), first_stream_(FirstStream(layer)) {}

  const BlockParameters& parameters() const { return parameters_; }

  absl::Status Forward(BlockTools<T, O>& tools, const GptPass& pass, const T* input,
                       BlockMemory<T, O>& memory) const {
    const int64_t rows = pass.rows(), size = rows * width_;
    const Operands<T, O>& operands = tools.operands;
    const BlockParameters& p = parameters_;
    memory.statistics.Resize(4 * rows);

    O* norm_1 = memory.norm_1.Resize(size);
    LayerNormForward(rows, width_, input, operands.Vector(p.ln_1.weight),
                     operands.Vector(p.ln_1.bias), norm_1, Statistics(pass, memory, 0));
    O* qkv = memory.qkv.Resize(3 * size);
    EK_RETURN_IF_ERROR(Apply(tools, pass.Linear(width_, 3 * width_), p.c_attn, norm_1, qkv));
    O* mixed = memory.mixed.Resize(size);
    EK_RETURN_IF_ERROR(tools.attention.Forward(pass.Attention(width_, heads_),
                                               pass.Noise(first_stream_), qkv, mixed));
    T* middle = memory.middle.Resize(size);
    EK_RETURN_IF_ERROR(Apply(tools, pass.Linear(width_, width_), p.attn_c_proj, mixed, middle));
    EndPart(pass, first_stream_ + 1, input, middle);

    O* norm_2 = memory.norm_2.Resize(size);
    LayerNormForward(rows, width_, middle, operands.Vector(p.ln_2.weight),
                     operands.Vector(p.ln_2.bias), norm_2, Statistics(pass, memory, 1));
    T* hidden = memory.hidden.Resize(4 * size);
    EK_RETURN_IF_ERROR(Apply(tools, pass.Linear(width_, 4 * width_), p.c_fc, norm_2, hidden));
    O* activated = memory.activated.Resize(4 * size);
    GeluForward(4 * size, hidden, activated);
    T* output = memory.output.Resize(size);
    EK_RETURN_IF_ERROR(
        Apply(tools, pass.Linear(4 * width_, width_), p.mlp_c_proj, activated, output));
    EndPart(pass, first_stream_ + 2, middle, output);
    return absl::OkStatus();
  }

  absl::Status Backward(BlockTools<T, O>& tools, const GptPass& pass, const T* input,
                        const BlockMemory<T, O>& memory, GradientSink& sink, T* diff) const {
    EK_RETURN_IF_ERROR(PerceptronBackward(tools, pass, memory, sink, diff));
    if (!sink.AnyTrainedBefore(parameters_.ln_2.weight)) return absl::OkStatus();
    return AttentionBackward(tools, pass, input, memory, sink, diff);
  }

 private:
  // Returns the statistics of the first (0) or second (1) norm.
  static RowStatistics<T> Statistics(const GptPass& pass, const BlockMemory<T, O>& memory,
                                     int norm) {
    T* own = memory.statistics.data() + 2 * norm * pass.rows();
    return {.mean = own, .inverse_deviation = own + pass.rows()};
  }

  // Dropout, and the sum with what went around the part.
  void EndPart(const GptPass& pass, uint64_t stream, const T* around, T* part) const {
    const int64_t rows = pass.rows();
    if (pass.dropout > 0) Dropout(pass.Noise(stream), WholeMatrix(rows, width_), part, part);
    const std::span<T> sum(part, rows * width_);
    Add<T>(std::span(around, sum.size()), sum, sum);
  }

  // The gradient of a part's end, as products take it.
  const O* BeginPart(BlockTools<T, O>& tools, const GptPass& pass, uint64_t stream,
                     const T* diff) const {
    const int64_t rows = pass.rows();
    if (pass.dropout == 0) return AsOperand(rows * width_, diff, tools.narrow_operand);
    O* operand = tools.narrow_operand.Resize(rows * width_);
    Dropout(pass.Noise(stream), WholeMatrix(rows, width_), diff, operand);
    return operand;
  }

  template <typename Result>
  absl::Status Apply(BlockTools<T, O>& tools, const LinearShape& shape, const WeightAndBias& linear,
                     const O* input, Result* output) const {
    return tools.products.Run(shape.Forward(), input, tools.operands.Matrix(linear.weight),
                              tools.operands.Vector(linear.bias), output);
  }
  template <typename Result>
  absl::Status LinearBackward(BlockTools<T, O>& tools, const LinearShape& shape,
                              const WeightAndBias& linear, const O* input, const O* diff_output,
                              Result* diff_input, GradientSink& sink) const {
    EK_RETURN_IF_ERROR(tools.products.Run(shape.BackwardInput(), diff_output,
                                          tools.operands.Matrix(linear.weight), nullptr,
                                          diff_input));
    EK_RETURN_IF_ERROR(sink.Write<T>(linear.bias, [&](GradTarget<T> target) {
      SumRows(shape.rows, shape.outputs, diff_output, target);
      return absl::OkStatus();
    }));
    return sink.Write<T>(linear.weight, [&](GradTarget<T> target) {
      return tools.products.Run(shape.BackwardWeight(target.add), input, diff_output, nullptr,
                                target.data);
    });
  }

  absl::Status PerceptronBackward(BlockTools<T, O>& tools, const GptPass& pass,
                                  const BlockMemory<T, O>& memory, GradientSink& sink,
                                  T* diff) const {
    const BlockParameters& p = parameters_;
    const int64_t wide = 4 * width_ * pass.rows();
    const LinearShape narrowing = pass.Linear(4 * width_, width_),
                      widening = pass.Linear(width_, 4 * width_);
    const O* diff_end = BeginPart(tools, pass, first_stream_ + 2, diff);
    T* diff_activated = tools.wide.Resize(wide);
    EK_RETURN_IF_ERROR(LinearBackward(tools, narrowing, p.mlp_c_proj, memory.activated.data(),
                                      diff_end, diff_activated, sink));
    if (!sink.AnyTrainedBefore(p.mlp_c_proj.weight)) return absl::OkStatus();

    O* diff_hidden = OperandMemory(diff_activated, wide, tools.wide_operand);
    GeluBackward(wide, memory.hidden.data(), diff_activated, diff_hidden);
    T* diff_norm = tools.norm_diff.Resize(pass.rows() * width_);
    EK_RETURN_IF_ERROR(LinearBackward(tools, widening, p.c_fc, memory.norm_2.data(), diff_hidden,
                                      diff_norm, sink));
    if (!sink.AnyTrainedBefore(p.c_fc.weight)) return absl::OkStatus();

    return NormBackward(tools, pass.rows(), width_, p.ln_2, memory.middle.data(),
                        Statistics(pass, memory, 1), diff_norm, sink, diff);
  }

  absl::Status AttentionBackward(BlockTools<T, O>& tools, const GptPass& pass, const T* input,
                                 const BlockMemory<T, O>& memory, GradientSink& sink,
                                 T* diff) const {
    const BlockParameters& p = parameters_;
    const int64_t size = width_ * pass.rows();
    const LinearShape projection = pass.Linear(width_, width_),
                      widening = pass.Linear(width_, 3 * width_);
    const O* diff_end = BeginPart(tools, pass, first_stream_ + 1, diff);
    O* diff_mixed = tools.wide_operand.Resize(4 * size);
    EK_RETURN_IF_ERROR(LinearBackward(tools, projection, p.attn_c_proj, memory.mixed.data(),
                                      diff_end, diff_mixed, sink));
    if (!sink.AnyTrainedBefore(p.attn_c_proj.weight)) return absl::OkStatus();

    T* diff_qkv = tools.wide.Resize(4 * size);
    EK_RETURN_IF_ERROR(tools.attention.Backward(pass.Attention(width_, heads_),
                                                pass.Noise(first_stream_), memory.qkv.data(),
                                                diff_mixed, diff_qkv));
    const O* diff_operand = AsOperand(3 * size, diff_qkv, tools.wide_operand);
    T* diff_norm = tools.norm_diff.Resize(size);
    EK_RETURN_IF_ERROR(LinearBackward(tools, widening, p.c_attn, memory.norm_1.data(), diff_operand,
                                      diff_norm, sink));
    if (!sink.AnyTrainedBefore(p.c_attn.weight)) return absl::OkStatus();

    return NormBackward(tools, pass.rows(), width_, p.ln_1, input, Statistics(pass, memory, 0),
                        diff_norm, sink, diff);
  }

  const BlockParameters parameters_;
  const int64_t width_;
  const int64_t heads_;
  const uint64_t first_stream_;
};

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_GPT_BLOCK_H_
