// Values in the form that layers take: vectors in T, matrices in the type O of products.
//
//   Operands<float, BFloat16> operands(&parameters, &held);
//   operands.AddMatrix(weight);         // once
//   operands.Refresh();                 // before each pass: rounds all matrices anew
//   operands.Matrix(weight);            // const BFloat16*
//   operands.Vector(bias);              // const float*
//   AsOperand(count, diff, memory);     // const BFloat16*, in `memory`
//
// Where T and O are the same nothing is copied.
//
// Ownership: `parameters` and `held` (buffer.h) outlive it.
// Threads:   thread-compatible.

#ifndef EVENKEEL_TRAINER_GPT_OPERANDS_H_
#define EVENKEEL_TRAINER_GPT_OPERANDS_H_

#include <cstdint>
#include <map>
#include <type_traits>

#include "absl/types/span.h"
#include "evenkeel/bucket/parameter_set.h"
#include "evenkeel/comm/arith/convert.h"
#include "evenkeel/comm/types.h"
#include "evenkeel/trainer/gpt/buffer.h"

namespace evenkeel {

// Returns the memory of `n` values as products take them: their own where that is of one type.
template <typename T, typename O>
O* OperandMemory(T* values, int64_t n, Buffer<O>& memory) {
  if constexpr (std::is_same_v<T, O>) {
    return values;
  } else {
    return memory.Resize(n);
  }
}

// Returns `values` themselves where products take them as they are, else rounded in `memory`.
template <typename T, typename O>
const O* AsOperand(int64_t n, const T* values, O* memory) {
  if constexpr (std::is_same_v<T, O>) {
    return values;
  } else {
    ConvertFloats(TensorView(absl::MakeSpan(const_cast<T*>(values), n)),
                  TensorView(absl::MakeSpan(memory, n)));
    return memory;
  }
}

// A model's parameters.
template <typename T, typename O>
class Operands {
 public:
  Operands(const ParameterSet* parameters, int64_t* held) : parameters_(*parameters), held_(held) {}

  void AddMatrix(int index) {
    if constexpr (!std::is_same_v<T, O>) rounded_.emplace(index, Buffer<O>(held_));
  }

  void Refresh() {
    for (auto& [index, matrix] : rounded_) {
      const int64_t count = parameters_[index].value.count;
      AsOperand(count, Vector(index), matrix.Resize(count));
    }
  }
  // Returns the bytes that Refresh() takes.
  int64_t RoundedBytes() const {
    int64_t count = 0;
    for (const auto& [index, matrix] : rounded_) count += parameters_[index].value.count;
    return count * static_cast<int64_t>(sizeof(O));
  }

  const O* Matrix(int index) const {
    if constexpr (std::is_same_v<T, O>) {
      return Vector(index);
    } else {
      return rounded_.at(index).data();
    }
  }

  const T* Vector(int index) const { return static_cast<const T*>(parameters_[index].value.data); }

 private:
  const ParameterSet& parameters_;
  int64_t* held_;
  std::map<int, Buffer<O>> rounded_;  // By parameter; empty where T is O.
};

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_GPT_OPERANDS_H_
