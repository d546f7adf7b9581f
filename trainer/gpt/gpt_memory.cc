#include "evenkeel/trainer/gpt/gpt_memory.h"

#include <algorithm>

namespace evenkeel {
namespace {

constexpr int64_t kAttentionRows = 64;  // kRowsPerBlock of attention.cc.

}  // namespace

int64_t GptActivationBytes(const GptOptions& options, int64_t sequences, Mode mode) {
  const bool trains = mode == Mode::kTraining;
  const bool drops = trains && options.dropout > 0;
  const bool rounds = options.compute == GptCompute::kBFloat16;
  const int64_t rows = sequences * options.context, width = options.width;
  const int64_t size = rows * width;

  // In elements, of the types T and O of block.h.
  int64_t values = 0, operands = 0;
  const int64_t layers = trains ? options.layers : std::min<int64_t>(options.layers, 2);
  operands += layers * size;                                    // norm_1
  operands += layers * 3 * size;                                // qkv
  operands += layers * rows * options.heads * options.context;  // probabilities
  operands += layers * size;                                    // mixed
  values += layers * size;                                      // middle
  operands += layers * size;                                    // norm_2
  values += layers * 4 * size;                                  // hidden
  operands += layers * 4 * size;                                // activated
  values += layers * size;                                      // output
  values += layers * 4 * rows;                                  // statistics

  const int64_t block = sequences * options.heads * kAttentionRows * options.context;
  values += block;                                               // CausalAttention::scores_
  operands += drops || (trains && rounds) ? block : 0;           // CausalAttention::operands_
  values += size;                                                // embedded_
  values += 2 * rows;                                            // statistics_
  operands += size;                                              // final_
  values += rows * options.vocabulary;                           // scores_
  operands += trains && rounds ? rows * options.vocabulary : 0;  // diff_scores_
  if (rounds) operands += options.vocabulary * width + options.layers * 12 * width * width;
  if (trains) {
    values += 4 * size;                      // wide
    operands += 4 * size;                    // wide_operand
    operands += drops || rounds ? size : 0;  // narrow_operand
    values += size;                          // norm_diff
    values += 2 * width;                     // norm_sums
    values += size;                          // diff_
  }
  const int64_t value_bytes = options.compute == GptCompute::kFloat64 ? 8 : 4;
  return values * value_bytes + operands * (rounds ? 2 : value_bytes);
}

}  // namespace evenkeel
