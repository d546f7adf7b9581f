// The size at which collectives over several hosts are divided (collectives.h), for the backend and
// for models of its speed.

#ifndef EVENKEEL_COMM_HIERARCHICAL_THRESHOLDS_H_
#define EVENKEEL_COMM_HIERARCHICAL_THRESHOLDS_H_

#include <cstdint>

namespace evenkeel {

// The bytes that cross between two hosts at a time, while the next chunk is added up inside and the
// last one is spread there: enough to make the start of a step, some tens of microseconds,
// negligible.
inline constexpr int64_t kHierarchicalChunkBytes = 4 << 20;

}  // namespace evenkeel

#endif  // EVENKEEL_COMM_HIERARCHICAL_THRESHOLDS_H_
