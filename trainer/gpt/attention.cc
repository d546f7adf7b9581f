#include "evenkeel/trainer/gpt/attention.h"

#include <algorithm>

#include "evenkeel/comm/status.h"
#include "evenkeel/comm/types.h"
#include "evenkeel/trainer/gpt/causal_softmax.h"
#include "evenkeel/trainer/layers/strided_shape.h"

namespace evenkeel {
namespace {

// The matrices whose products run together: some heads of one sequence, or some sequences.
struct Part {
  AttentionShape shape;
  int64_t sequence = 0;   // The first one.
  int64_t head = 0;       // The first one.
  int64_t all_heads = 0;  // Of a sequence, also those of other parts.

  int64_t first_matrix() const { return sequence * all_heads + head; }
  int64_t width() const { return all_heads * shape.head_width; }
  // Where the part begins in a matrix whose rows are `row` long.
  int64_t Begin(int64_t row) const {
    return sequence * shape.context * row + head * shape.head_width;
  }

  AttentionRows RowsFrom(int64_t begin) const {
    const auto strides = [&](int64_t row) {
      return MatrixStrides{.outer = shape.context * row, .head = shape.head_width, .row = row};
    };
    const int64_t end = std::min(begin + kAttentionRows, shape.context);
    return {shape,
            begin,
            end,
            kAttentionRows,
            strides(3 * width()),
            strides(width()),
            /*weights_in_block=*/true};
  }
};

// Calls `run` with each part, and returns its first error.
template <typename Run>
absl::Status ForEachPart(const AttentionShape& shape, int64_t block_bytes, const Run& run) {
  const int64_t most = std::max<int64_t>(1, kAttentionPartBytes / block_bytes);
  int64_t heads = std::min(most, shape.heads);
  while (shape.heads % heads != 0) --heads;
  const int64_t sequences = heads < shape.heads ? 1 : most / heads;
  Part part{.all_heads = shape.heads};
  for (part.sequence = 0; part.sequence < shape.sequences; part.sequence += sequences) {
    part.shape = {std::min(sequences, shape.sequences - part.sequence), shape.context, heads,
                  shape.head_width};
    for (part.head = 0; part.head < shape.heads; part.head += heads) EK_RETURN_IF_ERROR(run(part));
  }
  return absl::OkStatus();
}

int64_t BlockSize(int64_t context) { return kAttentionRows * context; }

}  // namespace

template <typename T, typename O>
int64_t CausalAttention<T, O>::WorkSize(const AttentionShape& shape) {
  const int64_t block = BlockSize(shape.context), bytes = block * sizeof(T);
  return block * std::clamp<int64_t>(kAttentionPartBytes / bytes, 1, shape.matrices());
}

template <typename T, typename O>
absl::Status CausalAttention<T, O>::Forward(const AttentionShape& shape, const DropoutNoise& noise,
                                            const O* qkv, O* output) {
  return ForEachPart(shape, BlockSize(shape.context) * sizeof(T), [&](const Part& part) {
    const int64_t width = part.width();
    for (int64_t begin = 0; begin < shape.context; begin += kAttentionRows) {
      const Block block{part.RowsFrom(begin), part.first_matrix(), noise};
      EK_RETURN_IF_ERROR(
          ForwardBlock(block, qkv + part.Begin(3 * width), output + part.Begin(width)));
    }
    return absl::OkStatus();
  });
}

template <typename T, typename O>
absl::Status CausalAttention<T, O>::ForwardBlock(const Block& block, const O* qkv, O* output) {
  const AttentionRows& rows = block.rows;
  const int64_t width = rows.output.row;
  O* weights = memory_.operands;
  EK_RETURN_IF_ERROR(Weigh(block, qkv, weights));
  if (block.noise.probability > 0) Drop(block, weights, weights);
  return products_.Run(rows.Output(), weights, qkv + 2 * width, nullptr,
                       output + rows.begin * width);
}

// Computes the scores and their softmax.
template <typename T, typename O>
absl::Status CausalAttention<T, O>::Weigh(const Block& block, const O* qkv, O* probabilities) {
  const AttentionRows& rows = block.rows;
  const int64_t width = rows.output.row, context = rows.shape.context;
  EK_RETURN_IF_ERROR(products_.Run(rows.Scores(), qkv + rows.begin * 3 * width, qkv + width,
                                   nullptr, memory_.scores));
  for (int64_t i = 0; i < rows.shape.matrices(); ++i) {
    CausalSoftmaxForward({rows.begin, rows.count(), rows.end, context}, rows.Scale<T>(),
                         memory_.scores + i * BlockSize(context),
                         probabilities + i * BlockSize(context));
  }
  return absl::OkStatus();
}

template <typename T, typename O>
template <typename I, typename R>
void CausalAttention<T, O>::Drop(const Block& block, const I* input, R* output) const {
  const AttentionRows& rows = block.rows;
  const int64_t context = rows.shape.context;
  for (int64_t i = 0; i < rows.shape.matrices(); ++i) {
    const int64_t first_row = (block.first_matrix + i) * context + rows.begin;
    Dropout(block.noise, {first_row, rows.count(), rows.end, context},
            input + i * BlockSize(context), output + i * BlockSize(context));
  }
}

template <typename T, typename O>
absl::Status CausalAttention<T, O>::Backward(const AttentionShape& shape, const DropoutNoise& noise,
                                             const O* qkv, const O* diff_output, T* diff_qkv) {
  return ForEachPart(shape, BlockSize(shape.context) * sizeof(T), [&](const Part& part) {
    const int64_t width = part.width(), wide = part.Begin(3 * width);
    for (int64_t begin = (shape.context - 1) / kAttentionRows * kAttentionRows; begin >= 0;
         begin -= kAttentionRows) {
      const Block block{part.RowsFrom(begin), part.first_matrix(), noise};
      EK_RETURN_IF_ERROR(
          BackwardBlock(block, qkv + wide, diff_output + part.Begin(width), diff_qkv + wide));
    }
    return absl::OkStatus();
  });
}

template <typename T, typename O>
absl::Status CausalAttention<T, O>::BackwardBlock(const Block& block, const O* qkv,
                                                  const O* diff_output, T* diff_qkv) {
  const AttentionRows& rows = block.rows;
  const bool drops = block.noise.probability > 0;
  const int64_t width = rows.output.row, first_query = rows.begin * 3 * width;
  const int64_t block_size = BlockSize(rows.shape.context);
  const O* diff = diff_output + rows.begin * width;
  const auto [scores, probabilities, operands] = memory_;
  EK_RETURN_IF_ERROR(Weigh(block, qkv, probabilities));

  // Gradients of the values, which the probabilities weighted after dropout.
  if (drops) Drop(block, probabilities, operands);
  EK_RETURN_IF_ERROR(products_.Run(rows.DiffValues(), drops ? operands : probabilities, diff,
                                   nullptr, diff_qkv + 2 * width));

  // Gradients of the scores.
  EK_RETURN_IF_ERROR(products_.Run(rows.DiffWeights(), diff, qkv + 2 * width, nullptr, scores));
  if (drops) Drop(block, scores, scores);
  for (int64_t i = 0; i < rows.shape.matrices(); ++i) {
    CausalSoftmaxBackward({rows.begin, rows.count(), rows.end, rows.shape.context}, rows.Scale<T>(),
                          probabilities + i * block_size, scores + i * block_size,
                          operands + i * block_size);
  }

  // Gradients of queries and keys.
  EK_RETURN_IF_ERROR(
      products_.Run(rows.DiffQueries(), operands, qkv + width, nullptr, diff_qkv + first_query));
  return products_.Run(rows.DiffKeys(), operands, qkv + first_query, nullptr, diff_qkv + width);
}

template class CausalAttention<float, float>;
template class CausalAttention<float, BFloat16>;
template class CausalAttention<double, double>;

}  // namespace evenkeel
