// The instruction sets for which loops are compiled more than once, and which of them this machine
// supports.
//
// Threads: thread-safe.

#ifndef EVENKEEL_COMM_BASE_INSTRUCTION_SET_H_
#define EVENKEEL_COMM_BASE_INSTRUCTION_SET_H_

#include <vector>

namespace evenkeel::internal {

enum class InstructionSet { kBaseline, kAvx2, kAvx512 };
// Returns them in ascending order; the first is always supported.
std::vector<InstructionSet> SupportedInstructionSets();
InstructionSet BestInstructionSet();

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_BASE_INSTRUCTION_SET_H_
