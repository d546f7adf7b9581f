#include "evenkeel/bucket/reduction.h"

#include "absl/strings/str_cat.h"

namespace evenkeel {

absl::StatusOr<RoundBuffers> BucketReduction::BeginRound(const BucketInfo& bucket, int round,
                                                         const ReductionStep& step) {
  if (round > 0) {
    return absl::UnimplementedError(absl::StrCat("round ", round, ": the reduction does not override BeginRound()"));
  }
  const TensorView& sent = used_flags() == UsedFlags::kOnWire ? bucket.wire : bucket.data;
  return RoundBuffers{.in = {sent}, .out = {sent}, .scale = step.scale};
}

}  // namespace evenkeel
