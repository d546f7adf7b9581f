// The parameters of a model as evenkeel sees them: where each value and gradient lies, which are trained, and whose
// gradient each holds at the moment.
//
//   ParameterSet params;
//   int weight = params.Add("fc1.weight", TensorView(absl::MakeSpan(w)), TensorView(absl::MakeSpan(dw)));
//   ...
//   // In backward: write into params[weight].grad (or add, unless its state is kNone), then
//   params.SetGradState(weight, GradState::kLocal);
//   // the reducer makes it kReduced. Before the next backward:
//   params.ClearGradients();
//   params.SetTrainable("fc1.", false);     // freeze by prefix, from the next step on
//
// The model owns the set; reducers and optimizers keep a reference to it. Trainability lives here, packed and with a
// version, so that finding out that nothing changed costs one comparison, for any number of parameters.
//
// Layout:    value and gradient are flat: element i of the gradient belongs to element i of the value, whatever strides
//            the tensors have that they are seen through. The gradient's type is the value's.
// Shared:    the same memory added under another name (tied weights) is one parameter with two names: one gradient,
//            to which all of its uses add, announced once, after the last of them.
// Sparse:    of a parameter added with AddSparse() backward writes some rows (an embedding). They are gathered instead
//            of reduced, and Sgd without momentum and decay updates just these; `grad` has no memory.
// Ignored:   parameters of which data parallelism keeps its hands off: no bucket, no broadcast, no check that replicas
//            are equal, no optimizer's step; only names and that they are ignored must agree on all ranks. They may
//            differ in size and type, and lie on another device. They never count as trained.
//
// Memory:    a tensor that has moved (a tensor library's `to()`) is announced with Rebind(), or found by a reader
//            (DataParallelOptions::memory). Reducers and optimizers keep no address of a value.
//
// Ownership: the set owns names and flags, and none of the tensors. It and their memory must outlive every reducer and
//            optimizer made for it. With gradients as bucket views the reducer repoints `grad`; the address is stable
//            within a plan generation.
// Threads:   thread-compatible. Between a step's begin and its end the reducer shares it with the one thread that runs
//            backward.

#ifndef EVENKEEL_BUCKET_PARAMETER_SET_H_
#define EVENKEEL_BUCKET_PARAMETER_SET_H_

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "evenkeel/bucket/sparse_rows.h"
#include "evenkeel/bucket/trainable_mask.h"
#include "evenkeel/comm/types.h"

namespace evenkeel {

enum class GradState : uint8_t {
  kNone,     // No gradient: an optimizer leaves the parameter alone, decay and momentum included; memory unspecified.
  kLocal,    // This rank's own gradient, not reduced yet.
  kReduced,  // The group's gradient, equal on all ranks.
};

struct Parameter {
  std::string name;
  TensorView value;
  TensorView grad;  // Count, dtype and device of `value`; data may be null where gradients are bucket views.
};

// OK if `to` has the count, the type and the device of `from`; else InvalidArgument, which begins with `what`.
absl::Status CheckMoved(absl::string_view what, const TensorView& from, const TensorView& to);

class ParameterSet {
 public:
  ParameterSet() = default;
  ParameterSet(const ParameterSet&) = delete;
  ParameterSet& operator=(const ParameterSet&) = delete;
  ParameterSet(ParameterSet&&) = default;
  ParameterSet& operator=(ParameterSet&&) = default;

  // Adds a trained parameter without gradient and returns its index. Add all before a reducer or optimizer is made. A
  // value that is there already answers the index of the first: `name` is one more name of it, and `grad` the same
  // memory, or none.
  int Add(std::string name, TensorView value, TensorView grad = {}) { return Add(std::move(name), value, grad, 0); }
  // A table of rows of `row_size` elements, whose gradients come with SetSparseGrad().
  int AddSparse(std::string name, TensorView value, int64_t row_size) {
    return Add(std::move(name), value, {}, row_size);
  }
  // OK, or InvalidArgument that names the first parameter that has no memory, another's name, a gradient of another
  // shape, or memory that overlaps another's. Reducers and optimizers ask it once, when they are made.
  absl::Status Validate() const;

  int size() const { return static_cast<int>(params_.size()); }
  const Parameter& operator[](int index) const { return params_[index]; }
  // Index of the (first) parameter of that name, be it a shared one's second; -1 if there is none.
  int Find(absl::string_view name) const;
  // The names of shared parameters that are not their first.
  struct SharedName {
    std::string name;
    int index = 0;
    TensorView grad;       // As it was added,
    int64_t row_size = 0;  // and this.
  };
  const std::vector<SharedName>& shared_names() const { return shared_names_; }

  // From here on the parameter is ignored, on all ranks alike. FailedPrecondition once a reducer is attached.
  absl::Status Ignore(int index);
  // All parameters with a name that starts with `prefix`; answers how many those are.
  absl::StatusOr<int> Ignore(absl::string_view prefix);
  bool is_ignored(int index) const { return ignored_count_ > 0 && ignored_[index]; }
  int ignored_count() const { return ignored_count_; }

  // Attaches a reducer as long as the result lives; one at a time. `has_views`: gradients are views of its buckets.
  // FailedPrecondition names the reducer that is attached already. Two models are two sets.
  absl::StatusOr<std::shared_ptr<const std::string>> Attach(absl::string_view reducer, bool has_views = false);
  // OK if Attach() would be.
  absl::Status CheckDetached() const;

  GradState grad_state(int index) const { return grad_states_[index]; }
  void SetGradState(int index, GradState state) { grad_states_[index] = state; }
  // Makes every gradient none; writes no memory.
  void ClearGradients();
  // Where the gradient lies from now on; its content is not moved.
  void SetGradMemory(int index, TensorView grad) { params_[index].grad = grad; }

  // Records that the value, and with `grad` the gradient's own memory, has moved with its contents. Call it between two
  // steps, or two backwards that accumulate, after SlicedOptimizer::WaitForAll(). On a device the old memory is in use
  // until the work that is on the stream is done; CUDA graphs that use it must be captured again.
  // Errors: those of CheckMoved(); then nothing has changed.
  absl::Status Rebind(int index, TensorView value, TensorView grad = {});
  // Grows with each address that Rebind() changes.
  uint64_t memory_version() const { return memory_version_; }
  // The gradient's own memory, as it was when the reducer was attached, or rebound since; `grad` may lie in a bucket.
  const TensorView& own_grad(int index) const { return own_grads_[index]; }

  // On a device: the stream on which values and gradients are computed, used by reducers and optimizers: what they read
  // is complete after what is on it when they are called, and what they write is there for what comes on it after. Every
  // call that announces a gradient, finishes a step or updates values puts work there, and waits for none. Set before a
  // reducer or an optimizer is made; lives as long as they do. Null (on the CPU): there is none.
  void SetStream(StreamRef stream) { stream_ = stream; }
  StreamRef stream() const { return stream_; }

  // Elements per row; 0: dense.
  int64_t row_size(int index) const { return sparse_.empty() ? 0 : RowSize(index); }
  // Backward's gradient: `values` has [rows.size() * row_size] elements of the parameter's type; a row may come more
  // than once. Added to what is there if the state is kLocal, which it is afterwards. InvalidArgument, and nothing
  // changed, if something does not fit.
  absl::Status SetSparseGrad(int index, std::span<const int64_t> rows, TensorView values);
  // Of a sparse parameter: rows ascend, each once.
  const SparseRows& sparse_grad(int index) const { return sparse_.at(index).grad; }
  void SetSparseRows(int index, SparseRows rows) { sparse_.at(index).grad = std::move(rows); }

  bool trainable(int index) const { return mask_[index]; }
  const TrainableMask& mask() const { return mask_; }
  // Grows with each change of the mask.
  uint64_t mask_version() const { return mask_version_; }
  // Without effect on an ignored parameter, as the two that follow.
  void SetTrainable(int index, bool trained);
  // All parameters with a name that starts with `prefix`; answers how many those are, ignored ones not counted.
  int SetTrainable(absl::string_view prefix, bool trained);
  // One byte per parameter, zero for frozen: for tensor libraries that keep the flag in their tensors. InvalidArgument,
  // and nothing changed, unless there are size() of them.
  absl::Status SetTrainable(std::span<const uint8_t> flags);
  // The whole mask; InvalidArgument, and nothing changed, unless it has size() entries and trains nothing ignored.
  absl::Status SetTrainable(const TrainableMask& mask);

 private:
  int Add(std::string name, TensorView value, TensorView grad, int64_t row_size);
  // Indices of the parameters with a name of that prefix, ascending, those not ignored.
  std::vector<int> WithPrefix(absl::string_view prefix) const;
  absl::Status CheckNames() const;
  absl::Status CheckSparse() const;
  int64_t RowSize(int index) const;
  absl::Status CheckOverlaps() const;

  std::vector<Parameter> params_;
  absl::flat_hash_map<std::string, int> index_of_;
  absl::flat_hash_map<const void*, int> at_;  // By where its value begins.
  std::vector<SharedName> shared_names_;
  struct Sparse {
    int64_t row_size = 0;
    SparseRows grad;
  };
  absl::flat_hash_map<int, Sparse> sparse_;  // By parameter.
  TrainableMask ignored_;                    // A bit is set for an ignored one.
  int ignored_count_ = 0;
  std::weak_ptr<const std::string> attached_;
  bool has_views_ = false;  // That reducer's.
  std::vector<TensorView> own_grads_;
  uint64_t memory_version_ = 0;
  std::vector<GradState> grad_states_;
  TrainableMask mask_;
  uint64_t mask_version_ = 0;
  StreamRef stream_;
};

}  // namespace evenkeel

#endif  // EVENKEEL_BUCKET_PARAMETER_SET_H_
