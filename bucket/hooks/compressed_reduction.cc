#include "evenkeel/bucket/hooks/compressed_reduction.h"

#include "absl/strings/str_cat.h"
#include "evenkeel/comm/convert.h"
#include "evenkeel/comm/status.h"

namespace evenkeel {
namespace {

bool IsNarrowed(const Collective& what) { return what.dtype == DType::kFloat32 || what.dtype == DType::kFloat64; }

bool IsInPlace(const Collective& what) {
  return what.kind == CollectiveKind::kAllReduce || what.kind == CollectiveKind::kReduce ||
         what.kind == CollectiveKind::kBroadcast;
}

bool IsReduction(const Collective& what) {
  return what.kind == CollectiveKind::kAllReduce || what.kind == CollectiveKind::kReduce ||
         what.kind == CollectiveKind::kReduceScatter;
}

// Sums can be scaled before they are added up.
bool IsSum(const Collective& what) {
  return IsReduction(what) && (what.op == ReduceOp::kSum || what.op == ReduceOp::kAverage);
}

int64_t CountOf(const TensorList& views) {
  int64_t count = 0;
  for (const TensorView& view : views) count += view.count;
  return count;
}

}  // namespace

CompressedReduction::CompressedReduction(DType wire, std::unique_ptr<BucketReduction> inner)
    : wire_(wire), inner_(inner != nullptr ? std::move(inner) : std::make_unique<AllReduceBuckets>()) {}

std::vector<Collective> CompressedReduction::CollectivesFor(const BucketInfo& bucket) const {
  std::vector<Collective> collectives = inner_->CollectivesFor(bucket);
  for (Collective& what : collectives) {
    if (IsNarrowed(what)) what.dtype = wire_;
  }
  return collectives;
}

absl::Status CompressedReduction::OnPlan(absl::Span<const BucketInfo> buckets) {
  if (wire_ != DType::kFloat16 && wire_ != DType::kBFloat16) {
    return absl::InvalidArgumentError(
        absl::StrCat("gradients can't be compressed to ", ToString(wire_), ": only to float16 or bfloat16"));
  }
  for (const BucketInfo& bucket : buckets) {
    if (bucket.data.device.is_cpu()) continue;
    return absl::UnimplementedError(absl::StrCat("can't compress ", ToString(bucket.data)));
  }
  EK_RETURN_IF_ERROR(inner_->OnPlan(buckets));
  rounds_.clear();
  rounds_.resize(buckets.size());
  return absl::OkStatus();
}

absl::StatusOr<RoundBuffers> CompressedReduction::BeginRound(const BucketInfo& bucket, int round,
                                                             const ReductionStep& step) {
  Receive(bucket, round);
  EK_ASSIGN_OR_RETURN(RoundBuffers wide, inner_->BeginRound(bucket, round, step));
  const std::vector<Collective> collectives = inner_->CollectivesFor(bucket);
  if (round >= static_cast<int>(collectives.size()) || !IsNarrowed(collectives[round])) return wide;
  const Collective& what = collectives[round];
  std::vector<Round>& rounds = rounds_[bucket.index];
  rounds.resize(collectives.size());
  Round& own = rounds[round];
  own.memory.resize((CountOf(wide.in) + (IsInPlace(what) ? 0 : CountOf(wide.out))) * SizeOf(wire_));
  std::byte* next = own.memory.data();
  const auto take = [&](const TensorView& like) {
    const TensorView half(next, like.count, wire_);
    next += half.bytes();
    return half;
  };

  RoundBuffers narrow{.scale = IsSum(what) ? 1.0 : wide.scale};
  const double scale = IsSum(what) ? wide.scale : 1.0;
  for (const TensorView& from : wide.in) {
    const TensorView half = take(from);
    narrow.in.push_back(half);
    EK_RETURN_IF_ERROR(CheckConvertible(from, half));
    if (IsReduction(what) && !step.contributes) continue;  // It is not read.
    if (from == bucket.wire) {  // The flags are no gradients: they stay what they are, however small the scale.
      ConvertFloats(bucket.data, half.Slice(0, bucket.data.count), {.scale = scale});
      ConvertFloats(bucket.used, half.Slice(bucket.data.count, bucket.used.count));
    } else {
      ConvertFloats(from, half, {.scale = scale});
    }
  }
  for (size_t i = 0; i < wide.out.size(); ++i) {
    narrow.out.push_back(IsInPlace(what) ? narrow.in[i] : take(wide.out[i]));
    own.arriving.emplace_back(narrow.out.back(), wide.out[i]);
  }
  return narrow;
}

void CompressedReduction::Receive(const BucketInfo& bucket, int round) {
  for (Round& before : rounds_[bucket.index]) {
    // What an earlier step that failed left behind has not arrived.
    if (round > 0) {
      for (const auto& [half, wide] : before.arriving) ConvertFloats(half, wide);
    }
    before.arriving.clear();
  }
}

absl::StatusOr<GradFate> CompressedReduction::OnReduced(const BucketInfo& bucket, const ReductionStep& step) {
  Receive(bucket, static_cast<int>(rounds_[bucket.index].size()));
  return inner_->OnReduced(bucket, step);
}

}  // namespace evenkeel
