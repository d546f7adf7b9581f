// Describes parameters, so that the ranks can verify that they have the same.
//
//   EK_RETURN_IF_ERROR(VerifySame(comm, "model", own, FactsOf(params, buffers)));  // comm/agree.h
//
// Threads: pure functions.

#ifndef EVENKEEL_BUCKET_PARAMETER_FACTS_H_
#define EVENKEEL_BUCKET_PARAMETER_FACTS_H_

#include <cstddef>
#include <string>
#include <vector>

#include "absl/types/span.h"
#include "evenkeel/bucket/parameter_set.h"
#include "evenkeel/bucket/plan/trainable_mask.h"
#include "evenkeel/comm/agree.h"
#include "evenkeel/comm/types.h"

namespace evenkeel {

// Returns the numbers of parameters and buffers; the names, sizes (shapes, if they are known),
// types and sharing of parameters (of ignored ones only the names); and the sizes and types of
// buffers.
std::vector<Fact> FactsOf(const ParameterSet& params, absl::Span<const TensorView> buffers = {});

// Returns "frozen: fc1.weight, fc1.bias"; empty if nothing is. Ignored parameters do not count.
std::string FrozenNote(const ParameterSet& params, const TrainableMask& mask);

namespace internal {

// Returns the first `most` names, and how many more there are: "fc1.weight, fc1.bias and 3 more".
std::string Listed(absl::Span<const std::string> names, size_t most);

}  // namespace internal

}  // namespace evenkeel

#endif  // EVENKEEL_BUCKET_PARAMETER_FACTS_H_
