// How much memory each part of training holds per rank: measured on the heap of a process whose
// threads are the ranks.
//
//   EK_ASSIGN_OR_RETURN(MemoryUse use, MeasureMemory({.world = 4,
//                                                     .views = true,
//                                                     .optimizer = OptimizerKind::kSharded}));
//   use.buckets;      // bytes of one rank
//
// AdamW trains one million elements of float32 in 22 tensors of which the largest has a quarter: 4
// MB of parameters, 8 MB of moments.
//
// Units:   bytes per rank: what all ranks hold together over their number, so that small things of
//          the process are in it too; most_state is the largest of the ranks'.
// Threads: one at a time per process.
// Errors:  Unimplemented under sanitizers.

#ifndef EVENKEEL_TESTS_MEMORY_MEMORY_USE_H_
#define EVENKEEL_TESTS_MEMORY_MEMORY_USE_H_

#include <cstdint>

#include "absl/status/statusor.h"

namespace evenkeel {

enum class OptimizerKind { kUnsharded, kSharded, kSliced };

struct MemorySetting {
  int world = 1;
  bool views = false;  // Gradients are views of buckets, and have no memory of their own.
  OptimizerKind optimizer = OptimizerKind::kUnsharded;
};

struct MemoryUse {
  int64_t parameters = 0;
  int64_t gradients = 0;  // The user's memory for them.
  int64_t buckets = 0;  // And all else that a DataParallel holds, after it has rebuilt its buckets.
  int64_t optimizer = 0;    // After its first step.
  int64_t most_state = 0;   // state_bytes() of the rank with most.
  int64_t peak = 0;         // The most that was ever held, from the first step on.
  int64_t steady_peak = 0;  // The same once the buckets are rebuilt.
};

// The model's sizes.
int64_t ParameterBytes();
int64_t LargestTensorBytes();

absl::StatusOr<MemoryUse> MeasureMemory(const MemorySetting& setting);

}  // namespace evenkeel

#endif  // EVENKEEL_TESTS_MEMORY_MEMORY_USE_H_
