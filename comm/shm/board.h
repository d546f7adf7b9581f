// Shared memory in which the ranks of one host publish their progress: all of them write it.
//
//   EK_ASSIGN_OR_RETURN(auto place, board.Join(key, patience));  // the same on all ranks
//   EK_ASSIGN_OR_RETURN(ShmSeat* seats, board.Seats(*place, ranks.size()));
//   seats[me].published.store(chunk + 1, std::memory_order_release);
//   board.Notify(seats, ranks, me);  // wakes threads that sleep; else costs a load per rank
//   board.Leave(*place, {seats, ranks.size()}, patience);  // when it is idle
//
// A lane is a sequence of operations that run in order: a channel's collectives, or its messages
// from one rank to another; messages with tags have a second lane, whose order the sender chooses
// (ShmTags). All counters of a seat only grow from the lane's first operation on, so a rank that
// looks late sees a larger number, never an older one.
//
// A lane has a place while ranks use it: from the first Join() until each rank that has joined has
// left. A rank may leave when all operations that it has issued have ended. No operation ends
// before all ranks of the lane have reached it, so all ranks have ended the same operations when
// the last rank leaves; in the lane's next place they count from zero. A rank that joins again
// before that continues with its counts. The number of places has no limit: the memory grows with
// it, and a place, once allocated, serves one lane after the other.
//
// Source:  eventcounts over futexes; the counters that processes spin on lie on one cache line per
//          rank.
// Threads: any, of any process that has the memory.

#ifndef EVENKEEL_COMM_SHM_BOARD_H_
#define EVENKEEL_COMM_SHM_BOARD_H_

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <type_traits>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "evenkeel/comm/base/shared_memory.h"
#include "evenkeel/comm/collective.h"

namespace evenkeel::internal {

inline constexpr int64_t kShmSlotBytes = 256 << 10;
inline constexpr int kShmSlots = 4;  // A rank's ring of slots in a lane.

// The description of a rank's operation beyond its gist: read where ranks disagree, or read each
// other's memory.
struct ShmHeader {
  static constexpr int kParts = 8;
  static constexpr int kExtents = 32;
  Collective what;
  double scale = 1.0;
  uint64_t step_of = 0;
  int32_t parts = 0;                             // How many views.
  std::array<int64_t, kParts> part_counts = {};  // The first ones' sizes, in elements.
  // The locations of its input in registered memory, view by view.
  struct Extent {
    uint64_t memory = 0;
    int64_t offset = 0;
    int64_t bytes = 0;
  };
  int32_t extents = 0;
  std::array<Extent, kExtents> extent = {};
};
static_assert(std::is_trivially_copyable_v<ShmHeader>);

// A value for each operation of a lane, kept for two: while a rank writes that of operation n,
// slower ranks may still read that of n - 1. It takes the place of that of n - 2, so a rank writes
// it only when all others have ended EndedBefore(n) operations.
template <typename T>
class ShmLatestTwo {
 public:
  T& Of(uint64_t operation) { return values_[operation % 2]; }
  const T& Of(uint64_t operation) const { return values_[operation % 2]; }
  static uint64_t EndedBefore(uint64_t operation) { return operation < 2 ? 0 : operation - 1; }

 private:
  T values_[2];
};

// The thread that polls a lane for a rank.
enum class ShmWatch : uint32_t {
  kAwake,       // A thread polls it, or none needs to.
  kRingThread,  // No thread polls it: ring for the rank's communication thread.
  kRingWaiter,  // No thread polls it: ring for the thread that waits for an operation of this lane.
};

struct ShmSeat {
  // Written by the rank whose seat it is; `watch` also by the rank that rings, which resets it.
  alignas(64) std::atomic<uint64_t> arrived;  // Operations of the lane that it has come to.
  std::atomic<uint64_t> done;  // Operations that it has ended, and of which it reads nothing more.
  std::atomic<uint64_t> published;  // Chunks that it has put where others can read them.
  std::atomic<uint64_t> reduced;    // Chunks of which it has reduced its piece.
  std::atomic<uint64_t> taken;      // Chunks of which it has read all that it needs of others.
  // A hash of the properties that all ranks must agree on, see ShmGist.
  ShmLatestTwo<std::atomic<uint64_t>> gists;
  std::atomic<uint32_t> watch;
  alignas(64) std::atomic<uint32_t> bell;  // For the waiter.
  // In the rank's share of an in-place reduction: blocks that some rank has begun, and ended.
  // Written by all ranks.
  alignas(64) std::atomic<uint64_t> claimed;
  std::atomic<uint64_t> finished;
  // In a lane of messages with tags: the tags of the receives, by the receiver; the number of
  // those, and of those that the sender has read, each by itself.
  static constexpr int kTags = 15;  // Two cache lines in all.
  alignas(64) std::atomic<uint64_t> tags_known;
  std::array<std::atomic<int64_t>, kTags> tags;
  alignas(64) ShmLatestTwo<ShmHeader> headers;

  // Restores the state before a lane's first operation.
  void Reset();
};
static_assert(std::atomic<uint64_t>::is_always_lock_free &&
              std::atomic<uint32_t>::is_always_lock_free);

// A gist's lowest bits say what differs between ranks that agree.
namespace ShmGist {
inline constexpr uint64_t kContributes = 1;
inline constexpr uint64_t kIsRegistered =
    2;  // Its input lies in registered memory, which others may read ...
inline constexpr uint64_t kIsWritable = 4;  // ... and write.
inline constexpr uint64_t kBits = 7;
}  // namespace ShmGist

// A lane's place: the number of its memory on the board.
struct ShmPlace {
  int64_t index = 0;
  uint64_t use = 0;  // Differs for each use of each place; not 0.

  friend bool operator==(const ShmPlace&, const ShmPlace&) = default;
};

class ShmBoard {
 public:
  // Makes the memory of a group. One rank calls it, and gives the memory to all.
  static absl::StatusOr<std::shared_ptr<SharedMemory>> CreateMemory(int world_size);
  ShmBoard(std::shared_ptr<SharedMemory> memory, int world_size);

  // Joins a lane, and returns its place. `key`: the same on all its ranks. Returns nothing if
  // another rank held the board's lock for all of `patience`: they hold it for a moment, or for
  // longer if they are stopped or die meanwhile.
  // Errors: those of SharedMemory::Part().
  absl::StatusOr<std::optional<ShmPlace>> Join(uint64_t key, absl::Duration patience);
  // Leaves a lane, and returns whether it has. All operations of this rank have ended, and none of
  // its threads uses the seats any more.
  absl::StatusOr<bool> Leave(const ShmPlace& place, std::span<ShmSeat> seats,
                             absl::Duration patience);

  // Return the memory of a place, which lives as long as the board: the seats of a lane, one for
  // each rank, or for a sender and a receiver; and a seat's ring of slots, with unspecified
  // contents.
  absl::StatusOr<ShmSeat*> Seats(const ShmPlace& place, size_t count);
  absl::StatusOr<std::byte*> Ring(const ShmPlace& place, int seat);

  // Returns the bell of a rank's communication thread.
  std::atomic<uint32_t>& bell(int rank) const;

  // A rank that gives up calls SayEnded() before it changes the memory of operations in flight. A
  // rank that has read that memory calls has_ended() before it uses what it has read.
  void SayEnded(int rank);
  bool has_ended(int rank) const;

  // Call it after a seat of the lane has changed. `ranks`: the rank of each seat.
  void Notify(ShmSeat* seats, std::span<const int> ranks, int me) const;

 private:
  struct Bell;
  struct Head;
  struct Entry;

  Head& head() const;
  Bell& BellOf(int rank) const;
  absl::StatusOr<Entry*> EntryAt(int64_t index);
  static int64_t EntriesPerPage();
  int64_t PageOfEntries(int64_t index) const;
  int64_t OffsetOf(const ShmPlace& place) const;
  absl::StatusOr<std::byte*> Part(int64_t offset, int64_t bytes);
  // Returns whether it has the lock.
  bool Lock(absl::Duration patience);
  void Unlock();

  const std::shared_ptr<SharedMemory> memory_;
  const int world_size_;

  absl::Mutex mutex_;
  // The parts of the memory that this process has mapped, by offset and size.
  std::map<std::pair<int64_t, int64_t>, std::shared_ptr<SharedMemory>> parts_
      ABSL_GUARDED_BY(mutex_);
};

// Sleeps until `bell` differs from `seen`, for at most this long; may return early.
void AwaitBell(const std::atomic<uint32_t>& bell, uint32_t seen, absl::Duration at_most);
void RingBell(std::atomic<uint32_t>& bell);

// Tells the processor that this is a loop that waits.
inline void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_SHM_BOARD_H_
