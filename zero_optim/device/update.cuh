// Update rules on a device: many tensors in one launch, a block for each chunk of one.
//
// Three kinds of kernels, and between them nothing but the device's memory:
//
//   ek_measure, ek_measure_total   gradients -> what was found: the sum of |g|^p or the largest
//     |g|, and how many blocks
//                                  saw something that is not finite
//   ek_prepare_update              what was found -> whether the step is skipped, and by what
//     gradients are multiplied;
//                                  each parameter's step count -> the numbers of its update, bias
//                                  corrections included
//   ek_update_...                  one pass over gradient, state and value, by these numbers
//
// Rounding: the same operations in the same order as on the CPU (internal/update_kernels.cc), fused
//           where those are, divisions and roots rounded to nearest. Only pow() in the bias
//           corrections may differ in the last bits of a double.
// Sums:     of each thread, then of each block, then of all, in an order that depends on the table
//           alone.

#ifndef EVENKEEL_ZERO_OPTIM_DEVICE_UPDATE_CUH_
#define EVENKEEL_ZERO_OPTIM_DEVICE_UPDATE_CUH_

#include <cstdint>

#include "evenkeel/comm/device/kernel.h"

#ifdef __CUDACC__
#define EK_UPDATE_UNROLL _Pragma("unroll")
#else
#include <cmath>
#define EK_UPDATE_UNROLL
#endif

namespace evenkeel::update {

// A tensor to update, in the device's memory.
struct Tensor {
  void* value;
  const void* gradient;
  float* first;   // Momentum, or the first moment.
  float* second;  // The second moment.
  float* master;  // For a value in 16 bits: the value before rounding.
  int32_t param;
  int32_t is_bfloat;  // Else float.
  friend bool operator==(const Tensor&, const Tensor&) = default;
};
struct Chunk {
  int64_t begin;
  int32_t tensor;
  int32_t count;
};
inline constexpr int kThreads = 256;
inline constexpr int kTotalThreads = 256;
inline constexpr int64_t kChunk = 4096;

enum class Rule : int32_t { kSgd, kMomentum, kAdam, kCount };
struct RuleNumbers {
  Rule rule;
  int32_t nesterov;
  int32_t decoupled;
  int32_t unused;
  double learning_rate, momentum, weight_decay, beta1, beta2, epsilon;
};
inline constexpr int kMostRules = 16;
struct Rules {
  RuleNumbers at[kMostRules];
};

// A parameter whose step is counted.
struct Entry {
  int32_t param;
  int32_t rule;
  int32_t flag;  // Among the flags, if there are some; -1: none of them.
  int32_t unused;
};

// The use of the measured values.
struct Decision {
  double grad_scale;
  double norm;      // The p of the p-norm; infinite: the largest magnitude.
  double max_norm;  // Where `clips`.
  int32_t is_measured;
  int32_t clips;
  int32_t skips_nonfinite;
  int32_t unused;
};
struct Found {
  double value;
  double nonfinite;
};
// The result that the host may fetch.
struct Check {
  double norm;
  int32_t is_finite;
  int32_t is_skipped;
};

// The constants of one parameter's update.
struct Numbers {
  float grad_scale, weight_decay, keep;
  float beta1, one_minus_beta1, beta2, one_minus_beta2;
  float epsilon, negative_step_size, sqrt_bias_correction2;
  float momentum, negative_learning_rate;
  int32_t is_skipped, is_first, decays, nesterov;
};

// Rounded one by one, except in Fma(): nvcc would make one operation of every product and sum. For
// g++ an option prevents this (-ffp-contract=off).
#ifdef __CUDACC__
EK_DEVICE float Mul(float a, float b) { return __fmul_rn(a, b); }
EK_DEVICE float Add(float a, float b) { return __fadd_rn(a, b); }
EK_DEVICE float Fma(float a, float b, float c) { return __fmaf_rn(a, b, c); }
EK_DEVICE float Div(float a, float b) { return __fdiv_rn(a, b); }
EK_DEVICE float Root(float a) { return __fsqrt_rn(a); }
EK_DEVICE double MulD(double a, double b) { return __dmul_rn(a, b); }
EK_DEVICE double AddD(double a, double b) { return __dadd_rn(a, b); }
EK_DEVICE double RootD(double a) { return sqrt(a); }
__device__ __noinline__ double Power(double a, double b) {
  return pow(a, b);
}  // Long, and seldom called.
EK_DEVICE double Magnitude(double a) { return fabs(a); }
EK_DEVICE bool IsInfinite(double a) { return isinf(a); }
EK_DEVICE double Infinity() { return __longlong_as_double(0x7ff0000000000000ll); }
#else
EK_DEVICE float Mul(float a, float b) { return a * b; }
EK_DEVICE float Add(float a, float b) { return a + b; }
EK_DEVICE float Fma(float a, float b, float c) { return std::fma(a, b, c); }
EK_DEVICE float Div(float a, float b) { return a / b; }
EK_DEVICE float Root(float a) { return std::sqrt(a); }
EK_DEVICE double MulD(double a, double b) { return a * b; }
EK_DEVICE double AddD(double a, double b) { return a + b; }
EK_DEVICE double RootD(double a) { return std::sqrt(a); }
EK_DEVICE double Power(double a, double b) { return std::pow(a, b); }
EK_DEVICE double Magnitude(double a) { return std::abs(a); }
EK_DEVICE bool IsInfinite(double a) { return std::isinf(a); }
EK_DEVICE double Infinity() { return HUGE_VAL; }
#endif

// Not 0 where any rank has a gradient. Where no rank has one, the parameter stays as it is.
struct Flags {
  const void* data;
  int64_t is_bfloat;  // Else float.
};
EK_DEVICE bool IsSet(const Flags& flags, int32_t flag) {
  if (flags.data == nullptr || flag < 0) return true;
  return flags.is_bfloat ? (static_cast<const uint16_t*>(flags.data)[flag] & 0x7fff) != 0
                         : static_cast<const float*>(flags.data)[flag] != 0;
}

// The rules, for one element ----------------------------------------------------------------------

EK_DEVICE float Scaled(const Numbers& c, float p, float gradient) {
  const float g = Mul(gradient, c.grad_scale);
  return c.decays ? Fma(p, c.weight_decay, g) : g;
}

// The part between the value and the gradient differs by rule: which state there is, and its new
// value.
struct SgdRule {
  static constexpr bool kFirst = false, kSecond = false;
  EK_DEVICE static float Step(const Numbers& c, float p, float gradient, float&, float&) {
    return Fma(Scaled(c, p, gradient), c.negative_learning_rate, p);
  }
};
struct MomentumRule {
  static constexpr bool kFirst = true, kSecond = false;
  EK_DEVICE static float Step(const Numbers& c, float p, float gradient, float& momentum, float&) {
    const float g = Scaled(c, p, gradient);
    const float m = c.is_first ? g : Add(Mul(c.momentum, momentum), g);
    momentum = m;
    return Fma(c.nesterov ? Fma(m, c.momentum, g) : m, c.negative_learning_rate, p);
  }
};
struct AdamRule {
  static constexpr bool kFirst = true, kSecond = true;
  EK_DEVICE static float Step(const Numbers& c, float p, float gradient, float& exp_avg,
                              float& exp_avg_sq) {
    const float g = Scaled(c, p, gradient);
    const float m = Fma(g, c.one_minus_beta1, Mul(c.beta1, exp_avg));
    const float v = Fma(Mul(c.one_minus_beta2, g), g, Mul(c.beta2, exp_avg_sq));
    exp_avg = m;
    exp_avg_sq = v;
    const float denominator = Add(Div(Root(v), c.sqrt_bias_correction2), c.epsilon);
    return Add(Mul(p, c.keep), Div(Mul(c.negative_step_size, m), denominator));
  }
};

// Over a table ------------------------------------------------------------------------------------

template <typename T>
inline constexpr bool kHasMaster = sizeof(T) < sizeof(float);

// Element i of a tensor.
template <typename R, typename T>
EK_DEVICE void UpdateOne(const Numbers& c, const Tensor& tensor, int64_t i) {
  T* const value = static_cast<T*>(tensor.value) + i;
  float first = R::kFirst ? tensor.first[i] : 0.0f, second = R::kSecond ? tensor.second[i] : 0.0f;
  const float p = kHasMaster<T> && !c.is_first ? tensor.master[i] : kernel::ToFloat(*value);
  const float now =
      R::Step(c, p, kernel::ToFloat(static_cast<const T*>(tensor.gradient)[i]), first, second);
  if (R::kFirst) tensor.first[i] = first;
  if (R::kSecond) tensor.second[i] = second;
  if (kHasMaster<T>) tensor.master[i] = now;
  *value = kernel::FromFloat<T>(now);
}

template <typename R, typename T>
EK_DEVICE void UpdateFour(const Numbers& c, const Tensor& tensor, int64_t i) {
  T* const value = static_cast<T*>(tensor.value) + i;
  const bool has_values =
      !kHasMaster<T> || c.is_first;  // Else the master copy is read in their place.
  kernel::Four<T> values{};
  if (has_values) values = kernel::LoadFour(value);
  const kernel::Four<T> gradients = kernel::LoadFour(static_cast<const T*>(tensor.gradient) + i);
  kernel::Four<float> first{}, second{}, master{};
  if (R::kFirst) first = kernel::LoadFour(tensor.first + i);
  if (R::kSecond) second = kernel::LoadFour(tensor.second + i);
  if (!has_values) master = kernel::LoadFour(tensor.master + i);
  for (int k = 0; k < 4; ++k) {
    const float p = has_values ? kernel::ToFloat(values.at[k]) : master.at[k];
    const float now = R::Step(c, p, kernel::ToFloat(gradients.at[k]), first.at[k], second.at[k]);
    master.at[k] = now;
    values.at[k] = kernel::FromFloat<T>(now);
  }
  if (R::kFirst) kernel::StoreFour(tensor.first + i, first);
  if (R::kSecond) kernel::StoreFour(tensor.second + i, second);
  if (kHasMaster<T>) kernel::StoreFour(tensor.master + i, master);
  kernel::StoreFour(value, values);
}

template <typename R, typename T>
EK_DEVICE void UpdateChunks(const Tensor* tensors, const Chunk* chunks, int64_t first, int64_t last,
                            const Numbers* numbers) {
  for (int64_t at = first + kernel::BlockX(); at < last; at += kernel::GridBlocks()) {
    const Chunk chunk = chunks[at];
    const Tensor tensor = tensors[chunk.tensor];
    const Numbers c = numbers[tensor.param];
    if (c.is_skipped) continue;
    const int64_t end = chunk.begin + chunk.count;
    int64_t i = chunk.begin;
    // Chunks begin at multiples of four.
    const bool is_aligned = kernel::IsAlignedForFour<T>(tensor.value) &&
                            kernel::IsAlignedForFour<T>(tensor.gradient) &&
                            kernel::IsAlignedForFour<float>(tensor.first) &&
                            kernel::IsAlignedForFour<float>(tensor.second) &&
                            kernel::IsAlignedForFour<float>(tensor.master);
    if (is_aligned) {
      const int64_t fours = chunk.count / 4;
      for (int64_t four = kernel::ThreadX(); four < fours; four += kernel::BlockThreads()) {
        UpdateFour<R, T>(c, tensor, chunk.begin + 4 * four);
      }
      i += 4 * fours;
    }
    for (i += kernel::ThreadX(); i < end; i += kernel::BlockThreads())
      UpdateOne<R, T>(c, tensor, i);
  }
}

// Measured values, and their use in a step --------------------------------------------------------

struct MeasureState {
  double value = 0;
  float zeros = 0;  // Zero times a number is zero, unless that is infinite or none.
};

EK_DEVICE void Measure(float g, double norm, MeasureState& state) {
  state.zeros = Add(state.zeros, Mul(g, 0.0f));
  const double size = Magnitude(static_cast<double>(g));
  if (norm == 2) {
    state.value = AddD(state.value, MulD(size, size));
  } else if (norm == 1) {
    state.value = AddD(state.value, size);
  } else if (IsInfinite(norm)) {
    state.value = state.value < size ? size : state.value;
  } else {
    state.value = AddD(state.value, Power(size, norm));
  }
}

template <typename T>
EK_DEVICE void MeasureFour(const kernel::Four<T>& four, double norm, MeasureState& state) {
  EK_UPDATE_UNROLL for (int k = 0; k < 4; ++k) Measure(kernel::ToFloat(four.at[k]), norm, state);
}

inline constexpr int kMeasureUnroll = 4;  // Loads on their way at once; a whole chunk of a block's.

template <typename T>
EK_DEVICE void MeasureChunk(const Chunk& chunk, const T* gradient, double norm,
                            MeasureState& state) {
  int64_t i = chunk.begin;
  if (kernel::IsAlignedForFour<T>(gradient)) {
    const int64_t fours = chunk.count / 4, step = kernel::BlockThreads();
    const T* const elements = gradient + chunk.begin;
    int64_t four = kernel::ThreadX();
    for (; four + (kMeasureUnroll - 1) * step < fours; four += kMeasureUnroll * step) {
      kernel::Four<T> loaded[kMeasureUnroll];
      EK_UPDATE_UNROLL for (int u = 0; u < kMeasureUnroll; ++u) loaded[u] =
          kernel::LoadFour(elements + 4 * (four + u * step));
      EK_UPDATE_UNROLL for (int u = 0; u < kMeasureUnroll; ++u) MeasureFour(loaded[u], norm, state);
    }
    for (; four < fours; four += step)
      MeasureFour(kernel::LoadFour(elements + 4 * four), norm, state);
    i += 4 * fours;
  }
  for (i += kernel::ThreadX(); i < chunk.begin + chunk.count; i += kernel::BlockThreads()) {
    Measure(kernel::ToFloat(gradient[i]), norm, state);
  }
}

EK_DEVICE double NormOf(const Found& found, const Decision& decision) {
  double total = found.value;
  if (decision.norm == 2) {
    total = RootD(total);
  } else if (decision.norm != 1 && !IsInfinite(decision.norm)) {
    total = Power(total, 1 / decision.norm);
  }
  return MulD(total, Magnitude(decision.grad_scale));
}

// Returns the factor for a clipped gradient, as ClipCoefficient() (gradient_check.h).
EK_DEVICE double ClipOf(double max_norm, double norm) {
  const double coefficient = max_norm / AddD(norm, 1e-6);
  return coefficient < 1 ? coefficient : 1;
}

EK_DEVICE Numbers NumbersFor(const RuleNumbers& rule, int64_t step, double grad_scale) {
  Numbers n{};
  n.grad_scale = static_cast<float>(grad_scale);
  n.is_first = step == 1;
  n.nesterov = rule.nesterov;
  n.momentum = static_cast<float>(rule.momentum);
  n.negative_learning_rate = static_cast<float>(-rule.learning_rate);
  const double added_decay = rule.decoupled ? 0 : rule.weight_decay;
  n.weight_decay = static_cast<float>(added_decay);
  n.decays = added_decay != 0;
  if (rule.rule != Rule::kAdam) return n;
  const double count = static_cast<double>(step);
  const double bias_correction1 = AddD(1, -Power(rule.beta1, count));
  const double bias_correction2 = AddD(1, -Power(rule.beta2, count));
  n.keep = rule.decoupled
               ? static_cast<float>(AddD(1, -MulD(rule.learning_rate, rule.weight_decay)))
               : 1.0f;
  n.beta1 = static_cast<float>(rule.beta1);
  n.one_minus_beta1 = static_cast<float>(AddD(1, -rule.beta1));
  n.beta2 = static_cast<float>(rule.beta2);
  n.one_minus_beta2 = static_cast<float>(AddD(1, -rule.beta2));
  n.epsilon = static_cast<float>(rule.epsilon);
  n.negative_step_size = static_cast<float>(-(rule.learning_rate / bias_correction1));
  n.sqrt_bias_correction2 = static_cast<float>(RootD(bias_correction2));
  return n;
}

}  // namespace evenkeel::update

namespace evenkeel {

// partials[b]: what block b found in its chunks.
EK_KERNEL(256, ek_measure)
(const update::Tensor* tensors, const update::Chunk* chunks, int64_t chunk_count, double norm,
 update::Found* partials) {
  EK_SHARED double scratch[32];
  update::MeasureState state;
  for (int64_t at = kernel::BlockX(); at < chunk_count; at += kernel::GridBlocks()) {
    const update::Chunk chunk = chunks[at];
    const update::Tensor tensor = tensors[chunk.tensor];
    if (tensor.is_bfloat) {
      update::MeasureChunk(chunk, static_cast<const kernel::BFloat*>(tensor.gradient), norm, state);
    } else {
      update::MeasureChunk(chunk, static_cast<const float*>(tensor.gradient), norm, state);
    }
  }
  const double value = update::IsInfinite(norm) ? kernel::BlockMax(state.value, scratch)
                                                : kernel::BlockSum(state.value, scratch);
  const double nonfinite = kernel::BlockSum(state.zeros == 0 ? 0.0 : 1.0, scratch);
  if (kernel::ThreadX() == 0) partials[kernel::BlockX()] = {value, nonfinite};
}

// One block.
EK_KERNEL(256, ek_measure_total)
(const update::Found* partials, int64_t count, double norm, update::Found* found) {
  EK_SHARED double scratch[32];
  double value = 0, nonfinite = 0;
  for (int64_t i = kernel::ThreadX(); i < count; i += kernel::BlockThreads()) {
    const double part = partials[i].value;
    if (update::IsInfinite(norm)) {
      value = value < part ? part : value;
    } else {
      value = update::AddD(value, part);
    }
    nonfinite = update::AddD(nonfinite, partials[i].nonfinite);
  }
  value = update::IsInfinite(norm) ? kernel::BlockMax(value, scratch)
                                   : kernel::BlockSum(value, scratch);
  nonfinite = kernel::BlockSum(nonfinite, scratch);
  if (kernel::ThreadX() == 0) *found = {value, nonfinite};
}

// A thread per entry; the first of all writes `check`, also if there is no entry.
EK_KERNEL(256, ek_prepare_update)
(const update::Entry* entries, int64_t count, update::Rules rules, update::Decision decision,
 update::Flags flags, const update::Found* found, int64_t* steps, update::Numbers* numbers,
 update::Check* check) {
  double grad_scale = decision.grad_scale;
  bool is_skipped = false;
  if (decision.is_measured) {
    const bool is_finite = found->nonfinite == 0;
    double norm = update::NormOf(*found, decision);
    if (!is_finite) norm = update::Infinity();
    is_skipped = decision.skips_nonfinite && !is_finite;
    if (decision.clips)
      grad_scale = update::MulD(grad_scale, update::ClipOf(decision.max_norm, norm));
    if (kernel::GlobalIndex() == 0 && check != nullptr) *check = {norm, is_finite, is_skipped};
  }
  for (int64_t i = kernel::GlobalIndex(); i < count; i += kernel::GlobalThreads()) {
    const update::Entry entry = entries[i];
    if (is_skipped || !update::IsSet(flags, entry.flag)) {
      numbers[entry.param].is_skipped = 1;
      continue;
    }
    const int64_t step = ++steps[entry.param];
    numbers[entry.param] = update::NumbersFor(rules.at[entry.rule], step, grad_scale);
  }
}

#define EK_UPDATE_KERNELS(rule, name)                                                          \
  EK_KERNEL(256, ek_update_##name##_float)                                                     \
  (const update::Tensor* tensors, const update::Chunk* chunks, int64_t first, int64_t last,    \
   const update::Numbers* numbers) {                                                           \
    update::UpdateChunks<update::rule, float>(tensors, chunks, first, last, numbers);          \
  }                                                                                            \
  EK_KERNEL(256, ek_update_##name##_bfloat)                                                    \
  (const update::Tensor* tensors, const update::Chunk* chunks, int64_t first, int64_t last,    \
   const update::Numbers* numbers) {                                                           \
    update::UpdateChunks<update::rule, kernel::BFloat>(tensors, chunks, first, last, numbers); \
  }
EK_UPDATE_KERNELS(SgdRule, sgd)
EK_UPDATE_KERNELS(MomentumRule, momentum)
EK_UPDATE_KERNELS(AdamRule, adam)
#undef EK_UPDATE_KERNELS

}  // namespace evenkeel

#endif  // EVENKEEL_ZERO_OPTIM_DEVICE_UPDATE_CUH_
