// The interface of evenkeel for a program in C++14 or 17: standard types. Its source is C++20.

#ifndef EVENKEEL_EXAMPLES_TRAINER_FACADE_H_
#define EVENKEEL_EXAMPLES_TRAINER_FACADE_H_

#include <cstddef>
#include <functional>
#include <string>

struct Tensor {
  double* value;
  double* gradient;
  std::size_t count;
};

// Trains on all ranks of the job. `backward` writes the gradients of this rank's next batch, and
// returns false if it has none. Returns the error; empty: none.
std::string TrainOnAllRanks(Tensor weights, double rate, const std::function<bool()>& backward);

#endif  // EVENKEEL_EXAMPLES_TRAINER_FACADE_H_
