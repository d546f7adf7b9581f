// Launches one step's buckets: in index order, each as soon as it is ready, none before the gate is open.
//
//   ready in any order  --BucketReady()-->  waits for its turn and the gate  --Open()-->  issued on the channel  -->
//   Wait()
//
// The gate is the step's agreement: until all ranks' records are in, nobody knows the divisor, or that all ranks are
// about to reduce the same. The user's thread does not wait for it; whoever opens the gate launches what has
// gathered.
//
// Threads: thread-safe.

#ifndef EVENKEEL_BUCKET_INTERNAL_BUCKET_LAUNCHER_H_
#define EVENKEEL_BUCKET_INTERNAL_BUCKET_LAUNCHER_H_

#include <memory>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "evenkeel/comm/communicator.h"

namespace evenkeel {

// When a bucket of a step was ready, launched and reduced; and how many gradients of the step there were at its launch.
struct BucketTimes {
  absl::Time ready = absl::InfiniteFuture();
  absl::Time launched = absl::InfiniteFuture();
  absl::Time reduced = absl::InfiniteFuture();
  int gradients_at_launch = 0;
};

class BucketLauncher {
 public:
  struct Bucket {
    Collective what;
    TensorView data;
    bool contributes = true;
  };

  BucketLauncher(Channel* channel, std::vector<Bucket> buckets);

  void BucketReady(int bucket);
  // Lets buckets go; sums are multiplied by `scale`. Only the first call counts.
  void Open(double scale);
  // For BucketTimes only: one more gradient of this step is there.
  void CountGradient();

  // Waits for every bucket in order, and until it is known that all ranks have launched the same, where the transport
  // does not see to that; all must be ready and the gate open.
  absl::Status Wait();
  std::vector<BucketTimes> times() const;

 private:
  void LaunchReady() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  Channel* const channel_;
  const std::vector<Bucket> buckets_;
  mutable absl::Mutex mutex_;
  bool open_ ABSL_GUARDED_BY(mutex_) = false;
  double scale_ ABSL_GUARDED_BY(mutex_) = 1.0;
  std::vector<bool> ready_ ABSL_GUARDED_BY(mutex_);
  std::vector<Work> works_ ABSL_GUARDED_BY(mutex_);  // Of launched buckets; its size is the next to launch.
  Work comparison_ ABSL_GUARDED_BY(mutex_);          // Begins when the last one is launched.
  std::vector<BucketTimes> times_ ABSL_GUARDED_BY(mutex_);
  int gradients_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace evenkeel

#endif  // EVENKEEL_BUCKET_INTERNAL_BUCKET_LAUNCHER_H_
