#include "evenkeel/trainer/device/device_attention.h"

#include <algorithm>

#include "evenkeel/comm/status.h"
#include "evenkeel/comm/types.h"

namespace evenkeel {

AttentionRows DeviceAttention::RowsFrom(int64_t begin) const {
  const int64_t end = std::min(begin + block_rows_, shape_.context);
  const int64_t width = shape_.head_width, matrix = shape_.context * width;
  const MatrixStrides heads = {.outer = shape_.heads * matrix, .head = matrix, .row = width};
  return {shape_, begin, end, block_rows_, heads, heads, noise_.probability > 0};
}

void* DeviceAttention::At(const void* operands, int64_t elements) const {
  return static_cast<std::byte*>(const_cast<void*>(operands)) +
         elements * SizeOf(layers_.operand());
}

absl::Status DeviceAttention::Product(const StridedShape& shape, const Operands* left,
                                      const Operands* right, TypedPointer output) const {
  return work_.math().Product(shape, {layers_.operand(), const_cast<void*>(left)}, right, nullptr,
                              output, work_.stream());
}

absl::Status DeviceAttention::Forward(const Operands* qkv, Operands* probabilities,
                                      Operands* output) const {
  for (int64_t begin = 0; begin < shape_.context; begin += block_rows_) {
    const AttentionRows rows = RowsFrom(begin);
    EK_RETURN_IF_ERROR(Weigh(rows, qkv, probabilities));
    const void* const weights =
        rows.weights_in_block ? memory_.operands : At(probabilities, begin * shape_.context);
    EK_RETURN_IF_ERROR(Product(rows.Output(), weights, At(qkv, 2 * size()),
                               {layers_.operand(), At(output, begin * shape_.head_width)}));
  }
  return absl::OkStatus();
}

// Scores and their softmax.
absl::Status DeviceAttention::Weigh(const AttentionRows& rows, const Operands* qkv,
                                    Operands* probabilities) const {
  EK_RETURN_IF_ERROR(Product(rows.Scores(), At(qkv, rows.begin * shape_.head_width),
                             At(qkv, size()), {DType::kFloat32, memory_.scores}));
  return layers_.CausalSoftmaxForward(rows, noise_, memory_.scores,
                                      At(probabilities, rows.begin * shape_.context),
                                      rows.weights_in_block ? memory_.operands : nullptr);
}

absl::Status DeviceAttention::Backward(const Operands* qkv, const Operands* probabilities,
                                       const Operands* diff_output, float* diff_qkv) const {
  for (int64_t begin = (shape_.context - 1) / block_rows_ * block_rows_; begin >= 0;
       begin -= block_rows_) {
    EK_RETURN_IF_ERROR(BackwardRows(RowsFrom(begin), qkv, probabilities, diff_output, diff_qkv));
  }
  return absl::OkStatus();
}

absl::Status DeviceAttention::BackwardRows(const AttentionRows& rows, const Operands* qkv,
                                           const Operands* probabilities,
                                           const Operands* diff_output, float* diff_qkv) const {
  const int64_t first_query = rows.begin * shape_.head_width;
  const void* const diff = At(diff_output, first_query);
  const void* const first = At(probabilities, rows.begin * shape_.context);

  // Gradients of the values, which the probabilities weighted after dropout.
  if (rows.weights_in_block)
    EK_RETURN_IF_ERROR(layers_.DropProbabilities(rows, noise_, first, memory_.operands));
  EK_RETURN_IF_ERROR(Product(rows.DiffValues(), rows.weights_in_block ? memory_.operands : first,
                             diff, {DType::kFloat32, diff_qkv + 2 * size()}));

  // Gradients of the scores.
  EK_RETURN_IF_ERROR(
      Product(rows.DiffWeights(), diff, At(qkv, 2 * size()), {DType::kFloat32, memory_.scores}));
  void* const diff_scores =
      layers_.operand() == DType::kFloat32 ? memory_.scores : memory_.operands;
  EK_RETURN_IF_ERROR(
      layers_.CausalSoftmaxBackward(rows, noise_, first, memory_.scores, diff_scores));

  // Gradients of queries and keys.
  EK_RETURN_IF_ERROR(Product(rows.DiffQueries(), diff_scores, At(qkv, size()),
                             {DType::kFloat32, diff_qkv + first_query}));
  return Product(rows.DiffKeys(), diff_scores, At(qkv, first_query),
                 {DType::kFloat32, diff_qkv + size()});
}

}  // namespace evenkeel
