// A GPT's kernels that go element by element or sum over rows: embedding, GELU, dropout, sums of
// columns (gpt_layers.h).
//
// No sum depends on which thread comes first: equal arguments give equal bits.

#ifndef EVENKEEL_TRAINER_DEVICE_INTERNAL_GPT_KERNELS_CUH_
#define EVENKEEL_TRAINER_DEVICE_INTERNAL_GPT_KERNELS_CUH_

#include <cstdint>

#include "evenkeel/comm/device/kernel.h"
#include "evenkeel/trainer/device/internal/gpt_rows.cuh"

namespace evenkeel::gpt_kernel {

inline constexpr int kTileColumns = 4 * kWarp;
inline constexpr int kMostWarps = 8;
inline constexpr int kRowsAtOnce = 4;  // On their way to a warp that sums rows.

// A matrix [rows, width], a block per row.
struct RowsShape {
  int64_t rows;
  int64_t width;
  uint32_t aligned;
};

EK_KERNEL(256, ek_gpt_embedding_forward)
(RowsShape shape, Noise noise, int64_t context, const int32_t* inputs, const float* token_table,
 const float* position_table, float* output) {
  const int64_t n = shape.width;
  const bool aligned = shape.aligned != 0;
  for (int64_t row = BlockX(); row < shape.rows; row += GridBlocks()) {
    const float* token = token_table + inputs[row] * n;
    const float* position = position_table + row % context * n;
    const RowNoise row_noise(noise, row);
    for (int64_t i = 4 * ThreadX(); i < n; i += 4 * BlockThreads()) {
      float sum[4], addend[4];
      Load4(token, i, n, aligned, sum);
      Load4(position, i, n, aligned, addend);
      EK_GPT_UNROLL for (int j = 0; j < 4; ++j) sum[j] = row_noise(i + j, sum[j] + addend[j]);
      Store4(output + row * n, i, n, aligned, sum);
    }
  }
}

// A block sums a tile of columns, each warp of it every so many rows; then the warps' sums in their
// order. Threads of the first warp come back with the result.
template <typename LoadRow>
EK_DEVICE void SumTile(int64_t count, float (*tile)[kTileColumns], float (&sum)[4], LoadRow load) {
  const int warp = ThreadX() / kWarp, lane = ThreadX() % kWarp, warps = BlockThreads() / kWarp;
  float own[4] = {};
  int64_t k = warp;
  for (; k + int64_t{kRowsAtOnce - 1} * warps < count; k += int64_t{kRowsAtOnce} * warps) {
    float values[kRowsAtOnce][4];
    EK_GPT_UNROLL for (int u = 0; u < kRowsAtOnce; ++u) load(k + int64_t{u} * warps, values[u]);
    EK_GPT_UNROLL for (int u = 0; u < kRowsAtOnce; ++u) {
      EK_GPT_UNROLL for (int j = 0; j < 4; ++j) own[j] += values[u][j];
    }
  }
  for (; k < count; k += warps) {
    float values[4];
    load(k, values);
    EK_GPT_UNROLL for (int j = 0; j < 4; ++j) own[j] += values[j];
  }
  EK_GPT_UNROLL for (int j = 0; j < 4; ++j) tile[warp][4 * lane + j] = own[j];
  SyncThreads();
  if (warp > 0) return;
  EK_GPT_UNROLL for (int j = 0; j < 4; ++j) {
    sum[j] = 0;
    for (int w = 0; w < warps; ++w) sum[j] += tile[w][4 * lane + j];
  }
}

// A block per token of the batch and tile of columns: the token's row gets the sum of all rows
// where it stands.
EK_KERNEL(256, ek_gpt_embedding_backward_tokens)
(RowsShape shape, Noise noise, const int32_t* tokens, const int32_t* ends, const int32_t* order,
 const float* diff_output, float* diff_table) {
  EK_SHARED float tile[kMostWarps][kTileColumns];
  const int64_t bucket = BlockX(), n = shape.width;
  const bool aligned = shape.aligned != 0;
  const int64_t begin = bucket == 0 ? 0 : ends[bucket - 1], count = ends[bucket] - begin;
  const int64_t i = BlockY() * kTileColumns + 4 * (ThreadX() % kWarp);
  float sum[4];
  SumTile(count, tile, sum, [&](int64_t k, float(&values)[4]) {
    const int64_t row = order[begin + k];
    Load4(diff_output + row * n, i, n, aligned, values);
    if (noise.is_on == 0) return;
    const RowNoise row_noise(noise, row);
    EK_GPT_UNROLL for (int j = 0; j < 4; ++j) values[j] = row_noise(i + j, values[j]);
  });
  if (ThreadX() >= kWarp || i >= n) return;
  float* to = diff_table + tokens[bucket] * n;
  float old[4];
  Load4(to, i, n, aligned, old);
  EK_GPT_UNROLL for (int j = 0; j < 4; ++j) sum[j] += old[j];
  Store4(to, i, n, aligned, sum);
}

// A block per row of the table, which is shape.rows high. Rows after the context get 0, or keep
// what they have.
EK_KERNEL(256, ek_gpt_embedding_backward_positions)
(RowsShape shape, Noise noise, int64_t sequences, int64_t context, const float* diff_output,
 float* diff_table, uint32_t add) {
  const int64_t n = shape.width;
  const bool aligned = shape.aligned != 0;
  for (int64_t position = BlockX(); position < shape.rows; position += GridBlocks()) {
    if (position >= context && add != 0) continue;
    for (int64_t i = 4 * ThreadX(); i < n; i += 4 * BlockThreads()) {
      float sum[4] = {};
      if (add != 0) Load4(diff_table + position * n, i, n, aligned, sum);
      for (int64_t row = position; position < context && row < sequences * context;
           row += context) {
        const RowNoise row_noise(noise, row);
        float values[4];
        Load4(diff_output + row * n, i, n, aligned, values);
        EK_GPT_UNROLL for (int j = 0; j < 4; ++j) sum[j] += row_noise(i + j, values[j]);
      }
      Store4(diff_table + position * n, i, n, aligned, sum);
    }
  }
}

// trainer/gpt/gelu.cc says where these are from.
inline constexpr float kGeluLinear = 1.5957691216057308f, kGeluCubic = 0.071354816272600248f,
                       kGeluEnd = 12;

EK_DEVICE float GeluClamp(float x) {
  return x < -kGeluEnd ? -kGeluEnd : (x > kGeluEnd ? kGeluEnd : x);
}
// Returns exp(-2 u): never infinite, so that times 0 it is 0.
EK_DEVICE float GeluExponential(float x) {
  const float exponent = -x * (kGeluLinear + kGeluCubic * x * x);
  return Exp(exponent > 88 ? 88.0f : exponent);
}
EK_DEVICE float Gelu(float input) {
  const float x = GeluClamp(input);
  const float open = 1 / (1 + GeluExponential(x));
  return x == -kGeluEnd ? 0.0f : input * open;
}
EK_DEVICE float GeluSlope(float input) {
  const float x = GeluClamp(input);
  const float exponential = GeluExponential(x);
  const float open = 1 / (1 + exponential), closed = exponential * open;
  return open + x * open * closed * (kGeluLinear + 3 * kGeluCubic * x * x);
}

template <typename O>
EK_DEVICE void GeluForward(int64_t n, uint32_t aligned, const float* input, O* output) {
  for (int64_t i = 4 * GlobalIndex(); i < n; i += 4 * GlobalThreads()) {
    float x[4];
    Load4(input, i, n, aligned != 0, x);
    EK_GPT_UNROLL for (int j = 0; j < 4; ++j) x[j] = Gelu(x[j]);
    Store4(output, i, n, aligned != 0, x);
  }
}

template <typename O>
EK_DEVICE void GeluBackward(int64_t n, uint32_t aligned, const float* input,
                            const float* diff_output, O* diff_input) {
  for (int64_t i = 4 * GlobalIndex(); i < n; i += 4 * GlobalThreads()) {
    float x[4], diff[4];
    Load4(input, i, n, aligned != 0, x);
    Load4(diff_output, i, n, aligned != 0, diff);
    EK_GPT_UNROLL for (int j = 0; j < 4; ++j) diff[j] *= GeluSlope(x[j]);
    Store4(diff_input, i, n, aligned != 0, diff);
  }
}

// Without noise: only rounds. `columns` of each row, which begin `stride` apart; rows of one matrix
// follow each other `per_matrix` at a time, the next matrix's begin at the next multiple of a
// matrix's stride.
struct DropoutShape {
  int64_t matrices;
  int64_t rows;  // Per matrix.
  int64_t columns;
  int64_t row_stride;    // For input and output.
  int64_t input_stride;  // From matrix to matrix.
  int64_t output_stride;
  int64_t first_row;   // Noise's row of a matrix's first.
  int64_t noise_rows;  // Noise's rows from matrix to matrix.
  uint32_t aligned;
};

template <typename I, typename O>
EK_DEVICE void Dropout(const DropoutShape& shape, const Noise& noise, const I* input, O* output) {
  const bool aligned = shape.aligned != 0;
  for (int64_t index = BlockX(); index < shape.matrices * shape.rows; index += GridBlocks()) {
    const int64_t matrix = index / shape.rows, row = index % shape.rows;
    const RowNoise row_noise(noise, matrix * shape.noise_rows + shape.first_row + row);
    const I* from = input + matrix * shape.input_stride + row * shape.row_stride;
    O* to = output + matrix * shape.output_stride + row * shape.row_stride;
    for (int64_t i = 4 * ThreadX(); i < shape.columns; i += 4 * BlockThreads()) {
      float x[4];
      Load4(from, i, shape.columns, aligned, x);
      EK_GPT_UNROLL for (int j = 0; j < 4; ++j) x[j] = row_noise(i + j, x[j]);
      Store4(to, i, shape.columns, aligned, x);
    }
  }
}

// A row of `parts` * heads * head_width elements per position, and the same elements head by head:
// [parts, sequences, heads, context, head_width]. A block per row.
struct HeadsShape {
  int64_t sequences;
  int64_t context;
  int64_t heads;
  int64_t head_width;
  int64_t parts;
  uint32_t aligned;  // So are heads.
};

// Where element `column` of a row lies among the heads.
EK_DEVICE int64_t PlaceAmongHeads(const HeadsShape& shape, int64_t row, int64_t column) {
  const auto head_width = static_cast<int>(shape.head_width);
  const auto head = static_cast<int>(column) / head_width;  // Counted through all parts.
  const int64_t element = static_cast<int>(column) % head_width;
  const int64_t part = head / static_cast<int>(shape.heads),
                own = head % static_cast<int>(shape.heads);
  const int64_t sequence = row / shape.context, position = row % shape.context;
  return (((part * shape.sequences + sequence) * shape.heads + own) * shape.context + position) *
             head_width +
         element;
}

template <typename T>
EK_DEVICE void SplitHeads(const HeadsShape& shape, const T* rows, T* heads) {
  const int64_t n = shape.parts * shape.heads * shape.head_width;
  for (int64_t row = BlockX(); row < shape.sequences * shape.context; row += GridBlocks()) {
    for (int64_t i = 4 * ThreadX(); i < n; i += 4 * BlockThreads()) {
      if (shape.aligned != 0) {
        StoreFour(heads + PlaceAmongHeads(shape, row, i), LoadFour(rows + row * n + i));
        continue;
      }
      for (int j = 0; j < 4 && i + j < n; ++j)
        heads[PlaceAmongHeads(shape, row, i + j)] = rows[row * n + i + j];
    }
  }
}

template <typename I, typename O>
EK_DEVICE void MergeHeads(const HeadsShape& shape, const I* heads, O* rows) {
  const int64_t n = shape.parts * shape.heads * shape.head_width;
  for (int64_t row = BlockX(); row < shape.sequences * shape.context; row += GridBlocks()) {
    for (int64_t i = 4 * ThreadX(); i < n; i += 4 * BlockThreads()) {
      float x[4] = {};
      if (shape.aligned != 0) {
        Load4(heads + PlaceAmongHeads(shape, row, i), 0, 4, true, x);
      } else {
        for (int j = 0; j < 4 && i + j < n; ++j)
          x[j] = ToFloat(heads[PlaceAmongHeads(shape, row, i + j)]);
      }
      Store4(rows + row * n, i, n, shape.aligned != 0, x);
    }
  }
}

// A block sums a tile of columns over a part of the rows: to[part, column].
template <typename O>
EK_DEVICE void SumRows(const RowsShape& shape, int64_t rows_per_part, const O* matrix, float* to,
                       uint32_t add) {
  EK_SHARED float tile[kMostWarps][kTileColumns];
  const int64_t part = BlockY(), n = shape.width, first = part * rows_per_part;
  const bool aligned = shape.aligned != 0;
  const int64_t count = shape.rows - first < rows_per_part ? shape.rows - first : rows_per_part;
  const int64_t i = BlockX() * kTileColumns + 4 * (ThreadX() % kWarp);
  float sum[4];
  SumTile(count, tile, sum, [&](int64_t k, float(&values)[4]) {
    Load4(matrix + (first + k) * n, i, n, aligned, values);
  });
  if (ThreadX() >= kWarp || i >= n) return;
  float* own = to + part * n;
  if (add != 0) {
    float old[4];
    Load4(own, i, n, false, old);
    EK_GPT_UNROLL for (int j = 0; j < 4; ++j) sum[j] += old[j];
  }
  Store4(own, i, n, false, sum);
}

#define EK_GPT_KERNELS(O, name)                                                                  \
  EK_KERNEL(256, ek_gpt_gelu_forward_##name)                                                     \
  (int64_t n, uint32_t aligned, const float* input, O* output) {                                 \
    GeluForward(n, aligned, input, output);                                                      \
  }                                                                                              \
  EK_KERNEL(256, ek_gpt_gelu_backward_##name)                                                    \
  (int64_t n, uint32_t aligned, const float* input, const float* diff_output, O* diff_input) {   \
    GeluBackward(n, aligned, input, diff_output, diff_input);                                    \
  }                                                                                              \
  EK_KERNEL(256, ek_gpt_dropout_##name)                                                          \
  (DropoutShape shape, Noise noise, const float* input, O* output) {                             \
    Dropout(shape, noise, input, output);                                                        \
  }                                                                                              \
  EK_KERNEL(256, ek_gpt_drop_operands_##name)                                                    \
  (DropoutShape shape, Noise noise, const O* input, O* output) {                                 \
    Dropout(shape, noise, input, output);                                                        \
  }                                                                                              \
  EK_KERNEL(256, ek_gpt_split_heads_##name)(HeadsShape shape, const O* rows, O* heads) {         \
    SplitHeads(shape, rows, heads);                                                              \
  }                                                                                              \
  EK_KERNEL(256, ek_gpt_merge_heads_##name)(HeadsShape shape, const O* heads, O* rows) {         \
    MergeHeads(shape, heads, rows);                                                              \
  }                                                                                              \
  EK_KERNEL(256, ek_gpt_merge_gradients_##name)(HeadsShape shape, const float* heads, O* rows) { \
    MergeHeads(shape, heads, rows);                                                              \
  }                                                                                              \
  EK_KERNEL(256, ek_gpt_sum_rows_##name)                                                         \
  (RowsShape shape, int64_t rows_per_part, const O* matrix, float* to, uint32_t add) {           \
    SumRows(shape, rows_per_part, matrix, to, add);                                              \
  }
EK_GPT_KERNELS(float, float)
EK_GPT_KERNELS(BFloat, bfloat)
#undef EK_GPT_KERNELS

}  // namespace evenkeel::gpt_kernel

#endif  // EVENKEEL_TRAINER_DEVICE_INTERNAL_GPT_KERNELS_CUH_
