// The memory of one plan's buckets, and where in it each gradient lies.
//
// On the CPU gradients are copied one by one, by CopyIn() and CopyOut(). On a device a bucket's are
// copied together, in one launch: Pack() and Unpack().
//
// Ownership: owns the buckets; it outlives what runs with them on a device. Gradients that are
//            views point into them, so they are moved out before it goes.
// Threads:   thread-compatible; CopyIn() of different parameters at the same time is safe.

#ifndef EVENKEEL_BUCKET_REDUCER_BUCKET_STORAGE_H_
#define EVENKEEL_BUCKET_REDUCER_BUCKET_STORAGE_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "evenkeel/bucket/parameter_set.h"
#include "evenkeel/bucket/plan/planner.h"
#include "evenkeel/bucket/reducer/device_side.h"
#include "evenkeel/bucket/reducer/repeated_copy.h"
#include "evenkeel/bucket/reduction.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/device/copy.h"

namespace evenkeel {

class BucketStorage {
 public:
  struct Layout {
    Fusion fusion = Fusion::kFlat;
    int64_t count_multiple = 1;   // Each bucket's element count is a multiple of it.
    bool separate_flags = false;  // UsedFlags::kSeparate.
    friend bool operator==(const Layout&, const Layout&) = default;
  };
  static absl::StatusOr<std::unique_ptr<BucketStorage>> Create(BucketPlan plan,
                                                               const ParameterSet& params,
                                                               Layout layout, Communicator& comm);

  const BucketPlan& plan() const { return plan_; }
  const Layout& layout() const { return layout_; }
  int size() const { return static_cast<int>(infos_.size()); }
  const BucketInfo& bucket(int index) const { return infos_[index]; }
  const std::vector<BucketInfo>& buckets() const { return infos_; }
  // Returns the memory of a planned parameter's gradient; null data if it is not planned, or not
  // copied. It is valid as long as the storage.
  TensorView SlotOf(int param) const { return slots_[param]; }
  // By parameter, whether it has a gradient, one float each beside the buckets; null data: none.
  TensorView separate_flags() const { return separate_; }
  // The used flag of a planned parameter that the ranks reduce.
  TensorView flag(int param) const {
    return separate_.data != nullptr ? separate_.Slice(param, 1) : flags_[param];
  }

  // Makes planned gradients views of their slots, or (`are_views` false) moves them back; the
  // others lie in their own memory. Contents move along. `device` null: on the CPU.
  absl::Status MoveGradients(ParameterSet& params, bool are_views, const DeviceSide* device) const;

  // Copies the gradient into its slot (zeros if the parameter has none), unless it lies there
  // already; sets its used flags. Where nothing is copied, a parameter that has none gets zeros in
  // its own memory.
  void CopyIn(const ParameterSet& params, int param);
  // Where nothing is copied: notes the present memory of its gradient. CopyIn() does so, too.
  void Locate(const ParameterSet& params, int param);
  // Returns whether the used flag of a planned parameter is set.
  bool IsUsed(int param) const;
  // Copies the slot to the gradient's memory, unless that is the slot.
  void CopyOut(ParameterSet& params, int param) const;

  // On a device -----------------------------------------------------------------------------------
  // Makes the lists of a step in which this rank has all gradients, where they lie now. Waits for
  // the device.
  absl::Status Prepare(const ParameterSet& params, StreamRef stream);
  // CopyIn() of a bucket's parameters, on `stream`.
  absl::Status Pack(const ParameterSet& params, int bucket, StreamRef stream);
  // CopyOut() of those of a bucket's parameters that have a gradient now.
  absl::Status Unpack(const ParameterSet& params, int bucket, StreamRef stream);

 private:
  // The common part of both, for used parameters.
  using IsUsedFn = absl::FunctionRef<bool(int param)>;
  std::vector<CopySegment> PackSegments(const ParameterSet& params, int bucket,
                                        IsUsedFn is_used) const;
  std::vector<CopySegment> UnpackSegments(const ParameterSet& params, int bucket,
                                          IsUsedFn is_used) const;

  BucketStorage() = default;

  BucketPlan plan_;
  Layout layout_;
  std::vector<Memory> memory_;
  std::vector<std::vector<int64_t>> offsets_;
  std::vector<std::vector<TensorView>> parts_;
  std::vector<BucketInfo> infos_;
  std::vector<TensorView> slots_;
  std::vector<TensorView*> part_of_;  // By parameter: its part, where nothing is copied.
  std::vector<TensorView> flags_;     // One element each, in its bucket.
  TensorView separate_;
  std::vector<RepeatedCopy> packs_, unpacks_;  // By bucket; on a device.
};

}  // namespace evenkeel

#endif  // EVENKEEL_BUCKET_REDUCER_BUCKET_STORAGE_H_
