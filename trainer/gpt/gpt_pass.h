// Shared by the GPTs of the host and of devices: where a layer's parameters are, and the sizes of a
// pass.
//
// Threads: values and pure functions.

#ifndef EVENKEEL_TRAINER_GPT_GPT_PASS_H_
#define EVENKEEL_TRAINER_GPT_GPT_PASS_H_

#include <cstdint>

#include "evenkeel/trainer/data/batch.h"
#include "evenkeel/trainer/gpt/attention_rows.h"
#include "evenkeel/trainer/gpt/dropout.h"
#include "evenkeel/trainer/gpt/gpt_options.h"
#include "evenkeel/trainer/layers/mode.h"
#include "evenkeel/trainer/layers/strided_shape.h"
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

// Streams of dropout: one of the embedding, then three of each layer, of its attention's weights,
// the attention's end and the perceptron's end.
inline constexpr uint64_t kEmbeddingStream = 0;
constexpr uint64_t FirstStream(int layer) { return 1 + 3 * static_cast<uint64_t>(layer); }

// The sizes and the dropout of a pass.
struct GptPass {
  GptPass() = default;
  GptPass(const GptOptions& model, const TokenBatch& batch, Mode mode, const PassOptions& options)
      : sequences(static_cast<int64_t>(batch.inputs.size()) / batch.context),
        context(batch.context),
        dropout(mode == Mode::kTraining ? model.dropout : 0),
        noise(options.noise) {}

  int64_t sequences = 0;
  int64_t context = 0;
  double dropout = 0;  // 0 in evaluation.
  uint64_t noise = 0;

  int64_t rows() const { return sequences * context; }
  DropoutNoise Noise(uint64_t stream) const {
    return {.probability = dropout, .seed = noise, .stream = stream};
  }
  LinearShape Linear(int64_t inputs, int64_t outputs) const {
    return {.rows = rows(), .inputs = inputs, .outputs = outputs};
  }
  AttentionShape Attention(int64_t width, int64_t heads) const {
    return {
        .sequences = sequences, .context = context, .heads = heads, .head_width = width / heads};
  }
};

// Returns the bytes that the model of the host takes for a pass over sequences of options.context
// tokens, by arithmetic (Gpt::ActivationBytes() after it); in training, with the backward pass. It
// has a line for each buffer of BlockMemory, BlockTools, CausalAttention and the model; a new
// buffer there needs a line here.
int64_t GptActivationBytes(const GptOptions& options, int64_t sequences, Mode mode);

// Returns how many of `rows` the head takes at once: scores of 16 MiB, or those of 256 rows if that
// is more. Products of fewer rows are slower, because each reads the token table and updates its
// gradient.
int64_t HeadRows(int64_t rows, int64_t vocabulary, int64_t bytes_per_score);

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_GPT_GPT_PASS_H_
