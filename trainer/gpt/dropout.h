// Dropout: each element becomes 0 with a probability, and the others grow so that the mean stays.
//
//   const DropoutNoise noise{.probability = 0.1, .seed = step, .stream = layer};
//   Dropout(noise, {.rows = rows, .columns = width, .stride = width}, values, values);  // forward
//   // backward is the same
//   Dropout(noise, {.rows = rows, .columns = width, .stride = width}, diff, diff);
//
// Which elements those are follows from seed, stream, row and column alone, so that backward finds
// them again and no mask is kept.
//
// Shapes:  row i of `matrix` starts at i * stride in input and output and is counted as row
//          noise.first_row + matrix.first_row + i. So the noise of a batch that is computed in
//          parts, also on several ranks, is that of the whole batch.
// Threads: pure function. `output` may be the memory of `input`.
// Source:  Srivastava et al., "Dropout", JMLR 2014. The mixing of 32 bits: Wellons, "Hash
//          prospector", lowbias32.

#ifndef EVENKEEL_TRAINER_GPT_DROPOUT_H_
#define EVENKEEL_TRAINER_GPT_DROPOUT_H_

#include <cstdint>

namespace evenkeel {

struct DropoutNoise {
  double probability = 0;  // In [0, 1).
  uint64_t seed = 0;
  uint64_t stream = 0;    // A place in the model.
  int64_t first_row = 0;  // The row of the whole batch with which the matrices begin.
};

struct DropoutMatrix {
  int64_t first_row = 0;
  int64_t rows = 0;
  int64_t columns = 0;
  int64_t stride = 0;
};

// All of a matrix without gaps.
inline DropoutMatrix WholeMatrix(int64_t rows, int64_t width) {
  return {.rows = rows, .columns = width, .stride = width};
}

// I and O are float, BFloat16 or double; the product is rounded once.
template <typename I, typename O>
void Dropout(DropoutNoise noise, DropoutMatrix matrix, const I* input, O* output);

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_GPT_DROPOUT_H_
