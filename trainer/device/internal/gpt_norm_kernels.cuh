// Layer norm, and the sum before it: the kernels behind gpt_layers.h.
//
// Each of the threads that share a row keeps up to kNormVectors groups of four of its elements in
// registers: a row is read once. Backward adds up the gradients of weight and bias there too, over
// all rows that its threads take, and each block leaves one row of sums: what remains is a sum over
// blocks, in their order.

#ifndef EVENKEEL_TRAINER_DEVICE_INTERNAL_GPT_NORM_KERNELS_CUH_
#define EVENKEEL_TRAINER_DEVICE_INTERNAL_GPT_NORM_KERNELS_CUH_

#include <cstdint>

#include "evenkeel/comm/device/kernel.h"
#include "evenkeel/trainer/device/internal/gpt_rows.cuh"

namespace evenkeel::gpt_kernel {

inline constexpr int kNormVectors = 8;  // Vectors of four elements, per thread.
inline constexpr int kMostNormThreads = 512;
// For backward's usual kernel, whose threads so have enough registers for their data. Longer rows
// have a kernel of their own.
inline constexpr int kUsualNormThreads = 256;
inline constexpr float kNormEpsilon = 1e-5f;

struct NormShape {
  int64_t rows;
  int64_t width;
  int threads_per_row;
  uint32_t aligned;  // Rows, weight and bias begin at multiples of four elements.
};

// sum = input + dropout(part) where there is a part; output = norm(sum) * weight + bias.
template <typename O>
EK_DEVICE void NormForward(const NormShape& shape, const Noise& noise, const float* input,
                           const float* part, float* sum, const float* weight, const float* bias,
                           O* output, float* mean, float* inverse_deviation) {
  EK_SHARED float scratch[kWarp];
  const RowPlace place(shape.threads_per_row);
  const int64_t n = shape.width;
  const bool aligned = shape.aligned != 0;
  for (int64_t first = place.first; first < shape.rows; first += place.step) {
    const int64_t row = first + place.own, at = row * n;
    const bool has_row = row < shape.rows;
    const RowNoise row_noise(noise, row);
    float x[kNormVectors][4] = {}, own[kNormVectors][4] = {};
    // All loads before the first store, which they would wait for: it may be to where they are
    // from.
    EK_GPT_UNROLL for (int v = 0; v < kNormVectors; ++v) {
      const int64_t i = 4 * (int64_t{v} * place.threads + place.lane);
      if (!has_row || i >= n) continue;
      Load4(input + at, i, n, aligned, x[v]);
      if (part != nullptr) Load4(part + at, i, n, aligned, own[v]);
    }
    float total = 0;
    EK_GPT_UNROLL for (int v = 0; v < kNormVectors; ++v) {
      const int64_t i = 4 * (int64_t{v} * place.threads + place.lane);
      if (!has_row || i >= n) continue;
      if (part != nullptr) {
        EK_GPT_UNROLL for (int j = 0; j < 4; ++j) x[v][j] += row_noise(i + j, own[v][j]);
        Store4(sum + at, i, n, aligned, x[v]);
      }
      EK_GPT_UNROLL for (int j = 0; j < 4; ++j) total += i + j < n ? x[v][j] : 0.0f;
    }
    const float center = RowSum(total, place, scratch) / static_cast<float>(n);
    float squares = 0;
    EK_GPT_UNROLL for (int v = 0; v < kNormVectors; ++v) {
      const int64_t i = 4 * (int64_t{v} * place.threads + place.lane);
      if (!has_row || i >= n) continue;
      EK_GPT_UNROLL for (int j = 0; j < 4; ++j) {
        const float off = i + j < n ? x[v][j] - center : 0.0f;
        squares += off * off;
      }
    }
    const float variance = RowSum(squares, place, scratch) / static_cast<float>(n);
    const float scale = ReciprocalSqrt(variance + kNormEpsilon);
    EK_GPT_UNROLL for (int v = 0; v < kNormVectors; ++v) {
      const int64_t i = 4 * (int64_t{v} * place.threads + place.lane);
      if (!has_row || i >= n) continue;
      float w[4], b[4];
      Load4(weight, i, n, aligned, w);
      Load4(bias, i, n, aligned, b);
      EK_GPT_UNROLL for (int j = 0; j < 4; ++j) x[v][j] = (x[v][j] - center) * scale * w[j] + b[j];
      Store4(output + at, i, n, aligned, x[v]);
    }
    if (has_row && place.lane == 0) {
      mean[row] = center;
      inverse_deviation[row] = scale;
    }
  }
}

// The block's sums, of which each of its warps has a part: thread t of the first 128 adds up
// element t of all warps.
EK_DEVICE void StoreSums(const RowPlace& place, int64_t n, float (&own)[kNormVectors][4],
                         float (*tile)[4 * kWarp], float* to) {
  EK_GPT_UNROLL for (int v = 0; v < kNormVectors; ++v) {
    const int64_t begin = 4 * int64_t{v} * place.threads;
    if (begin >= n) break;
    if (place.threads > kWarp) {
      Store4(to, begin + 4 * place.lane, n, false, own[v]);
      continue;
    }
    EK_GPT_UNROLL for (int j = 0; j < 4; ++j) tile[place.own][4 * place.lane + j] = own[v][j];
    SyncThreads();
    for (int t = ThreadX(); t < 4 * kWarp; t += BlockThreads()) {
      float sum = 0;
      for (int warp = 0; warp < BlockThreads() / kWarp; ++warp) sum += tile[warp][t];
      if (begin + t < n) to[begin + t] = sum;
    }
    SyncThreads();
  }
}

// With x' the normalised input and g = weight * diff_output: diff_input += scale * (g - mean(g) -
// x' * mean(g x')). sums: [2, blocks, width], the first half of diff_output * x', for the weight.
template <int kMostThreads>
EK_DEVICE void NormBackward(const NormShape& shape, const float* input, const float* mean,
                            const float* inverse_deviation, const float* weight,
                            const float* diff_output, float* diff_input, float* sums) {
  EK_SHARED float scratch[kWarp];
  EK_SHARED float tile[kMostThreads / kWarp][4 * kWarp];
  const RowPlace place(shape.threads_per_row);
  const int64_t n = shape.width;
  const bool aligned = shape.aligned != 0;
  float weight_sum[kNormVectors][4] = {}, bias_sum[kNormVectors][4] = {};
  for (int64_t first = place.first; first < shape.rows; first += place.step) {
    const int64_t row = first + place.own, at = row * n;
    const bool has_row = row < shape.rows;
    const float center = has_row ? mean[row] : 0.0f,
                scale = has_row ? inverse_deviation[row] : 0.0f;
    float g_sum = 0, product_sum = 0;
    EK_GPT_UNROLL for (int v = 0; v < kNormVectors; ++v) {
      const int64_t i = 4 * (int64_t{v} * place.threads + place.lane);
      if (!has_row || i >= n) continue;
      float x[4], d[4], w[4];
      Load4(input + at, i, n, aligned, x);
      Load4(diff_output + at, i, n, aligned, d);
      Load4(weight, i, n, aligned, w);
      EK_GPT_UNROLL for (int j = 0; j < 4; ++j) {
        weight_sum[v][j] += d[j] * ((x[j] - center) * scale);  // Beyond the row's end d is 0.
        bias_sum[v][j] += d[j];
        g_sum += w[j] * d[j];
        product_sum += w[j] * d[j] * (x[j] - center);
      }
    }
    if (diff_input == nullptr) continue;
    g_sum = RowSum(g_sum, place, scratch);
    product_sum = RowSum(product_sum, place, scratch);
    const float g_mean = g_sum / static_cast<float>(n);
    const float slope = product_sum * scale * scale / static_cast<float>(n);
    EK_GPT_UNROLL for (int v = 0; v < kNormVectors; ++v) {
      const int64_t i = 4 * (int64_t{v} * place.threads + place.lane);
      if (!has_row || i >= n) continue;
      float x[4], d[4], w[4], to[4];
      Load4(input + at, i, n, aligned, x);
      Load4(diff_output + at, i, n, aligned, d);
      Load4(weight, i, n, aligned, w);
      Load4(diff_input + at, i, n, aligned, to);
      EK_GPT_UNROLL for (int j = 0; j < 4; ++j) to[j] +=
          scale * (w[j] * d[j] - g_mean - (x[j] - center) * slope);
      Store4(diff_input + at, i, n, aligned, to);
    }
  }
  StoreSums(place, n, weight_sum, tile, sums + BlockX() * n);
  StoreSums(place, n, bias_sum, tile, sums + (GridBlocks() + BlockX()) * n);
}

EK_KERNEL(256, ek_gpt_norm_backward)
(NormShape shape, const float* input, const float* mean, const float* inverse_deviation,
 const float* weight, const float* diff_output, float* diff_input, float* sums) {
  NormBackward<kUsualNormThreads>(shape, input, mean, inverse_deviation, weight, diff_output,
                                  diff_input, sums);
}
EK_KERNEL(512, ek_gpt_norm_backward_wide)
(NormShape shape, const float* input, const float* mean, const float* inverse_deviation,
 const float* weight, const float* diff_output, float* diff_input, float* sums) {
  NormBackward<kMostNormThreads>(shape, input, mean, inverse_deviation, weight, diff_output,
                                 diff_input, sums);
}
EK_KERNEL(512, ek_gpt_norm_forward_float)
(NormShape shape, Noise noise, const float* input, const float* part, float* sum,
 const float* weight, const float* bias, float* output, float* mean, float* inverse_deviation) {
  NormForward(shape, noise, input, part, sum, weight, bias, output, mean, inverse_deviation);
}
EK_KERNEL(512, ek_gpt_norm_forward_bfloat)
(NormShape shape, Noise noise, const float* input, const float* part, float* sum,
 const float* weight, const float* bias, BFloat* output, float* mean, float* inverse_deviation) {
  NormForward(shape, noise, input, part, sum, weight, bias, output, mean, inverse_deviation);
}

}  // namespace evenkeel::gpt_kernel

#endif  // EVENKEEL_TRAINER_DEVICE_INTERNAL_GPT_NORM_KERNELS_CUH_
