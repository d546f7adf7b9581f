// The running RunJoined() as its loop sees it: collectives that ranks without inputs take part in too.
//
//   RunJoined({ddp.get(), optimizer.get()}, {}, [&](JoinScope& scope) -> absl::Status {
//     while (loader.Next(batch)) {
//       double loss = ...;
//       EK_RETURN_IF_ERROR(scope.AllReduce(absl::MakeSpan(&loss, 1), ReduceOp::kAverage));  // over ranks with inputs
//       ...
//     }
//   });
//
// A rank that has run dry follows the lowest rank that has inputs, call by call, also where the sequence of calls
// depends on data. What it contributes is said by the call, equally on all ranks:
//
//   kIdentity   nothing: zeros to a sum, ones to a product, the least to a maximum; zeros to all_gather and all_to_all.
//               The default.
//   kOwned      its real value: the tensor that it has named with Own().
//   kReceive    nothing, and the result is written to the tensor that it has named with Own().
//
// Without Own() a dry rank drops results. Ranks that have left (JoinOptions::leave_after_shadow_steps) contribute the
// identity and receive nothing; where ranks can leave, kOwned and kReceive are refused. A collective on the bare
// communicator is not followed: inside the loop it is an error as soon as a rank has run dry.
//
// Devices: tensors lie on the group's device. With ScopeOptions::stream a call begins behind what is on that stream,
//          and what comes there afterwards sees its result; the host waits until all ranks have issued it, and for the
//          device only where ranks leave. An error of the device then shows in a later call, or when the loop ends.
//          Without a stream tensors are ready at the call, and their results when it returns. When RunJoined() returns
//          all calls have ended.
// Order:   all ranks with inputs issue the same calls in the same order, and in the same order with their steps,
//          anywhere in the loop: before its first step, between steps, in the middle of backward. They have a channel
//          of their own.
// Cost:    nothing but the collective while all ranks have inputs. kAverage and kHighestActive need a second, tiny one;
//          on a device that is over the control plane. There, slices of ranks that have left are put in and taken out
//          by a copy on the stream each way, and memory for that, and for exhausted ranks' inputs, is allocated at
//          first use, which may wait for the device.
// Threads: one thread of the loop at a time. Tensors of Own() belong to the scope once the loop has returned.
// Ownership: what a call on a stream uses lives until the stream has passed it; streams outlive RunJoined().
// Errors:  those of Channel. FailedPrecondition, which ends the group with that sentence on all ranks: the root of a
//          reduce or broadcast has run dry; a dry rank has no tensor of the name that a call asks for, or another one.

#ifndef EVENKEEL_JOIN_SCOPE_H_
#define EVENKEEL_JOIN_SCOPE_H_

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "evenkeel/comm/collective.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/memory.h"
#include "evenkeel/comm/types.h"

namespace evenkeel {

namespace internal {
class DeviceCalls;
}  // namespace internal

// For JoinScope::Broadcast(): from the highest rank that issues the call itself.
inline constexpr int kHighestActive = -2;

struct ScopeOptions {
  Contribution joined = Contribution::kIdentity;
  std::string tensor;  // With kOwned and kReceive: which of the dry rank's.
  StreamRef stream;    // On a device: where this rank computes the tensors.
};

class JoinScope {
 public:
  // For RunJoined(). `is_followed`: ranks may run dry. `can_leave`: and then leave the group.
  explicit JoinScope(Communicator* comm, bool is_followed, bool can_leave = false);
  ~JoinScope();
  JoinScope(const JoinScope&) = delete;
  JoinScope& operator=(const JoinScope&) = delete;

  // The group in which RunJoined() began, whoever has left since.
  Communicator& communicator() const { return *comm_; }

  // Before each step, with DivideBy::kSamples: so many samples more in what this rank brings. What a rank has said when
  // it runs dry, and has not begun a step with, counts too.
  absl::Status AddSamples(int64_t samples);
  // Who had inputs in the last step that all ranks have begun, as far as this rank knows yet. Does not wait.
  std::vector<int> active_ranks() const;

  // Shapes: w = world size, dry ranks included. kAverage divides by the ranks that contribute; floats only.
  absl::Status AllReduce(TensorView data, ReduceOp op, const ScopeOptions& options = {});
  absl::Status Reduce(TensorView data, ReduceOp op, int root, const ScopeOptions& options = {});
  absl::Status Broadcast(TensorView data, int root, const ScopeOptions& options = {});
  absl::Status AllGather(TensorView input /*[n]*/, TensorView output /*[w * n]*/, const ScopeOptions& options = {});
  absl::Status ReduceScatter(TensorView input /*[w * n]*/, TensorView output /*[n]*/, ReduceOp op,
                             const ScopeOptions& options = {});
  // Part r of the output is what rank r sent to this one: zeros if it is exhausted. What is sent to such a rank is
  // lost.
  absl::Status AllToAll(TensorView input /*[w * n]*/, TensorView output /*[w * n]*/, const ScopeOptions& options = {});
  absl::Status Barrier();  // On a device, too, the host waits for it.

  // Before this rank runs dry: what calls with kOwned or kReceive mean by that name. The memory outlives RunJoined().
  // `stream`: where the tensor is computed, also while this rank is dry. On a device without one it is ready when the
  // loop returns, and what it has received when RunJoined() does.
  void Own(absl::string_view name, TensorView tensor, StreamRef stream = {}) {
    owned_[std::string(name)] = {tensor, stream};
  }

 private:
  friend class JoinRun;

  struct Call {
    Collective what;
    std::string tensor;

    std::string Serialize() const;
    static absl::StatusOr<Call> Parse(absl::string_view bytes);
  };
  // What one rank puts in and gets out, and whether a reduction counts the former.
  struct Part {
    TensorList in, out;
    bool contributes = true;
    bool is_followed = false;  // Another rank's call: this one has run dry.
    StreamRef stream;          // On a device: what the call begins behind.
    bool is_async = true;      // On a device: the stream waits for the result, and not the host.
  };
  struct Tensor {
    TensorView view;
    StreamRef stream;
  };
  class CallMemory;

  absl::Status Issue(CollectiveKind kind, ReduceOp op, int root, TensorView in, TensorView out,
                     const ScopeOptions& options);
  // On a dry rank: takes part in a call of the others.
  absl::Status Follow(absl::string_view call);
  absl::StatusOr<Tensor> Owned(const Call& call, int64_t count) const;
  // The loop goes on in a group of those ranks of communicator().
  absl::Status GoOnIn(Communicator& here, const std::vector<int>& members);
  // Waits until all calls have ended: before a group goes.
  absl::Status Drain();
  // The same collective among the ranks that have not left: shapes and roots as in here_.
  absl::Status IssueHere(CollectiveKind kind, ReduceOp op, int root, TensorView in, TensorView out,
                         const ScopeOptions& options);
  // The same where `in`, `out` or both have a slice for each rank of comm_, and some of those have left.
  absl::Status IssueSlices(CollectiveKind kind, ReduceOp op, TensorView in, TensorView out,
                           const ScopeOptions& options);
  // Null on the CPU.
  absl::StatusOr<internal::DeviceCalls*> OnDevice();
  absl::Status CheckRoot(const Call& call) const;
  absl::Status CheckPart(const Call& call, const Part& part) const;
  absl::Status Run(const Call& call, const Part& part);
  absl::Status RunOnDevice(const Collective& what, const Part& part, const CallOptions& options);
  // Over all ranks: the sum, or the maximum.
  absl::Status Agree(int64_t& value, ReduceOp op);

  Communicator* const comm_;
  const bool is_followed_;
  const bool can_leave_;
  Communicator* here_;        // Those that have not left.
  std::vector<int> members_;  // Which ranks of comm_ they are; empty: all.
  Channel* channel_ = nullptr;
  std::map<std::string, Tensor> owned_;
  std::unique_ptr<internal::DeviceCalls> on_device_;
  std::array<Memory, 2> on_host_;  // On the CPU: what calls work in.
};

}  // namespace evenkeel

#endif  // EVENKEEL_JOIN_SCOPE_H_
