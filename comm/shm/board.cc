// The file consists of a head, the ranks' bells, and then pages of entries, each followed by the
// places of these entries. So all ranks find an entry and a place by their number alone.

#include "evenkeel/comm/shm/board.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "evenkeel/comm/base/clock.h"
#include "evenkeel/comm/status.h"

namespace evenkeel::internal {
namespace {

// How often to look again before ringing: a thread that has just issued its operation is about to
// wait for it, and then looks by itself. Ringing costs both processes some ten times as much.
constexpr int kGracePauses = 100;

constexpr int64_t kRingBytes = kShmSlots * kShmSlotBytes;

int64_t WholePages(int64_t bytes) { return (bytes + PageBytes() - 1) / PageBytes() * PageBytes(); }

// A place consists of seats for all ranks, and their rings. Memory is allocated only for the parts
// that a lane needs.
int64_t SeatsBytes(int world_size) {
  return WholePages(static_cast<int64_t>(sizeof(ShmSeat)) * std::max(2, world_size));
}
int64_t PlaceBytes(int world_size) {
  return SeatsBytes(world_size) + std::max(2, world_size) * kRingBytes;
}

}  // namespace

// Only the rank that holds the lock accesses the entries, and the other fields here.
struct alignas(64) ShmBoard::Head {
  std::atomic<uint32_t> is_locked;
  int64_t places;  // The number of entries in the table.
  uint64_t uses;   // The number of uses of all places so far.
};
struct alignas(64) ShmBoard::Bell {
  std::atomic<uint32_t> rung;
  std::atomic<uint32_t> has_ended;  // Its rank.
};
// The current use of a place, in the table of all places.
struct ShmBoard::Entry {
  uint64_t key;
  uint64_t use;
  int64_t ranks;  // Ranks that have joined and not left; 0: it is free, with seats reset.
};

void ShmSeat::Reset() {
  for (std::atomic<uint64_t>* const counter :
       {&arrived, &done, &published, &reduced, &taken, &claimed, &finished, &tags_known})
    counter->store(0, std::memory_order_relaxed);
  watch.store(static_cast<uint32_t>(ShmWatch::kAwake), std::memory_order_relaxed);
}

absl::StatusOr<std::shared_ptr<SharedMemory>> ShmBoard::CreateMemory(int world_size) {
  return SharedMemory::CreateGrowing(
      static_cast<int64_t>(sizeof(Head) + world_size * sizeof(Bell)));
}

ShmBoard::ShmBoard(std::shared_ptr<SharedMemory> memory, int world_size)
    : memory_(std::move(memory)), world_size_(world_size) {}

ShmBoard::Head& ShmBoard::head() const { return *reinterpret_cast<Head*>(memory_->data()); }

ShmBoard::Bell& ShmBoard::BellOf(int rank) const {
  return reinterpret_cast<Bell*>(memory_->data() + sizeof(Head))[rank];
}

absl::StatusOr<ShmBoard::Entry*> ShmBoard::EntryAt(int64_t index) {
  EK_ASSIGN_OR_RETURN(std::byte* const page, Part(PageOfEntries(index), PageBytes()));
  return reinterpret_cast<Entry*>(page) + index % EntriesPerPage();
}

int64_t ShmBoard::EntriesPerPage() { return PageBytes() / static_cast<int64_t>(sizeof(Entry)); }

int64_t ShmBoard::PageOfEntries(int64_t index) const {
  const int64_t block = PageBytes() + EntriesPerPage() * PlaceBytes(world_size_);
  return memory_->bytes() + index / EntriesPerPage() * block;
}

int64_t ShmBoard::OffsetOf(const ShmPlace& place) const {
  return PageOfEntries(place.index) + PageBytes() +
         place.index % EntriesPerPage() * PlaceBytes(world_size_);
}

absl::StatusOr<std::optional<ShmPlace>> ShmBoard::Join(uint64_t key, absl::Duration patience) {
  if (!Lock(patience)) return std::nullopt;
  const absl::Cleanup unlock = [this] { Unlock(); };
  int64_t free = head().places;
  Entry* entries = nullptr;
  for (int64_t index = 0; index < head().places; ++index) {
    const int64_t in_page = index % EntriesPerPage();
    if (in_page == 0) {
      EK_ASSIGN_OR_RETURN(entries, EntryAt(index));
    }
    Entry& entry = entries[in_page];
    if (entry.ranks == 0) {
      free = std::min(free, index);
    } else if (entry.key == key) {
      ++entry.ranks;
      return ShmPlace{index, entry.use};
    }
  }
  EK_ASSIGN_OR_RETURN(Entry* const entry, EntryAt(free));
  *entry = {.key = key, .use = ++head().uses, .ranks = 1};
  head().places = std::max(head().places, free + 1);
  return ShmPlace{free, entry->use};
}

absl::StatusOr<bool> ShmBoard::Leave(const ShmPlace& place, std::span<ShmSeat> seats,
                                     absl::Duration patience) {
  EK_ASSIGN_OR_RETURN(Entry* const entry, EntryAt(place.index));
  if (!Lock(patience)) return false;
  if (--entry->ranks == 0) {
    for (ShmSeat& seat : seats) seat.Reset();
  }
  Unlock();
  return true;
}

absl::StatusOr<ShmSeat*> ShmBoard::Seats(const ShmPlace& place, size_t count) {
  EK_ASSIGN_OR_RETURN(
      std::byte* const seats,
      Part(OffsetOf(place), WholePages(static_cast<int64_t>(count * sizeof(ShmSeat)))));
  return reinterpret_cast<ShmSeat*>(seats);
}

absl::StatusOr<std::byte*> ShmBoard::Ring(const ShmPlace& place, int seat) {
  return Part(OffsetOf(place) + SeatsBytes(world_size_) + seat * kRingBytes, kRingBytes);
}

absl::StatusOr<std::byte*> ShmBoard::Part(int64_t offset, int64_t bytes) {
  absl::MutexLock lock(&mutex_);
  std::shared_ptr<SharedMemory>& part = parts_[{offset, bytes}];
  if (part == nullptr) {
    EK_ASSIGN_OR_RETURN(part, memory_->Part(offset, bytes));
  }
  return part->data();
}

bool ShmBoard::Lock(absl::Duration patience) {
  const absl::Time until = SteadyNow() + patience;
  while (head().is_locked.exchange(1, std::memory_order_acquire) != 0) {
    if (SteadyNow() >= until) return false;
    sched_yield();
  }
  return true;
}

void ShmBoard::Unlock() { head().is_locked.store(0, std::memory_order_release); }

std::atomic<uint32_t>& ShmBoard::bell(int rank) const { return BellOf(rank).rung; }

void ShmBoard::SayEnded(int rank) {
  BellOf(rank).has_ended.store(1);
  std::atomic_thread_fence(std::memory_order_seq_cst);  // Orders plain memory accesses that follow.
}

bool ShmBoard::has_ended(int rank) const {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  return BellOf(rank).has_ended.load() != 0;
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
