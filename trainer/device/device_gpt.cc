#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "evenkeel/comm/base/clock.h"
#include "evenkeel/comm/memory.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/trainer/data/batch.h"
#include "evenkeel/trainer/device/device_attention.h"
#include "evenkeel/trainer/device/device_gpt_memory.h"
#include "evenkeel/trainer/device/device_models.h"
#include "evenkeel/trainer/device/device_work.h"
#include "evenkeel/trainer/device/gpt_layers.h"
#include "evenkeel/trainer/device/loss.h"
#include "evenkeel/trainer/device/math.h"
#include "evenkeel/trainer/device/rounded_matrices.h"
#include "evenkeel/trainer/device/token_buckets.h"
#include "evenkeel/trainer/gpt/attention_rows.h"
#include "evenkeel/trainer/gpt/gpt_pass.h"
#include "evenkeel/trainer/layers/gradient_sink.h"
#include "evenkeel/trainer/layers/strided_shape.h"
#include "evenkeel/trainer/models/batch_result.h"

namespace evenkeel {
namespace {

// A pass puts its launches on the stream in the order of the CPU's model (trainer/gpt/gpt.cc), but
// that the sum at the end of each part and the norm after it are one launch.
class DeviceGptModel : public Gpt {
 public:
  DeviceGptModel(const GptOptions& options, const DeviceGptOptions& device_options)
      : options_(options), device_options_(device_options), buckets_(options.vocabulary) {}

  absl::Status Init(const Gpt& host, const DevicePlace& place) {
    EK_RETURN_IF_ERROR(InitOnDevice(place, host));
    EK_ASSIGN_OR_RETURN(work_, DeviceWork::Create(place));
    layers_.emplace(work_->runtime(), work_->stream(), operand());
    FindParameters();
    return matrices_.Init(*work_, *this, operand(), position_table_);
  }

  const GptOptions& options() const override { return options_; }
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
  using Layer = DeviceGptMemory::Layer;

  absl::Status Check(const Batch& batch) const override {
    return CheckTokens(batch, options_.context, options_.vocabulary).status();
  }

  absl::StatusOr<PendingResult> DoForward(const Batch& any, Mode mode,
                                          const PassOptions& options) override {
    EK_RETURN_IF_ERROR(Prepare(std::get<TokenBatch>(any), mode, options));
    const int64_t rows = pass_.rows(), width = options_.width;
    EK_RETURN_IF_ERROR(layers_->EmbeddingForward(
        rows, pass_.context, width, pass_.Noise(kEmbeddingStream), tokens_.inputs,
        Vector(token_table_), Vector(position_table_), memory_.embedded));
    const WeightAndBias& first_norm = blocks_[0].ln_1;
    EK_RETURN_IF_ERROR(layers_->NormForward(rows, width, memory_.embedded,
                                            Vector(first_norm.weight), Vector(first_norm.bias),
                                            Of(0).norm_1, Of(0).statistics_1));
    for (int layer = 0; layer < options_.layers; ++layer) EK_RETURN_IF_ERROR(ForwardBlock(layer));

    EK_RETURN_IF_ERROR(LinearInput(Head(), token_table_, memory_.final, AsFloats(memory_.scores)));
    DeviceLoss* const loss = work_->loss();
    EK_RETURN_IF_ERROR(layers_->TokenLoss(rows, options_.vocabulary, Head().input_stride,
                                          memory_.scores, tokens_.targets,
                                          options.weight / static_cast<double>(rows),
                                          mode == Mode::kTraining ? memory_.diff_scores : nullptr,
                                          memory_.sums, &loss->sum, &loss->correct));
    return work_->FetchLoss(rows);
  }

  absl::Status DoBackward(GradientSink& sink) override {
    if (!sink.AnyTrainedBefore(parameters().size())) return absl::OkStatus();
    // The head's part may overwrite what lies there; the embedding's is added to it.
    const GradTarget<float> token_gradient = sink.Target<float>(token_table_);
    EK_RETURN_IF_ERROR(HeadBackward(sink, token_gradient));
    for (int layer = static_cast<int>(options_.layers) - 1; layer >= 0; --layer) {
      if (!sink.AnyTrainedBefore(blocks_[layer].mlp_c_proj.bias + 1)) return absl::OkStatus();
      EK_RETURN_IF_ERROR(BlockBackward(layer, sink));
    }
    if (!sink.AnyTrainedBefore(position_table_ + 1)) return absl::OkStatus();
    return EmbeddingBackwardAndAnnounce(sink, token_gradient);
  }

  void FindParameters() {
    const auto find = [this](const std::string& name) {
      return WeightAndBias{.weight = parameters().Find(name + ".weight"),
                           .bias = parameters().Find(name + ".bias")};
    };
    token_table_ = parameters().Find("wte.weight");
    position_table_ = parameters().Find("wpe.weight");
    for (int layer = 0; layer < options_.layers; ++layer) {
      const std::string name = absl::StrCat("h.", layer, ".");
      blocks_.push_back({.ln_1 = find(name + "ln_1"),
                         .c_attn = find(name + "attn.c_attn"),
                         .attn_c_proj = find(name + "attn.c_proj"),
                         .ln_2 = find(name + "ln_2"),
                         .c_fc = find(name + "mlp.c_fc"),
                         .mlp_c_proj = find(name + "mlp.c_proj")});
    }
    final_norm_ = find("ln_f");
  }

  // Prepares a pass over the batch, and memory for it.
  absl::Status Prepare(const TokenBatch& batch, Mode mode, const PassOptions& options) {
    const bool trains = mode == Mode::kTraining;
    const auto rows = static_cast<int64_t>(batch.inputs.size());
    pass_ = GptPass(options_, batch, mode, options);
    const DeviceGptSize size{.sequences = pass_.sequences,
                             .context = pass_.context,
                             .trains = trains,
                             .drops = pass_.dropout > 0,
                             .attention_rows = device_options_.attention_rows,
                             .operand = operand()};
    if (laid_out_ != size) {
      const int64_t bytes = LayOutGptMemory(options_, size, nullptr).bytes;
      laid_out_.reset();
      if (const absl::Status taken = block_.Need(*work_, bytes); !taken.ok()) {
        return absl::Status(
            taken.code(),
            absl::StrCat("gpt: ", trains ? "training" : "evaluation", " on ", pass_.sequences,
                         " sequences of ", pass_.context, " tokens takes ", bytes,
                         " bytes for activations: ", taken.message()));
      }
      memory_ = LayOutGptMemory(options_, size, block_.as<void>());
      laid_out_ = size;
    }

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

  // From its first norm, which is there, to the norm that follows it.
  absl::Status ForwardBlock(int layer) {
    const int64_t rows = pass_.rows(), width = options_.width;
    const BlockParameters& p = blocks_[layer];
    const Layer& own = Of(layer);
    EK_RETURN_IF_ERROR(
        Linear(pass_.Linear(width, 3 * width), p.c_attn, own.norm_1, AsOperands(memory_.qkv_rows)));
    EK_RETURN_IF_ERROR(layers_->SplitHeads(Heads(), 3, memory_.qkv_rows, own.qkv));
    EK_RETURN_IF_ERROR(Attention(layer).Forward(own.qkv, own.probabilities, memory_.heads));
    EK_RETURN_IF_ERROR(layers_->MergeHeads(Heads(), 1, memory_.heads, own.mixed));
    EK_RETURN_IF_ERROR(
        Linear(pass_.Linear(width, width), p.attn_c_proj, own.mixed, AsFloats(own.middle)));
    EK_RETURN_IF_ERROR(layers_->SumAndNormForward(
        rows, width, pass_.Noise(FirstStream(layer) + 1), Input(layer), own.middle, own.middle,
        Vector(p.ln_2.weight), Vector(p.ln_2.bias), own.norm_2, own.statistics_2));
    EK_RETURN_IF_ERROR(
        Linear(pass_.Linear(width, 4 * width), p.c_fc, own.norm_2, AsFloats(own.hidden)));
    EK_RETURN_IF_ERROR(layers_->GeluForward(4 * rows * width, own.hidden, own.activated));
    EK_RETURN_IF_ERROR(
        Linear(pass_.Linear(4 * width, width), p.mlp_c_proj, own.activated, AsFloats(own.output)));

    const bool is_last = layer + 1 == options_.layers;
    const WeightAndBias& norm = is_last ? final_norm_ : blocks_[layer + 1].ln_1;
    return layers_->SumAndNormForward(
        rows, width, pass_.Noise(FirstStream(layer) + 2), own.middle, own.output, own.output,
        Vector(norm.weight), Vector(norm.bias), is_last ? memory_.final : Of(layer + 1).norm_1,
        is_last ? memory_.statistics : Of(layer + 1).statistics_1);
  }

  absl::Status HeadBackward(GradientSink& sink, GradTarget<float> token_gradient) {
    EK_RETURN_IF_ERROR(Product(Head().Forward(), memory_.diff_scores, matrices_[token_table_],
                               nullptr, AsFloats(memory_.norm_diff)));
    if (token_gradient) {
      EK_RETURN_IF_ERROR(Product(Head().BackwardWeight(token_gradient.add), memory_.diff_scores,
                                 memory_.final, nullptr, AsFloats(token_gradient.data)));
    }
    const int64_t bytes = pass_.rows() * options_.width * static_cast<int64_t>(sizeof(float));
    EK_RETURN_IF_ERROR(work_->runtime().Zero(memory_.diff, bytes, work_->stream()));
    return NormBackward(final_norm_, Input(static_cast<int>(options_.layers)), memory_.statistics,
                        sink);
  }

  absl::Status BlockBackward(int layer, GradientSink& sink) {
    EK_RETURN_IF_ERROR(PerceptronBackward(layer, sink));
    if (!sink.AnyTrainedBefore(blocks_[layer].ln_2.weight)) return absl::OkStatus();
    return AttentionBackward(layer, sink);
  }

  absl::Status PerceptronBackward(int layer, GradientSink& sink) {
    const BlockParameters& p = blocks_[layer];
    const Layer& own = Of(layer);
    const int64_t width = options_.width;
    const LinearShape narrowing = pass_.Linear(4 * width, width),
                      widening = pass_.Linear(width, 4 * width);
    EK_ASSIGN_OR_RETURN(const Operands* const diff_end, BeginPart(FirstStream(layer) + 2));
    EK_RETURN_IF_ERROR(LinearBackward(narrowing, p.mlp_c_proj, own.activated, diff_end,
                                      AsFloats(memory_.wide), sink));
    if (!sink.AnyTrainedBefore(p.mlp_c_proj.weight)) return absl::OkStatus();

    Operands* const diff_hidden =
        operand() == DType::kFloat32 ? memory_.wide : memory_.wide_operand;
    EK_RETURN_IF_ERROR(
        layers_->GeluBackward(4 * pass_.rows() * width, own.hidden, memory_.wide, diff_hidden));
    EK_RETURN_IF_ERROR(LinearBackward(widening, p.c_fc, own.norm_2, diff_hidden,
                                      AsFloats(memory_.norm_diff), sink));
    if (!sink.AnyTrainedBefore(p.c_fc.weight)) return absl::OkStatus();
    return NormBackward(p.ln_2, own.middle, own.statistics_2, sink);
  }

  absl::Status AttentionBackward(int layer, GradientSink& sink) {
    const BlockParameters& p = blocks_[layer];
    const Layer& own = Of(layer);
    const int64_t width = options_.width;
    const LinearShape projection = pass_.Linear(width, width),
                      widening = pass_.Linear(width, 3 * width);
    EK_ASSIGN_OR_RETURN(const Operands* const diff_end, BeginPart(FirstStream(layer) + 1));
    EK_RETURN_IF_ERROR(LinearBackward(projection, p.attn_c_proj, own.mixed, diff_end,
                                      AsOperands(memory_.qkv_rows), sink));
    if (!sink.AnyTrainedBefore(p.attn_c_proj.weight)) return absl::OkStatus();

    EK_RETURN_IF_ERROR(layers_->SplitHeads(Heads(), 1, memory_.qkv_rows, memory_.heads));
    EK_RETURN_IF_ERROR(
        Attention(layer).Backward(own.qkv, own.probabilities, memory_.heads, memory_.wide));
    Operands* const diff_qkv = memory_.qkv_rows;
    EK_RETURN_IF_ERROR(layers_->MergeHeadGradients(Heads(), 3, memory_.wide, diff_qkv));
    EK_RETURN_IF_ERROR(LinearBackward(widening, p.c_attn, own.norm_1, diff_qkv,
                                      AsFloats(memory_.norm_diff), sink));
    if (!sink.AnyTrainedBefore(p.c_attn.weight)) return absl::OkStatus();
    return NormBackward(p.ln_1, Input(layer), own.statistics_1, sink);
  }

  absl::Status EmbeddingBackwardAndAnnounce(GradientSink& sink, GradTarget<float> token_gradient) {
    const DropoutNoise noise = pass_.Noise(kEmbeddingStream);
    if (const GradTarget<float> target = sink.Target<float>(position_table_)) {
      EK_RETURN_IF_ERROR(layers_->EmbeddingBackwardPositions(pass_.rows(), pass_.context,
                                                             options_.context, options_.width,
                                                             noise, memory_.diff, target));
    }
    if (token_gradient) {
      EK_RETURN_IF_ERROR(layers_->EmbeddingBackwardTokens(options_.width, noise, tokens_,
                                                          memory_.diff, token_gradient.data));
    }
    EK_RETURN_IF_ERROR(sink.Announce(position_table_));
    return sink.Announce(token_table_);
  }

  absl::Status Product(const StridedShape& shape, const Operands* left, const Operands* right,
                       const float* bias, TypedPointer output) {
    return work_->math().Product(shape, AsOperands(const_cast<Operands*>(left)), right, bias,
                                 output, work_->stream());
  }

  // output = input * weight + bias, and its ways back.
  absl::Status Linear(const LinearShape& shape, const WeightAndBias& linear, const Operands* input,
                      TypedPointer output) {
    return Product(shape.Forward(), input, matrices_[linear.weight], Vector(linear.bias), output);
  }

  absl::Status LinearInput(const LinearShape& shape, int weight, const Operands* diff_output,
                           TypedPointer diff_input) {
    return Product(shape.BackwardInput(), diff_output, matrices_[weight], nullptr, diff_input);
  }

  absl::Status LinearBackward(const LinearShape& shape, const WeightAndBias& linear,
                              const Operands* input, const Operands* diff_output,
                              TypedPointer diff_input, GradientSink& sink) {
    EK_RETURN_IF_ERROR(LinearInput(shape, linear.weight, diff_output, diff_input));
    EK_RETURN_IF_ERROR(sink.Write<float>(linear.bias, [&](GradTarget<float> target) {
      return layers_->SumRows(shape.rows, shape.outputs, diff_output, Sums(), target);
    }));
    return sink.Write<float>(linear.weight, [&](GradTarget<float> target) {
      return Product(shape.BackwardWeight(target.add), input, diff_output, nullptr,
                     AsFloats(target.data));
    });
  }

  // Adds to memory_.diff; gradients of the norm's parameters included.
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

  // The gradient of a part's end, as products take it.
  absl::StatusOr<const void*> BeginPart(uint64_t stream) {
    if (pass_.dropout == 0) return AsOperand(options_.width, memory_.diff, memory_.narrow_operand);
    EK_RETURN_IF_ERROR(layers_->Dropout(pass_.rows(), options_.width, pass_.Noise(stream),
                                        memory_.diff, memory_.narrow_operand));
    return memory_.narrow_operand;
  }

  // `values` themselves where products take them as they are.
  absl::StatusOr<const void*> AsOperand(int64_t width, const float* values, Operands* to) {
    if (operand() == DType::kFloat32) return values;
    EK_RETURN_IF_ERROR(layers_->Dropout(pass_.rows(), width, {}, values, to));
    return to;
  }

  DType operand() const {
    return options_.compute == GptCompute::kBFloat16 ? DType::kBFloat16 : DType::kFloat32;
  }
  const float* Vector(int index) const {
    return static_cast<const float*>(parameters()[index].value.data);
  }
  TypedPointer AsOperands(Operands* data) const { return {operand(), data}; }
  static TypedPointer AsFloats(float* data) { return {DType::kFloat32, data}; }
  // As that of the host (trainer/gpt/gpt.cc); rows of scores are apart by more.
  LinearShape Head() const {
    return {.rows = pass_.rows(),
            .inputs = options_.vocabulary,
            .outputs = options_.width,
            .input_stride = ScoreStride(options_.vocabulary)};
  }
  Layer& Of(int layer) { return memory_.layers[layer % memory_.layers.size()]; }
  const float* Input(int layer) { return layer == 0 ? memory_.embedded : Of(layer - 1).output; }
  AttentionShape Heads() const { return pass_.Attention(options_.width, options_.heads); }
  DeviceAttention Attention(int layer) const {
    return DeviceAttention(
        *work_, *layers_, Heads(), pass_.Noise(FirstStream(layer)), laid_out_->block_rows(),
        {.scores = memory_.attention_scores, .operands = memory_.attention_operands});
  }

  float* Sums() const { return static_cast<float*>(memory_.sums); }

  const GptOptions options_;
  const DeviceGptOptions device_options_;
  int token_table_ = 0;
  int position_table_ = 0;
  std::vector<BlockParameters> blocks_;
  WeightAndBias final_norm_;

  RoundedMatrices matrices_;
  DeviceBuffer block_;
  std::optional<DeviceGptSize> laid_out_;
  DeviceGptMemory memory_;  // In `block_`.
  Memory next_scores_;      // For NextToken, on the host.
  TokenBuckets buckets_;
  std::vector<int32_t> bucket_memory_;

  GptPass pass_;  // The last Forward's.
  DeviceTokens tokens_;
  std::unique_ptr<DeviceWork> work_;  // Goes first: waits for what uses the rest.
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
