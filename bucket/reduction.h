// The interface between the reducer, which launches all gradient collectives, and the object that
// chooses them. DataParallel uses all-reduce; compression, optimizers that update in backward, and
// sharded optimizers have their own.
//
//   class SumBuckets : public BucketReduction {  // all-reduces each bucket and scales the sum
//    public:
//     std::vector<Collective> CollectivesFor(const BucketInfo& bucket) const override {
//       return {{.kind = CollectiveKind::kAllReduce,
//                .dtype = bucket.data.dtype,
//                .count = bucket.data.count,
//                .op = ReduceOp::kSum}};
//     }
//   };
//   EK_ASSIGN_OR_RETURN(auto ddp, DataParallel::Create(&comm, &params, buffers, {},
//                                                      std::make_unique<SumBuckets>()));
//
// Override BeginRound() and OnReduced() to send something else than the gradients themselves.
//
// A reduction has one or more rounds with one collective each. For each bucket, in this order:
//
//   BeginRound(bucket, 0) -> the collective -> BeginRound(bucket, 1) -> the collective -> ... ->
//     OnReduced(bucket)
//
// OnStepBegin() is before all buckets of a step, OnStepEnd() behind them.
//
// Rounds of different buckets overlap: bucket 1 may be in its first round while bucket 0 is in its
// last. Within a round the buckets come in index order on all ranks. Exhausted ranks run the same
// rounds with `step.contributes` false: their contribution is ignored, and they receive the result.
//
// Memory:  `bucket.data` lives as long as the plan; a round's buffers until the end of the step.
//          Keep data that outlives a step (error feedback, moments) per parameter, or drop it in
//          OnPlan(), since buckets change with the plan.
// Threads: the calls of a step never overlap. If HasThread(), they run on the reducer's own thread,
//          and may communicate on a channel of their own. Else they run on the thread that
//          announces gradients, on the one that finishes the step, or on the control thread, and
//          must not block. OnPlan(), StepMessage() and OnShadow() come between steps,
//          OnStepBegin() and OnStepEnd() on the threads that begin and finish a step.
// Devices: only work on `step.stream` may access a bucket on a device, and no call waits for the
//          device: BeginRound() and OnReduced() enqueue their kernels and return. Work on the
//          stream runs after the bucket's gradients and the collectives of its earlier rounds; the
//          round's collective runs after the work enqueued by BeginRound(), and
//          ParameterSet::stream() runs after all of it once the step has ended. The first round of
//          a bucket is enqueued when the bucket is launched, on the launching thread, also if
//          HasThread(); the other rounds and OnReduced() on the thread that finishes the step. Each
//          round has one stream for all buckets and steps, and so has OnReduced(). The next step
//          reports the failure of a collective. OnPlan() is called when the device has finished
//          earlier work: allocate memory for the plan there.
// Errors:  an error of BeginRound() or OnReduced() ends the step on all ranks.

#ifndef EVENKEEL_BUCKET_REDUCTION_H_
#define EVENKEEL_BUCKET_REDUCTION_H_

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "evenkeel/comm/backend.h"
#include "evenkeel/comm/collective.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/types.h"

namespace evenkeel {

class ParameterSet;

// How a bucket's gradients are sent together.
enum class Fusion : uint8_t {
  kFlat,  // Copied into one block of memory and back; gradients that are bucket views need no copy.
  kCoalesced,  // From their own memory, as one operation on many tensors.
};

struct BucketInfo {
  int index = 0;
  int bucket_count = 0;
  // Flat; the gradients of `params`, one after the other, then zeros up to a multiple of
  // CountMultiple(). After the reduction the group's gradients.
  TensorView data;
  // One element per parameter, of the type of `data`: not zero if a rank has its gradient; see
  // UsedFlags. It follows `data` in the same memory, and `wire` is both.
  TensorView used;
  TensorView wire;
  // The default input of the first round, `parts_count` elements: `wire`; or, with
  // Fusion::kCoalesced (for all-reduce only, with `data` empty), each gradient in its own memory,
  // then `used`.
  std::span<const TensorView> parts;
  int64_t parts_count = 0;
  std::span<const int> params;       // The parameters, in the order of `data`.
  std::span<const int64_t> offsets;  // The begin of each in `data`, in elements.
};

// The settings of one step's reductions. `scale` is equal on all ranks.
struct ReductionStep {
  double scale = 1.0;       // The factor for a sum of gradients: one over the divisor.
  bool contributes = true;  // False: this rank adds nothing to this bucket.
  // This rank has a gradient for each of the bucket's parameters: after the reduction all of `used`
  // is set, so the host need not read it, nor wait for a device.
  bool has_all = false;
  StreamRef stream;  // On a device: the stream for work; see Devices above. Null on the CPU.
};

struct RoundBuffers {
  TensorList in, out;  // The arguments of Channel::Issue() for the round's collective.
  double scale = 1.0;  // The collective's result is multiplied by it; equal on all ranks. Float
                       // reductions only.
};

// How the ranks learn which parameters of a bucket have no gradient on any rank, and do not change.
enum class UsedFlags : uint8_t {
  kOnWire,    // The reduction's first round reduces `wire`, and with it `used`.
  kSeparate,  // The reducer adds a small all-reduce for all buckets behind the last.
  kOwn,       // The reduction sets `used` before OnReduced() returns; the reducer reads it then.
};

// The state of a bucket's gradients after the reduction.
enum class GradFate : uint8_t {
  kReduced,  // They are in `data`: each parameter's gradient is the group's.
  kNone,     // Consumed: the gradients' state is kNone.
};

class BucketReduction {
 public:
  virtual ~BucketReduction() = default;

  // The bucket's collectives, one per round, as many for each bucket and at least one: kind, dtype,
  // count, op and root; the reducer fills in the rest. Called with equal buckets on all ranks when
  // a plan is made; must return the same on all.
  virtual std::vector<Collective> CollectivesFor(const BucketInfo& bucket) const = 0;

  // Returns the buffers of the round. The default is for a single round, which reduces `data`
  // (`parts`, if the used flags are on the wire) in place and scales it.
  virtual absl::StatusOr<RoundBuffers> BeginRound(const BucketInfo& bucket, int round,
                                                  const ReductionStep& step);
  // Called when all rounds of the bucket have ended without an error. If it returns kReduced,
  // `data` must contain the group's gradients on every rank.
  virtual absl::StatusOr<GradFate> OnReduced(const BucketInfo& /*bucket*/,
                                             const ReductionStep& /*step*/) {
    return GradFate::kReduced;
  }

  // Called once per step that reduces, on the thread that begins it, before any of its buckets can
  // be launched. OnStepEnd() follows, unless the step fails, which ends the group.
  virtual absl::Status OnStepBegin() { return absl::OkStatus(); }
  // Called once per step, after its last bucket, also if buckets were skipped; on the thread that
  // finishes the step.
  virtual absl::Status OnStepEnd() { return absl::OkStatus(); }

  // Returns whether the calls get a thread of their own (on the CPU), so that computation and the
  // rounds after the first overlap with backward. Must be true, on devices too, if
  // CollectivesFor() returns more than one round: otherwise making the plan fails with
  // InvalidArgument. Must not change.
  virtual bool HasThread() const { return false; }
  // Returns how the used flags are reduced. Must not change.
  virtual UsedFlags used_flags() const { return UsedFlags::kSeparate; }
  // Returns the number of which the element count of each bucket's `data` is a multiple.
  virtual int64_t CountMultiple() const { return 1; }
  // Called with the group of the reduction, before the first plan and in another group. A plan
  // follows. A running step is dropped, on some ranks later than on others: state that must be
  // equal on all ranks is reset.
  virtual void OnGroup(Communicator& /*comm*/) {}
  // Returns a number that changes when CollectivesFor() would return something else for the same
  // buckets; it is called again before the next step. Must change on all ranks, exhausted ones
  // included, between the same two steps.
  virtual int64_t CollectivesVersion() const { return 0; }
  // Called with the buckets of another plan, in force from the next step on: on all ranks before
  // the same step, but not at the same time, so it must not communicate. Move data between ranks in
  // the next step's first BeginRound(). If it fails, or the plan does for another reason, the plan
  // before it stays in force, and OnPlan() is called with its buckets again: keep none of others.
  virtual absl::Status OnPlan(absl::Span<const BucketInfo> /*buckets*/) { return absl::OkStatus(); }
  // Called before this rank sends the record of a step: settings must not change after it.
  virtual void PrepareStep() {}
  // Waits for parameters that the reduction's owner updates in the background; on a device
  // ParameterSet::stream() does. Called on all ranks before the parameters are compared
  // (replica_check.h).
  virtual absl::Status WaitForValues() { return absl::OkStatus(); }
  // Returns further data for exhausted ranks about the step that begins (a learning rate). Called
  // on the lowest active rank when its step begins; OnShadow() of exhausted ranks receives it
  // before they begin the step.
  virtual std::string StepMessage() { return ""; }
  virtual absl::Status OnShadow(absl::string_view /*message*/) { return absl::OkStatus(); }
};

// The default: one all-reduce per bucket.
class AllReduceBuckets : public BucketReduction {
 public:
  std::vector<Collective> CollectivesFor(const BucketInfo& bucket) const override {
    return {{.kind = CollectiveKind::kAllReduce,
             .dtype = bucket.data.dtype,
             .count = bucket.parts_count}};
  }
  UsedFlags used_flags() const override { return UsedFlags::kOnWire; }
};

// Reduces the gradients of a set of parameters, for objects with a reduction of their own, such as
// optimizers. DataParallel is one.
class GradientReducer {
 public:
  virtual ~GradientReducer() = default;
  virtual Communicator& communicator() const = 0;
  virtual ParameterSet& parameters() const = 0;
  // Replaces all-reduce by `reduction`, between two steps. A collective; on failure all ranks
  // return an error, and nothing has changed. FailedPrecondition inside a step, or if the reducer
  // has another reduction already: compose the two instead.
  virtual absl::Status InstallReduction(std::unique_ptr<BucketReduction> reduction) = 0;
};

}  // namespace evenkeel

#endif  // EVENKEEL_BUCKET_REDUCTION_H_
