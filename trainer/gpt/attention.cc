#include "evenkeel/trainer/gpt/attention.h"

#include <algorithm>
#include <cmath>
#include <type_traits>
#include <utility>

#include "evenkeel/comm/status.h"
#include "evenkeel/comm/types.h"
#include "evenkeel/trainer/gpt/causal_softmax.h"

namespace evenkeel {
namespace {

// Of a context of 128 a quarter of the products is left out, of 1024 nearly half. Smaller blocks leave out more, but
// their products are slower.
constexpr int64_t kRowsPerBlock = 64;

}  // namespace

template <typename T, typename O>
struct CausalAttention<T, O>::Rows {
  AttentionShape shape;
  int64_t begin;
  int64_t end;

  int64_t count() const { return end - begin; }
  T scale() const { return 1 / std::sqrt(static_cast<T>(shape.head_width)); }

  // Where matrix `index` of a block's memory, or of the probabilities from this block on, begins.
  int64_t InBlock(int64_t index) const { return index * kRowsPerBlock * shape.context; }
  int64_t InProbabilities(int64_t index) const { return (index * shape.context + begin) * shape.context; }
  CausalBlock Block() const { return {.first = begin, .rows = count(), .columns = end, .stride = shape.context}; }
  DropoutMatrix Noise(int64_t index) const {
    return {.first_row = index * shape.context + begin, .rows = count(), .columns = end, .stride = shape.context};
  }

  MatrixStrides Of(int64_t row_width) const {
    return {.outer = shape.context * row_width, .head = shape.head_width, .row = row_width};
  }
  MatrixStrides Qkv() const { return Of(3 * shape.width()); }
  MatrixStrides Output() const { return Of(shape.width()); }
  MatrixStrides Memory() const { return Square(kRowsPerBlock * shape.context); }
  MatrixStrides Probabilities() const { return Square(shape.context * shape.context); }
  MatrixStrides Square(int64_t matrix) const {
    return {.outer = shape.heads * matrix, .head = matrix, .row = shape.context};
  }
  static MatrixStrides Transposed(MatrixStrides strides) {
    std::swap(strides.row, strides.column);
    return strides;
  }

  // A product for each head of each sequence.
  StridedShape Product(int64_t rows, int64_t columns, int64_t inner) const {
    return {.outer = shape.sequences, .heads = shape.heads, .rows = rows, .columns = columns, .inner = inner};
  }
};

template <typename T, typename O>
absl::Status CausalAttention<T, O>::Forward(const AttentionShape& shape, const DropoutNoise& noise, const O* qkv,
                                            O* probabilities, O* output) {
  const int64_t block_size = shape.matrices() * kRowsPerBlock * shape.context;
  scores_.Resize(block_size);
  if (noise.probability > 0) operands_.Resize(block_size);
  for (int64_t begin = 0; begin < shape.context; begin += kRowsPerBlock) {
    const Rows rows{shape, begin, std::min(begin + kRowsPerBlock, shape.context)};
    EK_RETURN_IF_ERROR(ForwardRows(rows, noise, qkv, probabilities, output));
  }
  return absl::OkStatus();
}

template <typename T, typename O>
absl::Status CausalAttention<T, O>::ForwardRows(const Rows& rows, const DropoutNoise& noise, const O* qkv,
                                                O* probabilities, O* output) {
  const int64_t width = rows.shape.width(), head_width = rows.shape.head_width;
  const O* queries = qkv + rows.begin * 3 * width;
  StridedShape fit = rows.Product(rows.count(), rows.end, head_width);
  fit.left = rows.Qkv(), fit.right = Rows::Transposed(rows.Qkv()), fit.output = rows.Memory();
  EK_RETURN_IF_ERROR(products_.Run(fit, queries, qkv + width, nullptr, scores_.data()));

  const bool drops = noise.probability > 0;
  for (int64_t i = 0; i < rows.shape.matrices(); ++i) {
    O* own = probabilities + rows.InProbabilities(i);
    CausalSoftmaxForward(rows.Block(), rows.scale(), scores_.data() + rows.InBlock(i), own);
    if (drops) Dropout(noise, rows.Noise(i), own, operands_.data() + rows.InBlock(i));
  }

  StridedShape mean = rows.Product(rows.count(), head_width, rows.end);
  mean.left = drops ? rows.Memory() : rows.Probabilities(), mean.right = rows.Qkv(), mean.output = rows.Output();
  const O* weights = drops ? operands_.data() : probabilities + rows.InProbabilities(0);
  return products_.Run(mean, weights, qkv + 2 * width, nullptr, output + rows.begin * width);
}

// The last block comes first: its keys are all of them, and what it writes the others are added to.
template <typename T, typename O>
absl::Status CausalAttention<T, O>::Backward(const AttentionShape& shape, const DropoutNoise& noise, const O* qkv,
                                             const O* probabilities, const O* diff_output, T* diff_qkv) {
  const int64_t block_size = shape.matrices() * kRowsPerBlock * shape.context;
  scores_.Resize(block_size);
  if (noise.probability > 0 || !std::is_same_v<T, O>) operands_.Resize(block_size);
  for (int64_t begin = (shape.context - 1) / kRowsPerBlock * kRowsPerBlock; begin >= 0; begin -= kRowsPerBlock) {
    const Rows rows{shape, begin, std::min(begin + kRowsPerBlock, shape.context)};
    EK_RETURN_IF_ERROR(BackwardRows(rows, noise, qkv, probabilities, diff_output, diff_qkv));
  }
  return absl::OkStatus();
}

template <typename T, typename O>
absl::Status CausalAttention<T, O>::BackwardRows(const Rows& rows, const DropoutNoise& noise, const O* qkv,
                                                 const O* probabilities, const O* diff_output, T* diff_qkv) {
  const int64_t width = rows.shape.width(), head_width = rows.shape.head_width;
  const int64_t first_query = rows.begin * 3 * width;
  const bool drops = noise.probability > 0, adds = rows.end < rows.shape.context;
  const O* diff = diff_output + rows.begin * width;
  const O* first = probabilities + rows.InProbabilities(0);

  // Of the values, which the probabilities weighted after dropout.
  if (drops) {
    for (int64_t i = 0; i < rows.shape.matrices(); ++i) {
      Dropout(noise, rows.Noise(i), probabilities + rows.InProbabilities(i), operands_.data() + rows.InBlock(i));
    }
  }
  StridedShape of_values = rows.Product(rows.end, head_width, rows.count());
  of_values.left = Rows::Transposed(drops ? rows.Memory() : rows.Probabilities());
  of_values.right = rows.Output(), of_values.output = rows.Qkv(), of_values.add = adds;
  EK_RETURN_IF_ERROR(products_.Run(of_values, drops ? operands_.data() : first, diff, nullptr, diff_qkv + 2 * width));

  // Of the scores.
  StridedShape of_weights = rows.Product(rows.count(), rows.end, head_width);
  of_weights.left = rows.Output(), of_weights.right = Rows::Transposed(rows.Qkv()), of_weights.output = rows.Memory();
  EK_RETURN_IF_ERROR(products_.Run(of_weights, diff, qkv + 2 * width, nullptr, scores_.data()));
  O* diff_scores;
  if constexpr (std::is_same_v<T, O>) {
    diff_scores = scores_.data();
  } else {
    diff_scores = operands_.data();
  }
  for (int64_t i = 0; i < rows.shape.matrices(); ++i) {
    T* own = scores_.data() + rows.InBlock(i);
    if (drops) Dropout(noise, rows.Noise(i), own, own);
    CausalSoftmaxBackward(rows.Block(), rows.scale(), probabilities + rows.InProbabilities(i), own,
                          diff_scores + rows.InBlock(i));
  }

  // Of queries and keys.
  StridedShape of_queries = rows.Product(rows.count(), head_width, rows.end);
  of_queries.left = rows.Memory(), of_queries.right = rows.Qkv(), of_queries.output = rows.Qkv();
  EK_RETURN_IF_ERROR(products_.Run(of_queries, diff_scores, qkv + width, nullptr, diff_qkv + first_query));
  StridedShape of_keys = rows.Product(rows.end, head_width, rows.count());
  of_keys.left = Rows::Transposed(rows.Memory()), of_keys.right = rows.Qkv(), of_keys.output = rows.Qkv();
  of_keys.add = adds;
  return products_.Run(of_keys, diff_scores, qkv + first_query, nullptr, diff_qkv + width);
}

template class CausalAttention<float, float>;
template class CausalAttention<float, BFloat16>;
template class CausalAttention<double, double>;

}  // namespace evenkeel
