// Decides what a step issues and when: the collectives of each plan, the pipeline of a step's
// buckets behind its gate, and the buckets that no rank uses and that stay.
//
//   EK_RETURN_IF_ERROR(launcher.OnPlan());          // for each plan: collectives and channels
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
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"
#include "evenkeel/bucket/reducer/bucket_pipeline.h"
#include "evenkeel/bucket/reducer/bucket_storage.h"
#include "evenkeel/bucket/reducer/device_side.h"
#include "evenkeel/bucket/reducer/reducer.h"
#include "evenkeel/bucket/reducer/unused_agreement.h"
#include "evenkeel/comm/base/worker_thread.h"

namespace evenkeel {

// State that the parts of a reducer share: its constructor's arguments, its group, and the plan in
// force. The thread that runs steps changes it, between steps.
struct ReducerCore {
  bool HasLivingGroup() const { return !group.expired(); }

  Communicator* comm;
  std::weak_ptr<const void> group;  // Expires with the group.
  ParameterSet* const params;
  std::shared_ptr<const std::string> attached;  // To the parameters.
  const std::string name;
  const ReducerOptions options;
  bool has_own_reduction;
  std::unique_ptr<BucketReduction> reduction;
  std::unique_ptr<DeviceSide> device;  // Null on the CPU.
  std::vector<ParamSpec> specs;

  PlanState state;
  std::unique_ptr<BucketStorage> storage;
  std::vector<int> sparse;  // Trained parameters whose rows are gathered.
};

class Launcher {
 public:
  explicit Launcher(ReducerCore* core) : core_(*core) {}

  absl::Status Init();
  // Starts or ends the thread, as the reduction needs one.
  void MakeWorker();
  absl::Status ReplaceGroup();
  // The reduction's collectives for the plan, and their channels.
  absl::Status OnPlan();
  // The same, if the reduction has come to need others.
  absl::Status Refresh();
  const Schedule& schedule() const { return schedule_; }
  Channel& channel() const { return *plan_->channels[0]; }  // For the first round.

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
  ReducerCore& core_;
  Schedule schedule_;
  std::shared_ptr<const BucketPipeline::Plan> plan_;
  int64_t collectives_version_ = 0;          // The reduction's version when `plan_` was made.
  std::unique_ptr<UnusedAgreement> unused_;  // With skip_unused_buckets.
  absl::Mutex packing_;  // On a device buckets become ready in the order in which they are packed.
  std::shared_ptr<BucketPipeline> pipeline_;  // The current step's.
  // The thread of a reduction that has one. Last: it ends before the members that it uses.
  std::unique_ptr<internal::WorkerThread> worker_;
};

}  // namespace evenkeel

#endif  // EVENKEEL_BUCKET_REDUCER_LAUNCHER_H_
