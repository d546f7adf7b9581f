// How a bucket of gradients is reduced: the seam between the reducer, which launches every gradient collective, and
// whoever decides what those collectives are. Data parallel brings all-reduce; compression, optimizers that step in
// backward, and sharded optimizers bring theirs.
//
//   class ReduceToOwner : public BucketReduction {
//     std::vector<Collective> CollectivesFor(const BucketInfo& bucket) const override {
//       return {{.kind = CollectiveKind::kReduce, .count = bucket.data.count, .root = owner_of_[bucket.index]}};
//     }
//   };
//
// A reduction has one or more rounds, a collective each. For each bucket, in this order:
//
//   BeginRound(bucket, 0) -> the collective -> BeginRound(bucket, 1) -> the collective -> ... -> OnReduced(bucket)
//
// Rounds of different buckets overlap: bucket 1 may be in its first round while bucket 0 is in its last. Within a round
// buckets come in index order, on all ranks alike. Ranks that have run out of inputs run the same rounds with
// `step.contributes` false: what they contribute is ignored, what they receive is the same.
//
// Memory:  `bucket.data` lives as long as the plan; a round's buffers until the step's end. Keep what outlives a step
//          (error feedback, moments) per parameter, or drop it in OnPlan(): buckets change with the plan.
// Threads: all calls of one step come one after the other, never at the same time: on the reducer's own thread if
//          HasThread(), where they may also communicate, on a channel of their own; else on the thread that announces
//          gradients, finishes the step, or runs the control plane: they must not block. OnPlan(), StepMessage() and
//          OnShadow() come between steps.
// Devices: where the bucket lies on a device, its content is touched by work on `step.stream` alone, and no call waits
//          for the device: BeginRound() and OnReduced() put their kernels there and answer. What comes on it then follows
//          the bucket's gradients and the collectives of its earlier rounds; the round's collective follows what is on
//          it when BeginRound() answers, and ParameterSet::stream() follows it all once the step has ended. A bucket's first
//          round is put there as soon as it goes out, on the thread that lets it go, whatever HasThread() says; the
//          others, and OnReduced(), by the thread that finishes the step. Each round has its stream, and OnReduced() one
//          of its own, in all buckets and steps. A collective's failure shows in the next step. OnPlan() comes when the
//          device has run what came before: memory for the plan is made there.
// Errors:  what BeginRound() or OnReduced() answer ends the step on all ranks.

#ifndef EVENKEEL_BUCKET_REDUCTION_H_
#define EVENKEEL_BUCKET_REDUCTION_H_

#include <cstdint>
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

// How a bucket's gradients go out together.
enum class Fusion : uint8_t {
  kFlat,       // Copied into one piece of memory, and back; nothing is copied where gradients are bucket views.
  kCoalesced,  // From where they lie, as one operation on many tensors.
  kMeasured,   // The faster one, found by some steps of each: flat at first. A bucket never is.
};

struct BucketInfo {
  int index = 0;
  int bucket_count = 0;
  // Flat; the gradients of `params`, one after the other, then zeros up to a multiple of CountMultiple(). After the
  // reduction the group's gradients.
  TensorView data;
  // One element per parameter, of data's type: not zero where a rank has a gradient for it; see UsedFlags. It lies
  // behind `data` in the same memory, and `wire` is both.
  TensorView used;
  TensorView wire;
  // What goes out if nothing is done to it, `parts_count` elements: `wire`; or, where gradients are not copied together
  // (Fusion::kCoalesced, which is for all-reduce only: `data` is empty there), each where it lies, then `used`.
  std::span<const TensorView> parts;
  int64_t parts_count = 0;
  std::span<const int> params;       // Which parameters, in the order of their place in `data`.
  std::span<const int64_t> offsets;  // Where each begins in `data`, in elements.
};

// What is true of one step's reductions. Equal on all ranks: `scale`.
struct ReductionStep {
  double scale = 1.0;       // What a sum of gradients is to be multiplied by: one over the divisor.
  bool contributes = true;  // False: this rank has nothing to add to this bucket.
  // This rank has a gradient for each of the bucket's parameters: after the reduction all of `used` is set, and nobody
  // need look, which on a device the host would have to wait for.
  bool has_all = false;
  StreamRef stream;  // On a device: where to put work; see Devices above. Null on the CPU.
};

struct RoundBuffers {
  TensorList in, out;  // As Channel::Issue() takes them for the round's collective.
  double scale = 1.0;  // The collective's result is multiplied by it; equal on all ranks. Float reductions only.
};

// How the ranks learn which parameters of a bucket got a gradient on none of them: those are left alone.
enum class UsedFlags : uint8_t {
  kOnWire,    // The reduction's first round reduces `wire`, and with it `used`.
  kSeparate,  // The reducer adds a small all-reduce for all buckets behind the last.
  kOwn,       // The reduction sees to it before OnReduced() returns; the reducer looks at `used` afterwards.
};

// What becomes of a bucket's gradients.
enum class GradFate : uint8_t {
  kReduced,  // They are in `data`: each parameter's gradient is the group's.
  kNone,     // Used up, or elsewhere: the gradients are none.
};

class BucketReduction {
 public:
  virtual ~BucketReduction() = default;

  // The bucket's collectives, one per round, as many for each bucket and at least one: kind, dtype, count, op and root;
  // the reducer fills in the rest. Called with equal buckets on all ranks when a plan is made, and must answer the same
  // on all.
  virtual std::vector<Collective> CollectivesFor(const BucketInfo& bucket) const = 0;

  // What the round sends and receives. The default: the first round reduces `data` (`parts`, if the
  // used flags are on the wire) in place and scales it; it is the only one.
  virtual absl::StatusOr<RoundBuffers> BeginRound(const BucketInfo& bucket, int round, const ReductionStep& step);
  // All rounds have ended well. `data` must hold the group's gradients when it answers kReduced.
  virtual absl::StatusOr<GradFate> OnReduced(const BucketInfo& /*bucket*/, const ReductionStep& /*step*/) {
    return GradFate::kReduced;
  }

  // After the last of the step's buckets, also if some were skipped; on the thread that finishes the step.
  virtual absl::Status OnStepEnd() { return absl::OkStatus(); }

  // Whether it computes, or has rounds after the first: its calls get a thread of their own, and what follows the first
  // round overlaps with backward. Must not change.
  virtual bool HasThread() const { return false; }
  // Must not change.
  virtual UsedFlags used_flags() const { return UsedFlags::kSeparate; }
  // `data` of each bucket has a multiple of so many elements.
  virtual int64_t CountMultiple() const { return 1; }
  // Whose ranks share the reduction from now on: before the first plan, and in another group. A plan follows. A step
  // that was under way is forgotten, on some ranks later than on others: state that must be equal on all begins anew.
  virtual void OnGroup(const Communicator& /*comm*/) {}
  // Another number when CollectivesFor() has come to answer something else for the same buckets: it is asked anew
  // before the next step. On all ranks between the same two steps, those included that ran out of inputs.
  virtual int64_t CollectivesVersion() const { return 0; }
  // Another plan: these are the buckets from the next step on. On all ranks before the same step, but not at the same
  // time: it must not communicate. What has to move between ranks moves in the next step's first BeginRound().
  virtual absl::Status OnPlan(absl::Span<const BucketInfo> /*buckets*/) { return absl::OkStatus(); }
  // Called before this rank sends the record of a step: the last moment for settings to change.
  virtual void PrepareStep() {}
  // For ranks that have run out of inputs: what else they must know of the step that begins (a learning rate). Taken on
  // the lowest active rank when its step begins, and given to OnShadow() of those before they begin theirs.
  virtual std::string StepMessage() { return ""; }
  virtual absl::Status OnShadow(absl::string_view /*message*/) { return absl::OkStatus(); }
};

// The default: one all-reduce per bucket.
class AllReduceBuckets : public BucketReduction {
 public:
  std::vector<Collective> CollectivesFor(const BucketInfo& bucket) const override {
    return {{.kind = CollectiveKind::kAllReduce, .dtype = bucket.data.dtype, .count = bucket.parts_count}};
  }
  UsedFlags used_flags() const override { return UsedFlags::kOnWire; }
};

}  // namespace evenkeel

#endif  // EVENKEEL_BUCKET_REDUCTION_H_
