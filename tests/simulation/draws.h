// Random numbers that are the same on every machine.
//
//   Draws draws(seed);
//   draws.Below(6) + 1
//
// SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014).

#ifndef EVENKEEL_TESTS_SIMULATION_DRAWS_H_
#define EVENKEEL_TESTS_SIMULATION_DRAWS_H_

#include <cmath>
#include <cstdint>

namespace evenkeel {

class Draws {
 public:
  explicit Draws(uint64_t seed) : state_(seed) {}

  uint64_t Next() {
    uint64_t x = (state_ += 0x9e3779b97f4a7c15);
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
    x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
    return x ^ (x >> 31);
  }
  int Below(int limit) { return static_cast<int>(Next() % static_cast<uint64_t>(limit)); }
  bool OneIn(int n) { return Below(n) == 0; }
  // Returns a number that is uniform in [0, 1).
  double Fraction() { return static_cast<double>(Next() >> 11) * 0x1p-53; }
  // Returns a number between two positive ones, uniform on a logarithmic scale.
  int64_t Magnitude(int64_t least, int64_t most) {
    const double ratio = static_cast<double>(most) / static_cast<double>(least);
    return static_cast<int64_t>(static_cast<double>(least) * std::pow(ratio, Fraction()));
  }

 private:
  uint64_t state_;
};

}  // namespace evenkeel

#endif  // EVENKEEL_TESTS_SIMULATION_DRAWS_H_
