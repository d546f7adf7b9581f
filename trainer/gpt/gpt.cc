#include "evenkeel/trainer/gpt/gpt.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <map>
#include <type_traits>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "evenkeel/comm/arith/convert.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/types.h"
#include "evenkeel/trainer/data/batch.h"
#include "evenkeel/trainer/data/stable_random.h"
#include "evenkeel/trainer/gpt/attention.h"
#include "evenkeel/trainer/gpt/dropout.h"
#include "evenkeel/trainer/gpt/embedding.h"
#include "evenkeel/trainer/gpt/gelu.h"
#include "evenkeel/trainer/gpt/gpt_memory.h"
#include "evenkeel/trainer/gpt/gpt_passes.h"
#include "evenkeel/trainer/gpt/layer_norm.h"
#include "evenkeel/trainer/gpt/strided_product.h"
#include "evenkeel/trainer/layers/gradient_sink.h"
#include "evenkeel/trainer/layers/initialize.h"
#include "evenkeel/trainer/layers/rows.h"
#include "evenkeel/trainer/layers/strided_shape.h"
#include "evenkeel/trainer/layers/tensor_memory.h"
#include "evenkeel/trainer/layers/token_loss.h"
#include "evenkeel/trainer/models/place.h"

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

// Returns how many of `rows` the head takes at once: scores of 16 MiB, or those of 256 rows if that
// is more. Products of fewer rows are slower, because each reads the token table and updates its
// gradient.
int64_t HeadRows(int64_t rows, int64_t vocabulary, int64_t bytes_per_score) {
  constexpr int64_t kBytes = 16 << 20, kLeastRows = 256;
  return std::min(rows, std::max(kLeastRows, kBytes / (vocabulary * bytes_per_score)));
}

// Returns `values` themselves where products take them as they are, else rounded in `memory`.
template <typename T, typename O>
const O* AsOperand(int64_t n, const T* values, O* memory) {
  if constexpr (std::is_same_v<T, O>) {
    return values;
  } else {
    ConvertFloats(TensorView(absl::MakeSpan(const_cast<T*>(values), n)),
                  TensorView(absl::MakeSpan(memory, n)));
    return memory;
  }
}

// The model for each precision: T is the type of values, gradients and sums, O the operand type of
// matrix products.
template <typename T, typename O>
class GptModel : public GptPasses<GptModel<T, O>, T, O> {
  using Base = GptPasses<GptModel<T, O>, T, O>;
  using Base::AddParameter, Base::parameters, Base::options_, Base::Vector, Base::Heads, Base::Qkv;
  using Base::AttentionNoise, Base::LayerAt, Base::memory_, Base::pass_;
  using typename Base::Norm;
  friend Base;

 public:
  explicit GptModel(const GptOptions& options) : Base(options) {
    AddParameter("wte.weight", DTypeOf<T>::value, {options.vocabulary, options.width});
    AddParameter("wpe.weight", DTypeOf<T>::value, {options.context, options.width});
    AddMatrix(kTokenTable);
    for (int table : {kTokenTable, kPositionTable}) {
      FillNormal(Value(table), kDeviation, StableRandom(options.seed, table));
    }
    for (int layer = 0; layer < options.layers; ++layer) AddBlock(layer);
    AddNorm("ln_f");
  }

  absl::StatusOr<std::span<const float>> NextToken(std::span<const int32_t> tokens) override {
    EK_ASSIGN_OR_RETURN(const int64_t row, this->ScorePrompt(tokens));
    T* scores = memory_.scores;  // Has room for one row.
    EK_RETURN_IF_ERROR(Product(Head(/*rows=*/1).BackwardInput(),
                               memory_.final + row * options_.width, Matrix(kTokenTable), nullptr,
                               scores));
    if constexpr (std::is_same_v<T, float>) {
      return std::span(scores, options_.vocabulary);
    } else {
      next_scores_.assign(scores, scores + options_.vocabulary);
      return next_scores_;
    }
  }

  int64_t ActivationBytes() const override { return held_; }
  absl::Status PlanPass(int64_t samples, Mode mode) override {
    if (!this->is_plan()) {
      return absl::FailedPreconditionError(
          "gpt: only a plan computes the memory of passes in advance; make the model with is_plan");
    }
    pass_ = GptPass(options_, samples, options_.context, mode);
    const GptMemorySize size = SizeOf(mode == Mode::kTraining);
    held_ = std::max(held_, LayOutGptMemory<T, O>(options_, size, nullptr).bytes);
    return absl::OkStatus();
  }

 private:
  void AddNorm(const std::string& name) {
    const int weight = AddParameter(name + ".weight", DTypeOf<T>::value, {options_.width});
    AddParameter(name + ".bias", DTypeOf<T>::value, {options_.width});
    std::ranges::fill(Value(weight), T{1});
  }

  void AddLinear(const std::string& name, int64_t inputs, int64_t outputs, double deviation) {
    const int weight = AddParameter(name + ".weight", DTypeOf<T>::value, {inputs, outputs});
    AddParameter(name + ".bias", DTypeOf<T>::value, {outputs});
    FillNormal(Value(weight), deviation, StableRandom(options_.seed, weight));
    AddMatrix(weight);
  }

  void AddBlock(int layer) {
    const std::string name = absl::StrCat("h.", layer, ".");
    const int64_t width = options_.width;
    // Projections back into the sum that runs through all layers: so that its variance doesn't grow
    // with their number.
    const double into_sum = kDeviation / std::sqrt(2.0 * static_cast<double>(options_.layers));
    AddNorm(name + "ln_1");
    AddLinear(name + "attn.c_attn", width, 3 * width, kDeviation);
    AddLinear(name + "attn.c_proj", width, width, into_sum);
    AddNorm(name + "ln_2");
    AddLinear(name + "mlp.c_fc", width, 4 * width, kDeviation);
    AddLinear(name + "mlp.c_proj", 4 * width, width, into_sum);
  }

  std::span<T> Value(int index) { return this->template Initial<T>(index); }

  // Returns the head as the layer from scores to hidden states, whose weight is wte: the head's
  // forward pass is BackwardInput() of that layer.
  LinearShape Head(int64_t rows) const {
    return {.rows = rows, .inputs = options_.vocabulary, .outputs = options_.width};
  }
  DropoutMatrix Rows() const { return WholeMatrix(pass_.rows(), options_.width); }

  GptMemorySize SizeOf(bool trains) const {
    // A later step of a planned run may train the table.
    const bool trains_table = trains && (this->is_plan() || parameters().trainable(kTokenTable));
    const int64_t rows = pass_.rows(), work = CausalAttention<T, O>::WorkSize(Heads());
    return {.rows = rows,
            .trains = trains,
            .drops = pass_.dropout > 0,
            .operand_bytes = sizeof(O),
            .scores = HeadRows(rows, options_.vocabulary, sizeof(T)) * options_.vocabulary,
            .head_gradient = trains_table ? options_.vocabulary * options_.width : 0,
            .rounded = rounded_,
            .probabilities = trains ? work : 0,
            .attention_scores = work,
            .sums_bytes = 2 * options_.width * static_cast<int64_t>(sizeof(T))};
  }
  absl::StatusOr<void*> Take(int64_t bytes) {
    if (bytes > held_) {
      block_ = {};
      held_ = 0;
      EK_ASSIGN_OR_RETURN(data_,
                          IfMemoryAllows("not enough memory", [&]() -> absl::StatusOr<void*> {
                            return block_.AllocateForOverwrite(DType::kUint8, bytes).data;
                          }));
      held_ = bytes;
    }
    return data_;
  }
  absl::Status Prepare(const TokenBatch& batch, bool /*trains*/) {
    inputs_ = batch.inputs;
    for (const auto& [index, at] : rounded_at_)
      AsOperand(parameters()[index].value.count, Vector(index), memory_.rounded + at);
    return absl::OkStatus();
  }

  // Gives a matrix its place in memory_.rounded.
  void AddMatrix(int index) {
    if constexpr (std::is_same_v<T, O>) return;
    constexpr int64_t kBytes = sizeof(O);
    rounded_at_[index] = rounded_;
    rounded_ += AlignedBytes(parameters()[index].value.count * kBytes) / kBytes;
  }
  const O* Matrix(int index) const {
    if constexpr (std::is_same_v<T, O>) {
      return Vector(index);
    } else {
      return memory_.rounded + rounded_at_.at(index);
    }
  }
  template <typename Result>
  absl::Status Product(const StridedShape& shape, const O* left, const O* right, const T* bias,
                       Result* output) {
    return products_.Run(shape, left, right, bias, output);
  }

  absl::Status EmbeddingForward() {
    T* sum = memory_.embedded;
    evenkeel::EmbeddingForward(pass_.context, options_.width, inputs_, Vector(kTokenTable),
                               Vector(kPositionTable), sum);
    if (pass_.dropout > 0) evenkeel::Dropout(pass_.Noise(kEmbeddingStream), Rows(), sum, sum);
    return absl::OkStatus();
  }

  absl::Status EmbeddingBackward(GradTarget<T> token_gradient, GradTarget<T> position_gradient) {
    const int64_t width = options_.width;
    T* diff = memory_.diff;
    if (pass_.dropout > 0) evenkeel::Dropout(pass_.Noise(kEmbeddingStream), Rows(), diff, diff);
    if (position_gradient && !position_gradient.add)
      std::fill_n(position_gradient.data, options_.context * width, T{0});
    evenkeel::EmbeddingBackward<T>(pass_.context, width, inputs_, diff, token_gradient.data,
                                   position_gradient.data);
    return absl::OkStatus();
  }

  absl::Status NormForward(const T* input, const Norm& norm) {
    LayerNormForward(pass_.rows(), options_.width, input, Vector(norm.parameters.weight),
                     Vector(norm.parameters.bias), norm.output, norm.statistics);
    return absl::OkStatus();
  }

  absl::Status SumAndNormForward(const DropoutNoise& noise, const T* around, T* part,
                                 const Norm& norm) {
    const std::span<T> sum(part, pass_.rows() * options_.width);
    if (noise.probability > 0) evenkeel::Dropout(noise, Rows(), part, part);
    Add<T>(std::span(around, sum.size()), sum, sum);
    return NormForward(part, norm);
  }

  absl::Status NormBackward(const WeightAndBias& norm, const T* input, RowStatistics<T> statistics,
                            GradientSink& sink) {
    const int64_t width = options_.width;
    T* weight_sum = static_cast<T*>(memory_.sums);
    T* bias_sum = weight_sum + width;
    LayerNormBackward(pass_.rows(), width, input, statistics, Vector(norm.weight),
                      memory_.norm_diff, weight_sum, bias_sum,
                      sink.AnyTrainedBefore(norm.weight) ? memory_.diff : nullptr);
    const auto write = [&](int index, const T* sum) {
      return sink.Write<T>(
          index, [&](GradTarget<T> target) { return SumRows(/*rows=*/1, width, sum, target); });
    };
    EK_RETURN_IF_ERROR(write(norm.bias, bias_sum));
    return write(norm.weight, weight_sum);
  }

  CausalAttention<T, O> Attention(int layer) {
    return {&products_,
            {memory_.attention_scores, LayerAt(layer).probabilities, memory_.attention_operands}};
  }
  absl::Status AttentionForward(int layer) {
    return Attention(layer).Forward(Heads(), AttentionNoise(layer), Qkv(layer),
                                    LayerAt(layer).mixed);
  }
  absl::StatusOr<const O*> AttentionBackward(int layer) {
    EK_RETURN_IF_ERROR(Attention(layer).Backward(Heads(), AttentionNoise(layer), Qkv(layer),
                                                 memory_.diff_rows, memory_.wide));
    return AsOperand(3 * pass_.rows() * options_.width, memory_.wide, memory_.diff_rows);
  }

  absl::Status GeluForward(int64_t n, const T* input, O* output) {
    evenkeel::GeluForward(n, input, output);
    return absl::OkStatus();
  }
  absl::Status GeluBackward(int64_t n, const T* input, const T* diff_output, O* diff_input) {
    evenkeel::GeluBackward(n, input, diff_output, diff_input);
    return absl::OkStatus();
  }
  absl::Status Dropout(const DropoutNoise& noise, const T* input, O* output) {
    if (noise.probability > 0) {
      evenkeel::Dropout(noise, Rows(), input, output);
    } else {
      AsOperand(pass_.rows() * options_.width, input, output);
    }
    return absl::OkStatus();
  }
  template <typename Element>
  absl::Status SumRows(int64_t rows, int64_t columns, const Element* matrix, GradTarget<T> target) {
    evenkeel::SumRows(rows, columns, matrix, target);
    return absl::OkStatus();
  }

  // Scores, loss and, in training, what Backward requires of them: the gradients of the last norm's
  // output and of the head's weight. Some rows go through all steps together, so that the scores of
  // all of them never exist at once.
  absl::StatusOr<PendingResult> HeadForward(std::span<const int32_t> targets, double weight) {
    const int64_t rows = pass_.rows(), vocabulary = options_.vocabulary, width = options_.width;
    const int64_t chunk = HeadRows(rows, vocabulary, sizeof(T));
    const O* table = Matrix(kTokenTable);
    O* diff_scores = memory_.diff_scores;  // Null in evaluation.
    T* gradient = memory_.head_gradient;

    TokenLossResult loss;
    for (int64_t begin = 0; begin < rows; begin += chunk) {
      const LinearShape head = Head(std::min(chunk, rows - begin));
      const O* input = memory_.final + begin * width;
      EK_RETURN_IF_ERROR(Product(head.BackwardInput(), input, table, nullptr, memory_.scores));
      loss += TokenLoss(vocabulary, memory_.scores, targets.subspan(begin, head.rows),
                        weight / static_cast<double>(rows), diff_scores);
      if (diff_scores == nullptr) continue;
      EK_RETURN_IF_ERROR(
          Product(head.Forward(), diff_scores, table, nullptr, memory_.norm_diff + begin * width));
      if (gradient == nullptr) continue;
      EK_RETURN_IF_ERROR(
          Product(head.BackwardWeight(/*add=*/begin > 0), diff_scores, input, nullptr, gradient));
    }
    return BatchResult{.loss_mean = loss.sum / static_cast<double>(rows), .correct = loss.correct};
  }

  absl::Status HeadBackward(GradTarget<T> token_gradient) {
    const int64_t elements = options_.vocabulary * options_.width;
    const T* gradient = memory_.head_gradient;
    if (token_gradient && gradient == nullptr) {
      return absl::FailedPreconditionError(
          "gpt: wte.weight became trainable between Forward and Backward; change it before "
          "Forward");
    }
    if (token_gradient.add) {
      EK_RETURN_IF_ERROR(SumRows(/*rows=*/1, elements, gradient, token_gradient));
    } else if (token_gradient) {
      std::copy_n(gradient, elements, token_gradient.data);
    }
    std::fill_n(memory_.diff, pass_.rows() * options_.width, T{0});
    return absl::OkStatus();
  }

  StridedProducts<O> products_;
  std::map<int, int64_t> rounded_at_;  // By parameter, in memory_.rounded; empty where T is O.
  int64_t rounded_ = 0;
  int64_t held_ = 0;  // The bytes of `block_`, or of a plan.
  TensorMemory block_;
  void* data_ = nullptr;             // In `block_`: the memory of memory_'s areas.
  std::span<const int32_t> inputs_;  // Of the last Forward().
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
