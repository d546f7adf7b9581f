// Where the kernels of a simulated NCCL communicator's ranks meet: on their streams' threads, which
// they block.
//
//   // returns once all its calls have met those of the other ranks, or rank aborts
//   meeting->Run(rank, kernel);
//
// As NCCL does it: the n-th collective of a rank meets the n-th of the others, a send the receive
// at its place between the two ranks, and nothing says what they are. Equal calls give the result;
// different ones of equal size complete, with garbage; others wait for ever. So do registered
// buffers that meet ones which are not: garbage.
//
// Threads: thread-safe. After Abort(rank) nothing touches that rank's buffers.

#ifndef EVENKEEL_COMM_TESTING_SIMULATED_NCCL_MEETING_H_
#define EVENKEEL_COMM_TESTING_SIMULATED_NCCL_MEETING_H_

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <set>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "evenkeel/comm/nccl/api.h"

namespace evenkeel::internal {

// A call whose reduction has been resolved.
struct SimulatedCall {
  NcclCall call;       // `op` is one of NcclReduction.
  double scale = 1.0;  // Multiplies the values first.
  bool is_registered = false;
};

class SimulatedNcclMeeting {
 public:
  explicit SimulatedNcclMeeting(int world_size) : world_size_(world_size), aborted_(world_size) {}

  int world_size() const { return world_size_; }
  // Takes the places of a kernel's calls, in the order of launches.
  struct Kernel {
    std::vector<SimulatedCall> calls;
    std::vector<int64_t> places;
  };
  std::shared_ptr<Kernel> Launch(int rank, std::vector<SimulatedCall> calls);
  void Run(int rank, const std::shared_ptr<Kernel>& kernel);
  void Abort(int rank);
  // How many meetings of different calls have given garbage.
  int64_t garbage() const;

 private:
  using Lane = std::pair<int, int>;  // From, to.
  struct Place {
    std::map<int, SimulatedCall> calls;  // By rank. Of messages: two.
    bool is_done = false;
  };

  Lane LaneOf(int rank, const NcclCall& call) const;
  Place& PlaceOf(int rank, const SimulatedCall& call, int64_t place)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool IsDone(int rank, const Kernel& kernel) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Arrive(int rank, const SimulatedCall& call, int64_t place)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Meet(Place& place) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const int world_size_;
  mutable absl::Mutex mutex_;
  std::map<Lane, std::map<int, int64_t>> next_
      ABSL_GUARDED_BY(mutex_);  // By rank. {-1, -1}: collectives.
  std::map<Lane, std::map<int64_t, Place>> places_ ABSL_GUARDED_BY(mutex_);
  std::vector<bool> aborted_ ABSL_GUARDED_BY(mutex_);
  int64_t garbage_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_TESTING_SIMULATED_NCCL_MEETING_H_
