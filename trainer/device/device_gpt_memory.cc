#include "evenkeel/trainer/device/device_gpt_memory.h"

#include <algorithm>

#include "evenkeel/trainer/device/gpt_layers.h"
#include "evenkeel/trainer/models/place.h"

namespace evenkeel {
namespace {

class Cursor {
 public:
  Cursor(void* block, DType operand)
      : block_(static_cast<std::byte*>(block)), operand_bytes_(SizeOf(operand)) {}

  float* Floats(int64_t count) {
    return static_cast<float*>(Take(count * static_cast<int64_t>(sizeof(float))));
  }
  void* Operands(int64_t count) { return Take(count * operand_bytes_); }
  RowStatistics<float> Statistics(int64_t rows) {
    float* const mean = Floats(rows);
    return {.mean = mean, .inverse_deviation = Floats(rows)};
  }
  void* Take(int64_t bytes) {
    void* const place = block_ == nullptr ? nullptr : block_ + taken_;
    taken_ += AlignedBytes(bytes);
    return place;
  }
  int64_t taken() const { return taken_; }

 private:
  std::byte* const block_;
  const int64_t operand_bytes_;
  int64_t taken_ = 0;
};

int64_t SumsBytes(const GptOptions& options, int64_t rows, bool trains) {
  int64_t bytes = DeviceGptLayers::TokenLossWorkspaceBytes(rows);
  if (!trains) return bytes;
  const int64_t floats = std::max(DeviceGptLayers::NormWorkspace(rows, options.width),
                                  DeviceGptLayers::SumRowsWorkspace(rows, 4 * options.width));
  return std::max(bytes, floats * static_cast<int64_t>(sizeof(float)));
}

}  // namespace

DeviceGptMemory LayOutGptMemory(const GptOptions& options, const DeviceGptSize& size, void* block) {
  const int64_t rows = size.rows(), width = options.width;
  const int64_t matrices = size.sequences * options.heads, square = size.context * size.context;
  const int64_t scores = rows * ScoreStride(options.vocabulary);
  const bool is_float = size.operand == DType::kFloat32;
  Cursor next(block, size.operand);

  DeviceGptMemory memory;
  memory.layers.resize(size.trains ? options.layers : std::min<int64_t>(options.layers, 2));
  void* const shared_probabilities = size.trains ? nullptr : next.Operands(matrices * square);
  for (DeviceGptMemory::Layer& layer : memory.layers) {
    layer.norm_1 = next.Operands(rows * width);
    layer.qkv = next.Operands(3 * rows * width);
    layer.probabilities = size.trains ? next.Operands(matrices * square) : shared_probabilities;
    layer.mixed = next.Operands(rows * width);
    layer.middle = next.Floats(rows * width);
    layer.norm_2 = next.Operands(rows * width);
    layer.hidden = next.Floats(4 * rows * width);
    layer.activated = next.Operands(4 * rows * width);
    layer.output = next.Floats(rows * width);
    layer.statistics_1 = next.Statistics(rows);
    layer.statistics_2 = next.Statistics(rows);
  }
  memory.embedded = next.Floats(rows * width);
  memory.statistics = next.Statistics(rows);
  memory.final = next.Operands(rows * width);
  memory.scores = next.Floats(scores);
  memory.sums = next.Take(SumsBytes(options, rows, size.trains));
  memory.qkv_rows = next.Operands(3 * rows * width);
  memory.heads = next.Operands(rows * width);
  const int64_t block_scores = matrices * size.block_rows() * size.context;
  memory.attention_scores = next.Floats(block_scores);
  if (size.drops || (size.trains && !is_float))
    memory.attention_operands = next.Operands(block_scores);
  if (size.trains) {
    memory.diff_scores = is_float ? memory.scores : next.Operands(scores);
    memory.diff = next.Floats(rows * width);
    memory.wide = next.Floats(4 * rows * width);
    if (!is_float) memory.wide_operand = next.Operands(4 * rows * width);
    memory.narrow_operand = next.Operands(rows * width);
    memory.norm_diff = next.Floats(rows * width);
  }
  memory.bytes = next.taken();
  return memory;
}

}  // namespace evenkeel
