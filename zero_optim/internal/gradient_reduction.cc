#include "evenkeel/zero_optim/internal/gradient_reduction.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "evenkeel/comm/arith/convert.h"
#include "evenkeel/comm/collective.h"
#include "evenkeel/comm/device/copy.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/zero_optim/internal/gradients.h"
#include "evenkeel/zero_optim/internal/open_works.h"

namespace evenkeel::internal {

GradientReduction::GradientReduction(Communicator* comm, Channel* channel,
                                     const ParameterSet* params, std::span<const ParamSpec> specs,
                                     Bytes cap, ParameterUpdater* updater)
    : comm_(comm),
      channel_(channel),
      params_(params),
      specs_(specs),
      cap_(cap),
      updater_(updater) {}

// Waits, at most until the operations' deadline, because on a device the host has not waited yet.
GradientReduction::~GradientReduction() {
  if (updater_->is_on_device()) (void)WaitForAll(works());
  DropBuckets();
}

// On a device the stream, which waits for the reductions, may still use them.
void GradientReduction::DropBuckets() {
  for (Bucket& bucket : buckets_) (void)updater_->Keep(std::move(bucket.memory));
  buckets_.clear();
}

absl::Status GradientReduction::Lay(const OwnerTable& owners, std::span<const int> chosen) {
  if (owners == owners_ && std::ranges::equal(chosen, chosen_)) return absl::OkStatus();
  EK_ASSIGN_OR_RETURN(const std::vector<ShardBucket> layout,
                      BucketsByOwner(specs_, owners, chosen, cap_));
  DropBuckets();
  chosen_.clear();  // Stays so if memory runs out.
  places_.assign(specs_.size(), Place());
  for (const ShardBucket& what : layout) {
    const int64_t flags = updater_->is_on_device() ? 0 : static_cast<int64_t>(what.params.size());
    const int64_t total = what.count + flags;
    Bucket bucket{.what = what};
    EK_ASSIGN_OR_RETURN(bucket.memory, comm_->Allocate(total * SizeOf(what.dtype)));
    const TensorView all(bucket.memory.data.get(), total, what.dtype, comm_->device());
    bucket.gradients = all.Slice(0, what.count);
    bucket.present = all.Slice(what.count, flags);
    int64_t offset = 0;
    for (int position = 0; position < static_cast<int>(what.params.size()); ++position) {
      const int param = what.params[position];
      places_[param] = {static_cast<int>(buckets_.size()), position, offset};
      offset += specs_[param].count;
    }
    buckets_.push_back(std::move(bucket));
  }
  owners_ = owners;
  chosen_.assign(chosen.begin(), chosen.end());
  return absl::OkStatus();
}

absl::Status GradientReduction::Fill(Bucket& bucket) {
  if (updater_->is_on_device()) return FillThere(bucket);
  for (int param : bucket.what.params) {
    const Place& place = places_[param];
    const TensorView to = bucket.gradients.Slice(place.offset, specs_[param].count);
    const bool is_present = HasOwnGradient(param);
    double flag = is_present ? 1 : 0;
    ConvertFloats(TensorView(&flag, 1, DType::kFloat64), bucket.present.Slice(place.position, 1));
    if (to.count == 0) continue;
    if (is_present) {
      std::memcpy(to.data, (*params_)[param].grad.data, to.bytes());
    } else {
      std::memset(to.data, 0, to.bytes());
    }
  }
  return absl::OkStatus();
}

absl::Status GradientReduction::FillThere(const Bucket& bucket) {
  std::vector<CopySegment> segments;
  const auto copy = [&]() -> absl::Status {
    if (segments.empty()) return absl::OkStatus();
    return CopySegmentsOnce(*comm_->runtime(), std::exchange(segments, {}), updater_->stream());
  };
  for (int param : bucket.what.params) {
    const TensorView to = bucket.gradients.Slice(places_[param].offset, specs_[param].count);
    if (to.count == 0) continue;
    segments.push_back(
        {.to = to, .from = HasOwnGradient(param) ? (*params_)[param].grad : TensorView()});
    if (segments.size() == kMostInlineSegments) EK_RETURN_IF_ERROR(copy());
  }
  return copy();
}

absl::Status GradientReduction::Start(const OwnerTable& owners, std::span<const int> chosen,
                                      const StartOptions& options) {
  EK_RETURN_IF_ERROR(Lay(owners, chosen));
  for (int index = 0; index < static_cast<int>(buckets_.size()); ++index) {
    Bucket& bucket = buckets_[index];
    const bool contributes =
        options.has_inputs || std::ranges::any_of(bucket.what.params, [this](int param) {
          return HasOwnGradient(param);
        });
    if (contributes) EK_RETURN_IF_ERROR(Fill(bucket));
    const TensorView all(bucket.memory.data.get(), bucket.gradients.count + bucket.present.count,
                         bucket.what.dtype, comm_->device());
    const Collective what{.kind = CollectiveKind::kReduce,
                          .dtype = all.dtype,
                          .count = all.count,
                          .op = ReduceOp::kSum,
                          .root = bucket.what.owner,
                          .role = Role::kShard,
                          .index = index,
                          .index_count = static_cast<int>(buckets_.size())};
    bucket.reduced = channel_->Issue(
        what, {all}, {all},
        {.scale = options.scale, .contributes = contributes, .after = updater_->stream()});
    bucket.is_awaited = false;
  }
  return absl::OkStatus();
}

// Once, on a device: each time would be a word to its stream.
absl::Status GradientReduction::Await(Bucket& bucket) {
  if (bucket.is_awaited && updater_->is_on_device()) return absl::OkStatus();
  EK_RETURN_IF_ERROR(bucket.reduced.OrderBefore(updater_->stream()));
  bucket.is_awaited = true;
  return absl::OkStatus();
}

absl::StatusOr<TensorView> GradientReduction::Wait(int param) {
  const Place& place = places_[param];
  Bucket& bucket = buckets_[place.bucket];
  EK_RETURN_IF_ERROR(Await(bucket));
  TensorView gradient = bucket.gradients.Slice(place.offset, specs_[param].count);
  if (updater_->is_on_device()) return gradient;
  if (!IsSet(bucket.present.Slice(place.position, 1))) gradient.data = nullptr;
  return gradient;
}

absl::Status GradientReduction::WaitAll() {
  absl::Status status;
  for (Bucket& bucket : buckets_) status.Update(Await(bucket));
  return status;
}

std::vector<Work> GradientReduction::works() const {
  std::vector<Work> works;
  for (const Bucket& bucket : buckets_) works.push_back(bucket.reduced);
  return works;
}

}  // namespace evenkeel::internal
