#include "evenkeel/bucket/hooks/compressed_reduction.h"

#include "absl/strings/str_cat.h"
#include "evenkeel/comm/arith/convert.h"
#include "evenkeel/comm/arith/view_lists.h"
#include "evenkeel/comm/device/copy.h"
#include "evenkeel/comm/status.h"

namespace evenkeel {
namespace {

using internal::CountOf;

bool IsNarrowed(const Collective& what) {
  return what.dtype == DType::kFloat32 || what.dtype == DType::kFloat64;
}

// Sums can be scaled before they are added up.
bool IsSum(const Collective& what) {
  return Reduces(what.kind) && (what.op == ReduceOp::kSum || what.op == ReduceOp::kAverage);
}

}  // namespace

CompressedReduction::CompressedReduction(DType wire, std::unique_ptr<BucketReduction> inner)
    : wire_(wire),
      inner_(inner != nullptr ? std::move(inner) : std::make_unique<AllReduceBuckets>()) {}

std::vector<Collective> CompressedReduction::CollectivesFor(const BucketInfo& bucket) const {
  std::vector<Collective> collectives = inner_->CollectivesFor(bucket);
  for (Collective& what : collectives) {
    if (IsNarrowed(what)) what.dtype = wire_;
  }
  return collectives;
}

absl::Status CompressedReduction::OnPlan(absl::Span<const BucketInfo> buckets) {
  if (wire_ != DType::kFloat16 && wire_ != DType::kBFloat16) {
    return absl::InvalidArgumentError(absl::StrCat(
        "gradients cannot be compressed to ", ToString(wire_), ": only to float16 or bfloat16"));
  }
  EK_RETURN_IF_ERROR(inner_->OnPlan(buckets));
  rounds_.clear();
  rounds_.resize(buckets.size());
  return absl::OkStatus();
}

absl::StatusOr<RoundBuffers> CompressedReduction::BeginRound(const BucketInfo& bucket, int round,
                                                             const ReductionStep& step) {
  EK_RETURN_IF_ERROR(Receive(bucket, round, step.stream));
  EK_ASSIGN_OR_RETURN(RoundBuffers wide, inner_->BeginRound(bucket, round, step));
  const std::vector<Collective> collectives = inner_->CollectivesFor(bucket);
  if (round >= static_cast<int>(collectives.size()) || !IsNarrowed(collectives[round])) return wide;
  const Collective& what = collectives[round];
  std::vector<Round>& rounds = rounds_[bucket.index];
  rounds.resize(collectives.size());
  Round& own = rounds[round];
  const int64_t count = CountOf(wide.in) + (IsInPlace(what.kind) ? 0 : CountOf(wide.out));
  EK_ASSIGN_OR_RETURN(std::byte * next, Reserve(own, count * SizeOf(wire_), bucket.data.device));
  const auto take = [&](const TensorView& like) {
    const TensorView half(next, like.count, wire_, like.device);
    next += half.bytes();
    return half;
  };

  RoundBuffers narrow{.scale = IsSum(what) ? 1.0 : wide.scale};
  const double scale = IsSum(what) ? wide.scale : 1.0;
  for (const TensorView& from : wide.in) {
    const TensorView half = take(from);
    narrow.in.push_back(half);
    if (from.device.is_cpu()) EK_RETURN_IF_ERROR(CheckConvertible(from, half));
    if (Reduces(what.kind) && !step.contributes) continue;  // It is not read.
    if (from == bucket.wire) {  // The flags are no gradients: they stay what they are, however
                                // small the scale.
      EK_RETURN_IF_ERROR(Narrow(bucket.data, half.Slice(0, bucket.data.count), scale, step.stream));
      EK_RETURN_IF_ERROR(
          Narrow(bucket.used, half.Slice(bucket.data.count, bucket.used.count), 1.0, step.stream));
    } else {
      EK_RETURN_IF_ERROR(Narrow(from, half, scale, step.stream));
    }
  }
  for (size_t i = 0; i < wide.out.size(); ++i) {
    narrow.out.push_back(IsInPlace(what.kind) ? narrow.in[i] : take(wide.out[i]));
    own.arriving.emplace_back(narrow.out.back(), wide.out[i]);
  }
  return narrow;
}

absl::StatusOr<std::byte*> CompressedReduction::Reserve(Round& round, int64_t bytes,
                                                        Device device) {
  if (device.is_cpu()) {
    round.memory.resize(bytes);
    return round.memory.data();
  }
  if (round.on_device.empty() || round.on_device.back().bytes < bytes) {
    EK_ASSIGN_OR_RETURN(Memory memory, runtime_->Allocate(device, bytes));
    round.on_device.push_back(std::move(memory));
  }
  return static_cast<std::byte*>(round.on_device.back().data.get());
}

absl::Status CompressedReduction::Narrow(const TensorView& from, const TensorView& half,
                                         double scale, StreamRef stream) {
  if (!from.device.is_cpu()) {
    return CopySegmentsOnce(*runtime_, {{.to = half, .from = from}}, stream, {.scale = scale});
  }
  ConvertFloats(from, half, {.scale = scale});
  return absl::OkStatus();
}

absl::Status CompressedReduction::Receive(const BucketInfo& bucket, int round, StreamRef stream) {
  for (Round& before : rounds_[bucket.index]) {
    // Data that an earlier, failed step left behind has not arrived.
    std::vector<CopySegment> on_device;
    for (const auto& [half, wide] : before.arriving) {
      if (round > 0 && wide.device.is_cpu()) ConvertFloats(half, wide);
      if (round > 0 && !wide.device.is_cpu()) on_device.push_back({.to = wide, .from = half});
    }
    before.arriving.clear();
    for (size_t begin = 0; begin < on_device.size(); begin += kMostInlineSegments) {
      const auto some = absl::MakeConstSpan(on_device).subspan(begin, kMostInlineSegments);
      EK_RETURN_IF_ERROR(CopySegmentsOnce(*runtime_, some, stream));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<GradFate> CompressedReduction::OnReduced(const BucketInfo& bucket,
                                                        const ReductionStep& step) {
  EK_RETURN_IF_ERROR(Receive(bucket, static_cast<int>(rounds_[bucket.index].size()), step.stream));
  return inner_->OnReduced(bucket, step);
}

}  // namespace evenkeel
