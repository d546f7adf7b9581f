#include "evenkeel/trainer/gpt/gpt.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <type_traits>
#include <variant>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/types.h"
#include "evenkeel/trainer/data/batch.h"
#include "evenkeel/trainer/data/stable_random.h"
#include "evenkeel/trainer/gpt/block.h"
#include "evenkeel/trainer/gpt/buffer.h"
#include "evenkeel/trainer/gpt/dropout.h"
#include "evenkeel/trainer/gpt/embedding.h"
#include "evenkeel/trainer/gpt/gpt_pass.h"
#include "evenkeel/trainer/gpt/layer_norm.h"
#include "evenkeel/trainer/gpt/operands.h"
#include "evenkeel/trainer/layers/gradient_sink.h"
#include "evenkeel/trainer/layers/initialize.h"
#include "evenkeel/trainer/layers/rows.h"
#include "evenkeel/trainer/layers/tensor_memory.h"
#include "evenkeel/trainer/layers/token_loss.h"

namespace evenkeel {
namespace {

// So that no product of sizes overflows, and a typing error does not ask for terabytes.
constexpr int64_t kMaxVocabulary = 1'000'000, kMaxContext = 65536, kMaxLayers = 1024,
                  kMaxWidth = 65536, kMaxHeads = 1024;
constexpr int64_t kMaxParameters = int64_t{1} << 34;

absl::Status CheckRange(absl::string_view name, int64_t value, int64_t lowest, int64_t highest) {
  if (value >= lowest && value <= highest) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("gpt: ", name, " may be ", lowest, " to ", highest, ", not ", value));
}

int64_t ParametersOf(const GptOptions& options) {
  const int64_t width = options.width;
  return (options.vocabulary + options.context + 2) * width +
         options.layers * (12 * width + 13) * width;
}

absl::Status Check(const GptOptions& options) {
  EK_RETURN_IF_ERROR(CheckRange("vocabulary", options.vocabulary, 2, kMaxVocabulary));
  EK_RETURN_IF_ERROR(CheckRange("context", options.context, 1, kMaxContext));
  EK_RETURN_IF_ERROR(CheckRange("layers", options.layers, 1, kMaxLayers));
  EK_RETURN_IF_ERROR(CheckRange("width", options.width, 1, kMaxWidth));
  EK_RETURN_IF_ERROR(CheckRange("heads", options.heads, 1, kMaxHeads));
  if (options.width % options.heads != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("gpt: ", options.heads, " heads do not divide the width, ", options.width));
  }
  if (!(options.dropout >= 0 && options.dropout < 1)) {
    return absl::InvalidArgumentError(
        absl::StrCat("gpt: dropout must be at least 0 and below 1, got ", options.dropout));
  }
  if (const int64_t parameters = ParametersOf(options); parameters > kMaxParameters) {
    return absl::InvalidArgumentError(absl::StrCat("gpt: these sizes result in ", parameters,
                                                   " parameters, more than the maximum of ",
                                                   kMaxParameters));
  }
  return absl::OkStatus();
}

constexpr double kDeviation = 0.02;

// The model for each precision: T is the type of values, gradients and sums, O the operand type of
// matrix products.
template <typename T, typename O>
class GptModel : public Gpt {
 public:
  explicit GptModel(const GptOptions& options)
      : Gpt(options.is_plan), options_(options), tools_(&parameters(), &held_) {
    token_table_ =
        AddParameter("wte.weight", DTypeOf<T>::value, {options.vocabulary, options.width});
    position_table_ =
        AddParameter("wpe.weight", DTypeOf<T>::value, {options.context, options.width});
    tools_.operands.AddMatrix(token_table_);
    for (int table : {token_table_, position_table_}) {
      FillNormal(Value(table), kDeviation, StableRandom(options.seed, table));
    }
    for (int layer = 0; layer < options.layers; ++layer) AddBlock(layer);
    final_norm_ = AddNorm("ln_f");
  }

  const GptOptions& options() const override { return options_; }
  absl::StatusOr<std::span<const float>> NextToken(std::span<const int32_t> tokens) override {
    EK_ASSIGN_OR_RETURN(const int64_t row, ScorePrompt(tokens));
    T* scores = scores_.data();  // Has room for one row.
    EK_RETURN_IF_ERROR(tools_.products.Run(Head(/*rows=*/1).BackwardInput(),
                                           final_.data() + row * options_.width,
                                           tools_.operands.Matrix(token_table_), nullptr, scores));
    if constexpr (std::is_same_v<T, float>) {
      return std::span(scores, options_.vocabulary);
    } else {
      next_scores_.assign(scores, scores + options_.vocabulary);
      return next_scores_;
    }
  }

  int64_t ActivationBytes() const override { return held_; }
  absl::Status PlanPass(int64_t samples, Mode mode) override {
    held_ = std::max(held_, GptActivationBytes(options_, samples, mode));
    return absl::OkStatus();
  }

 private:
  WeightAndBias AddNorm(const std::string& name) {
    const WeightAndBias norm = {
        .weight = AddParameter(name + ".weight", DTypeOf<T>::value, {options_.width}),
        .bias = AddParameter(name + ".bias", DTypeOf<T>::value, {options_.width})};
    std::ranges::fill(Value(norm.weight), T{1});
    return norm;
  }

  WeightAndBias AddLinear(const std::string& name, int64_t inputs, int64_t outputs,
                          double deviation) {
    const WeightAndBias linear = {
        .weight = AddParameter(name + ".weight", DTypeOf<T>::value, {inputs, outputs}),
        .bias = AddParameter(name + ".bias", DTypeOf<T>::value, {outputs})};
    FillNormal(Value(linear.weight), deviation, StableRandom(options_.seed, linear.weight));
    tools_.operands.AddMatrix(linear.weight);
    return linear;
  }

  void AddBlock(int layer) {
    const std::string name = absl::StrCat("h.", layer, ".");
    const int64_t width = options_.width;
    // Projections back into the sum that runs through all layers: so that its variance doesn't grow
    // with their number.
    const double into_sum = kDeviation / std::sqrt(2.0 * static_cast<double>(options_.layers));
    BlockParameters own;
    own.ln_1 = AddNorm(name + "ln_1");
    own.c_attn = AddLinear(name + "attn.c_attn", width, 3 * width, kDeviation);
    own.attn_c_proj = AddLinear(name + "attn.c_proj", width, width, into_sum);
    own.ln_2 = AddNorm(name + "ln_2");
    own.c_fc = AddLinear(name + "mlp.c_fc", width, 4 * width, kDeviation);
    own.mlp_c_proj = AddLinear(name + "mlp.c_proj", 4 * width, width, into_sum);
    blocks_.emplace_back(own, width, options_.heads, layer);
    memory_.emplace_back(&held_);
  }

  std::span<T> Value(int index) { return this->template Initial<T>(index); }

  absl::Status Check(const Batch& batch) const override {
    return CheckTokens(batch, options_.context, options_.vocabulary).status();
  }

  absl::StatusOr<PendingResult> DoForward(const Batch& any, Mode mode,
                                          const PassOptions& options) override {
    const auto& batch = std::get<TokenBatch>(any);
    const Operands<T, O>& operands = tools_.operands;
    const int64_t rows = static_cast<int64_t>(batch.inputs.size()), size = rows * options_.width;
    pass_ = GptPass(options_, batch, mode, options);
    inputs_ = batch.inputs;
    tools_.operands.Refresh();

    T* sum = embedded_.Resize(size);
    EmbeddingForward(batch.context, options_.width, batch.inputs, operands.Vector(token_table_),
                     operands.Vector(position_table_), sum);
    if (pass_.dropout > 0) {
      Dropout(pass_.Noise(kEmbeddingStream), WholeMatrix(rows, options_.width), sum, sum);
    }
    for (size_t layer = 0; layer < blocks_.size(); ++layer) {
      BlockMemory<T, O>& memory = Memory(layer, mode);
      EK_RETURN_IF_ERROR(blocks_[layer].Forward(tools_, pass_, sum, memory));
      sum = memory.output.data();
    }
    statistics_.Resize(2 * rows);
    LayerNormForward(rows, options_.width, sum, operands.Vector(final_norm_.weight),
                     operands.Vector(final_norm_.bias), final_.Resize(size), FinalStatistics());

    return HeadPass(batch.targets, mode, options.weight);
  }

  // Scores, loss and, in training, what Backward requires of them: the gradients of the last norm's
  // output and of the head's weight. Some rows go through all steps together, so that the scores of
  // all of them never exist at once.
  absl::StatusOr<PendingResult> HeadPass(std::span<const int32_t> targets, Mode mode,
                                         double weight) {
    const int64_t rows = pass_.rows(), vocabulary = options_.vocabulary, width = options_.width;
    const bool trains = mode == Mode::kTraining;
    const O* table = tools_.operands.Matrix(token_table_);
    const int64_t chunk = HeadRows(rows, vocabulary, sizeof(T));
    T* scores = scores_.Resize(chunk * vocabulary);
    O* diff_scores = trains ? OperandMemory(scores, chunk * vocabulary, diff_scores_) : nullptr;
    T* diff = trains ? head_diff_.Resize(rows * width) : nullptr;
    head_gradient_is_known_ = trains && parameters().trainable(token_table_);
    T* gradient = head_gradient_is_known_ ? head_gradient_.Resize(vocabulary * width) : nullptr;

    TokenLossResult loss;
    for (int64_t begin = 0; begin < rows; begin += chunk) {
      const LinearShape head = Head(std::min(chunk, rows - begin));
      const O* input = final_.data() + begin * width;
      EK_RETURN_IF_ERROR(tools_.products.Run(head.BackwardInput(), input, table, nullptr, scores));
      loss += TokenLoss(vocabulary, scores, targets.subspan(begin, head.rows),
                        weight / static_cast<double>(rows), diff_scores);
      if (!trains) continue;
      EK_RETURN_IF_ERROR(
          tools_.products.Run(head.Forward(), diff_scores, table, nullptr, diff + begin * width));
      if (gradient == nullptr) continue;
      EK_RETURN_IF_ERROR(tools_.products.Run(head.BackwardWeight(/*add=*/begin > 0), diff_scores,
                                             input, nullptr, gradient));
    }
    return BatchResult{.loss_mean = loss.sum / static_cast<double>(rows), .correct = loss.correct};
  }

  absl::Status DoBackward(GradientSink& sink) override {
    if (!sink.AnyTrainedBefore(parameters().size())) return absl::OkStatus();
    // The head's part may overwrite what lies there; the embedding's is added to it.
    const GradTarget<T> token_gradient = sink.Target<T>(token_table_);
    EK_RETURN_IF_ERROR(HeadBackward(sink, token_gradient));
    for (size_t layer = blocks_.size(); layer-- > 0;) {
      const Block<T, O>& block = blocks_[layer];
      if (!sink.AnyTrainedBefore(block.parameters().mlp_c_proj.bias + 1)) return absl::OkStatus();
      EK_RETURN_IF_ERROR(
          block.Backward(tools_, pass_, BlockInput(layer), memory_[layer], sink, diff_.data()));
    }
    if (!sink.AnyTrainedBefore(position_table_ + 1)) return absl::OkStatus();
    return EmbeddingBackwardAndAnnounce(sink, token_gradient);
  }

  absl::Status HeadBackward(GradientSink& sink, GradTarget<T> token_gradient) {
    const int64_t rows = pass_.rows(), size = rows * options_.width;
    if (token_gradient) {
      if (!head_gradient_is_known_) {
        return absl::FailedPreconditionError(
            "gpt: wte.weight became trainable between Forward and Backward; change it before "
            "Forward");
      }
      const int64_t elements = options_.vocabulary * options_.width;
      if (token_gradient.add) {
        SumRows(/*rows=*/1, elements, head_gradient_.data(), token_gradient);
      } else {
        std::copy_n(head_gradient_.data(), elements, token_gradient.data);
      }
    }
    T* diff = diff_.Resize(size);
    std::fill(diff, diff + size, T{0});
    return NormBackward(tools_, rows, options_.width, final_norm_, BlockInput(blocks_.size()),
                        FinalStatistics(), head_diff_.data(), sink, diff);
  }

  absl::Status EmbeddingBackwardAndAnnounce(GradientSink& sink, GradTarget<T> token_gradient) {
    const int64_t rows = pass_.rows(), width = options_.width;
    T* diff = diff_.data();
    if (pass_.dropout > 0) {
      Dropout(pass_.Noise(kEmbeddingStream), WholeMatrix(rows, width), diff, diff);
    }
    const GradTarget<T> position_gradient = sink.Target<T>(position_table_);
    if (position_gradient && !position_gradient.add) {
      std::fill(position_gradient.data, position_gradient.data + options_.context * width, T{0});
    }
    EmbeddingBackward<T>(pass_.context, width, inputs_, diff, token_gradient.data,
                         position_gradient.data);
    EK_RETURN_IF_ERROR(sink.Announce(position_table_));
    return sink.Announce(token_table_);
  }

  // Evaluation needs nothing of a layer after the next one has run: two layers' memory take turns.
  BlockMemory<T, O>& Memory(size_t layer, Mode mode) {
    return memory_[mode == Mode::kTraining ? layer : layer % 2];
  }
  // The head as the layer from scores to hidden states, which has wte as its weight: forward is
  // that one's way back.
  LinearShape Head(int64_t rows) const {
    return {.rows = rows, .inputs = options_.vocabulary, .outputs = options_.width};
  }
  RowStatistics<T> FinalStatistics() const {
    return {statistics_.data(), statistics_.data() + pass_.rows()};
  }
  const T* BlockInput(size_t layer) const {
    return layer == 0 ? embedded_.data() : memory_[layer - 1].output.data();
  }

  const GptOptions options_;
  int64_t held_ = 0;
  int token_table_ = 0;
  int position_table_ = 0;
  std::vector<Block<T, O>> blocks_;
  WeightAndBias final_norm_;

  BlockTools<T, O> tools_;
  std::vector<BlockMemory<T, O>> memory_;  // By layer.
  Buffer<T> embedded_{&held_};             // [rows, width]
  Buffer<T> statistics_{&held_};           // [2, rows]
  Buffer<O> final_{&held_};                // [rows, width], after the last norm
  Buffer<T> scores_{&held_};  // [rows of a chunk, vocabulary]; where T is O, also their gradient
  Buffer<O> diff_scores_{&held_};    // Unused where T is O.
  Buffer<T> head_diff_{&held_};      // [rows, width]: of the last norm's output
  Buffer<T> head_gradient_{&held_};  // [vocabulary, width]: the head's part of wte.weight's
  bool head_gradient_is_known_ = false;
  Buffer<T> diff_{&held_};  // [rows, width]: of what goes from layer to layer

  GptPass pass_;                     // The last Forward's.
  std::span<const int32_t> inputs_;  // The last training Forward's.
  std::vector<float> next_scores_;   // Unused in float32.
};

absl::StatusOr<std::unique_ptr<Gpt>> Make(const GptOptions& options) {
  switch (options.compute) {
    case GptCompute::kFloat32:
      return std::make_unique<GptModel<float, float>>(options);
    case GptCompute::kBFloat16:
      return std::make_unique<GptModel<float, BFloat16>>(options);
    case GptCompute::kFloat64:
      return std::make_unique<GptModel<double, double>>(options);
  }
  return absl::InvalidArgumentError(
      absl::StrCat("gpt: unknown precision number ", static_cast<int>(options.compute)));
}

}  // namespace

absl::StatusOr<GptOptions> GptPreset(absl::string_view name) {
  if (name == "tiny") return GptOptions{.context = 64, .layers = 2, .width = 64, .heads = 2};
  if (name == "mini") return GptOptions{};
  if (name == "gpt2") {
    return GptOptions{.vocabulary = 50257,
                      .context = 1024,
                      .layers = 12,
                      .width = 768,
                      .heads = 12,
                      .dropout = 0.1};
  }
  return absl::InvalidArgumentError(
      absl::StrCat(name, " is not a preset; choose tiny, mini, gpt2"));
}

absl::StatusOr<int64_t> Gpt::ScorePrompt(std::span<const int32_t> tokens) {
  if (tokens.empty())
    return absl::InvalidArgumentError(
        "gpt: the prediction of a token requires at least one token before it");
  const int64_t context = options().context;
  const int64_t count = std::min<int64_t>(tokens.size(), context);
  // Uses few lengths, so that memory is laid out and kernels are generated for few. Positions after
  // the last token have no influence on it.
  const auto length = static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(count)));
  prompt_.assign(std::min(length, context), 0);
  std::ranges::copy(tokens.last(count), prompt_.begin());
  const TokenBatch batch{prompt_, prompt_, static_cast<int64_t>(prompt_.size())};
  EK_RETURN_IF_ERROR(StartForward(batch, Mode::kEvaluation).status());
  return count - 1;
}

absl::StatusOr<std::unique_ptr<Gpt>> MakeGpt(const GptOptions& options) {
  EK_RETURN_IF_ERROR(Check(options));
  return IfMemoryAllows(absl::StrCat("gpt: not enough memory for ", ParametersOf(options),
                                     " parameters and their gradients"),
                        [&] { return Make(options); });
}

}  // namespace evenkeel
