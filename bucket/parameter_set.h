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
// Ownership: the set owns names and flags, and none of the tensors. It and their memory must outlive every reducer and
//            optimizer made for it. With gradients as bucket views the reducer repoints `grad`; the address is stable
//            within a plan generation.
// Threads:   thread-compatible. Between a step's begin and its end the reducer shares it with the one thread that runs
//            backward.

#ifndef EVENKEEL_BUCKET_PARAMETER_SET_H_
#define EVENKEEL_BUCKET_PARAMETER_SET_H_

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
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

class ParameterSet {
 public:
  ParameterSet() = default;
  ParameterSet(const ParameterSet&) = delete;
  ParameterSet& operator=(const ParameterSet&) = delete;
  ParameterSet(ParameterSet&&) = default;
  ParameterSet& operator=(ParameterSet&&) = default;

  // Adds a trained parameter without gradient and returns its index. Add all before a reducer or optimizer is made.
  int Add(std::string name, TensorView value, TensorView grad = {});
  // OK, or InvalidArgument that names the first parameter that has no memory, another's name, or a gradient of another
  // shape. Reducers and optimizers ask it once, when they are made.
  absl::Status Validate() const;

  int size() const { return static_cast<int>(params_.size()); }
  const Parameter& operator[](int index) const { return params_[index]; }
  // Index of the (first) parameter of that name; -1 if there is none.
  int Find(absl::string_view name) const;

  GradState grad_state(int index) const { return grad_states_[index]; }
  void SetGradState(int index, GradState state) { grad_states_[index] = state; }
  // Makes every gradient none; writes no memory.
  void ClearGradients();
  // Where the gradient lies from now on; its content is not moved.
  void SetGradMemory(int index, TensorView grad) { params_[index].grad = grad; }

  bool trainable(int index) const { return mask_[index]; }
  const TrainableMask& mask() const { return mask_; }
  // Grows with each change of the mask.
  uint64_t mask_version() const { return mask_version_; }
  void SetTrainable(int index, bool trained);
  // All parameters whose name starts with `prefix`; answers how many those are.
  int SetTrainable(absl::string_view prefix, bool trained);
  // One byte per parameter, zero for frozen: for tensor libraries that keep the flag in their tensors. InvalidArgument,
  // and nothing changed, unless there are size() of them.
  absl::Status SetTrainable(std::span<const uint8_t> flags);
  // The whole mask; InvalidArgument, and nothing changed, unless it has size() entries.
  absl::Status SetTrainable(const TrainableMask& mask);

 private:
  std::vector<Parameter> params_;
  absl::flat_hash_map<std::string, int> index_of_;
  std::vector<GradState> grad_states_;
  TrainableMask mask_;
  uint64_t mask_version_ = 0;
};

}  // namespace evenkeel

#endif  // EVENKEEL_BUCKET_PARAMETER_SET_H_
