// The memory layout of a GPT's pass, on the host or on a device: one block, laid out once per size.
//
//   const auto sizes = LayOutGptMemory<float, BFloat16>(options, size, nullptr);
//   ... allocate sizes.bytes ...
//   const auto memory = LayOutGptMemory<float, BFloat16>(options, size, block);
//
// T is the type of values, gradients and sums. O is the type of the operands of matrix products; on
// a device it is void. Where both are one type, operands lie in the memory of the values that they
// are. Areas that a pass does not use are null.
//
// Units:     elements, unless a name ends with `bytes`.
// Ownership: `block` outlives the result, which only points into it.
// Threads:   a pure function; the result is a value.

#ifndef EVENKEEL_TRAINER_GPT_GPT_MEMORY_H_
#define EVENKEEL_TRAINER_GPT_GPT_MEMORY_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "evenkeel/trainer/gpt/gpt_options.h"
#include "evenkeel/trainer/gpt/layer_norm.h"
#include "evenkeel/trainer/models/place.h"

namespace evenkeel {

// The sizes of a pass, and of the areas that differ between host and devices, in elements.
struct GptMemorySize {
  int64_t rows = 0;  // sequences * context
  bool trains = false;
  bool drops = false;            // With dropout.
  int64_t operand_bytes = 0;     // The size of one O.
  int64_t scores = 0;            // The head's, of the rows that it takes at once.
  int64_t head_gradient = 0;     // 0: it is not computed in the forward pass.
  int64_t rounded = 0;           // All matrices, as products take them.
  int64_t probabilities = 0;     // Of a layer's attention.
  int64_t attention_scores = 0;  // Of a block of attention's rows.
  int64_t sums_bytes = 0;        // The layers' workspace.
  // A device's attention takes heads apart from each other, and keeps its probabilities.
  bool splits_heads = false;

  friend bool operator==(const GptMemorySize&, const GptMemorySize&) = default;
};

template <typename T, typename O>
struct GptMemory {
  struct Layer {
    O* norm_1 = nullptr;  // [rows, width]
    O* qkv = nullptr;     // [rows, 3 width]; where heads are split, three of `heads`
    // [sequences, heads, context, context], kept in training; on the host a work area for the
    // backward pass of attention, one for all layers.
    O* probabilities = nullptr;
    O* mixed = nullptr;             // [rows, width]: the heads' means
    T* middle = nullptr;            // [rows, width]: the sum after attention
    O* norm_2 = nullptr;            // [rows, width]
    T* hidden = nullptr;            // [rows, 4 width]
    O* activated = nullptr;         // [rows, 4 width]
    T* output = nullptr;            // [rows, width]
    RowStatistics<T> statistics_1;  // [rows] each
    RowStatistics<T> statistics_2;
  };
  // In evaluation two, which take turns: nothing of a layer is needed after the next one has run.
  std::vector<Layer> layers;

  O* rounded = nullptr;   // All matrices, as products take them.
  T* embedded = nullptr;  // [rows, width]
  RowStatistics<T> statistics;
  O* final = nullptr;  // [rows, width], after the last norm
  T* scores = nullptr;
  O* diff_scores = nullptr;  // Their gradient; in the same memory where both are one type.
  void* sums = nullptr;      // The layers' workspace.

  O* qkv_rows = nullptr;  // [rows, 3 width]: before heads are split
  O* heads = nullptr;     // [sequences, heads, context, head_width]: of the output
  // [sequences, heads, rows of a block, context]; on the host only for the matrices of one part.
  T* attention_scores = nullptr;
  O* attention_operands = nullptr;  // Of the same shape.

  // Gradients.
  T* diff = nullptr;            // [rows, width]: of the sums that go from layer to layer
  O* narrow_operand = nullptr;  // The same, as it goes into a part; `diff` where nothing changes.
  T* norm_diff = nullptr;       // [rows, width]: of a norm's output
  T* wide = nullptr;            // [rows, 4 width]: within a part
  O* wide_operand = nullptr;    // The same, as products take it.
  // [rows, width]: of the heads' means; then [rows, 3 width]: of qkv, which on the host stays in
  // `wide` where both are one type.
  O* diff_rows = nullptr;
  T* head_gradient = nullptr;  // [vocabulary, width]: the head's part of that of wte.weight

  int64_t bytes = 0;
};

// Returns the areas in `block`, of which `bytes` are used. With a null `block` the areas are null,
// and only `bytes` is of use.
template <typename T, typename O>
GptMemory<T, O> LayOutGptMemory(const GptOptions& options, const GptMemorySize& size, void* block) {
  constexpr int64_t kValueBytes = sizeof(T);
  GptMemory<T, O> memory;
  const auto take = [&](int64_t bytes) -> void* {
    if (bytes == 0) return nullptr;
    void* const area = block == nullptr ? nullptr : static_cast<std::byte*>(block) + memory.bytes;
    memory.bytes += AlignedBytes(bytes);
    return area;
  };
  const auto values = [&](int64_t count) { return static_cast<T*>(take(count * kValueBytes)); };
  const auto operands = [&](int64_t count) {
    return static_cast<O*>(take(count * size.operand_bytes));
  };
  const auto statistics = [&] {
    T* const mean = values(size.rows);
    return RowStatistics<T>{.mean = mean, .inverse_deviation = values(size.rows)};
  };
  const int64_t n = size.rows * options.width;
  const bool is_one_type = size.operand_bytes == kValueBytes;
  const auto as_operands = [&](T* own, int64_t count) {
    return is_one_type ? static_cast<O*>(static_cast<void*>(own)) : operands(count);
  };

  memory.layers.resize(size.trains ? options.layers : std::min<int64_t>(options.layers, 2));
  const bool keeps = size.trains && size.splits_heads;
  O* const shared_probabilities = keeps ? nullptr : operands(size.probabilities);
  for (auto& layer : memory.layers) {
    layer.norm_1 = operands(n);
    layer.qkv = operands(3 * n);
    layer.probabilities = keeps ? operands(size.probabilities) : shared_probabilities;
    layer.mixed = operands(n);
    layer.middle = values(n);
    layer.norm_2 = operands(n);
    layer.hidden = values(4 * n);
    layer.activated = operands(4 * n);
    layer.output = values(n);
    layer.statistics_1 = statistics();
    layer.statistics_2 = statistics();
  }
  memory.rounded = operands(size.rounded);
  memory.embedded = values(n);
  memory.statistics = statistics();
  memory.final = operands(n);
  memory.scores = values(size.scores);
  memory.sums = take(size.sums_bytes);
  if (size.splits_heads) {
    memory.qkv_rows = operands(3 * n);
    memory.heads = operands(n);
  }
  memory.attention_scores = values(size.attention_scores);
  if (!size.splits_heads) {
    memory.attention_operands = as_operands(memory.attention_scores, size.attention_scores);
  } else if (size.drops || (size.trains && !is_one_type)) {
    memory.attention_operands = operands(size.attention_scores);
  }
  if (size.trains) {
    memory.diff_scores = as_operands(memory.scores, size.scores);
    memory.diff = values(n);
    memory.narrow_operand = size.drops ? operands(n) : as_operands(memory.diff, n);
    memory.norm_diff = values(n);
    memory.wide = values(4 * n);
    memory.wide_operand = as_operands(memory.wide, 4 * n);
    memory.diff_rows = memory.qkv_rows;
    if (!size.splits_heads) memory.diff_rows = is_one_type ? operands(n) : memory.wide_operand;
    memory.head_gradient = values(size.head_gradient);
  }
  return memory;
}

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_GPT_GPT_MEMORY_H_
