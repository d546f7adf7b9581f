// Loops that the compiler vectorises for each instruction set, chosen when the program runs.
//
//   struct ScaleLoop {
//     template <typename T>
//     EK_ALWAYS_INLINE static void Run(int64_t n, T factor, T* values) {
//       for (int64_t i = 0; i < n; ++i) values[i] *= factor;
//     }
//   };
//   Vectorised<ScaleLoop>(n, 0.5f, values);
//
// `Run` is always inlined into the copy around it and so takes on its instruction set; arguments
// are passed by value. Compile the file that calls Vectorised with VECTORISED_COPTS
// (vectorised.bzl): sums that may be reordered are marked with `#pragma omp simd reduction`, no
// other is.
//
// Rounding: may differ between instruction sets, which add and contract differently; on one
//           processor it is always the same.
// Threads:  thread-safe.

#ifndef EVENKEEL_TRAINER_LAYERS_VECTORISED_H_
#define EVENKEEL_TRAINER_LAYERS_VECTORISED_H_

#include "evenkeel/comm/base/instruction_set.h"

#define EK_ALWAYS_INLINE inline __attribute__((always_inline))

namespace evenkeel {

using LoopCopy = internal::InstructionSet;

// Chosen by hand: the resolver of an ifunc would run before a sanitizer is ready.
inline LoopCopy BestLoopCopy() {
#if defined(__x86_64__)
  if (!__builtin_cpu_supports("fma")) return LoopCopy::kBaseline;
#endif
  return internal::BestInstructionSet();
}

#if defined(__x86_64__)
template <typename Loop, typename... Args>
__attribute__((target("avx2,fma"))) auto RunAvx2(Args... args) {
  return Loop::Run(args...);
}

template <typename Loop, typename... Args>
__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma,prefer-vector-width=512"))) auto
RunAvx512(Args... args) {
  return Loop::Run(args...);
}
#endif

// `copy` is one that this processor can run.
template <typename Loop, typename... Args>
auto RunCopy(LoopCopy copy, Args... args) {
#if defined(__x86_64__)
  if (copy == LoopCopy::kAvx512) return RunAvx512<Loop>(args...);
  if (copy == LoopCopy::kAvx2) return RunAvx2<Loop>(args...);
#endif
  return Loop::Run(args...);
}

template <typename Loop, typename... Args>
auto Vectorised(Args... args) {
  return RunCopy<Loop>(BestLoopCopy(), args...);
}

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_LAYERS_VECTORISED_H_
