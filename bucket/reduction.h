// How a bucket of gradients is reduced: the seam between the reducer, which launches every gradient collective, and
// whoever decides what that collective is.
//
//   class ReduceToOwner : public BucketReduction {
//     Collective CollectiveFor(const BucketInfo& bucket) const override {
//       return {.kind = CollectiveKind::kReduce, .root = owner_of_[bucket.index]};
//     }
//   };
//
// Data parallel brings all-reduce; a sharded optimizer may bring reduce to the owner, and step when a bucket is there.
//
// Threads: CollectiveFor() is const and is called when a plan is made; OnReduced() on the thread that finishes the
//          step, in bucket order.

#ifndef EVENKEEL_BUCKET_REDUCTION_H_
#define EVENKEEL_BUCKET_REDUCTION_H_

#include <cstdint>
#include <span>

#include "absl/status/status.h"
#include "evenkeel/comm/collective.h"
#include "evenkeel/comm/types.h"

namespace evenkeel {

struct BucketInfo {
  int index = 0;
  int bucket_count = 0;
  TensorView data;                   // Flat; after the reduction the group's gradients.
  std::span<const int> params;       // Which parameters, in the order of their place in `data`.
  std::span<const int64_t> offsets;  // Where each begins in `data`, in elements.
};

class BucketReduction {
 public:
  virtual ~BucketReduction() = default;
  // Kind (all_reduce or reduce) and root; the reducer fills in the rest. After a reduce the root has the gradients; on
  // other ranks they are none. Called on all ranks with the same buckets, and must answer the same.
  virtual Collective CollectiveFor(const BucketInfo& bucket) const = 0;
  // The bucket is reduced, on this rank.
  virtual absl::Status OnReduced(const BucketInfo& /*bucket*/) { return absl::OkStatus(); }
};

class AllReduceBuckets : public BucketReduction {
 public:
  Collective CollectiveFor(const BucketInfo&) const override { return {.kind = CollectiveKind::kAllReduce}; }
};

}  // namespace evenkeel

#endif  // EVENKEEL_BUCKET_REDUCTION_H_
