// The memory layout of a GPT's pass on a device: one block, laid out once per size.
//
//   const DeviceGptMemory sizes = LayOutGptMemory(options, size, nullptr);
//   ... allocate sizes.bytes ...
//   const DeviceGptMemory memory = LayOutGptMemory(options, size, block);
//
// Rows are sequences * context. `Operands` are of the type that products take; what a pass has no
// use for is null.
//
// Threads: a pure function; the result is a value.

#ifndef EVENKEEL_TRAINER_DEVICE_DEVICE_GPT_MEMORY_H_
#define EVENKEEL_TRAINER_DEVICE_DEVICE_GPT_MEMORY_H_

#include <cstdint>
#include <vector>

#include "evenkeel/comm/types.h"
#include "evenkeel/trainer/gpt/gpt_options.h"
#include "evenkeel/trainer/gpt/layer_norm.h"

namespace evenkeel {

struct DeviceGptSize {
  int64_t sequences = 0;
  int64_t context = 0;
  bool trains = false;
  bool drops = false;
  int64_t attention_rows = 0;
  DType operand = DType::kFloat32;

  int64_t rows() const { return sequences * context; }
  // The rows of a block of attention.
  int64_t block_rows() const { return attention_rows < context ? attention_rows : context; }
  friend bool operator==(const DeviceGptSize&, const DeviceGptSize&) = default;
};

// From row to row of the scores over the vocabulary: rows begin where products read fastest.
inline int64_t ScoreStride(int64_t vocabulary) { return (vocabulary + 7) / 8 * 8; }

struct DeviceGptMemory {
  using Operands = void;

  struct Layer {
    Operands* norm_1 = nullptr;         // [rows, width]
    Operands* qkv = nullptr;            // [3, sequences, heads, context, head_width]
    Operands* probabilities = nullptr;  // [sequences, heads, context, context]
    Operands* mixed = nullptr;          // [rows, width]
    float* middle = nullptr;            // [rows, width]
    Operands* norm_2 = nullptr;         // [rows, width]
    float* hidden = nullptr;            // [rows, 4 width]
    Operands* activated = nullptr;      // [rows, 4 width]
    float* output = nullptr;            // [rows, width]
    RowStatistics<float> statistics_1;  // [rows] each
    RowStatistics<float> statistics_2;
  };
  std::vector<Layer> layers;  // In evaluation two, which take turns.

  float* embedded = nullptr;  // [rows, width]
  RowStatistics<float> statistics;
  Operands* final = nullptr;  // [rows, width]
  float* scores = nullptr;    // [rows, ScoreStride]; of float32 their gradient takes their place
  Operands* diff_scores = nullptr;  // The same.
  void* sums = nullptr;             // The layers' workspace.

  Operands* qkv_rows = nullptr;  // [rows, 3 width]: before heads are split or after their merge
  Operands* heads = nullptr;     // [sequences, heads, context, head_width]: of attention's output
  float* attention_scores = nullptr;       // [sequences, heads, block_rows, context]
  Operands* attention_operands = nullptr;  // The same.

  float* diff = nullptr;               // [rows, width]: of what goes from layer to layer
  float* wide = nullptr;               // [rows, 4 width]
  Operands* wide_operand = nullptr;    // The same; null of float32.
  Operands* narrow_operand = nullptr;  // [rows, width]
  float* norm_diff = nullptr;          // [rows, width]

  int64_t bytes = 0;
};

// Null `block`: for its `bytes`.
DeviceGptMemory LayOutGptMemory(const GptOptions& options, const DeviceGptSize& size, void* block);

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_DEVICE_DEVICE_GPT_MEMORY_H_
