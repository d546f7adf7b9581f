// The last collectives of a rank, with times and states, in a ring: what happened, when something has gone wrong.
//
//   FlightRecorder& recorder = comm.flight();
//   for (const FlightEntry& entry : recorder.Entries()) ...              // oldest first
//   EK_RETURN_IF_ERROR(comm.DumpFlight("/tmp/job/rank3.json"));           // on demand; on failure see FlightOptions
//
// Recording costs two locks and one copy of a small struct per collective; nothing is formatted until a dump. The dump
// is one JSON object (comm/flight_dump.h); `//tools:flight` merges those of all ranks into one account.
//
// Memory:  capacity * about 150 bytes. An operation that is still open is kept, whatever has come after it; it goes
//          when it ends, if its place in the ring is taken by then.
// Threads: thread-safe.
// Source:  PyTorch's NCCL flight recorder has this for one backend; here it is the communicator's, so every backend's.

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
  int64_t number = 0;    // Of all that this rank has issued in this group, from 0.
  uint64_t channel = 0;  // Channel::id().
  int64_t sequence = 0;  // Position in the channel; of send and recv, among those of the pair and direction.
  Collective what;
  absl::Time issued;
  absl::Time ended = absl::InfiniteFuture();  // Infinite: still open.
  absl::StatusCode code = absl::StatusCode::kOk;
  absl::Time deadline = absl::InfiniteFuture();

  bool is_open() const { return ended == absl::InfiniteFuture(); }
};

class FlightRecorder {
 public:
  // At least one entry is kept.
  explicit FlightRecorder(size_t capacity);

  // Records that an operation was issued, at `entry.issued`; its number, for End().
  int64_t Begin(const FlightEntry& entry);
  // Only the first call for a number counts.
  void End(int64_t number, const absl::Status& status);

  // While it is open, and mostly for a while after.
  std::optional<FlightEntry> Get(int64_t number) const;
  // Copies, oldest first.
  std::vector<FlightEntry> Entries() const;
  std::vector<FlightEntry> OpenEntries() const;
  // The last `count` collectives of a channel (send and recv left out), oldest first.
  std::vector<FlightEntry> Recent(uint64_t channel, size_t count) const;
  int64_t issued() const;

 private:
  const FlightEntry* Find(int64_t number) const ABSL_SHARED_LOCKS_REQUIRED(mutex_);  // In the ring.
  // Calls `visit` with the entries, oldest first; `visit_back` newest first, until it answers false.
  template <typename Visit>
  void ForEach(Visit visit) const ABSL_SHARED_LOCKS_REQUIRED(mutex_);
  template <typename Visit>
  void ForEachBack(Visit visit) const ABSL_SHARED_LOCKS_REQUIRED(mutex_);

  const size_t capacity_;
  mutable absl::Mutex mutex_;
  int64_t next_ ABSL_GUARDED_BY(mutex_) = 0;
  std::vector<FlightEntry> ring_ ABSL_GUARDED_BY(mutex_);  // Entry n at n % capacity; grows until it is full.
  // Open ones that the ring has no place for any more, by number: all of them older than the ring's.
  std::map<int64_t, FlightEntry> older_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace evenkeel

#endif  // EVENKEEL_COMM_FLIGHT_RECORDER_H_
