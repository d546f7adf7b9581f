// The expected result of training: one process on the batches of all ranks joined, in plain loops
// without any of our libraries.
//
//   Trained<double> expected = TrainAlone<double>(combination);
//   expected.weights[3];      // after three steps of the group
//
// Threads: pure function.

#ifndef EVENKEEL_TESTS_PARITY_REFERENCE_H_
#define EVENKEEL_TESTS_PARITY_REFERENCE_H_

#include <array>
#include <cstdint>
#include <vector>

#include "evenkeel/tests/parity/combination.h"
#include "evenkeel/tests/parity/tiny_model.h"

namespace evenkeel {

template <typename T>
struct Trained {
  std::vector<TinyWeights<T>> weights;  // [0]: at the start; [k]: after k steps.
  // The optimizer's state at the end: momentum, or both moments; and how often each parameter was
  // updated.
  TinyWeights<T> first, second;
  std::array<int64_t, kTinyParams> updates = {};
};

template <typename T>
Trained<T> TrainAlone(const Combination& combination);

}  // namespace evenkeel

#endif  // EVENKEEL_TESTS_PARITY_REFERENCE_H_
