#include "evenkeel/zero_optim/internal/update_kernels.h"

#include <cmath>

// Plain loops that the compiler vectorises, one copy per instruction set: they are always_inline
// templates, so that they take on the instruction set of the function around them, and that one is
// chosen by hand at run time (an ifunc's resolver would run before a sanitizer is ready). This file
// is compiled without contraction of a * b + c, which would round differently where the processor
// has it, and without errno, which would keep square roots scalar. std::fma(), where PyTorch's own
// loops have it, rounds once everywhere: it is an instruction in all copies but Baseline on x86-64,
// where it is a call. Settings that do not change inside a loop are selected, not branched on: a
// value computed in vain costs nothing here.

#define EK_ALWAYS_INLINE inline __attribute__((always_inline))

#if defined(__clang__)
#define EK_INDEPENDENT_ITERATIONS _Pragma("clang loop vectorize(assume_safety)")
#else
#define EK_INDEPENDENT_ITERATIONS _Pragma("GCC ivdep")
#endif

namespace evenkeel::internal {
namespace {

template <typename T>
EK_ALWAYS_INLINE void SgdLoop(const SgdCoefficients& c, int64_t n, T* value, const T* gradient) {
  const T grad_scale(c.grad_scale), weight_decay(c.weight_decay),
      negative_learning_rate(c.negative_learning_rate);
  const bool decays = c.weight_decay != 0;
  EK_INDEPENDENT_ITERATIONS
  for (int64_t i = 0; i < n; ++i) {
    const T p = value[i];
    T g = gradient[i] * grad_scale;
    g = decays ? std::fma(p, weight_decay, g) : g;
    value[i] = std::fma(g, negative_learning_rate, p);
  }
}

template <typename T>
EK_ALWAYS_INLINE void SgdWithMomentumLoop(const SgdCoefficients& c, int64_t n, T* value,
                                          const T* gradient, T* momentum_buffer) {
  const T grad_scale(c.grad_scale), weight_decay(c.weight_decay),
      negative_learning_rate(c.negative_learning_rate);
  const T momentum(c.momentum);
  const bool decays = c.weight_decay != 0, is_first = c.is_first, nesterov = c.nesterov;
  EK_INDEPENDENT_ITERATIONS
  for (int64_t i = 0; i < n; ++i) {
    const T p = value[i];
    T g = gradient[i] * grad_scale;
    g = decays ? std::fma(p, weight_decay, g) : g;
    const T moved = momentum * momentum_buffer[i] + g;
    const T m = is_first ? g : moved;
    momentum_buffer[i] = m;
    const T ahead = std::fma(m, momentum, g);
    value[i] = std::fma(nesterov ? ahead : m, negative_learning_rate, p);
  }
}

template <typename T>
EK_ALWAYS_INLINE void AdamLoop(const AdamCoefficients& c, int64_t n, T* value, const T* gradient,
                               T* exp_avg, T* exp_avg_sq) {
  const T grad_scale(c.grad_scale), weight_decay(c.weight_decay), keep(c.keep);
  const T beta1(c.beta1), one_minus_beta1(c.one_minus_beta1);
  const T beta2(c.beta2), one_minus_beta2(c.one_minus_beta2);
  const T epsilon(c.epsilon), negative_step_size(c.negative_step_size);
  const T sqrt_bias_correction2(c.sqrt_bias_correction2);
  const bool decays = c.weight_decay != 0;
  EK_INDEPENDENT_ITERATIONS
  for (int64_t i = 0; i < n; ++i) {
    const T p = value[i];
    T g = gradient[i] * grad_scale;
    g = decays ? std::fma(p, weight_decay, g) : g;
    const T m = std::fma(g, one_minus_beta1, beta1 * exp_avg[i]);
    const T v = std::fma(one_minus_beta2 * g, g, beta2 * exp_avg_sq[i]);
    exp_avg[i] = m;
    exp_avg_sq[i] = v;
    const T denominator = std::sqrt(v) / sqrt_bias_correction2 + epsilon;
    value[i] = p * keep + negative_step_size * m / denominator;
  }
}

// One copy of the loops under an instruction set's name.
#define EK_UPDATE_KERNELS(Set, target)                                                         \
  template <typename T>                                                                        \
  struct Set {                                                                                 \
    target static void Sgd(const SgdCoefficients& c, int64_t n, T* value, const T* gradient) { \
      SgdLoop(c, n, value, gradient);                                                          \
    }                                                                                          \
    target static void SgdWithMomentum(const SgdCoefficients& c, int64_t n, T* value,          \
                                       const T* gradient, T* m) {                              \
      SgdWithMomentumLoop(c, n, value, gradient, m);                                           \
    }                                                                                          \
    target static void Adam(const AdamCoefficients& c, int64_t n, T* value, const T* gradient, \
                            T* m, T* v) {                                                      \
      AdamLoop(c, n, value, gradient, m, v);                                                   \
    }                                                                                          \
    static constexpr UpdateKernels<T> kKernels = {Sgd, SgdWithMomentum, Adam};                 \
  };

EK_UPDATE_KERNELS(Baseline, )
#if defined(__x86_64__)
EK_UPDATE_KERNELS(Avx2, __attribute__((target("avx2,fma"))))
EK_UPDATE_KERNELS(Avx512, __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma"))))
#endif

}  // namespace

template <typename T>
std::vector<NamedUpdateKernels<T>> SupportedUpdateKernels() {
  std::vector<NamedUpdateKernels<T>> all = {{"baseline", Baseline<T>::kKernels}};
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("fma")) return all;
  if (__builtin_cpu_supports("avx2")) all.push_back({"avx2", Avx2<T>::kKernels});
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    all.push_back({"avx512", Avx512<T>::kKernels});
  }
#endif
  return all;
}

template <typename T>
const UpdateKernels<T>& BestUpdateKernels() {
  static const UpdateKernels<T> best = SupportedUpdateKernels<T>().back().kernels;
  return best;
}

template std::vector<NamedUpdateKernels<float>> SupportedUpdateKernels();
template std::vector<NamedUpdateKernels<double>> SupportedUpdateKernels();
template const UpdateKernels<float>& BestUpdateKernels();
template const UpdateKernels<double>& BestUpdateKernels();

}  // namespace evenkeel::internal
