// The last collectives of a rank, with times and states, in a ring: a record for the analysis of a
// failure.
//
//   FlightRecorder& recorder = comm.flight();
//   for (const FlightEntry& entry : recorder.Entries()) ...              // oldest first
//   // on demand; on failure see FlightOptions
//   EK_RETURN_IF_ERROR(comm.DumpFlight("/tmp/job/rank3.json"));
//
// Recording costs two locks and one copy of a small struct per collective; nothing is formatted
// before a dump. The dump is one JSON object (comm/flight_dump.h); `//tools:flight` merges those of
// all ranks.
//
// Memory:  capacity * about 150 bytes. An open operation is kept, however many came after it; it is
//          dropped when it ends, if its place in the ring is taken by then.
// Threads: thread-safe.
// Source:  PyTorch's NCCL flight recorder has this for one backend. Here it belongs to the
//          communicator, so all backends have it.

#ifndef EVENKEEL_COMM_FLIGHT_RECORDER_H_
#define EVENKEEL_COMM_FLIGHT_RECORDER_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "evenkeel/comm/collective.h"

namespace evenkeel {

struct FlightEntry {
  int64_t number = 0;    // The number among all operations of this rank in this group, from 0.
  uint64_t channel = 0;  // Channel::id().
  int64_t sequence =
      0;  // Position in the channel; for send and recv, among those of the pair, direction and tag.
  Collective what;
  absl::Time issued;                          // Times are those of SteadyNow() (comm/base/clock.h).
  absl::Time ended = absl::InfiniteFuture();  // Infinite: still open.
  absl::StatusCode code = absl::StatusCode::kOk;
  absl::Time deadline = absl::InfiniteFuture();

  bool is_open() const { return ended == absl::InfiniteFuture(); }
};

class FlightRecorder {
 public:
  // At least one entry is kept.
  explicit FlightRecorder(size_t capacity);

  // Records an operation that was issued at `entry.issued`. Returns its number, for End().
  int64_t Begin(const FlightEntry& entry);
  // Sets the peer of a receive from any rank, once it is known, and the position among those of the
  // pair.
  void SetPeer(int64_t number, int peer, int64_t sequence);
  // Only the first call for a number counts.
  void End(int64_t number, const absl::Status& status);

  // Returns the entry while the operation is open, and usually for a while after its end.
  std::optional<FlightEntry> Get(int64_t number) const;
  // Returns copies, oldest first.
  std::vector<FlightEntry> Entries() const;
  std::vector<FlightEntry> OpenEntries() const;
  // Returns the last `count` collectives of a channel without sends and receives, oldest first.
  std::vector<FlightEntry> Recent(uint64_t channel, size_t count) const;
  int64_t issued() const;

 private:
  // Searches the ring only.
  const FlightEntry* Find(int64_t number) const ABSL_SHARED_LOCKS_REQUIRED(mutex_);
  // Call `visit` with the entries: oldest first; and newest first, until it returns false.
  template <typename Visit>
  void ForEach(Visit visit) const ABSL_SHARED_LOCKS_REQUIRED(mutex_);
  template <typename Visit>
  void ForEachBack(Visit visit) const ABSL_SHARED_LOCKS_REQUIRED(mutex_);

  const size_t capacity_;
  mutable absl::Mutex mutex_;
  int64_t next_ ABSL_GUARDED_BY(mutex_) = 0;
  std::vector<FlightEntry> ring_
      ABSL_GUARDED_BY(mutex_);  // Entry n is at n % capacity; grows until it is full.
  // Open operations that were overwritten in the ring, by number: all of them are older than the
  // ring's.
  std::map<int64_t, FlightEntry> older_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace evenkeel

#endif  // EVENKEEL_COMM_FLIGHT_RECORDER_H_
