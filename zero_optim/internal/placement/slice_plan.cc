#include "evenkeel/zero_optim/internal/placement/slice_plan.h"

#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "evenkeel/comm/status.h"

namespace evenkeel::internal {
namespace {

absl::StatusOr<SlicedBucket> LayOut(const BucketInfo& info, const ParameterSet& params,
                                    int world_size) {
  SlicedBucket layout{.params = {info.params.begin(), info.params.end()},
                      .offsets = {info.offsets.begin(), info.offsets.end()},
                      .slice = info.data.count / world_size};
  for (int param : layout.params) layout.count += params[param].value.count;
  if (info.data.count % (world_size * kSliceUnit) != 0 || info.data.count < layout.count) {
    return absl::InternalError(absl::StrCat(
        "bucket ", info.index, " has ", info.data.count, " elements for ", layout.count,
        " gradients: no ", world_size, " equal slices of multiples of ", kSliceUnit));
  }
  return layout;
}

}  // namespace

absl::StatusOr<SlicePlan> PlanSlices(
    absl::Span<const BucketInfo> buckets, const ParameterSet& params, int rank, int world_size,
    absl::FunctionRef<absl::StatusOr<Memory>(int64_t bytes)> allocate) {
  SlicePlan plan{.bucket_of = std::vector<int>(params.size(), -1)};
  int64_t padding_bytes = 0;
  for (const BucketInfo& info : buckets) {
    SlicePlan::Bucket bucket{.first_flag = plan.flag_count};
    EK_ASSIGN_OR_RETURN(bucket.layout, LayOut(info, params, world_size));
    const int64_t slice = bucket.layout.slice;
    bucket.gradient = info.data.Slice(rank * slice, slice);
    bucket.gather = {.kind = CollectiveKind::kAllGather,
                     .dtype = info.data.dtype,
                     .count = slice,
                     .role = Role::kShard,
                     .index = info.index,
                     .index_count = info.bucket_count,
                     .joined = Contribution::kOwned};
    plan.flag_count += static_cast<int>(bucket.layout.params.size());
    padding_bytes += (slice * world_size - bucket.layout.count) * SizeOf(info.data.dtype);
    for (int param : bucket.layout.params) plan.bucket_of[param] = info.index;
    plan.buckets.push_back(std::move(bucket));
  }

  EK_ASSIGN_OR_RETURN(plan.padding, allocate(padding_bytes));
  auto* free_padding = static_cast<std::byte*>(plan.padding.data.get());
  for (SlicePlan::Bucket& bucket : plan.buckets) {
    const SlicedBucket& layout = bucket.layout;
    const DType dtype = bucket.gather.dtype;
    bucket.gradients.assign(layout.params.size(),
                            TensorView(nullptr, 0, dtype, bucket.gradient.device));
    size_t position = 0;
    for (const Segment& segment : SegmentsOf(layout, rank)) {
      while (layout.params[position] != segment.param) ++position;
      bucket.gradients[position] = bucket.gradient.Slice(segment.offset, segment.count);
      bucket.own.push_back(segment);
    }
    // Each bucket's padding has memory of its own: all-gathers may overlap.
    bucket.padding = TensorView(free_padding, layout.slice * world_size - layout.count, dtype,
                                bucket.gradient.device);
    bucket.own_padding = bucket.padding.Slice(0, PaddingOf(layout, rank));
    free_padding += bucket.padding.bytes();
  }
  return plan;
}

TensorList OwnValues(const SlicePlan::Bucket& bucket, const ParameterSet& params) {
  TensorList values;
  for (const Segment& segment : bucket.own) {
    values.push_back(params[segment.param].value.Slice(segment.begin, segment.count));
  }
  if (bucket.own_padding.count > 0) values.push_back(bucket.own_padding);
  return values;
}

TensorList AllValues(const SlicePlan::Bucket& bucket, const ParameterSet& params) {
  TensorList values;
  for (const int param : bucket.layout.params) {
    if (params[param].value.count > 0) values.push_back(params[param].value);
  }
  if (bucket.padding.count > 0) values.push_back(bucket.padding);
  return values;
}

}  // namespace evenkeel::internal
