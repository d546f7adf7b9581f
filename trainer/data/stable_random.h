// Random numbers that are the same on every machine, compiler and rank, now and in later versions.
//
//   StableRandom random(seed, /*stream=*/epoch);
//   random.Below(6);       // 0, 1, ... 5
//   random.Uniform();      // a double in [0, 1)
//
// Different streams of one seed are independent: one per epoch, one per parameter. The standard
// library's distributions differ between implementations; this class uses only integer arithmetic
// and one exact division.
//
// Threads: thread-compatible value.
// Source:  SplitMix64: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA
//          2014. Below: Lemire, "Fast random integer generation in an interval", TOMACS 2019.

#ifndef EVENKEEL_TRAINER_DATA_STABLE_RANDOM_H_
#define EVENKEEL_TRAINER_DATA_STABLE_RANDOM_H_

#include <cstdint>

namespace evenkeel {

class StableRandom {
 public:
  explicit StableRandom(uint64_t seed, uint64_t stream = 0) : state_(Mix(seed) ^ Mix(~stream)) {}

  uint64_t Next() { return Mix(state_ += kGolden); }

  // Returns a uniform value in [0, 1), a multiple of 2^-53.
  double Uniform() { return static_cast<double>(Next() >> 11) * 0x1p-53; }

  // Returns a uniform value from 0 to bound - 1; `bound` must be positive.
  uint64_t Below(uint64_t bound) {
    unsigned __int128 product = static_cast<unsigned __int128>(Next()) * bound;
    if (static_cast<uint64_t>(product) < bound) {
      const uint64_t uneven =
          -bound % bound;  // 2^64 mod bound: so many low products would be too frequent.
      while (static_cast<uint64_t>(product) < uneven)
        product = static_cast<unsigned __int128>(Next()) * bound;
    }
    return static_cast<uint64_t>(product >> 64);
  }

 private:
  static constexpr uint64_t kGolden = 0x9E3779B97F4A7C15;

  static uint64_t Mix(uint64_t z) {
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
    return z ^ (z >> 31);
  }

  uint64_t state_;
};

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_DATA_STABLE_RANDOM_H_
