#include "evenkeel/trainer/gpt/gpt_model.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <type_traits>
#include <variant>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/types.h"
#include "evenkeel/trainer/gpt/dropout.h"
#include "evenkeel/trainer/gpt/embedding.h"
#include "evenkeel/trainer/gpt/token_loss.h"
#include "evenkeel/trainer/initialize.h"
#include "evenkeel/trainer/stable_random.h"

namespace evenkeel {
namespace {

constexpr double kDeviation = 0.02;
constexpr uint64_t kEmbeddingStream = 0;  // Of dropout; the layers' follow.

}  // namespace

template <typename T, typename O>
GptModel<T, O>::GptModel(const GptOptions& options) : options_(options), tools_(&parameters(), &held_) {
  token_table_ = AddParameter("wte.weight", DTypeOf<T>::value, {options.vocabulary, options.width});
  position_table_ = AddParameter("wpe.weight", DTypeOf<T>::value, {options.context, options.width});
  tools_.operands.AddMatrix(token_table_);
  for (int table : {token_table_, position_table_}) {
    FillNormal(Value(table), kDeviation, StableRandom(options.seed, table));
  }
  for (int layer = 0; layer < options.layers; ++layer) AddBlock(layer);
  final_norm_ = AddNorm("ln_f");
}

template <typename T, typename O>
WeightAndBias GptModel<T, O>::AddNorm(const std::string& name) {
  const WeightAndBias norm = {.weight = AddParameter(name + ".weight", DTypeOf<T>::value, {options_.width}),
                              .bias = AddParameter(name + ".bias", DTypeOf<T>::value, {options_.width})};
  std::ranges::fill(Value(norm.weight), T{1});
  return norm;
}

template <typename T, typename O>
WeightAndBias GptModel<T, O>::AddLinear(const std::string& name, int64_t inputs, int64_t outputs, double deviation) {
  const WeightAndBias linear = {.weight = AddParameter(name + ".weight", DTypeOf<T>::value, {inputs, outputs}),
                                .bias = AddParameter(name + ".bias", DTypeOf<T>::value, {outputs})};
  FillNormal(Value(linear.weight), deviation, StableRandom(options_.seed, linear.weight));
  tools_.operands.AddMatrix(linear.weight);
  return linear;
}

template <typename T, typename O>
void GptModel<T, O>::AddBlock(int layer) {
  const std::string name = absl::StrCat("h.", layer, ".");
  const int64_t width = options_.width;
  // Projections back into the sum that runs through all layers: so that its variance doesn't grow with their number.
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

template <typename T, typename O>
absl::Status GptModel<T, O>::Check(const Batch& batch) const {
  return CheckTokens(batch, options_.context, options_.vocabulary).status();
}

template <typename T, typename O>
absl::StatusOr<PendingResult> GptModel<T, O>::DoForward(const Batch& any, Mode mode, const PassOptions& options) {
  const auto& batch = std::get<TokenBatch>(any);
  const bool trains = mode == Mode::kTraining;
  const Operands<T, O>& operands = tools_.operands;
  const int64_t rows = static_cast<int64_t>(batch.inputs.size()), size = rows * options_.width;
  pass_ = {.sequences = rows / batch.context,
           .context = batch.context,
           .dropout = trains ? options_.dropout : 0,
           .noise = options.noise};
  inputs_ = batch.inputs;
  tools_.operands.Refresh();

  T* sum = embedded_.Resize(size);
  EmbeddingForward(batch.context, options_.width, batch.inputs, operands.Vector(token_table_),
                   operands.Vector(position_table_), sum);
  if (pass_.dropout > 0) {
    Dropout(pass_.Noise(kEmbeddingStream), {.rows = rows, .columns = options_.width, .stride = options_.width}, sum,
            sum);
  }
  for (size_t layer = 0; layer < blocks_.size(); ++layer) {
    BlockMemory<T, O>& memory = Memory(layer, mode);
    EK_RETURN_IF_ERROR(blocks_[layer].Forward(tools_, pass_, sum, memory));
    sum = memory.output.data();
  }
  statistics_.Resize(2 * rows);
  LayerNormForward(rows, options_.width, sum, operands.Vector(final_norm_.weight), operands.Vector(final_norm_.bias),
                   final_.Resize(size), FinalStatistics());

  T* scores = scores_.Resize(rows * options_.vocabulary);
  EK_RETURN_IF_ERROR(
      LinearBackwardInput(tools_.products, Head(), operands.Matrix(token_table_), final_.data(), scores));
  O* diff_scores = nullptr;
  if (trains) {
    if constexpr (std::is_same_v<T, O>) {
      diff_scores = scores;
    } else {
      diff_scores = diff_scores_.Resize(rows * options_.vocabulary);
    }
  }
  const double count = static_cast<double>(rows);
  const TokenLossResult loss =
      TokenLoss(options_.vocabulary, scores, batch.targets, options.weight / count, diff_scores);
  return BatchResult{.loss_mean = loss.sum / count, .correct = loss.correct};
}

template <typename T, typename O>
absl::Status GptModel<T, O>::DoBackward(GradientSink& sink) {
  if (!sink.AnyTrainedBefore(parameters().size())) return absl::OkStatus();
  // The head's part may overwrite what lies there; the embedding's is added to it.
  const GradTarget<T> token_gradient = sink.Target<T>(token_table_);
  EK_RETURN_IF_ERROR(HeadBackward(sink, token_gradient));
  for (size_t layer = blocks_.size(); layer-- > 0;) {
    const Block<T, O>& block = blocks_[layer];
    if (!sink.AnyTrainedBefore(block.parameters().mlp_c_proj.bias + 1)) return absl::OkStatus();
    EK_RETURN_IF_ERROR(block.Backward(tools_, pass_, BlockInput(layer), memory_[layer], sink, diff_.data()));
  }
  if (!sink.AnyTrainedBefore(position_table_ + 1)) return absl::OkStatus();
  return EmbeddingBackwardAndAnnounce(sink, token_gradient);
}

template <typename T, typename O>
absl::Status GptModel<T, O>::HeadBackward(GradientSink& sink, GradTarget<T> token_gradient) {
  const int64_t rows = pass_.rows(), size = rows * options_.width;
  const O* diff_scores;
  if constexpr (std::is_same_v<T, O>) {
    diff_scores = scores_.data();
  } else {
    diff_scores = diff_scores_.data();
  }
  T* diff_norm = tools_.norm_diff.Resize(size);
  EK_RETURN_IF_ERROR(
      LinearForward(tools_.products, Head(), diff_scores, tools_.operands.Matrix(token_table_), nullptr, diff_norm));
  if (token_gradient) {
    EK_RETURN_IF_ERROR(LinearBackwardWeight(tools_.products, Head(), diff_scores, final_.data(), token_gradient));
  }
  T* diff = diff_.Resize(size);
  std::fill(diff, diff + size, T{0});
  return NormBackward(tools_, rows, options_.width, final_norm_, BlockInput(blocks_.size()), FinalStatistics(),
                      diff_norm, sink, diff);
}

template <typename T, typename O>
absl::Status GptModel<T, O>::EmbeddingBackwardAndAnnounce(GradientSink& sink, GradTarget<T> token_gradient) {
  const int64_t rows = pass_.rows(), width = options_.width;
  T* diff = diff_.data();
  if (pass_.dropout > 0) {
    Dropout(pass_.Noise(kEmbeddingStream), {.rows = rows, .columns = width, .stride = width}, diff, diff);
  }
  const GradTarget<T> position_gradient = sink.Target<T>(position_table_);
  if (position_gradient && !position_gradient.add) {
    std::fill(position_gradient.data, position_gradient.data + options_.context * width, T{0});
  }
  EmbeddingBackward<T>(pass_.context, width, inputs_, diff, token_gradient.data, position_gradient.data);
  EK_RETURN_IF_ERROR(sink.Announce(position_table_));
  return sink.Announce(token_table_);
}

template <typename T, typename O>
absl::StatusOr<std::span<const float>> GptModel<T, O>::NextToken(std::span<const int32_t> tokens) {
  if (tokens.empty()) return absl::InvalidArgumentError("gpt: what follows needs a token before it");
  const int64_t count = std::min<int64_t>(tokens.size(), options_.context);
  // Of few lengths, so that few kernels are generated. What is after the last token has no influence on it.
  const int64_t length = std::min<int64_t>(std::bit_ceil(static_cast<uint64_t>(count)), options_.context);
  prompt_.assign(length, 0);
  std::ranges::copy(tokens.last(count), prompt_.begin());
  EK_RETURN_IF_ERROR(Forward(TokenBatch{prompt_, prompt_, length}, Mode::kEvaluation).status());
  const T* scores = scores_.data() + (count - 1) * options_.vocabulary;
  if constexpr (std::is_same_v<T, float>) {
    return std::span(scores, options_.vocabulary);
  } else {
    next_scores_.assign(scores, scores + options_.vocabulary);
    return next_scores_;
  }
}

template class GptModel<float, float>;
template class GptModel<float, BFloat16>;
template class GptModel<double, double>;

}  // namespace evenkeel
