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
//   kIdentity   nothing: zeros to a sum, ones to a product, the least to a maximum; zeros to all_gather. The default.
//   kOwned      its real value: the tensor that it has named with Own().
//   kReceive    nothing, and the result is written to the tensor that it has named with Own().
//
// Without Own() a dry rank drops results. Ranks that have left (JoinOptions::leave_after_shadow_steps) contribute the
// identity and receive nothing; where ranks can leave, kOwned and kReceive are refused. A collective on the bare
// communicator is not followed: inside the loop it is an error as soon as a rank has run dry.
//
// Order:   all ranks with inputs issue the same calls in the same order, anywhere in the loop: before its first step,
//          between steps, in the middle of backward. They have a channel of their own.
// Cost:    nothing but the collective while all ranks have inputs. kAverage and kHighestActive need a second, tiny one.
// Threads: one thread of the loop at a time. Tensors of Own() belong to the scope once the loop has returned.
// Errors:  those of Channel. FailedPrecondition, which ends the group with that sentence on all ranks: the root of a
//          reduce or broadcast has run dry; a dry rank has no tensor of the name that a call asks for, or another one.

#ifndef EVENKEEL_JOIN_SCOPE_H_
#define EVENKEEL_JOIN_SCOPE_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "evenkeel/comm/collective.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/types.h"

namespace evenkeel {

// For JoinScope::Broadcast(): from the highest rank that issues the call itself.
inline constexpr int kHighestActive = -2;

struct ScopeOptions {
  Contribution joined = Contribution::kIdentity;
  std::string tensor;  // With kOwned and kReceive: which of the dry rank's.
};

class JoinScope {
 public:
  // For RunJoined(). `is_followed`: ranks may run dry. `can_leave`: and then leave the group.
  explicit JoinScope(Communicator* comm, bool is_followed, bool can_leave = false)
      : comm_(comm), is_followed_(is_followed), can_leave_(can_leave), here_(comm) {}
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
  absl::Status Barrier();

  // Before this rank runs dry: what calls with kOwned or kReceive mean by that name. The memory outlives RunJoined().
  void Own(absl::string_view name, TensorView tensor) { owned_[std::string(name)] = tensor; }

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
  };

  absl::Status Issue(CollectiveKind kind, ReduceOp op, int root, TensorView in, TensorView out,
                     const ScopeOptions& options);
  // On a dry rank: takes part in a call of the others.
  absl::Status Follow(absl::string_view call);
  absl::StatusOr<TensorView> Owned(const Call& call, int64_t count) const;
  // The loop goes on in a group of those ranks of communicator().
  void GoOnIn(Communicator& here, const std::vector<int>& members);
  // The same collective among the ranks that have not left: shapes and roots as in here_.
  absl::Status IssueHere(CollectiveKind kind, ReduceOp op, int root, TensorView in, TensorView out,
                         const ScopeOptions& options);
  absl::Status CheckRoot(const Call& call) const;
  absl::Status CheckPart(const Call& call, const Part& part) const;
  absl::Status Run(const Call& call, const Part& part);
  // Over all ranks, in the scope's channel.
  absl::Status Agree(int64_t& value, ReduceOp op);

  Communicator* const comm_;
  const bool is_followed_;
  const bool can_leave_;
  Communicator* here_;        // Those that have not left.
  std::vector<int> members_;  // Which ranks of comm_ they are; empty: all.
  Channel* channel_ = nullptr;
  std::map<std::string, TensorView> owned_;
};

}  // namespace evenkeel

#endif  // EVENKEEL_JOIN_SCOPE_H_
