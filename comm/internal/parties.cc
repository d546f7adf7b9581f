#include "evenkeel/comm/internal/parties.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace evenkeel::internal {
namespace {

using Party = std::pair<std::string, std::vector<int>>;

std::vector<Party> BySize(const Parties& parties) {
  std::map<std::string, std::vector<int>> ranks_with;
  for (const auto& [rank, what] : parties) ranks_with[what].push_back(rank);
  std::vector<Party> sorted(ranks_with.begin(), ranks_with.end());
  std::sort(sorted.begin(), sorted.end(), [](const Party& a, const Party& b) {
    return std::tuple(a.second.size(), a.second) < std::tuple(b.second.size(), b.second);
  });
  return sorted;
}

}  // namespace

std::string RankList(const std::vector<int>& ranks) {
  return absl::StrCat(ranks.size() == 1 ? "rank " : "ranks ", absl::StrJoin(ranks, ","));
}

std::string Describe(const Parties& parties, absl::string_view one, absl::string_view several) {
  return absl::StrJoin(BySize(parties), "; ", [&](std::string* out, const Party& party) {
    const auto& [what, ranks] = party;
    absl::StrAppend(out, RankList(ranks), " ", ranks.size() == 1 ? one : several, " ", what);
  });
}

int Suspect(const Parties& parties) { return parties.empty() ? -1 : BySize(parties).front().second.front(); }

}  // namespace evenkeel::internal
