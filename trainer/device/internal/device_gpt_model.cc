#include "evenkeel/trainer/device/internal/device_gpt_model.h"

#include <algorithm>
#include <bit>
#include <string>
#include <utility>
#include <variant>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/trainer/device/loss.h"
#include "evenkeel/trainer/device/math.h"
#include "evenkeel/trainer/layers/strided_shape.h"

namespace evenkeel {
namespace {

constexpr uint64_t kEmbeddingStream = 0;  // Of dropout; the layers' follow.
constexpr int64_t kAlignment = 256;

int64_t Rounded(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

}  // namespace

DeviceGptModel::DeviceGptModel(const GptOptions& options, const DeviceGptOptions& device_options)
    : options_(options), device_options_(device_options), buckets_(options.vocabulary) {}

absl::Status DeviceGptModel::Init(const Gpt& host, const DevicePlace& place) {
  EK_RETURN_IF_ERROR(InitOnDevice(place, host));
  EK_ASSIGN_OR_RETURN(work_, DeviceWork::Create(place));
  layers_.emplace(work_->runtime(), work_->stream(), operand());
  FindParameters();
  return ListMatrices();
}

void DeviceGptModel::FindParameters() {
  const auto find = [this](const std::string& name) {
    return WeightAndBias{.weight = parameters().Find(name + ".weight"), .bias = parameters().Find(name + ".bias")};
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

// Makes room for the rounded matrices, and the list of what is rounded to where.
absl::Status DeviceGptModel::ListMatrices() {
  matrices_.assign(parameters().size(), nullptr);
  std::vector<CopySegment> segments;
  int64_t bytes = 0;
  for (int i = 0; i < parameters().size(); ++i) {
    const TensorView& value = parameters()[i].value;
    matrices_[i] = value.data;
    if (operand() == DType::kFloat32 || shape(i).size() != 2 || i == position_table_) continue;
    segments.push_back({.to = TensorView(nullptr, value.count, operand(), value.device), .from = value});
    bytes += Rounded(segments.back().to.bytes());
  }
  if (segments.empty()) return absl::OkStatus();
  EK_RETURN_IF_ERROR(rounded_.Need(*work_, bytes));
  auto* next = rounded_.as<std::byte>();
  for (CopySegment& segment : segments) {
    segment.to.data = next;
    next += Rounded(segment.to.bytes());
    for (const void*& matrix : matrices_) {
      if (matrix == segment.from.data) matrix = segment.to.data;
    }
  }
  EK_ASSIGN_OR_RETURN(rounding_, SegmentCopy::Create(work_->runtime(), work_->stream().device, segments));
  return absl::OkStatus();
}

const void* DeviceGptModel::Matrix(int index) const { return matrices_[index]; }

absl::Status DeviceGptModel::Check(const Batch& batch) const {
  return CheckTokens(batch, options_.context, options_.vocabulary).status();
}

absl::Status DeviceGptModel::Prepare(const TokenBatch& batch, Mode mode, const PassOptions& options) {
  const bool trains = mode == Mode::kTraining;
  const auto rows = static_cast<int64_t>(batch.inputs.size());
  pass_ = {.sequences = rows / batch.context,
           .context = batch.context,
           .dropout = trains ? options_.dropout : 0,
           .noise = options.noise};
  const DeviceGptSize size{.sequences = pass_.sequences,
                           .context = pass_.context,
                           .trains = trains,
                           .drops = pass_.dropout > 0,
                           .keeps_probabilities = device_options_.keeps_probabilities,
                           .attention_rows = device_options_.attention_rows,
                           .operand = operand()};
  if (laid_out_ != size) {
    const int64_t bytes = LayOutGptMemory(options_, size, nullptr).bytes;
    laid_out_.reset();
    if (const absl::Status taken = block_.Need(*work_, bytes); !taken.ok()) {
      return absl::Status(taken.code(), absl::StrCat("gpt: ", trains ? "training" : "evaluation", " on ",
                                                     pass_.sequences, " sequences of ", pass_.context, " tokens takes ",
                                                     bytes, " bytes for activations: ", taken.message()));
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
  if (rounding_) return rounding_->Run(work_->stream());
  return absl::OkStatus();
}

DeviceAttention DeviceGptModel::Attention(int layer) const {
  return DeviceAttention(*work_, *layers_, Heads(), pass_.Noise(FirstStream(layer)), laid_out_->block_rows(),
                         {.scores = memory_.attention_scores, .operands = memory_.attention_operands});
}

absl::StatusOr<PendingResult> DeviceGptModel::DoForward(const Batch& any, Mode mode, const PassOptions& options) {
  EK_RETURN_IF_ERROR(Prepare(std::get<TokenBatch>(any), mode, options));
  const int64_t rows = pass_.rows(), width = options_.width;
  EK_RETURN_IF_ERROR(layers_->EmbeddingForward(rows, pass_.context, width, pass_.Noise(kEmbeddingStream),
                                               tokens_.inputs, Vector(token_table_), Vector(position_table_),
                                               memory_.embedded));
  const WeightAndBias& first_norm = blocks_[0].ln_1;
  EK_RETURN_IF_ERROR(layers_->NormForward(rows, width, memory_.embedded, Vector(first_norm.weight),
                                          Vector(first_norm.bias), Of(0).norm_1, Of(0).statistics_1));
  for (int layer = 0; layer < options_.layers; ++layer) EK_RETURN_IF_ERROR(ForwardBlock(layer));

  const int64_t stride = ScoreStride(options_.vocabulary);
  EK_RETURN_IF_ERROR(work_->math().Product({.rows = rows,
                                            .columns = options_.vocabulary,
                                            .inner = width,
                                            .left = {.row = width},
                                            .right = {.row = 1, .column = width},
                                            .output = {.row = stride}},
                                           AsOperands(memory_.final), Matrix(token_table_), nullptr,
                                           AsFloats(memory_.scores), work_->stream()));
  DeviceLoss* const loss = work_->loss();
  EK_RETURN_IF_ERROR(layers_->TokenLoss(
      rows, options_.vocabulary, stride, memory_.scores, tokens_.targets, options.weight / static_cast<double>(rows),
      mode == Mode::kTraining ? memory_.diff_scores : nullptr, memory_.sums, &loss->sum, &loss->correct));
  return work_->FetchLoss(rows);
}

// From its first norm, which is there, to the norm that follows it.
absl::Status DeviceGptModel::ForwardBlock(int layer) {
  const int64_t rows = pass_.rows(), width = options_.width;
  const BlockParameters& p = blocks_[layer];
  const Layer& own = Of(layer);
  EK_RETURN_IF_ERROR(Linear(Shape(width, 3 * width), p.c_attn, own.norm_1, AsOperands(memory_.qkv_rows)));
  EK_RETURN_IF_ERROR(layers_->SplitHeads(Heads(), 3, memory_.qkv_rows, own.qkv));
  EK_RETURN_IF_ERROR(Attention(layer).Forward(own.qkv, own.probabilities, memory_.heads));
  EK_RETURN_IF_ERROR(layers_->MergeHeads(Heads(), 1, memory_.heads, own.mixed));
  EK_RETURN_IF_ERROR(Linear(Shape(width, width), p.attn_c_proj, own.mixed, AsFloats(own.middle)));
  EK_RETURN_IF_ERROR(layers_->SumAndNormForward(rows, width, pass_.Noise(FirstStream(layer) + 1), Input(layer),
                                                own.middle, own.middle, Vector(p.ln_2.weight), Vector(p.ln_2.bias),
                                                own.norm_2, own.statistics_2));
  EK_RETURN_IF_ERROR(Linear(Shape(width, 4 * width), p.c_fc, own.norm_2, AsFloats(own.hidden)));
  EK_RETURN_IF_ERROR(layers_->GeluForward(4 * rows * width, own.hidden, own.activated));
  EK_RETURN_IF_ERROR(Linear(Shape(4 * width, width), p.mlp_c_proj, own.activated, AsFloats(own.output)));

  const bool is_last = layer + 1 == options_.layers;
  const WeightAndBias& norm = is_last ? final_norm_ : blocks_[layer + 1].ln_1;
  return layers_->SumAndNormForward(rows, width, pass_.Noise(FirstStream(layer) + 2), own.middle, own.output,
                                    own.output, Vector(norm.weight), Vector(norm.bias),
                                    is_last ? memory_.final : Of(layer + 1).norm_1,
                                    is_last ? memory_.statistics : Of(layer + 1).statistics_1);
}

absl::Status DeviceGptModel::DoBackward(GradientSink& sink) {
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

absl::Status DeviceGptModel::HeadBackward(GradientSink& sink, GradTarget<float> token_gradient) {
  const int64_t rows = pass_.rows(), width = options_.width, stride = ScoreStride(options_.vocabulary);
  EK_RETURN_IF_ERROR(work_->math().Product({.rows = rows,
                                            .columns = width,
                                            .inner = options_.vocabulary,
                                            .left = {.row = stride},
                                            .right = {.row = width},
                                            .output = {.row = width}},
                                           AsOperands(memory_.diff_scores), Matrix(token_table_), nullptr,
                                           AsFloats(memory_.norm_diff), work_->stream()));
  if (token_gradient) {
    EK_RETURN_IF_ERROR(work_->math().Product({.rows = options_.vocabulary,
                                              .columns = width,
                                              .inner = rows,
                                              .left = {.row = 1, .column = stride},
                                              .right = {.row = width},
                                              .output = {.row = width},
                                              .add = token_gradient.add},
                                             AsOperands(memory_.diff_scores), memory_.final, nullptr,
                                             AsFloats(token_gradient.data), work_->stream()));
  }
  EK_RETURN_IF_ERROR(
      work_->runtime().Zero(memory_.diff, rows * width * static_cast<int64_t>(sizeof(float)), work_->stream()));
  return NormBackward(final_norm_, Input(static_cast<int>(options_.layers)), memory_.statistics, sink);
}

absl::Status DeviceGptModel::BlockBackward(int layer, GradientSink& sink) {
  EK_RETURN_IF_ERROR(PerceptronBackward(layer, sink));
  if (!sink.AnyTrainedBefore(blocks_[layer].ln_2.weight)) return absl::OkStatus();
  return AttentionBackward(layer, sink);
}

absl::Status DeviceGptModel::PerceptronBackward(int layer, GradientSink& sink) {
  const BlockParameters& p = blocks_[layer];
  const Layer& own = Of(layer);
  const int64_t width = options_.width;
  const LinearShape narrowing = Shape(4 * width, width), widening = Shape(width, 4 * width);
  EK_ASSIGN_OR_RETURN(const Operands* const diff_end, BeginPart(FirstStream(layer) + 2));
  EK_RETURN_IF_ERROR(LinearInput(narrowing, p.mlp_c_proj, diff_end, AsFloats(memory_.wide)));
  EK_RETURN_IF_ERROR(WriteLinear(narrowing, p.mlp_c_proj, own.activated, diff_end, sink));
  if (!sink.AnyTrainedBefore(p.mlp_c_proj.weight)) return absl::OkStatus();

  Operands* const diff_hidden = operand() == DType::kFloat32 ? memory_.wide : memory_.wide_operand;
  EK_RETURN_IF_ERROR(layers_->GeluBackward(4 * pass_.rows() * width, own.hidden, memory_.wide, diff_hidden));
  EK_RETURN_IF_ERROR(LinearInput(widening, p.c_fc, diff_hidden, AsFloats(memory_.norm_diff)));
  EK_RETURN_IF_ERROR(WriteLinear(widening, p.c_fc, own.norm_2, diff_hidden, sink));
  if (!sink.AnyTrainedBefore(p.c_fc.weight)) return absl::OkStatus();
  return NormBackward(p.ln_2, own.middle, own.statistics_2, sink);
}

absl::Status DeviceGptModel::AttentionBackward(int layer, GradientSink& sink) {
  const BlockParameters& p = blocks_[layer];
  const Layer& own = Of(layer);
  const int64_t width = options_.width;
  const LinearShape projection = Shape(width, width), widening = Shape(width, 3 * width);
  EK_ASSIGN_OR_RETURN(const Operands* const diff_end, BeginPart(FirstStream(layer) + 1));
  EK_RETURN_IF_ERROR(LinearInput(projection, p.attn_c_proj, diff_end, AsOperands(memory_.qkv_rows)));
  EK_RETURN_IF_ERROR(WriteLinear(projection, p.attn_c_proj, own.mixed, diff_end, sink));
  if (!sink.AnyTrainedBefore(p.attn_c_proj.weight)) return absl::OkStatus();

  const auto probabilities = device_options_.keeps_probabilities ? DeviceAttention::Probabilities::kKept
                                                                 : DeviceAttention::Probabilities::kForgotten;
  EK_RETURN_IF_ERROR(layers_->SplitHeads(Heads(), 1, memory_.qkv_rows, memory_.heads));
  EK_RETURN_IF_ERROR(Attention(layer).Backward(own.qkv, own.probabilities, probabilities, memory_.heads, memory_.wide));
  Operands* const diff_qkv = memory_.qkv_rows;
  EK_RETURN_IF_ERROR(layers_->MergeHeadGradients(Heads(), 3, memory_.wide, diff_qkv));
  EK_RETURN_IF_ERROR(LinearInput(widening, p.c_attn, diff_qkv, AsFloats(memory_.norm_diff)));
  EK_RETURN_IF_ERROR(WriteLinear(widening, p.c_attn, own.norm_1, diff_qkv, sink));
  if (!sink.AnyTrainedBefore(p.c_attn.weight)) return absl::OkStatus();
  return NormBackward(p.ln_1, Input(layer), own.statistics_1, sink);
}

absl::Status DeviceGptModel::EmbeddingBackwardAndAnnounce(GradientSink& sink, GradTarget<float> token_gradient) {
  const DropoutNoise noise = pass_.Noise(kEmbeddingStream);
  if (const GradTarget<float> target = sink.Target<float>(position_table_)) {
    EK_RETURN_IF_ERROR(layers_->EmbeddingBackwardPositions(pass_.rows(), pass_.context, options_.context,
                                                           options_.width, noise, memory_.diff, target));
  }
  if (token_gradient) {
    EK_RETURN_IF_ERROR(
        layers_->EmbeddingBackwardTokens(options_.width, noise, tokens_, memory_.diff, token_gradient.data));
  }
  EK_RETURN_IF_ERROR(sink.Announce(position_table_));
  return sink.Announce(token_table_);
}

absl::Status DeviceGptModel::Linear(const LinearShape& shape, const WeightAndBias& linear, const Operands* input,
                                    TypedPointer output) {
  return work_->math().Product({.rows = shape.rows,
                                .columns = shape.outputs,
                                .inner = shape.inputs,
                                .left = {.row = shape.inputs},
                                .right = {.row = shape.outputs},
                                .output = {.row = shape.outputs}},
                               AsOperands(const_cast<Operands*>(input)), Matrix(linear.weight), Vector(linear.bias),
                               output, work_->stream());
}

absl::Status DeviceGptModel::LinearInput(const LinearShape& shape, const WeightAndBias& linear,
                                         const Operands* diff_output, TypedPointer diff_input) {
  return work_->math().Product({.rows = shape.rows,
                                .columns = shape.inputs,
                                .inner = shape.outputs,
                                .left = {.row = shape.outputs},
                                .right = {.row = 1, .column = shape.outputs},
                                .output = {.row = shape.inputs}},
                               AsOperands(const_cast<Operands*>(diff_output)), Matrix(linear.weight), nullptr,
                               diff_input, work_->stream());
}

absl::Status DeviceGptModel::WriteLinear(const LinearShape& shape, const WeightAndBias& linear, const Operands* input,
                                         const Operands* diff_output, GradientSink& sink) {
  EK_RETURN_IF_ERROR(sink.Write<float>(linear.bias, [&](GradTarget<float> target) {
    return layers_->SumRows(shape.rows, shape.outputs, diff_output, Sums(), target);
  }));
  return sink.Write<float>(linear.weight, [&](GradTarget<float> target) {
    return work_->math().Product({.rows = shape.inputs,
                                  .columns = shape.outputs,
                                  .inner = shape.rows,
                                  .left = {.row = 1, .column = shape.inputs},
                                  .right = {.row = shape.outputs},
                                  .output = {.row = shape.outputs},
                                  .add = target.add},
                                 AsOperands(const_cast<Operands*>(input)), diff_output, nullptr, AsFloats(target.data),
                                 work_->stream());
  });
}

absl::Status DeviceGptModel::NormBackward(const WeightAndBias& norm, const float* input,
                                          RowStatistics<float> statistics, GradientSink& sink) {
  const int64_t rows = pass_.rows(), width = options_.width;
  EK_RETURN_IF_ERROR(layers_->NormBackward(rows, width, input, statistics, Vector(norm.weight), memory_.norm_diff,
                                           sink.AnyTrainedBefore(norm.weight) ? memory_.diff : nullptr, Sums()));
  EK_RETURN_IF_ERROR(sink.Write<float>(
      norm.bias, [&](GradTarget<float> target) { return layers_->NormBias(rows, width, Sums(), target); }));
  return sink.Write<float>(norm.weight,
                           [&](GradTarget<float> target) { return layers_->NormWeight(rows, width, Sums(), target); });
}

absl::StatusOr<const void*> DeviceGptModel::BeginPart(uint64_t stream) {
  if (pass_.dropout == 0) return AsOperand(options_.width, memory_.diff, memory_.narrow_operand);
  EK_RETURN_IF_ERROR(
      layers_->Dropout(pass_.rows(), options_.width, pass_.Noise(stream), memory_.diff, memory_.narrow_operand));
  return memory_.narrow_operand;
}

absl::StatusOr<const void*> DeviceGptModel::AsOperand(int64_t width, const float* values, Operands* to) {
  if (operand() == DType::kFloat32) return values;
  EK_RETURN_IF_ERROR(layers_->Dropout(pass_.rows(), width, {}, values, to));
  return to;
}

absl::StatusOr<std::span<const float>> DeviceGptModel::NextToken(std::span<const int32_t> tokens) {
  if (tokens.empty()) return absl::InvalidArgumentError("gpt: what follows needs a token before it");
  const int64_t count = std::min<int64_t>(tokens.size(), options_.context);
  // Of few lengths, so that memory is laid out for few. What is after the last token has no influence on it.
  const int64_t length = std::min<int64_t>(std::bit_ceil(static_cast<uint64_t>(count)), options_.context);
  std::vector<int32_t> prompt(length, 0);
  std::ranges::copy(tokens.last(count), prompt.begin());
  EK_RETURN_IF_ERROR(StartForward(TokenBatch{prompt, prompt, length}, Mode::kEvaluation).status());
  DeviceRuntime& runtime = work_->runtime();
  const int64_t bytes = options_.vocabulary * static_cast<int64_t>(sizeof(float));
  if (next_scores_.bytes == 0) {
    EK_ASSIGN_OR_RETURN(next_scores_, runtime.AllocatePinned(bytes));
  }
  auto* const scores = static_cast<float*>(next_scores_.data.get());
  EK_RETURN_IF_ERROR(
      runtime.Copy(scores, memory_.scores + (count - 1) * ScoreStride(options_.vocabulary), bytes, work_->stream()));
  EK_RETURN_IF_ERROR(runtime.Synchronize(work_->stream(), absl::Now() + place().timeout));
  return std::span<const float>(scores, options_.vocabulary);
}

}  // namespace evenkeel
