#include <algorithm>
#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "evenkeel/comm/base/clock.h"
#include "evenkeel/comm/memory.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/trainer/data/batch.h"
#include "evenkeel/trainer/device/device_attention.h"
#include "evenkeel/trainer/device/device_models.h"
#include "evenkeel/trainer/device/device_work.h"
#include "evenkeel/trainer/device/gpt_layers.h"
#include "evenkeel/trainer/device/loss.h"
#include "evenkeel/trainer/device/math.h"
#include "evenkeel/trainer/device/rounded_matrices.h"
#include "evenkeel/trainer/device/token_buckets.h"
#include "evenkeel/trainer/gpt/gpt_memory.h"
#include "evenkeel/trainer/gpt/gpt_passes.h"
#include "evenkeel/trainer/layers/gradient_sink.h"
#include "evenkeel/trainer/layers/strided_shape.h"
#include "evenkeel/trainer/models/batch_result.h"

namespace evenkeel {
namespace {

// Returns the stride of the scores, from row to row: a multiple of 8, which products read fastest.
int64_t ScoreStride(int64_t vocabulary) { return (vocabulary + 7) / 8 * 8; }

// Returns the bytes of the workspace that the layers share.
int64_t SumsBytes(const GptOptions& options, int64_t rows, bool trains) {
  int64_t bytes = DeviceGptLayers::TokenLossWorkspaceBytes(rows);
  if (!trains) return bytes;
  const int64_t floats = std::max(DeviceGptLayers::NormWorkspace(rows, options.width),
                                  DeviceGptLayers::SumRowsWorkspace(rows, 4 * options.width));
  return std::max(bytes, floats * static_cast<int64_t>(sizeof(float)));
}

// Each operation puts its launches on the stream. The sum at the end of a part and the norm after
// it are one launch.
class DeviceGptModel : public GptPasses<DeviceGptModel, float, void> {
  friend GptPasses;

 public:
  DeviceGptModel(const GptOptions& options, const DeviceGptOptions& device_options)
      : GptPasses(options), device_options_(device_options), buckets_(options.vocabulary) {}

  absl::Status Init(const Gpt& host, const DevicePlace& place) {
    EK_RETURN_IF_ERROR(InitOnDevice(place, host));
    EK_ASSIGN_OR_RETURN(work_, DeviceWork::Create(place));
    layers_.emplace(work_->runtime(), work_->stream(), operand());
    return matrices_.Init(*work_, *this, operand(), kPositionTable);
  }

  absl::StatusOr<std::span<const float>> NextToken(std::span<const int32_t> tokens) override {
    EK_ASSIGN_OR_RETURN(const int64_t row, ScorePrompt(tokens));
    DeviceRuntime& runtime = work_->runtime();
    const int64_t bytes = options_.vocabulary * static_cast<int64_t>(sizeof(float));
    if (next_scores_.bytes == 0) {
      EK_ASSIGN_OR_RETURN(next_scores_, runtime.AllocatePinned(bytes));
    }
    auto* const scores = static_cast<float*>(next_scores_.data.get());
    EK_RETURN_IF_ERROR(runtime.Copy(scores, memory_.scores + row * ScoreStride(options_.vocabulary),
                                    bytes, work_->stream()));
    EK_RETURN_IF_ERROR(runtime.Synchronize(work_->stream(), SteadyNow() + place().timeout));
    return std::span<const float>(scores, options_.vocabulary);
  }

  int64_t ActivationBytes() const override { return work_ == nullptr ? 0 : work_->held_bytes(); }

 private:
  using Operands = void;

  GptMemorySize SizeOf(bool trains) const {
    const int64_t rows = pass_.rows();
    const int64_t matrices = pass_.sequences * options_.heads;
    return {.rows = rows,
            .trains = trains,
            .drops = pass_.dropout > 0,
            .operand_bytes = evenkeel::SizeOf(operand()),
            .scores = rows * ScoreStride(options_.vocabulary),
            .probabilities = matrices * pass_.context * pass_.context,
            .attention_scores = matrices * AttentionRowsAtOnce() * pass_.context,
            .sums_bytes = SumsBytes(options_, rows, trains),
            .splits_heads = true};
  }

  absl::StatusOr<void*> Take(int64_t bytes) {
    EK_RETURN_IF_ERROR(block_.Need(*work_, bytes));
    return block_.as<void>();
  }

  absl::Status Prepare(const TokenBatch& batch, bool trains) {
    const int64_t rows = pass_.rows();
    std::span<const std::byte> extra;
    if (trains) {
      bucket_memory_.resize(3 * rows);
      int32_t* const first = bucket_memory_.data();
      tokens_.buckets = buckets_.Fill(batch.inputs, {first, first + rows, first + 2 * rows});
      extra = std::as_bytes(std::span(bucket_memory_));
    }
    EK_ASSIGN_OR_RETURN(const DeviceBatch here, work_->Upload(batch, extra));
    const auto* const first = reinterpret_cast<const int32_t*>(here.extra);
    tokens_.inputs = here.inputs;
    tokens_.targets = here.targets;
    tokens_.tokens = first;
    tokens_.ends = trains ? first + rows : nullptr;
    tokens_.order = trains ? first + 2 * rows : nullptr;
    return matrices_.Round(work_->stream());
  }

  const Operands* Matrix(int index) const { return matrices_[index]; }
  absl::Status Product(const StridedShape& shape, const Operands* left, const Operands* right,
                       const float* bias, float* output) {
    return Product(shape, left, right, bias, {DType::kFloat32, output});
  }
  absl::Status Product(const StridedShape& shape, const Operands* left, const Operands* right,
                       const float* bias, Operands* output) {
    return Product(shape, left, right, bias, {operand(), output});
  }
  absl::Status Product(const StridedShape& shape, const Operands* left, const Operands* right,
                       const float* bias, TypedPointer output) {
    return work_->math().Product(shape, {operand(), const_cast<Operands*>(left)}, right, bias,
                                 output, work_->stream());
  }

  absl::Status EmbeddingForward() {
    return layers_->EmbeddingForward(pass_.rows(), pass_.context, options_.width,
                                     pass_.Noise(kEmbeddingStream), tokens_.inputs,
                                     Vector(kTokenTable), Vector(kPositionTable), memory_.embedded);
  }

  absl::Status EmbeddingBackward(GradTarget<float> token_gradient,
                                 GradTarget<float> position_gradient) {
    const DropoutNoise noise = pass_.Noise(kEmbeddingStream);
    if (position_gradient) {
      EK_RETURN_IF_ERROR(layers_->EmbeddingBackwardPositions(
          pass_.rows(), pass_.context, options_.context, options_.width, noise, memory_.diff,
          position_gradient));
    }
    if (!token_gradient) return absl::OkStatus();
    return layers_->EmbeddingBackwardTokens(options_.width, noise, tokens_, memory_.diff,
                                            token_gradient.data);
  }

  absl::Status NormForward(const float* input, const Norm& norm) {
    return layers_->NormForward(pass_.rows(), options_.width, input, Vector(norm.parameters.weight),
                                Vector(norm.parameters.bias), norm.output, norm.statistics);
  }
  absl::Status SumAndNormForward(const DropoutNoise& noise, const float* around, float* part,
                                 const Norm& norm) {
    return layers_->SumAndNormForward(pass_.rows(), options_.width, noise, around, part, part,
                                      Vector(norm.parameters.weight), Vector(norm.parameters.bias),
                                      norm.output, norm.statistics);
  }

  absl::Status NormBackward(const WeightAndBias& norm, const float* input,
                            RowStatistics<float> statistics, GradientSink& sink) {
    const int64_t rows = pass_.rows(), width = options_.width;
    EK_RETURN_IF_ERROR(layers_->NormBackward(
        rows, width, input, statistics, Vector(norm.weight), memory_.norm_diff,
        sink.AnyTrainedBefore(norm.weight) ? memory_.diff : nullptr, Sums()));
    EK_RETURN_IF_ERROR(sink.Write<float>(norm.bias, [&](GradTarget<float> target) {
      return layers_->NormBias(rows, width, Sums(), target);
    }));
    return sink.Write<float>(norm.weight, [&](GradTarget<float> target) {
      return layers_->NormWeight(rows, width, Sums(), target);
    });
  }

  absl::Status AttentionForward(int layer) {
    const Layer& at = LayerAt(layer);
    EK_RETURN_IF_ERROR(layers_->SplitHeads(Heads(), 3, Qkv(layer), at.qkv));
    EK_RETURN_IF_ERROR(Attention(layer).Forward(at.qkv, at.probabilities, memory_.heads));
    return layers_->MergeHeads(Heads(), 1, memory_.heads, at.mixed);
  }
  absl::StatusOr<const Operands*> AttentionBackward(int layer) {
    const Layer& at = LayerAt(layer);
    EK_RETURN_IF_ERROR(layers_->SplitHeads(Heads(), 1, memory_.diff_rows, memory_.heads));
    EK_RETURN_IF_ERROR(
        Attention(layer).Backward(at.qkv, at.probabilities, memory_.heads, memory_.wide));
    EK_RETURN_IF_ERROR(layers_->MergeHeadGradients(Heads(), 3, memory_.wide, memory_.diff_rows));
    return memory_.diff_rows;
  }
  DeviceAttention Attention(int layer) const {
    return DeviceAttention(
        *work_, *layers_, Heads(), AttentionNoise(layer), AttentionRowsAtOnce(),
        {.scores = memory_.attention_scores, .operands = memory_.attention_operands});
  }
  int64_t AttentionRowsAtOnce() const {
    return std::min(device_options_.attention_rows, pass_.context);
  }

  absl::Status GeluForward(int64_t n, const float* input, Operands* output) {
    return layers_->GeluForward(n, input, output);
  }
  absl::Status GeluBackward(int64_t n, const float* input, const float* diff_output,
                            Operands* diff_input) {
    return layers_->GeluBackward(n, input, diff_output, diff_input);
  }
  absl::Status Dropout(const DropoutNoise& noise, const float* input, Operands* output) {
    return layers_->Dropout(pass_.rows(), options_.width, noise, input, output);
  }
  absl::Status SumRows(int64_t rows, int64_t columns, const Operands* matrix,
                       GradTarget<float> target) {
    return layers_->SumRows(rows, columns, matrix, Sums(), target);
  }

  // As that of the host (trainer/gpt/gpt.cc); rows of scores are apart by more.
  LinearShape Head() const {
    return {.rows = pass_.rows(),
            .inputs = options_.vocabulary,
            .outputs = options_.width,
            .input_stride = ScoreStride(options_.vocabulary)};
  }

  absl::StatusOr<PendingResult> HeadForward(std::span<const int32_t> /*targets*/, double weight) {
    const int64_t rows = pass_.rows();
    EK_RETURN_IF_ERROR(Product(Head().BackwardInput(), memory_.final, Matrix(kTokenTable), nullptr,
                               memory_.scores));
    DeviceLoss* const loss = work_->loss();
    EK_RETURN_IF_ERROR(layers_->TokenLoss(rows, options_.vocabulary, Head().input_stride,
                                          memory_.scores, tokens_.targets,
                                          weight / static_cast<double>(rows), memory_.diff_scores,
                                          memory_.sums, &loss->sum, &loss->correct));
    return work_->FetchLoss(rows);
  }

  absl::Status HeadBackward(GradTarget<float> token_gradient) {
    EK_RETURN_IF_ERROR(Product(Head().Forward(), memory_.diff_scores, Matrix(kTokenTable), nullptr,
                               memory_.norm_diff));
    if (token_gradient) {
      EK_RETURN_IF_ERROR(Product(Head().BackwardWeight(token_gradient.add), memory_.diff_scores,
                                 memory_.final, nullptr, token_gradient.data));
    }
    const int64_t bytes = pass_.rows() * options_.width * static_cast<int64_t>(sizeof(float));
    return work_->runtime().Zero(memory_.diff, bytes, work_->stream());
  }

  DType operand() const {
    return options_.compute == GptCompute::kBFloat16 ? DType::kBFloat16 : DType::kFloat32;
  }
  float* Sums() const { return static_cast<float*>(memory_.sums); }

  const DeviceGptOptions device_options_;
  RoundedMatrices matrices_;
  DeviceBuffer block_;  // The memory of memory_'s areas.
  Memory next_scores_;  // For NextToken, on the host.
  TokenBuckets buckets_;
  std::vector<int32_t> bucket_memory_;

  DeviceTokens tokens_;               // Of the last Forward().
  std::unique_ptr<DeviceWork> work_;  // Its destructor waits for uses of the members above.
  std::optional<DeviceGptLayers> layers_;
};

absl::Status Check(const GptOptions& options, const DevicePlace& place,
                   const DeviceGptOptions& device_options) {
  if (place.is_host() || place.math == nullptr) {
    return absl::InvalidArgumentError(
        "gpt: a model on a device requires the device and its matrix products");
  }
  if (options.compute == GptCompute::kFloat64) {
    return absl::InvalidArgumentError(
        "gpt: on a device the model computes in float32 or bfloat16, not in float64");
  }
  if (options.width > kMostNormWidth) {
    return absl::InvalidArgumentError(absl::StrCat("gpt: on a device the width may be at most ",
                                                   kMostNormWidth, ", not ", options.width));
  }
  if (device_options.attention_rows < 1) {
    return absl::InvalidArgumentError(absl::StrCat(
        "gpt: attention requires at least 1 row at a time, got ", device_options.attention_rows));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<Gpt>> MakeDeviceGpt(const Gpt& host, const DevicePlace& place,
                                                   const DeviceGptOptions& options) {
  EK_RETURN_IF_ERROR(Check(host.options(), place, options));
  auto model = std::make_unique<DeviceGptModel>(host.options(), options);
  EK_RETURN_IF_ERROR(model->Init(host, place));
  return model;
}

}  // namespace evenkeel
