// A model's parameters in the form its layers take: vectors in T, matrices in the type O of
// products.
//
//   Operands<float, BFloat16> operands(&parameters, &held);
//   operands.AddMatrix(weight);         // once
//   operands.Refresh();                 // before each pass: rounds all matrices anew
//   operands.Matrix(weight);            // const BFloat16*
//   operands.Vector(bias);              // const float*
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

#include "evenkeel/bucket/parameter_set.h"
#include "evenkeel/trainer/gpt/buffer.h"
#include "evenkeel/trainer/gpt/rows.h"

namespace evenkeel {

template <typename T, typename O>
class Operands {
 public:
  Operands(const ParameterSet* parameters, int64_t* held) : parameters_(*parameters), held_(held) {}

  void AddMatrix(int index) {
    if constexpr (!std::is_same_v<T, O>) rounded_.emplace(index, Buffer<O>(held_));
  }

  void Refresh() {
    if constexpr (!std::is_same_v<T, O>) {
      for (auto& [index, matrix] : rounded_) {
        const int64_t count = parameters_[index].value.count;
        Round(count, Vector(index), matrix.Resize(count));
      }
    }
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
