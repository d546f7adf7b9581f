// The private half of libtorch.h: the state that the group, the replicas and the optimizers share.
//
// A user's exception destroys these objects before run() or join() can send its text to the other
// ranks. Park() therefore moves their state to the group's `parked`, which is destroyed afterwards.

#ifndef EVENKEEL_LIBTORCH_INTERNAL_H_
#define EVENKEEL_LIBTORCH_INTERNAL_H_

#include <torch/csrc/autograd/function.h>

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "evenkeel/bucket/data_parallel.h"
#include "evenkeel/bucket/parameter_set.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/types.h"
#include "evenkeel/join/joinable.h"
#include "evenkeel/join/scope.h"
#include "evenkeel/libtorch.h"

namespace evenkeel::libtorch {

// An error of evenkeel as an exception, from which join() takes the status again.
struct StatusError : Error {
  explicit StatusError(const absl::Status& status);
  const absl::Status status;
};
inline void Check(const absl::Status& status) {
  if (!status.ok()) throw StatusError(status);
}
template <class T>
T Value(absl::StatusOr<T> value) {
  Check(value.status());
  return *std::move(value);
}
// Throws an error for an invalid call; the group continues.
[[noreturn]] void Refuse(const std::string& what);
// Returns the text of an error of torch without its backtrace. The text of an error that comes
// from reading a gradient of Slices names this cause.
std::string TextOf(const c10::Error& error);

torch::ScalarType ScalarTypeOf(DType dtype);
// Returns the elements of a dense tensor in the order of memory. Refuses other tensors, which
// `what` names.
TensorView ViewOf(const torch::Tensor& tensor, const std::string& what);
// Returns the same without an error: null data if the tensor cannot have a view.
TensorView MemoryOf(const torch::Tensor& tensor);

struct Group::State {
  std::unique_ptr<Communicator> comm;
  std::vector<std::shared_ptr<void>> parked;
  std::vector<Joinable*> scalers;                  // For join().
  std::vector<DataParallelBase::Replica*> joined;  // The models of the join() that runs.
  bool is_left = false;  // The Group is destroyed; Park() no longer defers.
  // Destroys the parked objects. They own this state, and only this call ends the cycle.
  void DropParked() {
    while (!parked.empty()) parked.pop_back();
  }
};

// Releases `owned`: at once or, if an exception destroys its owner, after the group has the text of
// the exception.
template <class T>
void Park(const std::shared_ptr<Group::State>& group, std::shared_ptr<T> owned,
          int exceptions_at_creation) {
  if (std::uncaught_exceptions() > exceptions_at_creation && !group->is_left)
    group->parked.push_back(std::move(owned));
}

// Return a weak pointer to a node of autograd, whose kind of pointer depends on torch's version.
template <class Node>
c10::weak_intrusive_ptr<Node> WeakOf(const c10::intrusive_ptr<Node>& node) {
  return c10::weak_intrusive_ptr<Node>(node);
}
template <class Node>
std::weak_ptr<Node> WeakOf(const std::shared_ptr<Node>& node) {
  return node;
}

// A module's tensors under a DataParallel, and its step:
//
//   kClosed     No step is open. A backward begins one under no_sync(); else it is refused.
//   kEvaluated  The same after a forward in evaluation mode: a backward begins a step.
//   kForward    A step is open, and none of its gradients was computed.
//   kBackward   Gradients of the open step are computed, or some of them are missing at the end.
//   kThrown     A backward of the open step has thrown: a further one, and step(), are refused.
//
//   from                 to          by
//   kClosed, kEvaluated  kEvaluated  begin_forward() in evaluation mode; in an open step it has no
//                                    effect
//   kClosed, kEvaluated  kForward    Begin()
//   kForward             kBackward   BeforeBackward(), before the first gradient
//   kBackward, kThrown   kThrown     EndBackward()
//   kForward, kBackward  kClosed     Finish()
//
// A step accumulates or not from its beginning on. A replica is detached, or has followers,
// independently of steps.
struct DataParallelBase::Replica : std::enable_shared_from_this<Replica> {
  Replica(std::shared_ptr<Group::State> group, std::shared_ptr<torch::nn::Module> module,
          const DataParallelOptions& options);
  ~Replica();

  // The gradient of a parameter in the open step.
  enum class Arrival {
    kAwaited,
    kReady,
    kUnreached,  // Marked as unused: no output of forward depends on the parameter.
  };
  // The access to the gradient of a parameter:
  //
  //   kFree     grad() is the gradient, none, or the placeholder of one that a step has used up.
  //   kForStep  Only the next step() can read the gradient, or a slice of it: grad() must remain
  //             its placeholder until then.
  //   kSpoiled  The open step, or the end of a loop, has found the placeholder of a gradient that a
  //             step has used up.
  //
  //   from             to        by
  //   any              kFree     Begin()
  //   kFree            kSpoiled  DropUsedUp(), AfterLoop()
  //   kFree            kForStep  AdoptGradients() with Slices, HideGradients()
  //   kSpoiled         kForStep  HideGradients(), of a gradient that the user has stored since
  //   kForStep         kFree     MarkUsedUp()
  //   kSpoiled         kFree     AfterLoop(), ShareGradients(), AfterJoin()
  //   any              kSpoiled  ShareGradients(), if it is kSpoiled on the last ranks
  enum class Access { kFree, kForStep, kSpoiled };

  struct Parameter {
    torch::Tensor tensor;
    std::vector<int64_t> strides;
    torch::Tensor
        view;  // The gradient in its bucket: `tensor.grad()`, unless the user resets that.
    decltype(torch::autograd::impl::grad_accumulator(torch::Tensor())) accumulator;
    uintptr_t hook = 0;
    const torch::autograd::FunctionPreHook* pre_hook = nullptr;
    Arrival arrival = Arrival::kAwaited;
    Access access = Access::kFree;
    bool is_as_reduced = false;  // Its gradient was, when the loop of join() ended.
    // The gradient that was reduced before the parameter was frozen, or that it had when the loop
    // of join() ended.
    torch::Tensor kept;
    // The version and SampleOf() of its gradient after the reduction, if `has_followers`.
    std::optional<std::pair<int64_t, uint64_t>> reduced;
    torch::Tensor sparse_grad;    // The sparse gradient last stored in grad(),
    uint32_t sparse_version = 0;  // and its version at that time.
  };

  const std::string& NameOf(int param) const { return set[param].name; }

  // Installs the hooks of all parameters that require a gradient; Detach() removes them.
  void AttachAll();
  void Detach();
  void Begin();
  void Finish();           // Ends the step after backward.
  void FinishUnreached();  // Ends it without a backward: this rank has no gradient.
  void BeforeGradient(int param);
  void OnGradient(int param);
  // After a reduction, own or shadowed: sets each grad() to the reduced gradient, or none.
  // `had_gradient`: by parameter, whether this rank had one before it; empty: it had none.
  void AdoptGradients(const std::vector<bool>& had_gradient);
  // Sets the gradients to their views again after a new plan, which may have moved buckets.
  void FollowGradients();
  // Before an optimizer's step: throws if the user has changed the gradients of its parameters in a
  // way that other ranks do not follow. `may_clear`: they follow a gradient that was set to none.
  void CheckGradients(const std::vector<int>& of_step, bool may_clear) const;
  // Returns which of these have no gradient, for the comparison of the ranks' steps.
  std::string MissingText(const std::vector<int>& of_step) const;
  // Multiplies the reduced gradients of a step. Returns whether they were finite.
  bool ScaleGradients(const std::vector<int>& of_step, double factor);
  // Before a step that multiplies the gradients: makes any later read of them fail.
  void HideGradients(const std::vector<int>& of_step);
  // After a step: marks gradients that could not be read as used up or, if this rank has all of
  // them, shows them again, times `scale`.
  void MarkUsedUp(const std::vector<int>& of_step, double scale);
  // Reads the gradients again before they or their states are used: the user may have cleared,
  // changed or replaced them.
  void TakeGradients();
  // Called around the end of a loop, after which this rank follows the others.
  void EndLoop();
  void AfterLoop();       // Called after an early stop, too.
  void ShareGradients();  // On success: all ranks end with the gradients of the last step.
  void AfterJoin();

  const std::shared_ptr<Group::State> group;
  const std::shared_ptr<torch::nn::Module> module;
  const DataParallelOptions options;
  std::vector<Parameter> params;  // By index of `set`.
  std::unordered_map<const c10::TensorImpl*, int> index_of;
  std::vector<torch::Tensor> buffers;
  ParameterSet set;
  std::unique_ptr<evenkeel::DataParallel> core;
  // For join(), in the order of their creation.
  struct Enrolled {
    Joinable* joinable = nullptr;
    std::function<void()> after_loop;  // Sets the rates of torch's optimizer to the last ones.
    std::function<void()> after_join;
  };
  std::vector<Enrolled> optimizers;
  void Forget(const Joinable* optimizer);
  JoinScope* scope = nullptr;  // In join().
  bool has_followers = false;  // In a join() whose exhausted ranks take the steps of the others.

  bool is_open() const { return step_ >= Step::kForward; }
  bool is_detached = false;
  bool is_accumulating = false;  // The open step.
  int no_sync = 0;

 private:
  enum class Step { kClosed, kEvaluated, kForward, kBackward, kThrown };

  // The only writer of `step_`. Its callers have checked that the move is legal.
  void MoveTo(Step next);
  void CheckLayouts() const;
  void AddParameters();
  void AddBuffers();
  void AdoptStrides();
  void Attach(int param);
  void RemoveHooks(int param);
  bool HasChanged(int param) const;  // Its gradient, since the reduction.
  void ShowGradient(int param);      // grad() becomes the view of its bucket.
  bool ShowsBucket(int param) const;
  void MoveToBucket(int param);  // A gradient computed, or stored by the user, elsewhere.
  void RefuseSlices() const;
  void DropUsedUp();
  // Called before the open step's first gradient is computed, or in place of it. A gradient that
  // was kept after its reduction is part of the next reduction, without the ranks that are
  // exhausted then: its weight compensates for them.
  void PrepareGradients();
  void CheckReduced(int param) const;
  void ReadSparseGradient(int param);
  // Returns whether that backward begins with this gradient.
  bool BeforeBackward(int graph_task);
  void EndBackward(int graph_task, bool has_thrown);
  bool IsComplete() const;  // No gradient of the open step is missing.
  // The open step's backward has ended, but some of its gradients are missing.
  bool IsIncomplete() const;
  void MarkUnreached();
  void ShowSparseGradient(int param);

  friend class DataParallelBase;
  class BackwardEnd;
  // Guards the next three while a backward runs, as gradients may come on several threads. The
  // thread that calls Finish() is alone: no gradient of the step is missing then.
  std::mutex mutex_;
  Step step_ = Step::kClosed;
  std::vector<int> graph_tasks_;  // The backward of the open step, and those inside of it.
  // The graphs of the step's outputs begin here; weak, so that a skipped loss frees its graph.
  std::vector<decltype(WeakOf(Parameter::accumulator))> roots_;
};

}  // namespace evenkeel::libtorch

#endif  // EVENKEEL_LIBTORCH_INTERNAL_H_
