// Assigns samples to ranks and batches. It serves any data whose samples have numbers: the
// trainer's own or yours.
//
//   const BatchPlan plan{
//       .samples = 60000, .batch_size = 64, .rank = rank, .world_size = world_size};
//   EK_RETURN_IF_ERROR(CheckBatchPlan(plan));
//   // or InOrder(plan.samples)
//   const std::vector<int32_t> order = ShuffledOrder(plan.samples, seed, epoch);
//   for (int64_t b = 0; b < BatchCount(plan); ++b) {
//     const std::span<const int32_t> samples = BatchSamples(plan, order, b);  // Train on these.
//   }
//
// Batch b of rank r is the samples from position (b * world_size + r) * batch_size of the epoch's
// order on. Nothing is dropped: the last batch may be smaller, and ranks may be exhausted at
// different times, rank 0 last (see //join); over all ranks each sample is used exactly once per
// epoch.
//
// An epoch can continue with a different number of ranks, fewer or more: SamplesDone(plan, steps)
// is the position in the epoch's order up to which every sample was assigned. It is the only state
// besides seed and epoch, and becomes `first` of the plans for the rest, as often as needed:
//
//   const BatchPlan rest{.samples = 60000, .first = SamplesDone(plan, /*steps=*/412),
//                        .batch_size = 64, .rank = new_rank, .world_size = new_world_size};
//
// An order takes 4 bytes per sample on each rank, and is created for each epoch.
//
// Threads: pure functions.
// Errors:  InvalidArgument with the numbers from CheckBatchPlan, which the others rely on.

#ifndef EVENKEEL_TRAINER_DATA_SAMPLER_H_
#define EVENKEEL_TRAINER_DATA_SAMPLER_H_

#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "absl/status/status.h"

namespace evenkeel {

inline constexpr int64_t kNoBatchLimit = std::numeric_limits<int64_t>::max();

struct BatchPlan {
  int64_t samples = 0;  // In the whole data set, below 2^31.
  int64_t first = 0;    // Position in the epoch's order where batch 0 of rank 0 begins.
  int64_t batch_size = 1;
  int rank = 0;
  int world_size = 1;
  int64_t max_batches = kNoBatchLimit;  // For this rank, per epoch.
};

// Returns OK if counts and rank are in range, and each rank gets at least one sample unless
// `max_batches` is 0 or this is the rest of an epoch.
absl::Status CheckBatchPlan(const BatchPlan& plan);

// Returns the number of batches of `plan.rank` in an epoch.
int64_t BatchCount(const BatchPlan& plan);

// Returns the number of samples of `plan.rank` in an epoch.
int64_t SampleCount(const BatchPlan& plan);

// Returns the position in the epoch's order after `steps` of the group's steps, in each of which
// every rank that has a batch used one. For a plan without max_batches.
int64_t SamplesDone(const BatchPlan& plan, int64_t steps);

// Returns the part of `order` [samples] that is batch `batch`, which must be below
// BatchCount(plan).
std::span<const int32_t> BatchSamples(const BatchPlan& plan, std::span<const int32_t> order,
                                      int64_t batch);

// Returns 0, 1, ... samples - 1.
std::vector<int32_t> InOrder(int64_t samples);
// Returns a permutation of these that depends only on seed and epoch: equal on all ranks and
// machines.
std::vector<int32_t> ShuffledOrder(int64_t samples, uint64_t seed, int epoch);

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_DATA_SAMPLER_H_
