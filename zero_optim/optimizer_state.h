// What an optimizer remembers of its parameters, as a value: to save, to load, to compare.
//
//   OptimizerState state = optimizer->state();
//   const ParameterState& weight = state.params.at(0);
//   weight.step;                                     // updates that parameter 0 has had
//   weight.tensors.at("exp_avg").as<float>();        // as many elements as the parameter
//
// A parameter that was never updated has no entry. An unsharded optimizer and all ranks of a sharded one together hold
// the same entries, so a state that one of them gave can be loaded by the other, at any world size.
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

#include "evenkeel/comm/types.h"

namespace evenkeel {

// The type of a parameter's state: its own, or float32 if that has 16 bits.
constexpr DType StateDType(DType value) { return SizeOf(value) < SizeOf(DType::kFloat32) ? DType::kFloat32 : value; }

// A tensor in memory of its own.
class StateTensor {
 public:
  StateTensor() = default;
  StateTensor(DType dtype, int64_t count) : dtype_(dtype), bytes_(count * SizeOf(dtype)) {}  // Zeros.

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

// Of a parameter's elements, those whose state is meant.
struct StateRange {
  int64_t begin = 0;
  int64_t count = 0;
  friend bool operator==(const StateRange&, const StateRange&) = default;
};

// The part of a state that one rank has, where it lies: valid as long as the optimizer does nothing.
struct StatePiece {
  int param = 0;
  std::string tensor;
  int64_t begin = 0;  // The first of its elements among those of the tensor.
  TensorView data;
};
struct StatePieces {
  std::map<int, int64_t> steps;  // Updates so far of the parameters of which there is something here.
  std::vector<StatePiece> pieces;
  std::vector<std::shared_ptr<StateTensor>> copies;  // Of state that lies on a device, which the pieces are of then.
};

// Who gets the state that Consolidate() puts together, in place of one rank.
inline constexpr int kAllRanks = -1;

}  // namespace evenkeel

#endif  // EVENKEEL_ZERO_OPTIM_OPTIMIZER_STATE_H_
