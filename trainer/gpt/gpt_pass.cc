#include "evenkeel/trainer/gpt/gpt_pass.h"

#include <algorithm>

#include "evenkeel/trainer/gpt/attention.h"

namespace evenkeel {

int64_t HeadRows(int64_t rows, int64_t vocabulary, int64_t bytes_per_score) {
  constexpr int64_t kBytes = 16 << 20, kLeastRows = 256;
  return std::min(rows, std::max(kLeastRows, kBytes / (vocabulary * bytes_per_score)));
}

int64_t GptActivationBytes(const GptOptions& options, int64_t sequences, Mode mode) {
  const bool trains = mode == Mode::kTraining;
  const bool drops = trains && options.dropout > 0;
  const bool rounds = options.compute == GptCompute::kBFloat16;
  const int64_t rows = sequences * options.context, width = options.width;
  const int64_t size = rows * width;
  const int64_t value_bytes = options.compute == GptCompute::kFloat64 ? 8 : 4;

  // In elements, of the types T and O of block.h.
  int64_t values = 0, operands = 0;
  const int64_t layers = trains ? options.layers : std::min<int64_t>(options.layers, 2);
  operands += layers * size;      // norm_1
  operands += layers * 3 * size;  // qkv
  operands += layers * size;      // mixed
  values += layers * size;        // middle
  operands += layers * size;      // norm_2
  values += layers * 4 * size;    // hidden
  operands += layers * 4 * size;  // activated
  values += layers * size;        // output
  values += layers * 4 * rows;    // statistics

  const int64_t block = kAttentionRows * options.context;
  const int64_t part = block * std::clamp<int64_t>(kAttentionPartBytes / (block * value_bytes), 1,
                                                   sequences * options.heads);
  values += part;                 // CausalAttention::scores_
  operands += trains ? part : 0;  // CausalAttention::probabilities_
  operands += rounds ? part : 0;  // CausalAttention::operands_
  values += size;                 // embedded_
  values += 2 * rows;             // statistics_
  operands += size;               // final_
  const int64_t scores = HeadRows(rows, options.vocabulary, value_bytes) * options.vocabulary;
  values += scores;                           // scores_
  operands += trains && rounds ? scores : 0;  // diff_scores_
  if (rounds) operands += options.vocabulary * width + options.layers * 12 * width * width;
  if (trains) {
    values += 4 * size;                      // wide
    operands += 4 * size;                    // wide_operand
    operands += drops || rounds ? size : 0;  // narrow_operand
    values += size;                          // norm_diff
    values += 2 * width;                     // norm_sums
    values += size;                          // head_diff_
    values += options.vocabulary * width;    // head_gradient_
    values += size;                          // diff_
  }
  return values * value_bytes + operands * (rounds ? 2 : value_bytes);
}

}  // namespace evenkeel
