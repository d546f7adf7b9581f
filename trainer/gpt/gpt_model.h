// The model behind gpt.h, for each precision: GptModel<float, float>, <float, BFloat16> and <double, double>.
//
// T is what values, gradients and sums are in, O what matrix products take. MakeGpt() has checked the options.
//
// Threads: thread-compatible.

#ifndef EVENKEEL_TRAINER_GPT_GPT_MODEL_H_
#define EVENKEEL_TRAINER_GPT_GPT_MODEL_H_

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "evenkeel/trainer/batch.h"
#include "evenkeel/trainer/gpt/block.h"
#include "evenkeel/trainer/gpt/buffer.h"
#include "evenkeel/trainer/gpt/gpt.h"
#include "evenkeel/trainer/gpt/layer_norm.h"
#include "evenkeel/trainer/gpt/linear.h"
#include "evenkeel/trainer/gradient_sink.h"
#include "evenkeel/trainer/model.h"

namespace evenkeel {

template <typename T, typename O>
class GptModel final : public Gpt {
 public:
  explicit GptModel(const GptOptions& options);

  const GptOptions& options() const override { return options_; }
  absl::StatusOr<std::span<const float>> NextToken(std::span<const int32_t> tokens) override;
  int64_t ActivationBytes() const override { return held_; }

 private:
  WeightAndBias AddNorm(const std::string& name);
  WeightAndBias AddLinear(const std::string& name, int64_t inputs, int64_t outputs, double deviation);
  void AddBlock(int layer);
  std::span<T> Value(int index) { return parameters()[index].value.template as<T>(); }

  absl::Status Check(const Batch& batch) const override;
  absl::StatusOr<PendingResult> DoForward(const Batch& batch, Mode mode, const PassOptions& options) override;
  absl::Status DoBackward(GradientSink& sink) override;

  absl::Status HeadBackward(GradientSink& sink, GradTarget<T> token_gradient);
  absl::Status EmbeddingBackwardAndAnnounce(GradientSink& sink, GradTarget<T> token_gradient);

  // Evaluation needs nothing of a layer after the next one has run: two layers' memory take turns.
  BlockMemory<T, O>& Memory(size_t layer, Mode mode) { return memory_[mode == Mode::kTraining ? layer : layer % 2]; }
  // The head as the layer from scores to hidden states, which has wte as its weight: forward is that one's way back.
  LinearShape Head() const { return {.rows = pass_.rows(), .inputs = options_.vocabulary, .outputs = options_.width}; }
  RowStatistics<T> FinalStatistics() const { return {statistics_.data(), statistics_.data() + pass_.rows()}; }
  const T* BlockInput(size_t layer) const { return layer == 0 ? embedded_.data() : memory_[layer - 1].output.data(); }

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
  Buffer<T> scores_{&held_};               // [rows, vocabulary]; where T is O, their gradient takes their place
  Buffer<O> diff_scores_{&held_};          // Unused where T is O.
  Buffer<T> diff_{&held_};                 // [rows, width]: of what goes from layer to layer

  GptPass pass_;                     // Of the last Forward.
  std::span<const int32_t> inputs_;  // Of the last training Forward.
  std::vector<int32_t> prompt_;      // Of NextToken.
  std::vector<float> next_scores_;   // Unused in float32.
};

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_GPT_GPT_MODEL_H_
