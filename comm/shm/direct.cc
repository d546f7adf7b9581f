#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <optional>

#include "absl/container/inlined_vector.h"
#include "evenkeel/comm/shm/transfer.h"

namespace evenkeel::internal {
namespace {

class Direct : public ShmWay {
 public:
  Direct(const ShmTask& task, ShmArrival& arrival)
      : task_(task),
        lane_(task.lane),
        arrival_(arrival),
        per_block_(kClaimBytes / task.element_bytes) {}

  absl::Status Begin() override {
    const absl::Status found = arrival_.FindSources();
    // The others may have done it all by now, and freed their memory.
    return AreBlocksFinished() ? absl::OkStatus() : found;
  }
  absl::StatusOr<ShmProgress> Advance(int64_t budget, const std::atomic<bool>& stop) override;
  void CountIn() override {
    for (int share = 0; share < task_.size(); ++share) lane_.blocks[share] = EndOf(share);
  }

 private:
  // Returns the lane's count of the share's blocks when all of this operation are finished.
  uint64_t EndOf(int share) const {
    const int64_t length = task_.ShareOf(share, task_.count).length;
    return lane_.blocks[share] + (length + per_block_ - 1) / per_block_;
  }
  bool AreBlocksFinished() const;
  std::optional<int64_t> ClaimBlock(int share);
  int64_t ReduceBlock(int share, int64_t block);

  const ShmTask& task_;
  ShmLane& lane_;
  ShmArrival& arrival_;
  static constexpr int64_t kClaimBytes = 64 << 10;  // A rank claims so many at once.
  const int64_t per_block_;                         // As elements.
};

bool Direct::AreBlocksFinished() const {
  for (int share = 0; share < task_.size(); ++share) {
    if (lane_.seats[share].finished.load(std::memory_order_acquire) < EndOf(share)) return false;
  }
  return true;
}

std::optional<int64_t> Direct::ClaimBlock(int share) {
  std::atomic<uint64_t>& claimed = lane_.seats[share].claimed;
  const uint64_t end = EndOf(share);
  uint64_t next = claimed.load(std::memory_order_relaxed);
  while (next < end) {
    if (claimed.compare_exchange_weak(next, next + 1, std::memory_order_relaxed))
      return static_cast<int64_t>(next - lane_.blocks[share]);
  }
  return std::nullopt;
}

absl::StatusOr<ShmProgress> Direct::Advance(int64_t budget, const std::atomic<bool>& stop) {
  auto blocked = ShmProgress::kBlocked;
  for (int i = 0; i < task_.size(); ++i) {
    // Its own first: what it has read before is in its cache.
    const int share = (task_.me() + i) % task_.size();
    const uint64_t end = EndOf(share);
    while (true) {
      if (stop.load(std::memory_order_relaxed)) return blocked;
      if (budget <= 0 && lane_.seats[share].claimed.load(std::memory_order_relaxed) < end)
        return ShmProgress::kMore;
      const std::optional<int64_t> block = ClaimBlock(share);
      if (!block.has_value()) break;
      budget -= ReduceBlock(share, *block);
      blocked = ShmProgress::kMoved;
      if (lane_.seats[share].finished.fetch_add(1, std::memory_order_acq_rel) + 1 == end)
        lane_.Notify();
    }
  }
  return AreBlocksFinished() ? ShmProgress::kEnded : blocked;
}

int64_t Direct::ReduceBlock(int share, int64_t block) {
  const ShmRange all = task_.ShareOf(share, task_.count);
  const int64_t begin = all.begin + block * per_block_;
  const int64_t length = std::min(per_block_, all.length - block * per_block_);
  absl::InlinedVector<const void*, 8> inputs;
  absl::InlinedVector<std::byte*, 8> outputs;
  for (int64_t at = begin; at < begin + length;) {
    const int64_t n = std::min(kCacheBytes / task_.element_bytes, begin + length - at);
    inputs.clear();
    outputs.clear();
    for (int seat = 0; seat < task_.size(); ++seat) {
      std::byte* const place =
          static_cast<std::byte*>(arrival_.source(seat).front().data) + at * task_.element_bytes;
      if (arrival_.Contributes(seat)) inputs.push_back(place);
      if (task_.what.kind == CollectiveKind::kAllReduce || task_.IsRoot(seat))
        outputs.push_back(place);
    }
    task_.ReducePlain(inputs, outputs.front(), n);
    for (size_t i = 1; i < outputs.size(); ++i)
      std::memcpy(outputs[i], outputs.front(), n * task_.element_bytes);
    at += n;
  }
  return length * task_.element_bytes * task_.size();
}

}  // namespace

std::unique_ptr<ShmWay> MakeShmDirect(const ShmTask& task, ShmArrival& arrival) {
  return std::make_unique<Direct>(task, arrival);
}

}  // namespace evenkeel::internal
