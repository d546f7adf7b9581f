// Decides what a step issues and when: the pipeline of a step's buckets behind its gate, and the
// buckets that no rank uses and that stay.
//
//   launcher.Begin(/*measures_ends=*/false);        // a step's pipeline, its gate closed
//   EK_RETURN_IF_ERROR(launcher.BucketReady(3));    // packed, and on its way in its turn
//   launcher.Open(scale);                           // also from the control thread: pipeline()
//   launcher.Forget();                              // after the step, or in the middle of it
//
// Threads: BucketReady() is thread-safe; the rest is for the thread that runs steps.

#ifndef EVENKEEL_BUCKET_REDUCER_LAUNCHER_H_
#define EVENKEEL_BUCKET_REDUCER_LAUNCHER_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"
#include "evenkeel/bucket/reducer/bucket_pipeline.h"
#include "evenkeel/bucket/reducer/reducer_core.h"
#include "evenkeel/bucket/reducer/unused_agreement.h"
#include "evenkeel/comm/base/worker_thread.h"

namespace evenkeel {

class Launcher {
 public:
  explicit Launcher(const ReducerCore* core) : core_(*core) {}

  absl::Status Init();
  // Starts or ends the thread, as the reduction needs one.
  void MakeWorker();
  absl::Status ReplaceGroup();
  // The agreement on unused parameters, for a schedule; none without skip_unused_buckets.
  std::optional<Collective> unused() const;

  void Begin(bool measures_ends);
  // A step that this rank shadows: all buckets are ready, with what it had accumulated.
  absl::Status BeginShadow();
  bool has_begun() const { return pipeline_ != nullptr; }
  const std::shared_ptr<BucketPipeline>& pipeline() const { return pipeline_; }
  absl::Status BucketReady(int bucket, bool contributes = true);
  // `uses`: by parameter, not zero where this rank has a gradient, or will have one. Only with
  // skip_unused_buckets, once in a step.
  bool MustAgreeOnUnused() const { return unused_ != nullptr && !unused_->has_begun(); }
  void AgreeOnUnused(absl::Span<const uint8_t> uses, bool contributes);
  absl::Status WaitForUnused();
  void Forget();

 private:
  void MakePipeline(std::vector<bool> contributes, bool measures_ends);

  const ReducerCore& core_;
  std::unique_ptr<UnusedAgreement> unused_;  // With skip_unused_buckets.
  absl::Mutex packing_;  // On a device buckets become ready in the order in which they are packed.
  std::shared_ptr<BucketPipeline> pipeline_;  // The current step's.
  // The thread of a reduction that has one. Last: it ends before the members that it uses.
  std::unique_ptr<internal::WorkerThread> worker_;
};

}  // namespace evenkeel

#endif  // EVENKEEL_BUCKET_REDUCER_LAUNCHER_H_
