// Checks at regular steps that what must be equal on all ranks still is: for a bit that has flipped
// in memory, or a program that has changed one rank's weights.
//
//   const ReplicaCheckOptions check = {.every = 100};
//   EK_ASSIGN_OR_RETURN(auto ddp, DataParallel::Create(&comm, &params, buffers,
//                                                      {.check_replicas = check}));
//   EK_ASSIGN_OR_RETURN(auto optimizer, Optimizer::Create(*ddp, rule, {.check_replicas = check}));
//   // On all ranks ddp->BeginStep() returns "data_parallel#0: replicas differ after step 400:
//   // "fc1.weight" (tensor 3) differs on rank 2".
//
// EVENKEEL_CHECK_REPLICAS=100 does the same for all objects of a program without such options. In
// libtorch/ it compares parameters and buffers.
//
// Compared, byte for byte:
//   parameters   by DataParallel::BeginStep(), frozen ones included, ignored ones not. It waits for
//                those that Slices still gathers (overlap_forward).
//   buffers      by the same call, if it also makes them equal (BufferOptions::every), afterwards.
//                Between these steps, and with `every` 0, each rank has its own. With `parts`, a
//                buffer is compared if its turn comes in such a step.
//   state        at the end of a step of a Replicated optimizer: moments, master copies, and the
//                step count of each parameter. WholeTensors and Slices have it once, and nothing to
//                compare it with.
// Only what differs at a check is found. A step of WholeTensors or Slices overwrites a trained
// parameter on all ranks with the result of its owner: a difference elsewhere is gone then, and a
// wrong value of the owner is equal on all ranks. An update of a parameter of 16 bits, too,
// replaces it by its master copy.
//
// Steps:   DataParallel counts those of its group that synchronise, an Optimizer its own
//          (Joinable::steps_finished()).
// Join:    exhausted ranks are compared, too: they take every step. Only if RunJoined()'s list has
//          no optimizer, so that they do not, is nothing compared in BeginStep() while a rank is
//          exhausted.
// Cost:    nothing between checks. A check reads the tensors once and is one exchange of 24 bytes
//          per rank over the control plane, for which the ranks wait.
// Errors:  at creation InvalidArgument on all ranks for settings that are out of range or differ.
//          Internal on all ranks from the call that has compared, with the first tensor, the step,
//          and the ranks that differ from most; with two ranks: "ranks 0 and 1 differ". Its
//          FailureInfo (kDisagreement) has the same ranks. The step of an Optimizer that returns it
//          has been taken: do not repeat it. The group remains usable, unless the call was inside
//          RunJoined() or a FinishStep() that updates in backward. Recover() makes replicas equal
//          again, as bucket/replica_transfer.h describes.

#ifndef EVENKEEL_BUCKET_REPLICA_CHECK_H_
#define EVENKEEL_BUCKET_REPLICA_CHECK_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "evenkeel/bucket/divergence.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/types.h"

namespace evenkeel {

// Equal on all ranks.
struct ReplicaCheckOptions {
  // Compares after every so many steps; 0: the number in EVENKEEL_CHECK_REPLICAS, or never.
  int64_t every = 0;
  // Each check reads one of so many parts of the list of tensors, in turn: a tensor is compared
  // every `every * parts` steps.
  int64_t parts = 1;
};

// For the objects that compare. Replaces an `every` of 0 by the variable's number, before the other
// functions are called. Returns InvalidArgument for settings out of range.
absl::Status Complete(ReplicaCheckOptions& options);
// Returns the settings for the comparison between ranks: "every 100 steps in 1 part".
std::string ToString(const ReplicaCheckOptions& options);
// Returns whether a check is due after `step` steps, of which there are some, on several ranks.
bool IsCheckDue(const ReplicaCheckOptions& options, const Communicator& comm, int64_t step);
// Compares those of `tensors` whose turn it is. A collective, as FindDivergence(). `name`: of the
// object.
absl::Status CompareReplicas(absl::string_view name, absl::Span<const NamedView> tensors,
                             Communicator& comm, const ReplicaCheckOptions& options, int64_t step,
                             StreamRef stream);

}  // namespace evenkeel

#endif  // EVENKEEL_BUCKET_REPLICA_CHECK_H_
