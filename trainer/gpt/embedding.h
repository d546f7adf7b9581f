// The first layer of a language model: the row of each token, plus the row of its position.
//
//   EmbeddingForward(context, width, inputs, token_table, position_table, output);
//   EmbeddingBackward(context, width, inputs, diff_output, diff_tokens, diff_positions);
//
// Shapes:    inputs [n * context], token_table [vocabulary, width], position_table [at least
//            context, width], output [n * context, width].
// Gradients: are added to the present values. A null gradient is not computed.
// Threads:   pure functions.

#ifndef EVENKEEL_TRAINER_GPT_EMBEDDING_H_
#define EVENKEEL_TRAINER_GPT_EMBEDDING_H_

#include <cstddef>
#include <cstdint>
#include <span>

#include "evenkeel/trainer/layers/rows.h"

namespace evenkeel {

// T is float or double.
template <typename T>
void EmbeddingForward(int64_t context, int64_t width, std::span<const int32_t> inputs,
                      const T* token_table, const T* position_table, T* output) {
  const auto row = [width](const T* table, int64_t index) {
    return std::span(table + index * width, width);
  };
  for (size_t i = 0; i < inputs.size(); ++i) {
    Add<T>(row(token_table, inputs[i]), row(position_table, i % context),
           std::span(output + i * width, width));
  }
}

template <typename T>
void EmbeddingBackward(int64_t context, int64_t width, std::span<const int32_t> inputs,
                       const T* diff_output, T* diff_tokens, T* diff_positions) {
  const auto add_row = [width](std::span<const T> diff, T* table, int64_t index) {
    if (table == nullptr) return;
    const std::span<T> sum(table + index * width, width);
    Add<T>(sum, diff, sum);
  };
  for (size_t i = 0; i < inputs.size(); ++i) {
    const std::span<const T> diff(diff_output + i * width, width);
    add_row(diff, diff_tokens, inputs[i]);
    add_row(diff, diff_positions, i % context);
  }
}

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_GPT_EMBEDDING_H_
