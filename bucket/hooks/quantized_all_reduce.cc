#include "evenkeel/bucket/hooks/quantized_all_reduce.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "evenkeel/bucket/hooks/quantize.h"
#include "evenkeel/comm/base/bytes.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/types.h"

#if __GNUC__ >= 14  // It takes empty lists in RoundBuffers for uninitialized.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

// Between the rounds a bucket's `data` holds what this rank has not sent of its gradients, which
// becomes their error once all has gone well: a step that fails leaves errors as they were.

namespace evenkeel {
namespace {

constexpr int64_t kBlock = internal::kQuantizedBlock;
constexpr uint32_t kStateFormat = 1;

bool IsQuantized(const BucketInfo& bucket) { return bucket.data.dtype == DType::kFloat32; }

// A message's blocks, one after the other: all scales, then all elements.
float ScaleAt(const std::byte* message, int64_t block) {
  float scale = 0;
  std::memcpy(&scale, message + block * sizeof(float), sizeof(float));
  return scale;
}
const int8_t* ElementsOf(const std::byte* message, int64_t piece) {
  return reinterpret_cast<const int8_t*>(message + piece / kBlock * sizeof(float));
}
internal::ConstLevels LevelsAt(const int8_t* elements, int64_t block) {
  return internal::ConstLevels(elements + block * kBlock, kBlock);
}
internal::Levels LevelsAt(int8_t* elements, int64_t block) {
  return internal::Levels(elements + block * kBlock, kBlock);
}

// As many of the bucket's elements as are left from `begin` on, then zeros.
void LoadBlock(std::span<const float> from, int64_t begin, internal::Block block) {
  const int64_t there = std::clamp<int64_t>(static_cast<int64_t>(from.size()) - begin, 0, kBlock);
  if (there > 0) std::copy_n(from.data() + begin, there, block.begin());
  std::fill(block.begin() + there, block.end(), 0.0f);
}

void StoreBlock(std::span<const float, kBlock> block, std::span<float> to, int64_t begin) {
  const int64_t there = std::clamp<int64_t>(static_cast<int64_t>(to.size()) - begin, 0, kBlock);
  if (there > 0) std::copy_n(block.begin(), there, to.data() + begin);
}

}  // namespace

int64_t QuantizedAllReduce::MessageBytes(int64_t piece, int64_t flags) {
  const int64_t bytes = piece / kBlock * static_cast<int64_t>(sizeof(float)) + piece + flags;
  return (bytes + 7) / 8 * 8;
}

int64_t QuantizedAllReduce::PieceOf(const BucketInfo& bucket) const {
  const int64_t share = (bucket.data.count + world_size_ - 1) / world_size_;
  return (share + kBlock - 1) / kBlock * kBlock;
}

std::vector<Collective> QuantizedAllReduce::CollectivesFor(const BucketInfo& bucket) const {
  if (!IsQuantized(bucket)) {
    return {{.kind = CollectiveKind::kAllReduce,
             .dtype = bucket.data.dtype,
             .count = bucket.wire.count},
            {.kind = CollectiveKind::kBarrier}};
  }
  const int64_t piece = PieceOf(bucket);
  return {{.kind = CollectiveKind::kAllToAll,
           .dtype = DType::kUint8,
           .count = MessageBytes(piece, static_cast<int64_t>(bucket.params.size()))},
          {.kind = CollectiveKind::kAllGather,
           .dtype = DType::kUint8,
           .count = MessageBytes(piece, 0)}};
}

void QuantizedAllReduce::OnGroup(Communicator& comm) {
  rank_ = comm.rank();
  world_size_ = comm.world_size();
  if (!std::exchange(has_group_, true)) return;  // State loaded before the first group stays valid.
  errors_.clear();
  for (Bucket& bucket : buckets_) bucket.piece_error.clear();
}

absl::Status QuantizedAllReduce::OnPlan(absl::Span<const BucketInfo> buckets) {
  for (const BucketInfo& bucket : buckets) {
    if (bucket.data.device.is_cpu()) continue;
    return absl::UnimplementedError(absl::StrCat("cannot quantize ", ToString(bucket.data)));
  }
  errors_ = Errors();  // Pieces are others now: what this rank owes for its old ones goes with its
                       // own gradients.
  buckets_.clear();
  for (const BucketInfo& bucket : buckets) {
    Bucket& own = buckets_.emplace_back();
    if (!IsQuantized(bucket)) continue;
    for (size_t i = 0; i < bucket.params.size(); ++i) {
      const int64_t end = i + 1 < bucket.params.size() ? bucket.offsets[i + 1] : bucket.data.count;
      own.ranges.push_back({.param = bucket.params[i], .begin = bucket.offsets[i], .end = end});
      const auto error = errors_.find(bucket.params[i]);
      if (error == errors_.end() ||
          static_cast<int64_t>(error->second.size()) == end - bucket.offsets[i])
        continue;
      return absl::InvalidArgumentError(
          absl::StrCat("the error of parameter ", bucket.params[i], " has ", error->second.size(),
                       " elements, the parameter ", end - bucket.offsets[i]));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<RoundBuffers> QuantizedAllReduce::BeginRound(const BucketInfo& bucket, int round,
                                                            const ReductionStep& step) {
  if (!IsQuantized(bucket)) {
    RoundBuffers nothing;
    if (round > 0) return nothing;
    return RoundBuffers{.in = {bucket.wire}, .out = {bucket.wire}, .scale = step.scale};
  }
  Bucket& own = buckets_[bucket.index];
  const auto view = [](std::vector<std::byte>& bytes) {
    return TensorView(bytes.data(), static_cast<int64_t>(bytes.size()), DType::kUint8);
  };
  if (round == 0) {
    SendPieces(bucket, own, step);
    return RoundBuffers{.in = {view(own.sent)}, .out = {view(own.received)}};
  }
  SendSum(bucket, own);
  return RoundBuffers{.in = {view(own.sum_sent)}, .out = {view(own.sums)}};
}

void QuantizedAllReduce::SendPieces(const BucketInfo& bucket, Bucket& own,
                                    const ReductionStep& step) {
  own.piece = PieceOf(bucket);
  const int64_t flags = static_cast<int64_t>(own.ranges.size());
  const int64_t message = MessageBytes(own.piece, flags);
  own.sent.assign(world_size_ * message, std::byte{0});
  own.received.resize(world_size_ * message);
  for (size_t i = 0; i < own.ranges.size(); ++i) {
    own.ranges[i].is_used_here = step.contributes && bucket.used.as<float>()[i] != 0;
  }
  if (!step.contributes) return;

  const std::span<float> data = bucket.data.as<float>();
  for (const Range& range : own.ranges) {
    const auto error = errors_.find(range.param);
    if (!range.is_used_here || error == errors_.end()) continue;
    for (int64_t i = range.begin; i < range.end; ++i) data[i] += error->second[i - range.begin];
  }
  std::array<float, kBlock> block;
  for (int rank = 0; rank < world_size_; ++rank) {
    std::byte* const to = own.sent.data() + rank * message;
    int8_t* const elements = const_cast<int8_t*>(ElementsOf(to, own.piece));
    for (int64_t b = 0; b < own.piece / kBlock; ++b) {
      const int64_t begin = rank * own.piece + b * kBlock;
      LoadBlock(data, begin, block);
      const float scale = internal::QuantizeBlock(block, LevelsAt(elements, b));
      std::memcpy(to + b * sizeof(float), &scale, sizeof(float));
      StoreBlock(block, data, begin);
    }
    for (int64_t i = 0; i < flags; ++i) elements[own.piece + i] = own.ranges[i].is_used_here;
  }
}

void QuantizedAllReduce::SendSum(const BucketInfo& bucket, Bucket& own) {
  const int64_t flags = static_cast<int64_t>(own.ranges.size());
  const int64_t message = MessageBytes(own.piece, flags);
  const std::span<float> used = bucket.used.as<float>();
  std::fill(used.begin(), used.end(), 0.0f);
  std::vector<float> sum(own.piece, 0.0f);
  for (int rank = 0; rank < world_size_; ++rank) {
    const std::byte* const from = own.received.data() + rank * message;
    const int8_t* const elements = ElementsOf(from, own.piece);
    for (int64_t b = 0; b < own.piece / kBlock; ++b) {
      internal::AddLevels(LevelsAt(elements, b), ScaleAt(from, b),
                          internal::Block(sum.data() + b * kBlock, kBlock));
    }
    for (int64_t i = 0; i < flags; ++i) {
      if (elements[own.piece + i] != 0) used[i] = 1.0f;
    }
  }

  // Parameters that no rank has a gradient of are dropped at the end: what is owed for them is not
  // sent.
  own.piece_error.resize(own.piece, 0.0f);
  own.next_piece_error = own.piece_error;
  const int64_t first = rank_ * own.piece;
  const auto for_used = [&](auto visit) {
    for (int64_t p = 0; p < flags; ++p) {
      if (used[p] == 0) continue;
      const int64_t end = std::min(own.ranges[p].end - first, own.piece);
      for (int64_t i = std::max<int64_t>(0, own.ranges[p].begin - first); i < end; ++i) visit(i);
    }
  };
  for_used([&](int64_t i) { sum[i] += own.piece_error[i]; });
  own.sum_sent.assign(MessageBytes(own.piece, 0), std::byte{0});
  own.sums.resize(world_size_ * own.sum_sent.size());
  int8_t* const elements = const_cast<int8_t*>(ElementsOf(own.sum_sent.data(), own.piece));
  for (int64_t b = 0; b < own.piece / kBlock; ++b) {
    const internal::Block block(sum.data() + b * kBlock, kBlock);
    const float scale = internal::QuantizeBlock(block, LevelsAt(elements, b));
    std::memcpy(own.sum_sent.data() + b * sizeof(float), &scale, sizeof(float));
    if (!std::isfinite(scale))
      std::copy_n(own.piece_error.begin() + b * kBlock, kBlock, block.begin());
  }
  for_used([&](int64_t i) { own.next_piece_error[i] = sum[i]; });
}

absl::StatusOr<GradFate> QuantizedAllReduce::OnReduced(const BucketInfo& bucket,
                                                       const ReductionStep& step) {
  if (!IsQuantized(bucket)) return GradFate::kReduced;
  Bucket& own = buckets_[bucket.index];
  const std::span<float> data = bucket.data.as<float>();
  for (const Range& range : own.ranges) {
    if (!range.is_used_here) continue;
    std::vector<float>& error = errors_[range.param];
    error.resize(range.end - range.begin, 0.0f);
    for (int64_t i = range.begin; i < range.end; ++i) {
      // Values that are not finite were not sent; their error stays as it was before.
      const int rank = static_cast<int>(i / own.piece);
      const std::byte* const message =
          own.sent.data() + rank * MessageBytes(own.piece, own.ranges.size());
      if (std::isfinite(ScaleAt(message, i % own.piece / kBlock))) error[i - range.begin] = data[i];
    }
  }
  own.piece_error.swap(own.next_piece_error);

  const float step_scale = static_cast<float>(step.scale);
  const int64_t message = MessageBytes(own.piece, 0);
  std::array<float, kBlock> block;
  for (int rank = 0; rank < world_size_; ++rank) {
    const std::byte* const from = own.sums.data() + rank * message;
    const int8_t* const elements = ElementsOf(from, own.piece);
    for (int64_t b = 0; b < own.piece / kBlock; ++b) {
      block.fill(0.0f);
      internal::AddLevels(LevelsAt(elements, b), ScaleAt(from, b) * step_scale, block);
      StoreBlock(block, data, rank * own.piece + b * kBlock);
    }
  }
  return GradFate::kReduced;
}

std::map<int, std::vector<float>> QuantizedAllReduce::Errors() const {
  std::map<int, std::vector<float>> errors = errors_;
  for (const Bucket& own : buckets_) {
    if (own.piece_error.empty()) continue;
    const int64_t first = rank_ * own.piece;
    for (const Range& range : own.ranges) {
      const int64_t begin = std::max(range.begin, first),
                    end = std::min(range.end, first + own.piece);
      if (begin >= end) continue;
      std::vector<float>& error = errors[range.param];
      error.resize(range.end - range.begin, 0.0f);
      for (int64_t i = begin; i < end; ++i) error[i - range.begin] += own.piece_error[i - first];
    }
  }
  return errors;
}

std::string QuantizedAllReduce::Save() const {
  const std::map<int, std::vector<float>> errors = Errors();
  internal::ByteWriter writer;
  writer.U32(kStateFormat).U32(static_cast<uint32_t>(errors.size()));
  for (const auto& [param, error] : errors) {
    writer.I32(param).Bytes(
        {reinterpret_cast<const char*>(error.data()), error.size() * sizeof(float)});
  }
  return writer.Take();
}

absl::Status QuantizedAllReduce::Load(absl::string_view state) {
  internal::ByteReader reader(state);
  if (const uint32_t format = reader.U32(); format != kStateFormat) {
    return absl::InvalidArgumentError(absl::StrCat("quantisation errors of format ", format));
  }
  std::map<int, std::vector<float>> errors;
  for (uint32_t count = reader.U32(); count > 0 && reader.ok(); --count) {
    const int param = reader.I32();
    const absl::string_view bytes = reader.Bytes();
    if (bytes.size() % sizeof(float) != 0) reader.Refuse();
    std::vector<float>& error = errors[param];
    error.resize(bytes.size() / sizeof(float));
    if (!error.empty()) std::memcpy(error.data(), bytes.data(), error.size() * sizeof(float));
  }
  EK_RETURN_IF_ERROR(reader.Finish("quantisation errors"));
  for (const Bucket& own : buckets_) {
    for (const Range& range : own.ranges) {
      const auto error = errors.find(range.param);
      if (error == errors.end() ||
          static_cast<int64_t>(error->second.size()) == range.end - range.begin)
        continue;
      return absl::InvalidArgumentError(
          absl::StrCat("quantisation errors of parameter ", range.param, " have ",
                       error->second.size(), " elements, the parameter ", range.end - range.begin));
    }
  }
  errors_ = std::move(errors);
  for (Bucket& own : buckets_) own.piece_error.clear();
  return absl::OkStatus();
}

}  // namespace evenkeel
