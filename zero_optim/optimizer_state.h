// The state of an optimizer as a value, to save, load and compare.
//
//   OptimizerState state = optimizer->state();
//   const ParameterState& weight = state.params.at(0);
//   weight.step;                                     // number of updates of parameter 0
//   weight.tensors.at("exp_avg").as<float>();        // as many elements as the parameter
//
// A parameter that was never updated has no entry. An optimizer with the whole state on each rank,
// and all ranks of one with split state together, have the same entries, so each can load the state
// of the other, at any world size.
//
// Units:   keys are indices of the parameter set.
// Threads: thread-compatible value.

#ifndef EVENKEEL_ZERO_OPTIM_OPTIMIZER_STATE_H_
#define EVENKEEL_ZERO_OPTIM_OPTIMIZER_STATE_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "evenkeel/comm/types.h"

namespace evenkeel {

// Returns the type of a parameter's state: the parameter's type, or float32 if that has 16 bits.
constexpr DType StateDType(DType value) {
  return SizeOf(value) < SizeOf(DType::kFloat32) ? DType::kFloat32 : value;
}

// A tensor in memory of its own.
class StateTensor {
 public:
  StateTensor() = default;
  StateTensor(DType dtype, int64_t count)
      : dtype_(dtype), bytes_(count * SizeOf(dtype)) {}  // Zeros.

  DType dtype() const { return dtype_; }
  int64_t count() const { return static_cast<int64_t>(bytes_.size()) / SizeOf(dtype_); }
  int64_t bytes() const { return static_cast<int64_t>(bytes_.size()); }
  // Valid until the tensor is assigned to, moved or destroyed.
  TensorView view() { return TensorView(bytes_.data(), count(), dtype_); }
  // T must be the dtype's type.
  template <ElementType T>
  std::span<const T> as() const {
    return {reinterpret_cast<const T*>(bytes_.data()), static_cast<size_t>(count())};
  }
  const std::byte* data() const { return bytes_.data(); }

  friend bool operator==(const StateTensor&, const StateTensor&) = default;  // Bit for bit.

 private:
  DType dtype_ = DType::kFloat32;
  std::vector<std::byte> bytes_;
};

struct ParameterState {
  int64_t step = 0;  // Updates so far.
  std::map<std::string, StateTensor> tensors;
  friend bool operator==(const ParameterState&, const ParameterState&) = default;
};

struct OptimizerState {
  std::map<int, ParameterState> params;
  friend bool operator==(const OptimizerState&, const OptimizerState&) = default;
};

// A range of a parameter's elements.
struct StateRange {
  int64_t begin = 0;
  int64_t count = 0;
  friend bool operator==(const StateRange&, const StateRange&) = default;
};

// Views of the part of a state that one rank has: valid until the next call of the optimizer.
struct StatePiece {
  int param = 0;
  std::string tensor;
  int64_t begin = 0;  // The first of its elements among those of the tensor.
  TensorView data;
};
struct StatePieces {
  std::map<int, int64_t> steps;  // Updates so far, of the parameters in these pieces.
  std::vector<StatePiece> pieces;
  std::vector<std::shared_ptr<StateTensor>>
      copies;  // Host copies of state on a device, to which the pieces then refer.
};

// For Consolidate(): all ranks receive the state.
inline constexpr int kAllRanks = -1;

// A piece of all ranks' state, as Optimizer::VisitState() passes it on.
struct StateChunk {
  int param = 0;
  int64_t step = 0;          // Updates so far.
  absl::string_view tensor;  // Empty if the rule remembers nothing.
  int64_t count = 0;         // Elements of the whole tensor.
  int64_t begin = 0;         // The position of `data` in it.
  TensorView data;           // On the CPU, until the sink returns.
};
using StateSink = absl::FunctionRef<absl::Status(const StateChunk& chunk)>;

}  // namespace evenkeel

#endif  // EVENKEEL_ZERO_OPTIM_OPTIMIZER_STATE_H_
