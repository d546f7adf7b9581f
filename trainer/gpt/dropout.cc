#include "evenkeel/trainer/gpt/dropout.h"

#include "evenkeel/comm/types.h"
#include "evenkeel/trainer/data/stable_random.h"
#include "evenkeel/trainer/layers/vector_math.h"
#include "evenkeel/trainer/layers/vectorised.h"

namespace evenkeel {
namespace {

EK_ALWAYS_INLINE uint32_t Mix(uint32_t x) {
  x = (x ^ (x >> 16)) * 0x7FEB352D;
  x = (x ^ (x >> 15)) * 0x846CA68B;
  return x ^ (x >> 16);
}

struct RowLoop {
  template <typename I, typename O>
  EK_ALWAYS_INLINE static void Run(int64_t columns, uint32_t key, uint32_t change,
                                   uint32_t lowest_kept, double keep_scale, const I* input,
                                   O* output) {
    using T = decltype(Widen(I{}));
    const T scale = static_cast<T>(keep_scale);
#pragma omp simd
    for (int64_t i = 0; i < columns; ++i) {
      const uint32_t random = Mix(Mix(static_cast<uint32_t>(i) ^ key) + change);
      const T value = Widen(input[i]) * scale;
      output[i] = Narrow<O>(random >= lowest_kept ? value : T{0});
    }
  }
};

}  // namespace

template <typename I, typename O>
void Dropout(DropoutNoise noise, DropoutMatrix matrix, const I* input, O* output) {
  const uint32_t lowest_kept = static_cast<uint32_t>(noise.probability * 0x1p32);
  const double scale = 1 / (1 - noise.probability);
  const uint64_t place = StableRandom(noise.seed, noise.stream).Next();
  const int64_t first_row = noise.first_row + matrix.first_row;
  for (int64_t row = 0; row < matrix.rows; ++row) {
    const uint64_t key = StableRandom(place, first_row + row).Next();
    Vectorised<RowLoop>(matrix.columns, static_cast<uint32_t>(key),
                        static_cast<uint32_t>(key >> 32), lowest_kept, scale,
                        input + row * matrix.stride, output + row * matrix.stride);
  }
}

template void Dropout(DropoutNoise, DropoutMatrix, const float*, float*);
template void Dropout(DropoutNoise, DropoutMatrix, const float*, BFloat16*);
template void Dropout(DropoutNoise, DropoutMatrix, const BFloat16*, BFloat16*);
template void Dropout(DropoutNoise, DropoutMatrix, const double*, double*);

}  // namespace evenkeel
