#include "evenkeel/comm/shm/board.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <utility>

#include "absl/strings/str_cat.h"

namespace evenkeel::internal {
namespace {

struct alignas(64) Bell {
  std::atomic<uint32_t> rung;
  std::atomic<uint32_t> has_ended;  // Its rank.
};
struct alignas(64) LaneName {
  std::atomic<uint64_t> key;
};

// The limit on the memory of all lanes. Two ranks have some thousands of lanes, 64 ranks 128.
constexpr int64_t kLaneBytes = 4 << 20;
constexpr int64_t kMinLanes = 128;

int64_t LaneBytes(int world_size) {
  return static_cast<int64_t>(sizeof(LaneName) + sizeof(ShmSeat) * std::max(2, world_size));
}

int64_t MaxLanes(int world_size) { return std::max(kMinLanes, kLaneBytes / LaneBytes(world_size)); }

// How long to look again before a thread is rung for that is about to look by itself: one that has
// just issued its operation, and will wait for it. Ringing costs its process, and this one, some
// ten times as much.
constexpr int kGracePauses = 100;

}  // namespace

int64_t ShmBoard::BytesFor(int world_size) {
  return static_cast<int64_t>(sizeof(Bell)) * world_size +
         MaxLanes(world_size) * LaneBytes(world_size);
}

ShmBoard::ShmBoard(std::shared_ptr<SharedMemory> memory, int world_size)
    : memory_(std::move(memory)), world_size_(world_size), max_lanes_(MaxLanes(world_size)) {}

absl::StatusOr<ShmSeat*> ShmBoard::Lane(uint64_t key) {
  std::byte* const lanes = memory_->data() + sizeof(Bell) * world_size_;
  const int64_t lane_bytes = LaneBytes(world_size_);
  for (int64_t probe = 0; probe < max_lanes_; ++probe) {
    std::byte* const lane = lanes + (key + probe) % max_lanes_ * lane_bytes;
    auto& name = reinterpret_cast<LaneName*>(lane)->key;
    uint64_t seen = name.load(std::memory_order_acquire);
    if (seen == 0 && name.compare_exchange_strong(seen, key)) seen = key;
    if (seen == key) return reinterpret_cast<ShmSeat*>(lane + sizeof(LaneName));
  }
  return absl::ResourceExhaustedError(absl::StrCat(
      "the group's shared memory has place for ", max_lanes_,
      " lanes (channels that were used, and pairs of ranks that sent messages in them)"));
}

std::atomic<uint32_t>& ShmBoard::bell(int rank) const {
  return reinterpret_cast<Bell*>(memory_->data())[rank].rung;
}

void ShmBoard::SayEnded(int rank) {
  reinterpret_cast<Bell*>(memory_->data())[rank].has_ended.store(1);
  std::atomic_thread_fence(std::memory_order_seq_cst);  // Orders plain memory accesses that follow.
}

bool ShmBoard::has_ended(int rank) const {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  return reinterpret_cast<const Bell*>(memory_->data())[rank].has_ended.load() != 0;
}

void ShmBoard::Notify(ShmSeat* seats, std::span<const int> ranks, int me) const {
  // Either the thread that checks again after it has set `watch` sees the earlier stores, or this
  // thread sees `watch`.
  std::atomic_thread_fence(std::memory_order_seq_cst);
  for (int i = 0; i < static_cast<int>(ranks.size()); ++i) {
    if (i == me) continue;
    std::atomic<uint32_t>& watch = seats[i].watch;
    auto seen = static_cast<ShmWatch>(watch.load(std::memory_order_relaxed));
    for (int pause = 0; seen == ShmWatch::kRingThread && pause < kGracePauses; ++pause) {
      Pause();
      seen = static_cast<ShmWatch>(watch.load(std::memory_order_relaxed));
    }
    if (seen == ShmWatch::kAwake) continue;
    seen = static_cast<ShmWatch>(watch.exchange(static_cast<uint32_t>(ShmWatch::kAwake)));
    if (seen == ShmWatch::kRingThread) RingBell(bell(ranks[i]));
    if (seen == ShmWatch::kRingWaiter) RingBell(seats[i].bell);
  }
}

void AwaitBell(const std::atomic<uint32_t>& bell, uint32_t seen, absl::Duration at_most) {
  const timespec timeout =
      absl::ToTimespec(std::clamp(at_most, absl::ZeroDuration(), absl::Seconds(1)));
  syscall(SYS_futex, &bell, FUTEX_WAIT, seen, &timeout, nullptr, 0);
}

void RingBell(std::atomic<uint32_t>& bell) {
  bell.fetch_add(1);
  syscall(SYS_futex, &bell, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace evenkeel::internal
