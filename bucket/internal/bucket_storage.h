// The memory of one plan's buckets, and where in it each gradient lies.
//
// Ownership: owns the buckets. Gradients that are views point into them, so they are moved out before it goes.
// Threads:   thread-compatible.

#ifndef EVENKEEL_BUCKET_INTERNAL_BUCKET_STORAGE_H_
#define EVENKEEL_BUCKET_INTERNAL_BUCKET_STORAGE_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "evenkeel/bucket/parameter_set.h"
#include "evenkeel/bucket/planner.h"
#include "evenkeel/bucket/reduction.h"
#include "evenkeel/comm/communicator.h"

namespace evenkeel {

class BucketStorage {
 public:
  // Each bucket has a multiple of `count_multiple` elements.
  static absl::StatusOr<std::unique_ptr<BucketStorage>> Create(BucketPlan plan, const ParameterSet& params,
                                                               int64_t count_multiple, Communicator& comm);

  const BucketPlan& plan() const { return plan_; }
  int64_t count_multiple() const { return count_multiple_; }
  int size() const { return static_cast<int>(infos_.size()); }
  const BucketInfo& bucket(int index) const { return infos_[index]; }
  const std::vector<BucketInfo>& buckets() const { return infos_; }
  // Where the gradient of a planned parameter lies; null data if it is not planned.
  TensorView SlotOf(int param) const { return slots_[param]; }

  // Copies the gradient into its slot (zeros if the parameter has none), unless it lies there already, and sets its used
  // flag.
  void CopyIn(const ParameterSet& params, int param);
  // Whether the used flag of a planned parameter is set.
  bool IsUsed(int param) const;
  // Copies the slot to the gradient's memory, unless that is the slot.
  void CopyOut(ParameterSet& params, int param) const;

 private:
  BucketStorage() = default;

  BucketPlan plan_;
  int64_t count_multiple_ = 1;
  std::vector<Memory> memory_;
  std::vector<std::vector<int64_t>> offsets_;
  std::vector<BucketInfo> infos_;
  std::vector<TensorView> slots_;
  std::vector<TensorView> flags_;  // One element each.
};

}  // namespace evenkeel

#endif  // EVENKEEL_BUCKET_INTERNAL_BUCKET_STORAGE_H_
