// Where the ranks of one host tell each other how far they are: a piece of shared memory that all
// of them write.
//
//   ShmSeat* seats = board.Lane(key);  // one per rank of the lane; the same on all ranks
//   seats[me].published.store(chunk + 1, std::memory_order_release);
//   board.Notify(seats, ranks, me);  // wakes who sleeps for this lane; else costs a load per rank
//
// A lane is what runs in order: a channel's collectives, or its messages from one rank to another;
// those with tags have a second lane, whose order the sender chooses (ShmTags).
// Everything in a seat counts up from the lane's first operation on, so nothing is ever reset, and
// a rank that looks late sees a larger number, never an older one.
//
// Source:  eventcounts over futexes; the counters that processes spin on lie on one cache line per
//          rank.
// Threads: any, of any process that has the memory.

#ifndef EVENKEEL_COMM_SHM_BOARD_H_
#define EVENKEEL_COMM_SHM_BOARD_H_

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <type_traits>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "evenkeel/comm/base/shared_memory.h"
#include "evenkeel/comm/collective.h"

namespace evenkeel::internal {

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
  // Where its input lies in registered memory, view by view.
  struct Extent {
    uint64_t memory = 0;
    int64_t offset = 0;
    int64_t bytes = 0;
  };
  int32_t extents = 0;
  std::array<Extent, kExtents> extent = {};
};
static_assert(std::is_trivially_copyable_v<ShmHeader>);

// The thread that polls a lane for a rank.
enum class ShmWatch : uint32_t {
  kAwake,       // A thread does, or nobody need to.
  kRingThread,  // Nobody: ring for the rank's communication thread.
  kRingWaiter,  // Nobody: ring for the thread that waits for an operation of this lane.
};

struct ShmSeat {
  // By the rank whose seat it is, but for `watch`, which who rings sets back.
  alignas(64) std::atomic<uint64_t> arrived;  // Operations of the lane that it has come to.
  std::atomic<uint64_t> done;  // ... that it has ended, and of which it reads nothing any more.
  std::atomic<uint64_t> published;  // Chunks that it has put where others can read them.
  std::atomic<uint64_t> reduced;    // ... of which it has reduced its piece.
  std::atomic<uint64_t> taken;      // ... of which it has read all that it reads of others' memory.
  // For the operations with even and odd number: a hash of the properties that all ranks must agree
  // on, see ShmGist.
  std::atomic<uint64_t> gist[2];
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
  alignas(64) ShmHeader headers[2];
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

class ShmBoard {
 public:
  static int64_t BytesFor(int world_size);
  // `memory` is zeroed, or has been given to all ranks by the one that Made() it.
  ShmBoard(std::shared_ptr<SharedMemory> memory, int world_size);

  // `seats` of a lane, of all ranks or of a sender and a receiver; found by a key that is the same
  // on all ranks, not 0.
  // ResourceExhausted: there are more lanes than the board was made for.
  absl::StatusOr<ShmSeat*> Lane(uint64_t key);

  // For a rank's communication thread.
  std::atomic<uint32_t>& bell(int rank) const;

  // A rank that has given up says so before it touches the memory of what was in flight. Who has
  // read that memory looks here behind it, before it takes what it has read for true.
  void SayEnded(int rank);
  bool has_ended(int rank) const;

  // To be called after a seat of the lane has changed; `ranks`: of each seat.
  void Notify(ShmSeat* seats, std::span<const int> ranks, int me) const;

 private:
  const std::shared_ptr<SharedMemory> memory_;
  const int world_size_;
  const int64_t max_lanes_;
};

// Sleeps until `bell` is no longer `seen`, at most so long; may come back for no reason.
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
