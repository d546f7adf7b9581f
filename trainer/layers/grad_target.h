// The memory for one gradient, and whether the gradient is added to the present values or
// overwrites them.
//
//   SumRows(rows, columns, matrix, GradTarget<float>{.data = diff_bias, .add = true});

#ifndef EVENKEEL_TRAINER_LAYERS_GRAD_TARGET_H_
#define EVENKEEL_TRAINER_LAYERS_GRAD_TARGET_H_

namespace evenkeel {

template <typename T>
struct GradTarget {
  T* data = nullptr;  // Null: this gradient is not wanted.
  bool add = false;

  explicit operator bool() const { return data != nullptr; }
};

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_LAYERS_GRAD_TARGET_H_
