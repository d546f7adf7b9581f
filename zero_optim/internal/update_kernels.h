// The element-wise loops of update rules on the CPU.
//
// Rounding: every instruction set gives the same bits (except for which NaN a NaN is).
// Aliasing: the arrays of one call do not overlap.
// Threads:  pure functions on the caller's memory.

#ifndef EVENKEEL_ZERO_OPTIM_INTERNAL_UPDATE_KERNELS_H_
#define EVENKEEL_ZERO_OPTIM_INTERNAL_UPDATE_KERNELS_H_

#include <cstdint>
#include <vector>

namespace evenkeel::internal {

// In double; each kernel rounds them to its type once.
struct SgdCoefficients {
  double grad_scale = 1.0;
  double weight_decay = 0.0;
  double momentum = 0.0;
  double negative_learning_rate = 0.0;
  bool is_first = false;  // The momentum buffer becomes the gradient.
  bool nesterov = false;
};

struct AdamCoefficients {
  double grad_scale = 1.0;
  double weight_decay = 0.0;  // Added to the gradient.
  double keep = 1.0;          // Factor of the parameter before the update: decoupled decay.
  double beta1 = 0.0;
  double one_minus_beta1 = 0.0;
  double beta2 = 0.0;
  double one_minus_beta2 = 0.0;
  double epsilon = 0.0;
  double negative_step_size = 0.0;
  double sqrt_bias_correction2 = 1.0;
};

// The kernels of one instruction set for elements of type T.
template <typename T>
struct UpdateKernels {
  void (*sgd)(const SgdCoefficients& coefficients, int64_t n, T* value, const T* gradient);
  void (*sgd_with_momentum)(const SgdCoefficients& coefficients, int64_t n, T* value,
                            const T* gradient, T* momentum);
  void (*adam)(const AdamCoefficients& coefficients, int64_t n, T* value, const T* gradient,
               T* exp_avg, T* exp_avg_sq);
};

// The fastest that this machine can run.
template <typename T>
const UpdateKernels<T>& BestUpdateKernels();

// For tests and benchmarks: all that this machine can run.
template <typename T>
struct NamedUpdateKernels {
  const char* name;  // "baseline", "avx2", "avx512"
  UpdateKernels<T> kernels;
};
template <typename T>
std::vector<NamedUpdateKernels<T>> SupportedUpdateKernels();

}  // namespace evenkeel::internal

#endif  // EVENKEEL_ZERO_OPTIM_INTERNAL_UPDATE_KERNELS_H_
