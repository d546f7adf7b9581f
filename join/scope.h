// The scope of a running RunJoined(): collectives in which exhausted ranks take part, too.
//
//   const auto loop = [&](JoinScope& scope) -> absl::Status {
//     while (loader.Next(batch)) {
//       ...                                               // a training step, which computes a loss
//       // the mean over the ranks with inputs
//       EK_RETURN_IF_ERROR(scope.AllReduce(absl::MakeSpan(&loss, 1), ReduceOp::kAverage));
//     }
//     return absl::OkStatus();
//   };
//   EK_RETURN_IF_ERROR(RunJoined({ddp.get(), optimizer.get()}, {}, loop));
//
// An exhausted rank shadows the lowest active rank, call by call, also if the sequence of calls
// depends on data. The call determines the contribution of exhausted ranks, equally on all ranks:
//
//   kIdentity   the identity: zeros for a sum, ones for a product, the least value for a maximum;
//               zeros for all_gather and all_to_all. The default.
//   kOwned      its own value: the tensor that it has named with Own().
//   kReceive    the identity, and the result is written to the tensor that it has named with Own().
//
// Without Own() an exhausted rank drops results. Exhausted ranks do not shadow collectives on the
// communicator itself: inside the loop these are an error as soon as a rank is exhausted.
//
// Devices:   tensors are on the group's device. With ScopeOptions::stream a call begins after the
//            work on that stream, and later work on it sees the result; the host waits only until
//            all ranks have issued it. A later call, or the end of the loop, reports an error of
//            the device. Without a stream tensors must be ready at the call, and results are when
//            it returns. All calls have ended when RunJoined() returns.
// Order:     all ranks with inputs issue the same calls in the same order, also relative to their
//            steps, anywhere in the loop: before its first step, between steps, or in the middle of
//            backward. The calls have a channel of their own.
// Cost:      only the collective while all ranks have inputs. kAverage and kHighestActive need a
//            second, tiny one; on a device over the control plane. There, memory for the inputs of
//            exhausted ranks is allocated at first use, which may wait for the device.
// Threads:   one thread of the loop at a time. Tensors of Own() belong to the scope once the loop
//            has returned.
// Ownership: tensors of a call on a stream must live until the stream has passed it; streams must
//            outlive RunJoined().
// Errors:    those of Channel. FailedPrecondition, which ends the group on all ranks: the root of a
//            reduce or broadcast is exhausted; or an exhausted rank has no tensor, or a different
//            one, with the name in a call.

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

// For JoinScope::Broadcast(): from the highest active rank.
inline constexpr int kHighestActive = -2;

struct ScopeOptions {
  Contribution joined = Contribution::kIdentity;  // The contribution of exhausted ranks.
  std::string tensor;  // With kOwned and kReceive: the name of the exhausted rank's tensor.
  StreamRef stream;    // On a device: the stream that computes the tensors.
};

class JoinScope {
 public:
  // For RunJoined(). `is_followed`: exhausted ranks shadow the calls of this scope.
  JoinScope(Communicator* comm, bool is_followed);
  ~JoinScope();
  JoinScope(const JoinScope&) = delete;
  JoinScope& operator=(const JoinScope&) = delete;

  Communicator& communicator() const { return *comm_; }

  // Adds samples to this rank's next step, with DivideBy::kSamples; call it before each step.
  // Samples that an exhausted rank has added without a step count, too.
  absl::Status AddSamples(int64_t samples);
  // Returns the ranks with inputs in the last step that all ranks have begun, to this rank's
  // knowledge. Does not wait.
  std::vector<int> active_ranks() const;

  // Shapes: w = world size, exhausted ranks included. kAverage divides by the ranks that
  //         contribute, and is for floats only.
  absl::Status AllReduce(TensorView data, ReduceOp op, const ScopeOptions& options = {});
  absl::Status Reduce(TensorView data, ReduceOp op, int root, const ScopeOptions& options = {});
  absl::Status Broadcast(TensorView data, int root, const ScopeOptions& options = {});
  absl::Status AllGather(TensorView input /*[n]*/, TensorView output /*[w * n]*/,
                         const ScopeOptions& options = {});
  absl::Status ReduceScatter(TensorView input /*[w * n]*/, TensorView output /*[n]*/, ReduceOp op,
                             const ScopeOptions& options = {});
  // Part r of the output is from rank r, and zeros if that is exhausted. An exhausted rank drops
  // what it receives.
  absl::Status AllToAll(TensorView input /*[w * n]*/, TensorView output /*[w * n]*/,
                        const ScopeOptions& options = {});
  absl::Status Barrier();  // On a device, too, the host waits for it.

  // Names a tensor for calls with kOwned or kReceive, before this rank is exhausted. The memory
  // must outlive RunJoined(). `stream`: computes the tensor, also while this rank is exhausted. On
  // a device without a stream the tensor must be ready when the loop returns, and its received
  // value is ready when RunJoined() returns.
  void Own(absl::string_view name, TensorView tensor, StreamRef stream = {}) {
    owned_[std::string(name)] = {tensor, stream};
  }

 private:
  friend class JoinRun;

  struct Call {
    Collective what;
    std::string tensor;

    static void VisitFields(auto& self, auto& visit) {
      visit(visit.UpTo(self.what.kind, CollectiveKind::kBarrier),
            visit.UpTo(self.what.dtype, DType::kInt64), self.what.count,
            visit.UpTo(self.what.op, ReduceOp::kBitXor), self.what.root,
            visit.UpTo(self.what.joined, Contribution::kReceive), self.tensor);
    }
  };
  // One rank's inputs and outputs, and whether a reduction counts the inputs.
  struct Part {
    TensorList in, out;
    bool contributes = true;
    bool is_followed = false;  // Another rank's call: this one is exhausted.
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
  // Takes part, on an exhausted rank, in a call of the others.
  absl::Status Follow(absl::string_view call);
  absl::StatusOr<Tensor> Owned(const Call& call, int64_t count) const;
  // Waits until all calls have ended, before a group is left.
  absl::Status Drain();
  // Returns null on the CPU; reports the error of a call that has ended.
  absl::StatusOr<internal::DeviceCalls*> OnDevice();
  absl::Status CheckRoot(const Call& call) const;
  absl::Status Run(const Call& call, const Part& part);
  // Over all ranks: the sum, or the maximum.
  absl::Status Agree(int64_t& value, ReduceOp op);

  Communicator* const comm_;
  const bool is_followed_;
  Channel* channel_ = nullptr;
  std::map<std::string, Tensor> owned_;
  std::unique_ptr<internal::DeviceCalls> on_device_;
  std::array<Memory, 2> on_host_;  // On the CPU: what calls work in.
};

}  // namespace evenkeel

#endif  // EVENKEEL_JOIN_SCOPE_H_
