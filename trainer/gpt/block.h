// One layer of a GPT: x += attention(norm(x)), then x += perceptron(norm(x)).
//
//   Block<float, float> block({.ln_1 = {4, 5}, ...}, width, heads);
//   EK_RETURN_IF_ERROR(block.Forward(tools, pass, input, memory));           // memory.output is the next one's input
//   EK_RETURN_IF_ERROR(block.Backward(tools, pass, input, memory, sink, diff));
//
// `diff` comes as the gradient of the output and leaves as that of the input. Backward ends where nothing below is
// trained; then `diff` is unspecified. Gradients are announced from the last parameter to the first, each after the
// last use of the parameter's value.
//
// Shapes:  input and diff [pass.rows(), width].
// Types:   T is float or double; O, what matrix products take, is T or, for float, BFloat16.
// Threads: thread-compatible, together with `tools`.
// Errors:  those of StridedProducts and of the sink.

#ifndef EVENKEEL_TRAINER_GPT_BLOCK_H_
#define EVENKEEL_TRAINER_GPT_BLOCK_H_

#include <cstdint>

#include "absl/status/status.h"
#include "evenkeel/bucket/parameter_set.h"
#include "evenkeel/trainer/gpt/attention.h"
#include "evenkeel/trainer/gpt/buffer.h"
#include "evenkeel/trainer/gpt/layer_norm.h"
#include "evenkeel/trainer/gpt/linear.h"
#include "evenkeel/trainer/gpt/operands.h"
#include "evenkeel/trainer/gpt/strided_product.h"
#include "evenkeel/trainer/gradient_sink.h"

namespace evenkeel {

// The parameters of a part, by their indices.
struct WeightAndBias {
  int weight = 0;
  int bias = 0;
};

struct BlockParameters {
  WeightAndBias ln_1, c_attn, attn_c_proj, ln_2, c_fc, mlp_c_proj;
};

// What a pass is about.
struct GptPass {
  int64_t sequences = 0;
  int64_t context = 0;
  double dropout = 0;  // 0 in evaluation.
  uint64_t noise = 0;

  int64_t rows() const { return sequences * context; }
  DropoutNoise Noise(uint64_t stream) const { return {.probability = dropout, .seed = noise, .stream = stream}; }
};

// What a layer's backward pass needs of its forward pass.
template <typename T, typename O>
struct BlockMemory {
  explicit BlockMemory(int64_t* held)
      : norm_1(held),
        qkv(held),
        probabilities(held),
        mixed(held),
        middle(held),
        norm_2(held),
        hidden(held),
        activated(held),
        output(held),
        statistics(held) {}

  Buffer<O> norm_1;         // [rows, width]
  Buffer<O> qkv;            // [rows, 3 width]
  Buffer<O> probabilities;  // [sequences, heads, context, context]
  Buffer<O> mixed;          // [rows, width]: the heads' means
  Buffer<T> middle;         // [rows, width]: the sum after attention
  Buffer<O> norm_2;         // [rows, width]
  Buffer<T> hidden;         // [rows, 4 width]
  Buffer<O> activated;      // [rows, 4 width]
  Buffer<T> output;         // [rows, width]
  Buffer<T> statistics;     // [4, rows]: of both norms
};

// What all layers share: nothing in it lives longer than the pass of one layer.
template <typename T, typename O>
struct BlockTools {
  BlockTools(const ParameterSet* parameters, int64_t* held)
      : operands(parameters, held),
        attention(&products, held),
        wide(held),
        wide_operand(held),
        narrow_operand(held),
        norm_diff(held),
        norm_sums(held) {}

  StridedProducts<O> products;
  Operands<T, O> operands;
  CausalAttention<T, O> attention;
  Buffer<T> wide;            // [rows, 4 width]: gradients within a part
  Buffer<O> wide_operand;    // The same, as products take it; unused where T is O.
  Buffer<O> narrow_operand;  // [rows, width]: gradients that go into a part
  Buffer<T> norm_diff;       // [rows, width]: of a norm's output
  Buffer<T> norm_sums;       // [2, width]: of its weight and bias
};

// Backward through a layer norm, its parameters' gradients included.
template <typename T, typename O>
absl::Status NormBackward(BlockTools<T, O>& tools, int64_t rows, int64_t width, const WeightAndBias& norm,
                          const T* input, RowStatistics<T> statistics, const T* diff_output, GradientSink& sink,
                          T* diff_input);

template <typename T, typename O>
class Block {
 public:
  Block(const BlockParameters& parameters, int64_t width, int64_t heads, int layer)
      : parameters_(parameters), width_(width), heads_(heads), first_stream_(1 + 3 * static_cast<uint64_t>(layer)) {}

  const BlockParameters& parameters() const { return parameters_; }

  absl::Status Forward(BlockTools<T, O>& tools, const GptPass& pass, const T* input, BlockMemory<T, O>& memory) const;
  absl::Status Backward(BlockTools<T, O>& tools, const GptPass& pass, const T* input, const BlockMemory<T, O>& memory,
                        GradientSink& sink, T* diff) const;

 private:
  AttentionShape Attention(const GptPass& pass) const {
    return {.sequences = pass.sequences, .context = pass.context, .heads = heads_, .head_width = width_ / heads_};
  }
  LinearShape Linear(const GptPass& pass, int64_t inputs, int64_t outputs) const {
    return {.rows = pass.rows(), .inputs = inputs, .outputs = outputs};
  }
  // Of the norm that comes first (0) or second (1).
  static RowStatistics<T> Statistics(const GptPass& pass, const BlockMemory<T, O>& memory, int norm) {
    T* own = memory.statistics.data() + 2 * norm * pass.rows();
    return {.mean = own, .inverse_deviation = own + pass.rows()};
  }

  // Dropout, and the sum with what went around the part.
  void EndPart(const GptPass& pass, uint64_t stream, const T* around, T* part) const;
  // The gradient of a part's end, as products take it.
  const O* BeginPart(BlockTools<T, O>& tools, const GptPass& pass, uint64_t stream, const T* diff) const;
  absl::Status WriteLinear(BlockTools<T, O>& tools, const LinearShape& shape, const WeightAndBias& linear,
                           const O* input, const O* diff_output, GradientSink& sink) const;
  absl::Status PerceptronBackward(BlockTools<T, O>& tools, const GptPass& pass, const BlockMemory<T, O>& memory,
                                  GradientSink& sink, T* diff) const;
  absl::Status AttentionBackward(BlockTools<T, O>& tools, const GptPass& pass, const T* input,
                                 const BlockMemory<T, O>& memory, GradientSink& sink, T* diff) const;

  const BlockParameters parameters_;
  const int64_t width_;
  const int64_t heads_;
  const uint64_t first_stream_;  // Of dropout: the attention's weights, its end, the perceptron's end.
};

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_GPT_BLOCK_H_
