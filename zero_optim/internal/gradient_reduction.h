// Brings the ranks' own gradients to the owners of their parameters, for steps whose gradients
// nobody else reduced.
//
//   // asynchronous
//   EK_RETURN_IF_ERROR(reduction.Start(plan.owners, to_reduce, {.scale = 1.0 / world_size}));
//   for (int param : mine) EK_ASSIGN_OR_RETURN(TensorView gradient, reduction.Wait(param));
//   EK_RETURN_IF_ERROR(reduction.WaitAll());
//
// Gradients are copied into flat buckets, one list of buckets per owner, so the parameters' own
// gradients stay as they are. Behind a bucket's gradients travels one element per parameter that
// says whether a rank had a gradient of its own; so ranks may lack different ones, and a parameter
// without any is told from one whose gradients are zero.
//
// Devices: all is work on the updater's stream, which waits in place of the host. No flag travels
//          along: what no rank has is zeros, and who wants to know asks DeviceFlags. Wait for all
//          before a Start() that follows.
// Order:   every rank starts with the same owners, parameters and scale; buckets are issued in one
//          order.
// Threads: thread-compatible.

#ifndef EVENKEEL_ZERO_OPTIM_INTERNAL_GRADIENT_REDUCTION_H_
#define EVENKEEL_ZERO_OPTIM_INTERNAL_GRADIENT_REDUCTION_H_

#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "evenkeel/bucket/parameter_set.h"
#include "evenkeel/bucket/plan/planner.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/memory.h"
#include "evenkeel/comm/types.h"
#include "evenkeel/comm/work.h"
#include "evenkeel/zero_optim/internal/parameter_updater.h"
#include "evenkeel/zero_optim/internal/placement/shard_plan.h"
#include "evenkeel/zero_optim/partition.h"

namespace evenkeel::internal {

class GradientReduction {
 public:
  // All of them outlive it.
  GradientReduction(Communicator* comm, Channel* channel, const ParameterSet* params,
                    std::span<const ParamSpec> specs, Bytes cap, ParameterUpdater* updater);
  GradientReduction(const GradientReduction&) = delete;
  GradientReduction& operator=(const GradientReduction&) = delete;
  ~GradientReduction();

  struct StartOptions {
    double scale = 1.0;
    bool has_inputs = true;  // False: this rank contributes only what it had accumulated when it
                             // became exhausted.
  };
  // Issues the reductions of `chosen` (ascending). The previous ones must have been waited for.
  absl::Status Start(const OwnerTable& owners, std::span<const int> chosen,
                     const StartOptions& options);

  // On the owner: the reduced gradient of a chosen parameter, without data if no rank had one.
  // Valid until the next Start().
  absl::StatusOr<TensorView> Wait(int param);
  // Until nothing is in flight; the first error.
  absl::Status WaitAll();
  // Those of the last Start().
  std::vector<Work> works() const;
  bool HasOwnGradient(int param) const { return params_->grad_state(param) == GradState::kLocal; }

 private:
  struct Bucket {
    ShardBucket what;
    Memory memory;
    TensorView gradients;  // In `memory`.
    TensorView present;    // Behind them, one element per parameter; none on a device.
    Work reduced = Work();
    bool is_awaited = true;
  };
  struct Place {
    int bucket = 0;
    int position = 0;  // In the bucket's parameters.
    int64_t offset = 0;
  };

  absl::Status Lay(const OwnerTable& owners, std::span<const int> chosen);
  absl::Status Await(Bucket& bucket);
  absl::Status Fill(Bucket& bucket);
  absl::Status FillThere(const Bucket& bucket);  // On a device.
  void DropBuckets();

  Communicator* const comm_;
  Channel* const channel_;
  const ParameterSet* const params_;
  const std::span<const ParamSpec> specs_;
  const Bytes cap_;
  ParameterUpdater* const updater_;

  // The parameters for which the buckets were laid out.
  OwnerTable owners_;
  std::vector<int> chosen_;
  std::vector<Bucket> buckets_;
  std::vector<Place> places_;  // By parameter; only those of `chosen_` count.
};

}  // namespace evenkeel::internal

#endif  // EVENKEEL_ZERO_OPTIM_INTERNAL_GRADIENT_REDUCTION_H_
