// The passes of a GPT, written once for the host (gpt.cc) and for devices
// (trainer/device/device_gpt.cc), which implement the operations. A layer computes
// x += attention(norm(x)), then x += perceptron(norm(x)).
//
//   class DeviceGptModel : public GptPasses<DeviceGptModel, float, void> {
//     friend GptPasses;
//     absl::Status GeluForward(int64_t n, const float* input, void* output);
//     ...
//   };
//
// Backward ends where nothing below is trained. Gradients are announced from the last parameter to
// the first, each after the last use of the parameter's value.
//
// Types:   those of gpt_memory.h.
// Threads: thread-compatible.
// Errors:  those of the operations; an error of Take() gets the sizes of the pass.
//
// The operations that `Own` implements:
//
//   GptMemorySize SizeOf(trains)           of pass_
//   StatusOr<void*> Take(bytes)            memory for a pass; earlier contents are lost
//   Status Prepare(batch, trains)          the batch, and the operands of all matrices
//   Status EmbeddingForward()              memory_.embedded, after dropout
//   Status NormForward(input, norm)        of pass_.rows() rows, like all that have no count
//   Status SumAndNormForward(noise, around, part, norm)   part = around + dropout(part); its norm
//   Status Product(strided_shape, left, right, bias, output)        output of T or O
//   const O* Matrix(index)                 the value of a parameter, as products take it
//   Status AttentionForward(layer)         from Qkv(layer) to mixed
//   StatusOr<const O*> AttentionBackward(layer)   the gradient of Qkv(layer) from memory_.diff_rows
//   Status GeluForward(n, input, output), GeluBackward(n, input, diff_output, diff_input)
//   Status Dropout(noise, input, operands) only rounds where noise.probability is 0
//   Status SumRows(rows, columns, operands, target)
//   Status NormBackward(norm, input, statistics, sink)    adds to memory_.diff, from .norm_diff
//   StatusOr<PendingResult> HeadForward(targets, weight)
//   Status HeadBackward(token_gradient)    memory_.norm_diff; memory_.diff becomes 0
//   Status EmbeddingBackward(token_gradient, position_gradient)     adds to the former

#ifndef EVENKEEL_TRAINER_GPT_GPT_PASSES_H_
#define EVENKEEL_TRAINER_GPT_GPT_PASSES_H_

#include <cstdint>
#include <optional>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/trainer/data/batch.h"
#include "evenkeel/trainer/gpt/attention_rows.h"
#include "evenkeel/trainer/gpt/dropout.h"
#include "evenkeel/trainer/gpt/gpt.h"
#include "evenkeel/trainer/gpt/gpt_memory.h"
#include "evenkeel/trainer/gpt/gpt_options.h"
#include "evenkeel/trainer/gpt/layer_norm.h"
#include "evenkeel/trainer/layers/gradient_sink.h"
#include "evenkeel/trainer/layers/mode.h"
#include "evenkeel/trainer/layers/strided_shape.h"
#include "evenkeel/trainer/models/batch_result.h"
#include "evenkeel/trainer/models/model.h"

namespace evenkeel {

// The parameters of a part, by their indices.
struct WeightAndBias {
  int weight = 0;
  int bias = 0;
};

struct BlockParameters {
  WeightAndBias ln_1, c_attn, attn_c_proj, ln_2, c_fc, mlp_c_proj;
};

// The tables come before all blocks (gpt.h has the order).
inline constexpr int kTokenTable = 0, kPositionTable = 1;

// Streams of dropout: one of the embedding, then three of each layer, of its attention's weights,
// the attention's end and the perceptron's end.
inline constexpr uint64_t kEmbeddingStream = 0;
constexpr uint64_t FirstStream(int layer) { return 1 + 3 * static_cast<uint64_t>(layer); }

// The sizes and the dropout of a pass.
struct GptPass {
  GptPass() = default;
  GptPass(const GptOptions& model, int64_t sequences, int64_t context, Mode mode,
          const PassOptions& options = {})
      : sequences(sequences),
        context(context),
        dropout(mode == Mode::kTraining ? model.dropout : 0),
        noise(options.noise),
        first_sequence(options.first_sample) {}

  int64_t sequences = 0;
  int64_t context = 0;
  double dropout = 0;  // 0 in evaluation.
  uint64_t noise = 0;
  int64_t first_sequence = 0;  // The place of the first one for noise.

  int64_t rows() const { return sequences * context; }
  // `matrices`: of `context` rows each, for each sequence.
  DropoutNoise Noise(uint64_t stream, int64_t matrices = 1) const {
    return {.probability = dropout,
            .seed = noise,
            .stream = stream,
            .first_row = first_sequence * matrices * context};
  }
  LinearShape Linear(int64_t inputs, int64_t outputs) const {
    return {.rows = rows(), .inputs = inputs, .outputs = outputs};
  }
  AttentionShape Attention(int64_t width, int64_t heads) const {
    return {
        .sequences = sequences, .context = context, .heads = heads, .head_width = width / heads};
  }
};

template <typename Own, typename T, typename O>
class GptPasses : public Gpt {
 public:
  const GptOptions& options() const override { return options_; }

 protected:
  using Layer = typename GptMemory<T, O>::Layer;
  // A norm, and the memory to which its forward pass writes.
  struct Norm {
    WeightAndBias parameters;
    O* output = nullptr;
    RowStatistics<T> statistics;
  };

  explicit GptPasses(const GptOptions& options) : Gpt(options.is_plan), options_(options) {
    int next = kPositionTable + 1;
    const auto part = [&] {
      next += 2;
      return WeightAndBias{.weight = next - 2, .bias = next - 1};
    };
    for (int64_t layer = 0; layer < options.layers; ++layer) {
      blocks_.push_back({.ln_1 = part(),
                         .c_attn = part(),
                         .attn_c_proj = part(),
                         .ln_2 = part(),
                         .c_fc = part(),
                         .mlp_c_proj = part()});
    }
    final_norm_ = part();
  }

  const T* Vector(int index) const {
    return static_cast<const T*>(this->parameters()[index].value.data);
  }
  AttentionShape Heads() const { return pass_.Attention(options_.width, options_.heads); }
  DropoutNoise AttentionNoise(int layer) const {
    return pass_.Noise(FirstStream(layer), options_.heads);
  }
  // Returns the layer's queries, keys and values, by rows.
  O* Qkv(int layer) { return memory_.qkv_rows != nullptr ? memory_.qkv_rows : LayerAt(layer).qkv; }
  Layer& LayerAt(int layer) { return memory_.layers[layer % memory_.layers.size()]; }

  const GptOptions options_;
  GptMemory<T, O> memory_;
  GptPass pass_;  // Of the last Forward().

 private:
  std::vector<BlockParameters> blocks_;  // By layer.
  WeightAndBias final_norm_;
  std::optional<GptMemorySize> laid_out_;  // The size of memory_.

  Own& own() { return static_cast<Own&>(*this); }
  const T* Input(int layer) { return layer == 0 ? memory_.embedded : LayerAt(layer - 1).output; }
  // Returns the norm of the layer's input; after the last layer, the final norm.
  Norm NormBefore(int layer) {
    if (layer == options_.layers) return {final_norm_, memory_.final, memory_.statistics};
    return {blocks_[layer].ln_1, LayerAt(layer).norm_1, LayerAt(layer).statistics_1};
  }

  absl::Status Check(const Batch& batch) const override {
    return CheckTokens(batch, options_.context, options_.vocabulary).status();
  }

  absl::StatusOr<PendingResult> DoForward(const Batch& any, Mode mode,
                                          const PassOptions& options) override {
    const auto& batch = std::get<TokenBatch>(any);
    const int64_t sequences = static_cast<int64_t>(batch.inputs.size()) / batch.context;
    pass_ = GptPass(options_, sequences, batch.context, mode, options);
    const bool trains = mode == Mode::kTraining;
    EK_RETURN_IF_ERROR(LayOut(own().SizeOf(trains)));
    EK_RETURN_IF_ERROR(own().Prepare(batch, trains));
    EK_RETURN_IF_ERROR(own().EmbeddingForward());
    EK_RETURN_IF_ERROR(own().NormForward(memory_.embedded, NormBefore(0)));
    for (int layer = 0; layer < options_.layers; ++layer) EK_RETURN_IF_ERROR(ForwardBlock(layer));
    return own().HeadForward(batch.targets, options.weight);
  }

  absl::Status LayOut(const GptMemorySize& size) {
    if (laid_out_ == size) return absl::OkStatus();
    laid_out_.reset();
    const int64_t bytes = LayOutGptMemory<T, O>(options_, size, nullptr).bytes;
    const absl::StatusOr<void*> block = own().Take(bytes);
    if (!block.ok()) {
      return absl::Status(
          block.status().code(),
          absl::StrCat("gpt: ", size.trains ? "training" : "evaluation", " on ", pass_.sequences,
                       " sequences of ", pass_.context, " tokens takes ", bytes,
                       " bytes for activations: ", block.status().message()));
    }
    memory_ = LayOutGptMemory<T, O>(options_, size, *block);
    laid_out_ = size;
    return absl::OkStatus();
  }

  // Computes a layer whose input has been normalized, and the norm of its output.
  absl::Status ForwardBlock(int layer) {
    const int64_t width = options_.width, wide = 4 * width;
    const BlockParameters& p = blocks_[layer];
    const Layer& at = LayerAt(layer);
    EK_RETURN_IF_ERROR(Linear(pass_.Linear(width, 3 * width), p.c_attn, at.norm_1, Qkv(layer)));
    EK_RETURN_IF_ERROR(own().AttentionForward(layer));
    EK_RETURN_IF_ERROR(Linear(pass_.Linear(width, width), p.attn_c_proj, at.mixed, at.middle));
    EK_RETURN_IF_ERROR(own().SumAndNormForward(pass_.Noise(FirstStream(layer) + 1), Input(layer),
                                               at.middle,
                                               Norm{p.ln_2, at.norm_2, at.statistics_2}));
    EK_RETURN_IF_ERROR(Linear(pass_.Linear(width, wide), p.c_fc, at.norm_2, at.hidden));
    EK_RETURN_IF_ERROR(own().GeluForward(wide * pass_.rows(), at.hidden, at.activated));
    EK_RETURN_IF_ERROR(Linear(pass_.Linear(wide, width), p.mlp_c_proj, at.activated, at.output));
    return own().SumAndNormForward(pass_.Noise(FirstStream(layer) + 2), at.middle, at.output,
                                   NormBefore(layer + 1));
  }

  absl::Status DoBackward(GradientSink& sink) override {
    if (!sink.AnyTrainedBefore(this->parameters().size())) return absl::OkStatus();
    // The head's part may overwrite what lies there; the embedding's is added to it.
    const GradTarget<T> token_gradient = sink.Target<T>(kTokenTable);
    const int layers = static_cast<int>(options_.layers);
    EK_RETURN_IF_ERROR(own().HeadBackward(token_gradient));
    EK_RETURN_IF_ERROR(own().NormBackward(final_norm_, Input(layers), memory_.statistics, sink));
    for (int layer = layers; layer-- > 0;) {
      const BlockParameters& p = blocks_[layer];
      if (!sink.AnyTrainedBefore(p.mlp_c_proj.bias + 1)) return absl::OkStatus();
      EK_RETURN_IF_ERROR(PerceptronBackward(layer, sink));
      if (!sink.AnyTrainedBefore(p.ln_2.weight)) return absl::OkStatus();
      EK_RETURN_IF_ERROR(AttentionBackward(layer, sink));
    }
    if (!sink.AnyTrainedBefore(kPositionTable + 1)) return absl::OkStatus();
    EK_RETURN_IF_ERROR(own().EmbeddingBackward(token_gradient, sink.Target<T>(kPositionTable)));
    EK_RETURN_IF_ERROR(sink.Announce(kPositionTable));
    return sink.Announce(kTokenTable);
  }

  absl::Status PerceptronBackward(int layer, GradientSink& sink) {
    const BlockParameters& p = blocks_[layer];
    const Layer& at = LayerAt(layer);
    const int64_t width = options_.width, wide = 4 * width;
    EK_RETURN_IF_ERROR(BeginPart(FirstStream(layer) + 2));
    EK_RETURN_IF_ERROR(LinearBackward(pass_.Linear(wide, width), p.mlp_c_proj, at.activated,
                                      memory_.narrow_operand, memory_.wide, sink));
    if (!sink.AnyTrainedBefore(p.mlp_c_proj.weight)) return absl::OkStatus();

    EK_RETURN_IF_ERROR(
        own().GeluBackward(wide * pass_.rows(), at.hidden, memory_.wide, memory_.wide_operand));
    EK_RETURN_IF_ERROR(LinearBackward(pass_.Linear(width, wide), p.c_fc, at.norm_2,
                                      memory_.wide_operand, memory_.norm_diff, sink));
    if (!sink.AnyTrainedBefore(p.c_fc.weight)) return absl::OkStatus();
    return own().NormBackward(p.ln_2, at.middle, at.statistics_2, sink);
  }

  absl::Status AttentionBackward(int layer, GradientSink& sink) {
    const BlockParameters& p = blocks_[layer];
    const Layer& at = LayerAt(layer);
    const int64_t width = options_.width;
    EK_RETURN_IF_ERROR(BeginPart(FirstStream(layer) + 1));
    EK_RETURN_IF_ERROR(LinearBackward(pass_.Linear(width, width), p.attn_c_proj, at.mixed,
                                      memory_.narrow_operand, memory_.diff_rows, sink));
    if (!sink.AnyTrainedBefore(p.attn_c_proj.weight)) return absl::OkStatus();

    EK_ASSIGN_OR_RETURN(const O* const diff_qkv, own().AttentionBackward(layer));
    EK_RETURN_IF_ERROR(LinearBackward(pass_.Linear(width, 3 * width), p.c_attn, at.norm_1, diff_qkv,
                                      memory_.norm_diff, sink));
    if (!sink.AnyTrainedBefore(p.c_attn.weight)) return absl::OkStatus();
    return own().NormBackward(p.ln_1, Input(layer), at.statistics_1, sink);
  }

  // Writes the gradient of a part's output, memory_.diff through dropout, to
  // memory_.narrow_operand.
  absl::Status BeginPart(uint64_t stream) {
    if (static_cast<const void*>(memory_.narrow_operand) == memory_.diff) return absl::OkStatus();
    return own().Dropout(pass_.Noise(stream), memory_.diff, memory_.narrow_operand);
  }

  // Computes output = input * weight + bias; LinearBackward() computes its gradients.
  template <typename Result>
  absl::Status Linear(const LinearShape& shape, const WeightAndBias& linear, const O* input,
                      Result* output) {
    return own().Product(shape.Forward(), input, own().Matrix(linear.weight), Vector(linear.bias),
                         output);
  }
  template <typename Result>
  absl::Status LinearBackward(const LinearShape& shape, const WeightAndBias& linear, const O* input,
                              const O* diff_output, Result* diff_input, GradientSink& sink) {
    EK_RETURN_IF_ERROR(own().Product(shape.BackwardInput(), diff_output,
                                     own().Matrix(linear.weight), nullptr, diff_input));
    EK_RETURN_IF_ERROR(sink.Write<T>(linear.bias, [&](GradTarget<T> target) {
      return own().SumRows(shape.rows, shape.outputs, diff_output, target);
    }));
    return sink.Write<T>(linear.weight, [&](GradTarget<T> target) {
      return own().Product(shape.BackwardWeight(target.add), input, diff_output, nullptr,
                           target.data);
    });
  }
};

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_GPT_GPT_PASSES_H_
