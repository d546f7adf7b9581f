// Starting values of weights, the same on every machine.
//
//   FillUniform(weight.as<float>(), std::sqrt(6.0 / fan_in), StableRandom(seed, /*stream=*/index));
//
// A stream per parameter keeps its values independent of what other parameters a model has.

#ifndef EVENKEEL_TRAINER_INITIALIZE_H_
#define EVENKEEL_TRAINER_INITIALIZE_H_

#include <span>

#include "evenkeel/trainer/stable_random.h"

namespace evenkeel {

// Evenly from [-limit, limit). A float gets the rounded value of what a double gets.
template <typename T>
void FillUniform(std::span<T> values, double limit, StableRandom random) {
  for (T& value : values) value = static_cast<T>((2 * random.Uniform() - 1) * limit);
}

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_INITIALIZE_H_
