#include "evenkeel/join/internal/join_list.h"

#include <algorithm>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace evenkeel {

absl::StatusOr<std::vector<Joinable*>> InOrder(absl::string_view call,
                                               absl::Span<Joinable* const> joinables) {
  if (joinables.empty())
    return absl::InvalidArgumentError(absl::StrCat(call, " needs at least one Joinable"));
  for (size_t i = 0; i < joinables.size(); ++i) {
    if (joinables[i] == nullptr)
      return absl::InvalidArgumentError(absl::StrCat(call, ": entry ", i, " is null"));
    if (std::ranges::count(joinables, joinables[i]) > 1)
      return absl::InvalidArgumentError(
          absl::StrCat(call, ": ", joinables[i]->join_name(), " is in the list more than once"));
  }
  std::vector<Joinable*> ordered(joinables.begin(), joinables.end());
  std::ranges::sort(ordered, {}, [](const Joinable* joinable) {
    return std::pair(joinable->join_phase(), joinable->join_name());
  });
  return ordered;
}

}  // namespace evenkeel
