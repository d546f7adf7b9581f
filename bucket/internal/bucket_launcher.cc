#include "evenkeel/bucket/internal/bucket_launcher.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"

namespace evenkeel {

BucketLauncher::BucketLauncher(Channel* channel, std::vector<Bucket> buckets)
    : channel_(channel), buckets_(std::move(buckets)), ready_(buckets_.size(), false), times_(buckets_.size()) {}

void BucketLauncher::BucketReady(int bucket) {
  absl::MutexLock lock(&mutex_);
  ready_[bucket] = true;
  times_[bucket].ready = absl::Now();
  LaunchReady();
}

void BucketLauncher::Open(double scale) {
  absl::MutexLock lock(&mutex_);
  if (open_) return;
  open_ = true;
  scale_ = scale;
  LaunchReady();
}

void BucketLauncher::CountGradient() {
  absl::MutexLock lock(&mutex_);
  ++gradients_;
}

void BucketLauncher::LaunchReady() {
  while (open_ && works_.size() < buckets_.size() && ready_[works_.size()]) {
    const size_t next = works_.size();
    const Bucket& bucket = buckets_[next];
    times_[next].launched = absl::Now();
    times_[next].gradients_at_launch = gradients_;
    works_.push_back(channel_->Issue(bucket.what, {bucket.data}, {bucket.data},
                                     {.scale = scale_, .contributes = bucket.contributes}));
    if (works_.size() == buckets_.size()) comparison_ = channel_->CompareIssued();
  }
}

absl::Status BucketLauncher::Wait() {
  absl::Status first;
  for (size_t b = 0; b < buckets_.size(); ++b) {  // All of them, also after a failure: they use the buckets' memory.
    Work work;
    {
      absl::MutexLock lock(&mutex_);
      if (b >= works_.size()) {
        first.Update(absl::InternalError(absl::StrCat("bucket ", b, " was never launched")));
        break;
      }
      work = works_[b];
    }
    first.Update(work.Wait());
    absl::MutexLock lock(&mutex_);
    times_[b].reduced = absl::Now();
  }
  Work comparison;
  {
    absl::MutexLock lock(&mutex_);
    comparison = comparison_;
  }
  first.Update(comparison.Wait());
  return first;
}

std::vector<BucketTimes> BucketLauncher::times() const {
  absl::MutexLock lock(&mutex_);
  return times_;
}

}  // namespace evenkeel
