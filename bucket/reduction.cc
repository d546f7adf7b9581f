#include "evenkeel/bucket/reduction.h"

#include "absl/strings/str_cat.h"

#if __GNUC__ >= 14  // It takes empty lists in RoundBuffers for uninitialized.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

namespace evenkeel {

absl::StatusOr<RoundBuffers> BucketReduction::BeginRound(const BucketInfo& bucket, int round,
                                                         const ReductionStep& step) {
  if (round > 0) {
    return absl::UnimplementedError(
        absl::StrCat("round ", round, ": the reduction does not override BeginRound()"));
  }
  if (used_flags() != UsedFlags::kOnWire)
    return RoundBuffers{{bucket.data}, {bucket.data}, step.scale};
  const TensorList parts(bucket.parts.begin(), bucket.parts.end());
  return RoundBuffers{parts, parts, step.scale};
}

}  // namespace evenkeel
