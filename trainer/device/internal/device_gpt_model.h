// The model behind device_gpt.h.
//
// A pass puts its launches on the stream in the order of the CPU's model (trainer/gpt/gpt_model.h), but that the sum at
// the end of each part and the norm after it are one launch.
//
// Threads: thread-compatible.

#ifndef EVENKEEL_TRAINER_DEVICE_INTERNAL_DEVICE_GPT_MODEL_H_
#define EVENKEEL_TRAINER_DEVICE_INTERNAL_DEVICE_GPT_MODEL_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "evenkeel/comm/device/copy.h"
#include "evenkeel/comm/memory.h"
#include "evenkeel/comm/types.h"
#include "evenkeel/trainer/batch.h"
#include "evenkeel/trainer/batch_result.h"
#include "evenkeel/trainer/device/device_gpt.h"
#include "evenkeel/trainer/device/device_work.h"
#include "evenkeel/trainer/device/gpt_layers.h"
#include "evenkeel/trainer/device/internal/device_attention.h"
#include "evenkeel/trainer/device/internal/device_gpt_memory.h"
#include "evenkeel/trainer/device/place.h"
#include "evenkeel/trainer/device/token_buckets.h"
#include "evenkeel/trainer/gpt/attention.h"
#include "evenkeel/trainer/gpt/block.h"
#include "evenkeel/trainer/gpt/gpt.h"
#include "evenkeel/trainer/gpt/linear.h"
#include "evenkeel/trainer/gradient_sink.h"
#include "evenkeel/trainer/model.h"

namespace evenkeel {

class DeviceGptModel final : public Gpt {
 public:
  DeviceGptModel(const GptOptions& options, const DeviceGptOptions& device_options);
  absl::Status Init(const Gpt& host, const DevicePlace& place);

  const GptOptions& options() const override { return options_; }
  absl::StatusOr<std::span<const float>> NextToken(std::span<const int32_t> tokens) override;
  int64_t ActivationBytes() const override { return work_ == nullptr ? 0 : work_->held_bytes(); }

 private:
  using Operands = void;
  using Layer = DeviceGptMemory::Layer;

  absl::Status Check(const Batch& batch) const override;
  absl::StatusOr<PendingResult> DoForward(const Batch& batch, Mode mode, const PassOptions& options) override;
  absl::Status DoBackward(GradientSink& sink) override;

  void FindParameters();
  absl::Status ListMatrices();
  // What a pass needs of the batch, and memory for it.
  absl::Status Prepare(const TokenBatch& batch, Mode mode, const PassOptions& options);
  absl::Status ForwardBlock(int layer);
  absl::Status HeadBackward(GradientSink& sink, GradTarget<float> token_gradient);
  absl::Status BlockBackward(int layer, GradientSink& sink);
  absl::Status PerceptronBackward(int layer, GradientSink& sink);
  absl::Status AttentionBackward(int layer, GradientSink& sink);
  absl::Status EmbeddingBackwardAndAnnounce(GradientSink& sink, GradTarget<float> token_gradient);

  // output = input * weight + bias, and its ways back.
  absl::Status Linear(const LinearShape& shape, const WeightAndBias& linear, const Operands* input,
                      TypedPointer output);
  absl::Status LinearInput(const LinearShape& shape, const WeightAndBias& linear, const Operands* diff_output,
                           TypedPointer diff_input);
  absl::Status WriteLinear(const LinearShape& shape, const WeightAndBias& linear, const Operands* input,
                           const Operands* diff_output, GradientSink& sink);
  // Adds to memory_.diff; gradients of the norm's parameters included.
  absl::Status NormBackward(const WeightAndBias& norm, const float* input, RowStatistics<float> statistics,
                            GradientSink& sink);
  // The gradient of a part's end, as products take it.
  absl::StatusOr<const Operands*> BeginPart(uint64_t stream);
  // `values` themselves where products take them as they are.
  absl::StatusOr<const Operands*> AsOperand(int64_t width, const float* values, Operands* to);

  DType operand() const { return options_.compute == GptCompute::kBFloat16 ? DType::kBFloat16 : DType::kFloat32; }
  const Operands* Matrix(int index) const;
  const float* Vector(int index) const { return static_cast<const float*>(parameters()[index].value.data); }
  TypedPointer AsOperands(Operands* data) const { return {operand(), data}; }
  static TypedPointer AsFloats(float* data) { return {DType::kFloat32, data}; }
  LinearShape Shape(int64_t inputs, int64_t outputs) const {
    return {.rows = pass_.rows(), .inputs = inputs, .outputs = outputs};
  }
  Layer& Of(int layer) { return memory_.layers[layer % memory_.layers.size()]; }
  const float* Input(int layer) { return layer == 0 ? memory_.embedded : Of(layer - 1).output; }
  static uint64_t FirstStream(int layer) { return 1 + 3 * static_cast<uint64_t>(layer); }
  AttentionShape Heads() const {
    return {.sequences = pass_.sequences,
            .context = pass_.context,
            .heads = options_.heads,
            .head_width = options_.width / options_.heads};
  }
  DeviceAttention Attention(int layer) const;
  float* Sums() const { return static_cast<float*>(memory_.sums); }

  const GptOptions options_;
  const DeviceGptOptions device_options_;
  int token_table_ = 0;
  int position_table_ = 0;
  std::vector<BlockParameters> blocks_;
  WeightAndBias final_norm_;

  DeviceBuffer rounded_;               // Matrices as products take them, where those are not the values.
  std::vector<const void*> matrices_;  // By parameter; null for vectors.
  std::optional<SegmentCopy> rounding_;
  DeviceBuffer block_;
  std::optional<DeviceGptSize> laid_out_;
  DeviceGptMemory memory_;  // In `block_`.
  Memory next_scores_;      // Of NextToken, on the host.
  TokenBuckets buckets_;
  std::vector<int32_t> bucket_memory_;

  GptPass pass_;  // Of the last Forward.
  DeviceTokens tokens_;
  std::unique_ptr<DeviceWork> work_;  // Goes first: waits for what uses the rest.
  std::optional<DeviceGptLayers> layers_;
};

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_DEVICE_INTERNAL_DEVICE_GPT_MODEL_H_
