// The names of an enumeration's values, as a table in their order from 0.
//
//   constexpr absl::string_view kNames[] = {"sum", "average"};
//   NameIn(kNames, ReduceOp::kAverage, "unknown reduction");  // "average"
//   ValueIn<ReduceOp>(kNames, "sum");                         // ReduceOp::kSum
//
// Threads: pure functions.

#ifndef EVENKEEL_COMM_BASE_NAMES_H_
#define EVENKEEL_COMM_BASE_NAMES_H_

#include <algorithm>
#include <cstddef>
#include <optional>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace evenkeel::internal {

// Returns `unknown` for a value that the table does not have.
template <typename Enum>
absl::string_view NameIn(absl::Span<const absl::string_view> names, Enum value,
                         absl::string_view unknown) {
  const size_t index = static_cast<size_t>(value);
  return index < names.size() ? names[index] : unknown;
}

// Returns nothing for an unknown name.
template <typename Enum>
std::optional<Enum> ValueIn(absl::Span<const absl::string_view> names, absl::string_view name) {
  const auto found = std::find(names.begin(), names.end(), name);
  if (found == names.end()) return std::nullopt;
  return static_cast<Enum>(found - names.begin());
}

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_BASE_NAMES_H_
