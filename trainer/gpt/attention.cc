#include "evenkeel/trainer/gpt/attention.h"

#include <algorithm>
#include <type_traits>

#include "evenkeel/comm/status.h"
#include "evenkeel/comm/types.h"
#include "evenkeel/trainer/gpt/causal_softmax.h"
#include "evenkeel/trainer/layers/strided_shape.h"

namespace evenkeel {
namespace {

// With a context of 128 a quarter of the products is left out, with 1024 nearly half. Smaller
// blocks leave out more, but their products are slower.
constexpr int64_t kRowsPerBlock = 64;

AttentionRows RowsFrom(int64_t begin, const AttentionShape& shape, bool drops) {
  const auto of_width = [&](int64_t width) {
    return MatrixStrides{.outer = shape.context * width, .head = shape.head_width, .row = width};
  };
  const int64_t end = std::min(begin + kRowsPerBlock, shape.context);
  const MatrixStrides qkv = of_width(3 * shape.width());
  return {shape, begin, end, kRowsPerBlock, qkv, of_width(shape.width()), drops};
}

// Where matrix `index` of a block's memory, or of the probabilities from this block on, begins.
int64_t InBlock(const AttentionRows& rows, int64_t index) {
  return index * kRowsPerBlock * rows.shape.context;
}
int64_t InProbabilities(const AttentionRows& rows, int64_t index) {
  return (index * rows.shape.context + rows.begin) * rows.shape.context;
}
CausalBlock BlockOf(const AttentionRows& rows) {
  return {rows.begin, rows.count(), rows.end, rows.shape.context};
}
DropoutMatrix NoiseOf(const AttentionRows& rows, int64_t index) {
  const int64_t context = rows.shape.context;
  return {index * context + rows.begin, rows.count(), rows.end, context};
}

}  // namespace

template <typename T, typename O>
absl::Status CausalAttention<T, O>::Forward(const AttentionShape& shape, const DropoutNoise& noise,
                                            const O* qkv, O* probabilities, O* output) {
  const int64_t block_size = shape.matrices() * kRowsPerBlock * shape.context;
  scores_.Resize(block_size);
  if (noise.probability > 0) operands_.Resize(block_size);
  for (int64_t begin = 0; begin < shape.context; begin += kRowsPerBlock) {
    const AttentionRows rows = RowsFrom(begin, shape, noise.probability > 0);
    EK_RETURN_IF_ERROR(ForwardRows(rows, noise, qkv, probabilities, output));
  }
  return absl::OkStatus();
}

template <typename T, typename O>
absl::Status CausalAttention<T, O>::ForwardRows(const AttentionRows& rows,
                                                const DropoutNoise& noise, const O* qkv,
                                                O* probabilities, O* output) {
  const int64_t width = rows.shape.width();
  const O* queries = qkv + rows.begin * 3 * width;
  EK_RETURN_IF_ERROR(products_.Run(rows.Scores(), queries, qkv + width, nullptr, scores_.data()));

  for (int64_t i = 0; i < rows.shape.matrices(); ++i) {
    O* own = probabilities + InProbabilities(rows, i);
    CausalSoftmaxForward(BlockOf(rows), rows.Scale<T>(), scores_.data() + InBlock(rows, i), own);
    if (rows.drops) Dropout(noise, NoiseOf(rows, i), own, operands_.data() + InBlock(rows, i));
  }

  const O* weights = rows.drops ? operands_.data() : probabilities + InProbabilities(rows, 0);
  return products_.Run(rows.Output(), weights, qkv + 2 * width, nullptr,
                       output + rows.begin * width);
}

template <typename T, typename O>
absl::Status CausalAttention<T, O>::Backward(const AttentionShape& shape, const DropoutNoise& noise,
                                             const O* qkv, const O* probabilities,
                                             const O* diff_output, T* diff_qkv) {
  const int64_t block_size = shape.matrices() * kRowsPerBlock * shape.context;
  scores_.Resize(block_size);
  if (noise.probability > 0 || !std::is_same_v<T, O>) operands_.Resize(block_size);
  for (int64_t begin = (shape.context - 1) / kRowsPerBlock * kRowsPerBlock; begin >= 0;
       begin -= kRowsPerBlock) {
    const AttentionRows rows = RowsFrom(begin, shape, noise.probability > 0);
    EK_RETURN_IF_ERROR(BackwardRows(rows, noise, qkv, probabilities, diff_output, diff_qkv));
  }
  return absl::OkStatus();
}

template <typename T, typename O>
absl::Status CausalAttention<T, O>::BackwardRows(const AttentionRows& rows,
                                                 const DropoutNoise& noise, const O* qkv,
                                                 const O* probabilities, const O* diff_output,
                                                 T* diff_qkv) {
  const int64_t width = rows.shape.width(), first_query = rows.begin * 3 * width;
  const O* diff = diff_output + rows.begin * width;
  const O* weights = probabilities + InProbabilities(rows, 0);

  // Gradients of the values, which the probabilities weighted after dropout.
  if (rows.drops) {
    for (int64_t i = 0; i < rows.shape.matrices(); ++i) {
      Dropout(noise, NoiseOf(rows, i), probabilities + InProbabilities(rows, i),
              operands_.data() + InBlock(rows, i));
    }
    weights = operands_.data();
  }
  EK_RETURN_IF_ERROR(
      products_.Run(rows.DiffValues(), weights, diff, nullptr, diff_qkv + 2 * width));

  // Gradients of the scores.
  EK_RETURN_IF_ERROR(
      products_.Run(rows.DiffWeights(), diff, qkv + 2 * width, nullptr, scores_.data()));
  O* diff_scores = OperandMemory(scores_.data(), InBlock(rows, rows.shape.matrices()), operands_);
  for (int64_t i = 0; i < rows.shape.matrices(); ++i) {
    T* own = scores_.data() + InBlock(rows, i);
    if (rows.drops) Dropout(noise, NoiseOf(rows, i), own, own);
    CausalSoftmaxBackward(BlockOf(rows), rows.Scale<T>(), probabilities + InProbabilities(rows, i),
                          own, diff_scores + InBlock(rows, i));
  }

  // Gradients of queries and keys.
  EK_RETURN_IF_ERROR(
      products_.Run(rows.DiffQueries(), diff_scores, qkv + width, nullptr, diff_qkv + first_query));
  return products_.Run(rows.DiffKeys(), diff_scores, qkv + first_query, nullptr, diff_qkv + width);
}

template class CausalAttention<float, float>;
template class CausalAttention<float, BFloat16>;
template class CausalAttention<double, double>;

}  // namespace evenkeel
