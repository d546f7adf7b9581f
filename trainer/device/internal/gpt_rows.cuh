// Shared by the kernels of a GPT: rows, by the threads that take one together; four elements at a
// time; the noise of dropout.
//
//   const RowPlace place(width_threads);                      // as many threads share a row
//   for (int64_t first = place.first; first < rows; first += place.step) {
//     // all threads of a block make the same number of turns,
//     const int64_t row = first + place.own;
//     const bool has_row = row < rows;                        // some of them without a row
//     for (int64_t i = 4 * place.lane; has_row && i < width; i += 4 * place.threads) {
//       ... Load4(x + row * width, ...)
//     }
//     const float sum = RowSum(own, place, scratch);
//   }
//
// A row is taken by a warp, of which a block has several then, or by a whole block: its `threads`
// are 32 or all.

#ifndef EVENKEEL_TRAINER_DEVICE_INTERNAL_GPT_ROWS_CUH_
#define EVENKEEL_TRAINER_DEVICE_INTERNAL_GPT_ROWS_CUH_

#include <cstdint>

#include "evenkeel/comm/device/kernel.h"

#ifdef __CUDACC__
#define EK_GPT_UNROLL _Pragma("unroll")
#else
#define EK_GPT_UNROLL
#endif

namespace evenkeel::gpt_kernel {

using namespace kernel;  // NOLINT: this is the language that kernels are written in.

inline constexpr float kLowest = -3.402823466e+38f;

struct RowPlace {
  int threads;    // That share a row.
  int lane;       // Which of them this is.
  int64_t own;    // Which of the block's rows.
  int64_t first;  // The first of the block's rows in its first turn.
  int64_t step;

  EK_DEVICE explicit RowPlace(int threads_per_row)
      : threads(threads_per_row),
        lane(ThreadX() % threads_per_row),
        own(ThreadX() / threads_per_row),
        first(BlockX() * (BlockThreads() / threads_per_row)),
        step(GridBlocks() * (BlockThreads() / threads_per_row)) {}
};

template <typename T>
EK_DEVICE T RowSum(T value, const RowPlace& place, T* scratch) {
  return place.threads == kWarp ? WarpSum(value) : BlockSum(value, scratch);
}
template <typename T>
EK_DEVICE T RowMax(T value, const RowPlace& place, T* scratch) {
  return place.threads == kWarp ? WarpMax(value) : BlockMax(value, scratch);
}

// Elements [i, i + 4) of a row of n, 0 beyond its end. `aligned`: the row begins at a multiple of a
// Four.
template <typename T>
EK_DEVICE void Load4(const T* row, int64_t i, int64_t n, bool aligned, float (&to)[4]) {
  if (aligned && i + 4 <= n) {
    const Four<T> loaded = LoadFour(row + i);
    EK_GPT_UNROLL for (int j = 0; j < 4; ++j) to[j] = ToFloat(loaded.at[j]);
    return;
  }
  EK_GPT_UNROLL for (int j = 0; j < 4; ++j) to[j] = i + j < n ? ToFloat(row[i + j]) : 0.0f;
}

template <typename T>
EK_DEVICE void Store4(T* row, int64_t i, int64_t n, bool aligned, const float (&from)[4]) {
  if (aligned && i + 4 <= n) {
    Four<T> stored;
    EK_GPT_UNROLL for (int j = 0; j < 4; ++j) stored.at[j] = FromFloat<T>(from[j]);
    StoreFour(row + i, stored);
    return;
  }
  EK_GPT_UNROLL for (int j = 0; j < 4; ++j) {
    if (i + j < n) row[i + j] = FromFloat<T>(from[j]);
  }
}

// Dropout's noise: bit for bit that of trainer/gpt/dropout.h, whose comments say what it is.
struct Noise {
  uint64_t place = 0;  // Mix64 of what seed and stream make.
  int64_t first_row = 0;
  uint32_t lowest_kept = 0;
  float keep_scale = 1;
  uint32_t is_on = 0;
};

EK_DEVICE uint64_t Mix64(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}
EK_DEVICE uint32_t Mix32(uint32_t x) {
  x = (x ^ (x >> 16)) * 0x7FEB352Du;
  x = (x ^ (x >> 15)) * 0x846CA68Bu;
  return x ^ (x >> 16);
}

struct RowNoise {
  const Noise& noise;
  uint32_t key = 0;
  uint32_t change = 0;

  EK_DEVICE RowNoise(const Noise& of, int64_t row) : noise(of) {
    if (noise.is_on == 0) return;
    const uint64_t random = Mix64(
        (noise.place ^ Mix64(~static_cast<uint64_t>(noise.first_row + row))) + 0x9E3779B97F4A7C15u);
    key = static_cast<uint32_t>(random);
    change = static_cast<uint32_t>(random >> 32);
  }
  // Element `column` of the row, after dropout.
  EK_DEVICE float operator()(int64_t column, float value) const {
    if (noise.is_on == 0) return value;
    const uint32_t random = Mix32(Mix32(static_cast<uint32_t>(column) ^ key) + change);
    return random >= noise.lowest_kept ? value * noise.keep_scale : 0.0f;
  }
};

}  // namespace evenkeel::gpt_kernel

#endif  // EVENKEEL_TRAINER_DEVICE_INTERNAL_GPT_ROWS_CUH_
