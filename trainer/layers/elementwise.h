// Activations and sums, element by element.
//
//   ReluBackward<float>(hidden, diff);  // diff = 0 where hidden is 0
//   Add(left, right, sum);
//
// Shapes:  all arguments of a call have the same size.
// Threads: pure functions.

#ifndef EVENKEEL_TRAINER_LAYERS_ELEMENTWISE_H_
#define EVENKEEL_TRAINER_LAYERS_ELEMENTWISE_H_

#include <span>

namespace evenkeel {

// T is float or double in all functions.
// Turns `diff` from the gradient of `output` = max(input, 0) into that of the input.
template <typename T>
void ReluBackward(std::span<const T> output, std::span<T> diff);

// Adds two arrays; `sum` may be the memory of `left` or of `right`.
template <typename T>
void Add(std::span<const T> left, std::span<const T> right, std::span<T> sum);

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_LAYERS_ELEMENTWISE_H_
