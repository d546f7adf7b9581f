// The layers of a GPT on a device, except for matrix products: those of trainer/gpt on the CPU,
// under the same names.
//
//   // the type of the operands of products: bfloat16 or float32
//   const DeviceGptLayers layers(runtime, stream, DType::kBFloat16);
//   EK_RETURN_IF_ERROR(layers.NormForward(rows, width, input, weight, bias, output, statistics));
//   EK_RETURN_IF_ERROR(layers.GeluForward(n, hidden, activated));
//
// Each call puts one or two launches on the stream and returns at once. The headers of trainer/gpt
// define what they compute; the masks of dropout are the same bits. No sum depends on which thread
// comes first: equal arguments give equal bits on one kind of device.
//
// Types:     `Operands` are memory of the type that products take; everything else is float32,
//            unless a comment names another type.
// Shapes:    widths of a norm are at most kMostNormWidth. Memory of any alignment; of a multiple of
//            16 bytes, with row lengths that are multiples of four, it is moved four elements at a
//            time.
// Workspace: memory of the device for intermediate sums. A function whose name contains Workspace
//            returns its size; later work on the stream may reuse it.
// Ownership: the runtime and all memory live until what was launched has run.
// Threads:   thread-compatible.
// Errors:    the runtime's; InvalidArgument for a norm that is too wide.

#ifndef EVENKEEL_TRAINER_DEVICE_GPT_LAYERS_H_
#define EVENKEEL_TRAINER_DEVICE_GPT_LAYERS_H_

#include <cstdint>

#include "absl/status/status.h"
#include "evenkeel/comm/device/runtime.h"
#include "evenkeel/comm/types.h"
#include "evenkeel/trainer/gpt/attention_rows.h"
#include "evenkeel/trainer/gpt/dropout.h"
#include "evenkeel/trainer/gpt/layer_norm.h"
#include "evenkeel/trainer/layers/gradient_sink.h"

namespace evenkeel {

inline constexpr int64_t kMostNormWidth = 16384;

// A batch's tokens as the embedding sees them, on the device (token_buckets.h).
struct DeviceTokens {
  const int32_t* inputs = nullptr;   // [rows]
  const int32_t* targets = nullptr;  // [rows]
  const int32_t* tokens = nullptr;   // [buckets]
  const int32_t* ends = nullptr;     // [buckets]
  const int32_t* order = nullptr;    // [rows]
  int64_t buckets = 0;
};

class DeviceGptLayers {
 public:
  using Operands = void;

  DeviceGptLayers(DeviceRuntime& runtime, StreamRef stream, DType operand)
      : runtime_(runtime), stream_(stream), operand_(operand) {}

  DType operand() const { return operand_; }

  // output = dropout(token's row + position's row); `noise` of probability 0: without.
  absl::Status EmbeddingForward(int64_t rows, int64_t context, int64_t width,
                                const DropoutNoise& noise, const int32_t* inputs,
                                const float* token_table, const float* position_table,
                                float* output) const;
  // Added to what lies in diff_table; diff_output as before dropout's backward.
  absl::Status EmbeddingBackwardTokens(int64_t width, const DropoutNoise& noise,
                                       const DeviceTokens& tokens, const float* diff_output,
                                       float* diff_table) const;
  // `positions`: the table's rows; those after the context get 0, or keep what they have.
  absl::Status EmbeddingBackwardPositions(int64_t rows, int64_t context, int64_t positions,
                                          int64_t width, const DropoutNoise& noise,
                                          const float* diff_output,
                                          GradTarget<float> diff_table) const;

  absl::Status NormForward(int64_t rows, int64_t width, const float* input, const float* weight,
                           const float* bias, Operands* output,
                           RowStatistics<float> statistics) const {
    return SumAndNormForward(rows, width, {}, input, nullptr, nullptr, weight, bias, output,
                             statistics);
  }
  // The end of a part and the norm after it: sum = around + dropout(part), output = norm(sum).
  // `sum` may be `part`. Null `part`: output = norm(around).
  absl::Status SumAndNormForward(int64_t rows, int64_t width, const DropoutNoise& noise,
                                 const float* around, const float* part, float* sum,
                                 const float* weight, const float* bias, Operands* output,
                                 RowStatistics<float> statistics) const;
  // The input's gradient is added to diff_input, null if it is not wanted. `workspace` keeps the
  // sums for the two that follow, until then.
  static int64_t NormWorkspace(int64_t rows, int64_t width);
  absl::Status NormBackward(int64_t rows, int64_t width, const float* input,
                            RowStatistics<float> statistics, const float* weight,
                            const float* diff_output, float* diff_input, float* workspace) const;
  absl::Status NormBias(int64_t rows, int64_t width, const float* workspace,
                        GradTarget<float> diff_bias) const;
  absl::Status NormWeight(int64_t rows, int64_t width, const float* workspace,
                          GradTarget<float> diff_weight) const;

  absl::Status GeluForward(int64_t n, const float* input, Operands* output) const;
  absl::Status GeluBackward(int64_t n, const float* input, const float* diff_output,
                            Operands* diff_input) const;

  // Applies dropout to a matrix [rows, width]; `noise` of probability 0 only rounds.
  absl::Status Dropout(int64_t rows, int64_t width, const DropoutNoise& noise, const float* input,
                       Operands* output) const;

  // to[c] = sum over r of matrix[r, c].
  static int64_t SumRowsWorkspace(int64_t rows, int64_t columns);
  absl::Status SumRows(int64_t rows, int64_t columns, const Operands* matrix, float* workspace,
                       GradTarget<float> to) const;

  // Rows [sequences * context, parts * width], head by head: [parts, sequences, heads, context,
  // head_width], so that a product of all heads is one of equally spaced matrices. And back.
  absl::Status SplitHeads(const AttentionShape& shape, int parts, const Operands* rows,
                          Operands* heads) const;
  absl::Status MergeHeads(const AttentionShape& shape, int parts, const Operands* heads,
                          Operands* rows) const;
  // Rounded on the way.
  absl::Status MergeHeadGradients(const AttentionShape& shape, int parts, const float* heads,
                                  Operands* rows) const;

  // Computes the first `rows.end` columns of each matrix. `probabilities` points to the first of
  // the rows, in whole matrices; `scores` and arrays laid out like it have the block's rows only.
  // `dropped` is null without noise.
  absl::Status CausalSoftmaxForward(const AttentionRows& rows, const DropoutNoise& noise,
                                    const float* scores, Operands* probabilities,
                                    Operands* dropped) const;
  // diff_scores may be diff_dropped where operands are float32. diff_dropped: the gradient behind
  // dropout.
  absl::Status CausalSoftmaxBackward(const AttentionRows& rows, const DropoutNoise& noise,
                                     const Operands* probabilities, const float* diff_dropped,
                                     Operands* diff_scores) const;
  // The probabilities after dropout once more.
  absl::Status DropProbabilities(const AttentionRows& rows, const DropoutNoise& noise,
                                 const Operands* probabilities, Operands* dropped) const;

  // loss_sum and correct, each one number of the device's memory. `stride`: from row to row of
  // scores and diff_scores, at least the vocabulary. diff_scores, null for none, may be `scores`
  // where operands are float32. The workspace is in bytes, at a multiple of 8.
  static int64_t TokenLossWorkspaceBytes(int64_t rows) { return rows * 12; }
  absl::Status TokenLoss(int64_t rows, int64_t vocabulary, int64_t stride, const float* scores,
                         const int32_t* targets, double gradient_scale, Operands* diff_scores,
                         void* workspace, double* loss_sum, int64_t* correct) const;

 private:
  // Launches the kernel for this type of operands.
  template <typename Kernels, typename... Args>
  absl::Status Run(const Kernels& kernels, const LaunchShape& shape, Args... args) const;

  DeviceRuntime& runtime_;
  const StreamRef stream_;
  const DType operand_;
};

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_DEVICE_GPT_LAYERS_H_
