// Softmax of attention scores, of which row i sees the columns up to its own.
//
//   CausalSoftmaxForward(block, scale, scores, probabilities);
//   CausalSoftmaxBackward(block, scale, probabilities, diff_probabilities, diff_scores);
//
// Shapes:    a block of rows `first` to `first + rows - 1` of a square matrix, its first `columns`
//            columns; row i of it starts at i * stride in memory, in every argument. Columns after
//            the row's own become 0.
// Scale:     positive; the scores are multiplied by it first, and diff_scores are by the scores as
//            given.
// Precision: any finite scores are safe. O is T or, for float, BFloat16.
// Threads:   pure functions. Results may lie in the memory of an argument of their type. Forward
//            uses `scores` up.

#ifndef EVENKEEL_TRAINER_GPT_CAUSAL_SOFTMAX_H_
#define EVENKEEL_TRAINER_GPT_CAUSAL_SOFTMAX_H_

#include <cstdint>

namespace evenkeel {

struct CausalBlock {
  int64_t first = 0;
  int64_t rows = 0;
  int64_t columns = 0;  // first + rows at least.
  int64_t stride = 0;
};

template <typename T, typename O>
void CausalSoftmaxForward(CausalBlock block, T scale, T* scores, O* probabilities);

template <typename T, typename O>
void CausalSoftmaxBackward(CausalBlock block, T scale, const O* probabilities,
                           const T* diff_probabilities, O* diff_scores);

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_GPT_CAUSAL_SOFTMAX_H_
