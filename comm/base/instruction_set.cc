#include "evenkeel/comm/base/instruction_set.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace evenkeel::internal {

#if defined(__x86_64__)
namespace {

// Clang 14 does not know this name in __builtin_cpu_supports.
bool HasF16c() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
}

}  // namespace
#endif

std::vector<InstructionSet> SupportedInstructionSets() {
  std::vector<InstructionSet> sets = {InstructionSet::kBaseline};
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2") && HasF16c()) {
    sets.push_back(InstructionSet::kAvx2);
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
      sets.push_back(InstructionSet::kAvx512);
    }
  }
#endif
  return sets;
}

InstructionSet BestInstructionSet() {
  static const InstructionSet best = SupportedInstructionSets().back();
  return best;
}

}  // namespace evenkeel::internal
