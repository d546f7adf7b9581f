// The parameters of a model: the memory of each value and gradient, the set of trained parameters,
// and the state of each gradient.
//
//   ParameterSet params;
//   int weight =
//       params.Add("fc1.weight", TensorView(absl::MakeSpan(w)), TensorView(absl::MakeSpan(dw)));
//   ...
//   // In backward: write into params[weight].grad (or add, unless its state is kNone), then
//   params.SetGradState(weight, GradState::kLocal);
//   // the reducer makes it kReduced. Before the next backward:
//   params.ClearGradients();
//   params.SetTrainable("fc1.", false);     // freeze by prefix, from the next step on
//
// The model owns the set; reducers and optimizers keep a reference to it. The set keeps
// trainability as packed flags with a version, so that a check for changes is one comparison for
// any number of parameters.
//
// Layout:    value and gradient are flat: element i of the gradient belongs to element i of the
//            value, whatever the strides of the tensors that show them. They have the same type.
// Shared:    the same memory added under another name (tied weights) is one parameter with two
//            names and one gradient, to which all its uses add, announced once, after the last of
//            them.
// Sparse:    backward writes only some rows of a parameter that was added with AddSparse() (an
//            embedding). Rows are gathered instead of reduced, and Sgd without momentum and decay
//            updates only them; `grad` has no memory.
// Ignored:   data parallelism does not use an ignored parameter: no bucket, no broadcast, no check
//            that replicas are equal, no update. Only the names, and that they are ignored, must
//            agree on all ranks; sizes, types and devices may differ. It never counts as trained.
// Memory:    if a tensor has moved (a tensor library's `to()`), call Rebind(), or pass a reader
//            (DataParallelOptions::memory). Reducers and optimizers keep no address of a value.
//
// Ownership: the set owns names and flags, but no tensor. It and the tensors must outlive every
//            reducer and optimizer made for it. With gradients as bucket views the reducer changes
//            the address of `grad`; it is stable within a plan generation.
// Threads:   thread-compatible. Between the begin and the end of a step the reducer shares it with
//            the threads of backward: each of them accesses the gradients that it announces, and
//            their states.

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
#include "evenkeel/bucket/plan/trainable_mask.h"
#include "evenkeel/bucket/sparse_rows.h"
#include "evenkeel/comm/types.h"

namespace evenkeel {

enum class GradState : uint8_t {
  kNone,     // No gradient, and unspecified memory. An optimizer does not change the parameter, nor
             // its momentum.
  kLocal,    // This rank's own gradient, not reduced yet.
  kReduced,  // The group's gradient, equal on all ranks.
};

struct Parameter {
  std::string name;
  TensorView value;
  TensorView grad;  // Count, dtype and device of `value`. `data` may be null if gradients are
                    // bucket views.
};

// Returns OK if `to` has the count, the type and the device of `from`; else InvalidArgument that
// begins with `what`.
absl::Status CheckMoved(absl::string_view what, const TensorView& from, const TensorView& to);

class ParameterSet {
 public:
  ParameterSet() = default;
  ParameterSet(const ParameterSet&) = delete;
  ParameterSet& operator=(const ParameterSet&) = delete;
  ParameterSet(ParameterSet&&) = default;
  ParameterSet& operator=(ParameterSet&&) = default;

  // Adds a trained parameter without gradient and returns its index. Add all before a reducer or an
  // optimizer is made. For a value that was added before, returns the index of the first: `name` is
  // a further name of it, and `grad` the same memory, or none. `shape`: optional sizes of
  // dimensions.
  int Add(std::string name, TensorView value, TensorView grad = {},
          std::vector<int64_t> shape = {}) {
    return Add(std::move(name), value, grad, 0, std::move(shape));
  }
  // Adds a table of rows of `row_size` elements, whose gradients SetSparseGrad() sets.
  int AddSparse(std::string name, TensorView value, int64_t row_size) {
    return Add(std::move(name), value, {}, row_size, {});
  }
  // Returns OK, or InvalidArgument that names the first parameter without memory, with the name of
  // another, with a gradient or a shape of another size, or with memory that overlaps another's or
  // that of one of `buffers`. Reducers and optimizers call it once, when they are made.
  absl::Status Validate(std::span<const TensorView> buffers = {}) const;

  int size() const { return static_cast<int>(params_.size()); }
  const Parameter& operator[](int index) const { return params_[index]; }
  // Returns the shape given to Add(); empty: unknown, or a scalar.
  std::span<const int64_t> shape(int index) const { return shapes_[index]; }
  // Returns the index of the (first) parameter with that name, which may be a further name of a
  // shared one; -1 if no parameter has it.
  int Find(absl::string_view name) const;
  int Find(const char* name) const { return Find(absl::string_view(name)); }
  // Returns the index of the (first) parameter whose value begins at that address; -1 for none.
  int Find(const void* value) const;
  // The names of shared parameters that are not their first.
  struct SharedName {
    std::string name;
    int index = 0;
    TensorView grad;       // As it was added,
    int64_t row_size = 0;  // and this.
  };
  const std::vector<SharedName>& shared_names() const { return shared_names_; }

  // Ignores the parameter from now on; call it on all ranks. FailedPrecondition once a reducer is
  // attached.
  absl::Status Ignore(int index);
  // Ignores all parameters whose names start with `prefix`; returns their number.
  absl::StatusOr<int> Ignore(absl::string_view prefix);
  bool is_ignored(int index) const { return ignored_count_ > 0 && ignored_[index]; }
  int ignored_count() const { return ignored_count_; }

  // Attaches a reducer while the result lives; one at a time. `has_views`: gradients are views of
  // its buckets. FailedPrecondition names the reducer that is attached already. Use one set per
  // model.
  absl::StatusOr<std::shared_ptr<const std::string>> Attach(absl::string_view reducer,
                                                            bool has_views = false);
  // Returns the error that Attach() would return.
  absl::Status CheckDetached() const;

  GradState grad_state(int index) const { return grad_states_[index]; }
  void SetGradState(int index, GradState state);
  // Returns whether the gradient of any trained parameter is kLocal. Looks at that of `first`
  // first.
  bool has_local_gradients(int first = 0) const;
  // Returns how often the program has dropped the last of such gradients.
  int64_t dropped_gradients() const { return dropped_gradients_; }
  // Sets the state of every gradient to kNone; writes no memory.
  void ClearGradients();
  // For reducers: the gradients of all ranks have been reduced; or the next step begins.
  void SetReduced(bool is_reduced);
  // Returns true from the end of a step that reduced the gradients to the beginning of the next.
  bool is_reduced() const { return is_reduced_; }
  // Returns whether the state has been set to kNone since the last reduction, also where it was
  // kNone already because each rank has a slice.
  bool was_cleared(int index) const { return was_cleared_[index] != 0; }
  // Sets the address of the gradient; does not move its content.
  void SetGradMemory(int index, TensorView grad) { params_[index].grad = grad; }

  // Records that the value, and with `grad` the gradient's own memory, has moved with its contents.
  // Call it between two steps, or two backwards that accumulate, after Optimizer::WaitForAll(). On
  // a device the old memory is in use until the work on the stream has ended; CUDA graphs that use
  // it must be captured again. Errors: those of CheckMoved(), without a change.
  absl::Status Rebind(int index, TensorView value, TensorView grad = {});
  // Grows with each address that Rebind() changes.
  uint64_t memory_version() const { return memory_version_; }
  // Returns the gradient's own memory, as it was when the reducer was attached, or rebound since;
  // `grad` may be in a bucket.
  const TensorView& own_grad(int index) const { return own_grads_[index]; }

  // On a device: the stream on which values and gradients are computed. Reducers and optimizers
  // read after the work that is on it when they are called, and later work on it sees what they
  // write. Every call that announces a gradient, finishes a step or updates values enqueues work on
  // it, and waits for none. Set it before a reducer or an optimizer is made; it must outlive them.
  // Null on the CPU.
  void SetStream(StreamRef stream) { stream_ = stream; }
  StreamRef stream() const { return stream_; }

  // Returns the elements per row; 0: dense.
  int64_t row_size(int index) const { return sparse_.empty() ? 0 : RowSize(index); }
  // Sets the gradient from backward: `values` has [rows.size() * row_size] elements of the
  // parameter's type; a row may appear more than once. Adds to the present gradient if its state is
  // kLocal; sets this state. InvalidArgument, without a change, if an argument does not fit.
  absl::Status SetSparseGrad(int index, std::span<const int64_t> rows, TensorView values);
  // Returns the gradient of a sparse parameter: rows ascend, each once.
  const SparseRows& sparse_grad(int index) const { return sparse_.at(index).grad; }
  void SetSparseRows(int index, SparseRows rows) { sparse_.at(index).grad = std::move(rows); }

  bool trainable(int index) const { return mask_[index]; }
  const TrainableMask& mask() const { return mask_; }
  // Grows with each change of the mask.
  uint64_t mask_version() const { return mask_version_; }
  // This and the next two have no effect on ignored parameters.
  void SetTrainable(int index, bool trained);
  // Sets all parameters whose names start with `prefix`; returns their number without ignored ones.
  int SetTrainable(absl::string_view prefix, bool trained);
  // Sets all from one byte per parameter, 0 for frozen, for tensor libraries that keep the flag in
  // their tensors. InvalidArgument, without a change, unless there are size() bytes.
  absl::Status SetTrainable(std::span<const uint8_t> flags);
  // Sets the whole mask. InvalidArgument, without a change, unless it has size() entries and trains
  // no ignored parameter.
  absl::Status SetTrainable(const TrainableMask& mask);

 private:
  int Add(std::string name, TensorView value, TensorView grad, int64_t row_size,
          std::vector<int64_t> shape);
  // Returns the indices of the parameters whose names start with the prefix, ascending, without
  // ignored ones.
  std::vector<int> WithPrefix(absl::string_view prefix) const;
  absl::Status CheckNames() const;
  absl::Status CheckSparse() const;
  int64_t RowSize(int index) const;
  absl::Status CheckOverlaps(std::span<const TensorView> buffers) const;

  std::vector<Parameter> params_;
  std::vector<std::vector<int64_t>> shapes_;
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
  int64_t dropped_gradients_ = 0;
  std::vector<uint8_t> was_cleared_;
  bool is_reduced_ = false;
  TrainableMask mask_;
  uint64_t mask_version_ = 0;
  StreamRef stream_;
};

}  // namespace evenkeel

#endif  // EVENKEEL_BUCKET_PARAMETER_SET_H_
