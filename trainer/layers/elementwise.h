// Activations and sums, element by element.
//
//   ReluForward<float>(scores, hidden);                    // hidden = max(scores, 0); may be the same memory
//   ReluBackward<float>(hidden, diff);                     // diff = 0 where hidden is 0
//   Add(left, right, sum);
//
// Shapes:  all arguments of a call have the same size.
// Threads: pure functions.

#ifndef EVENKEEL_TRAINER_LAYERS_ELEMENTWISE_H_
#define EVENKEEL_TRAINER_LAYERS_ELEMENTWISE_H_

#include <cstddef>
#include <span>

namespace evenkeel {

template <typename T>
void ReluForward(std::span<const T> input, std::span<T> output) {
  for (size_t i = 0; i < input.size(); ++i) output[i] = input[i] > T{0} ? input[i] : T{0};
}

// `output` is what ReluForward wrote; `diff` comes as its gradient and leaves as its input's.
template <typename T>
void ReluBackward(std::span<const T> output, std::span<T> diff) {
  for (size_t i = 0; i < output.size(); ++i) diff[i] = output[i] > T{0} ? diff[i] : T{0};
}

// `sum` may be the memory of `left` or of `right`.
inline void Add(std::span<const float> left, std::span<const float> right, std::span<float> sum) {
  for (size_t i = 0; i < left.size(); ++i) sum[i] = left[i] + right[i];
}

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_LAYERS_ELEMENTWISE_H_
