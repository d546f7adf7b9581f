#include "evenkeel/trainer/device/internal/device_attention.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "evenkeel/comm/status.h"
#include "evenkeel/comm/types.h"
#include "evenkeel/trainer/device/math.h"
#include "evenkeel/trainer/layers/strided_shape.h"

namespace evenkeel {

struct DeviceAttention::Rows {
  AttentionShape shape;
  int64_t begin;
  int64_t end;
  int64_t block_rows;

  int64_t count() const { return end - begin; }
  int64_t in_probabilities() const { return begin * shape.context; }
  DeviceAttentionRows ForLayers() const {
    return {.matrices = shape.matrices(),
            .context = shape.context,
            .begin = begin,
            .end = end,
            .block_rows = block_rows,
            .scale = 1 / std::sqrt(static_cast<float>(shape.head_width))};
  }

  int64_t in_heads() const { return begin * shape.head_width; }

  // Of queries, keys, values and the output.
  MatrixStrides Heads() const {
    const int64_t matrix = shape.context * shape.head_width;
    return {.outer = shape.heads * matrix, .head = matrix, .row = shape.head_width};
  }
  MatrixStrides Memory() const { return Square(block_rows * shape.context); }
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

DeviceAttention::Rows DeviceAttention::RowsFrom(int64_t begin) const {
  return {shape_, begin, std::min(begin + block_rows_, shape_.context), block_rows_};
}

void* DeviceAttention::At(void* operands, int64_t elements) const {
  return static_cast<std::byte*>(operands) + elements * SizeOf(layers_.operand());
}
const void* DeviceAttention::At(const void* operands, int64_t elements) const {
  return static_cast<const std::byte*>(operands) + elements * SizeOf(layers_.operand());
}

absl::Status DeviceAttention::Forward(const Operands* qkv, Operands* probabilities, Operands* output) const {
  for (int64_t begin = 0; begin < shape_.context; begin += block_rows_) {
    EK_RETURN_IF_ERROR(ForwardRows(RowsFrom(begin), qkv, probabilities, output));
  }
  return absl::OkStatus();
}

// Scores and their softmax.
absl::Status DeviceAttention::Weigh(const Rows& rows, const Operands* qkv, Operands* probabilities) const {
  StridedShape fit = rows.Product(rows.count(), rows.end, shape_.head_width);
  fit.left = rows.Heads(), fit.right = Rows::Transposed(rows.Heads()), fit.output = rows.Memory();
  EK_RETURN_IF_ERROR(work_.math().Product(fit, {layers_.operand(), const_cast<void*>(At(qkv, rows.in_heads()))},
                                          At(qkv, size()), nullptr, {DType::kFloat32, memory_.scores}, work_.stream()));
  return layers_.CausalSoftmaxForward(rows.ForLayers(), noise_, memory_.scores,
                                      At(probabilities, rows.in_probabilities()), drops() ? memory_.operands : nullptr);
}

absl::Status DeviceAttention::ForwardRows(const Rows& rows, const Operands* qkv, Operands* probabilities,
                                          Operands* output) const {
  EK_RETURN_IF_ERROR(Weigh(rows, qkv, probabilities));
  StridedShape mean = rows.Product(rows.count(), shape_.head_width, rows.end);
  mean.left = drops() ? rows.Memory() : rows.Probabilities(), mean.right = rows.Heads(), mean.output = rows.Heads();
  void* const weights = drops() ? memory_.operands : At(probabilities, rows.in_probabilities());
  return work_.math().Product(mean, {layers_.operand(), weights}, At(qkv, 2 * size()), nullptr,
                              {layers_.operand(), At(output, rows.in_heads())}, work_.stream());
}

// The last block comes first: its keys are all of them, and what it writes the others are added to.
absl::Status DeviceAttention::Backward(const Operands* qkv, Operands* probabilities, Probabilities state,
                                       const Operands* diff_output, float* diff_qkv) const {
  for (int64_t begin = (shape_.context - 1) / block_rows_ * block_rows_; begin >= 0; begin -= block_rows_) {
    const Rows rows = RowsFrom(begin);
    if (state == Probabilities::kForgotten) EK_RETURN_IF_ERROR(Weigh(rows, qkv, probabilities));
    EK_RETURN_IF_ERROR(BackwardRows(rows, qkv, probabilities, diff_output, diff_qkv));
  }
  return absl::OkStatus();
}

absl::Status DeviceAttention::BackwardRows(const Rows& rows, const Operands* qkv, const Operands* probabilities,
                                           const Operands* diff_output, float* diff_qkv) const {
  const DType operand = layers_.operand();
  const bool adds = rows.end < shape_.context;
  const DeviceAttentionRows own = rows.ForLayers();
  const void* const diff = At(diff_output, rows.in_heads());
  const void* const first = At(probabilities, rows.in_probabilities());
  DeviceMath& math = work_.math();
  const StreamRef stream = work_.stream();

  // Of the values, which the probabilities weighted after dropout.
  if (drops()) EK_RETURN_IF_ERROR(layers_.DropProbabilities(own, noise_, first, memory_.operands));
  StridedShape of_values = rows.Product(rows.end, shape_.head_width, rows.count());
  of_values.left = Rows::Transposed(drops() ? rows.Memory() : rows.Probabilities());
  of_values.right = rows.Heads(), of_values.output = rows.Heads(), of_values.add = adds;
  EK_RETURN_IF_ERROR(math.Product(of_values, {operand, drops() ? memory_.operands : const_cast<void*>(first)}, diff,
                                  nullptr, {DType::kFloat32, diff_qkv + 2 * size()}, stream));

  // Of the scores.
  StridedShape of_weights = rows.Product(rows.count(), rows.end, shape_.head_width);
  of_weights.left = rows.Heads(), of_weights.right = Rows::Transposed(rows.Heads()), of_weights.output = rows.Memory();
  EK_RETURN_IF_ERROR(math.Product(of_weights, {operand, const_cast<void*>(diff)}, At(qkv, 2 * size()), nullptr,
                                  {DType::kFloat32, memory_.scores}, stream));
  void* const diff_scores = operand == DType::kFloat32 ? memory_.scores : memory_.operands;
  EK_RETURN_IF_ERROR(layers_.CausalSoftmaxBackward(own, noise_, first, memory_.scores, diff_scores));

  // Of queries and keys.
  StridedShape of_queries = rows.Product(rows.count(), shape_.head_width, rows.end);
  of_queries.left = rows.Memory(), of_queries.right = rows.Heads(), of_queries.output = rows.Heads();
  EK_RETURN_IF_ERROR(math.Product(of_queries, {operand, diff_scores}, At(qkv, size()), nullptr,
                                  {DType::kFloat32, diff_qkv + rows.in_heads()}, stream));
  StridedShape of_keys = rows.Product(rows.end, shape_.head_width, rows.count());
  of_keys.left = Rows::Transposed(rows.Memory()), of_keys.right = rows.Heads(), of_keys.output = rows.Heads();
  of_keys.add = adds;
  return math.Product(of_keys, {operand, diff_scores}, At(qkv, rows.in_heads()), nullptr,
                      {DType::kFloat32, diff_qkv + size()}, stream);
}

}  // namespace evenkeel
