// Starting values of weights, the same on every machine.
//
//   FillUniform(weight.as<float>(), std::sqrt(6.0 / fan_in), StableRandom(seed, /*stream=*/index));
//
// A stream per parameter keeps its values independent of the model's other parameters.

#ifndef EVENKEEL_TRAINER_LAYERS_INITIALIZE_H_
#define EVENKEEL_TRAINER_LAYERS_INITIALIZE_H_

#include <cmath>
#include <span>

#include "evenkeel/trainer/data/stable_random.h"

namespace evenkeel {

// Fills with uniform values in [-limit, limit). A float gets the value of a double, rounded.
template <typename T>
void FillUniform(std::span<T> values, double limit, StableRandom random) {
  for (T& value : values) value = static_cast<T>((2 * random.Uniform() - 1) * limit);
}

// Fills with normally distributed values around 0 by the polar method (Marsaglia, Bray, "A
// convenient method for generating normal variables", 1964). The logarithm is the machine's: in a
// float its last bit is rounded away, except in rare ties.
template <typename T>
void FillNormal(std::span<T> values, double deviation, StableRandom random) {
  for (T& value : values) {
    double x, square;
    do {
      x = 2 * random.Uniform() - 1;
      const double y = 2 * random.Uniform() - 1;
      square = x * x + y * y;
    } while (square >= 1 || square == 0);
    value = static_cast<T>(deviation * x * std::sqrt(-2 * std::log(square) / square));
  }
}

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_LAYERS_INITIALIZE_H_
