#include "evenkeel/comm/ranks/parties.h"

#include <algorithm>
#include <optional>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "evenkeel/comm/failure_info.h"
#include "evenkeel/comm/status.h"

namespace evenkeel::internal {
namespace {

// Messages about thousands of ranks stay readable, and small for those who receive them.
constexpr size_t kMostListed = 16, kMostParties = 8;

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
  if (ranks.size() <= kMostListed)
    return absl::StrCat(ranks.size() == 1 ? "rank " : "ranks ", absl::StrJoin(ranks, ","));
  std::vector<std::string> ranges;
  size_t next = 0;
  while (next < ranks.size() && ranges.size() < kMostListed) {
    const size_t first = next;
    do {
      ++next;
    } while (next < ranks.size() && ranks[next] == ranks[next - 1] + 1);
    ranges.push_back(next == first + 1 ? absl::StrCat(ranks[first])
                                       : absl::StrCat(ranks[first], "-", ranks[next - 1]));
  }
  return absl::StrCat(
      "ranks ", absl::StrJoin(ranges, ","),
      next == ranks.size() ? "" : absl::StrCat(" and ", ranks.size() - next, " more"));
}

absl::Status AsErrorOf(int rank, const absl::Status& status) {
  if (status.ok() || FailureInfoOf(status).has_value()) return status;
  FailureInfo info{.ranks = {rank}};
  if (absl::IsDeadlineExceeded(status)) info = {.kind = FailureKind::kDeadline};
  return WithFailureInfo(Annotate(status, absl::StrCat("rank ", rank)), info);
}

absl::Status Renumber(const absl::Status& status, absl::Span<const int> from,
                      absl::Span<const int> to) {
  std::optional<FailureInfo> info = FailureInfoOf(status);
  if (!info.has_value()) return status;
  for (const int rank : std::exchange(info->ranks, {})) {
    if (rank < 0 || rank >= static_cast<int>(from.size())) continue;
    const auto found = std::find(to.begin(), to.end(), from[rank]);
    if (found != to.end()) info->ranks.push_back(static_cast<int>(found - to.begin()));
  }
  std::sort(info->ranks.begin(), info->ranks.end());
  return WithFailureInfo(status, *info);
}

absl::Status MissedDeadline(absl::string_view message, const std::vector<int>& missing,
                            absl::string_view operation, int64_t position) {
  return WithFailureInfo(absl::DeadlineExceededError(message), {.kind = FailureKind::kDeadline,
                                                                .ranks = missing,
                                                                .operation = std::string(operation),
                                                                .position = position});
}

std::string Describe(const Parties& parties, absl::string_view one, absl::string_view several) {
  std::vector<Party> by_size = BySize(parties);
  std::string others;
  if (by_size.size() > kMostParties) {
    const auto first = by_size.begin() + kMostParties - 1, last = by_size.end() - 1;
    size_t count = 0;
    for (auto party = first; party != last; ++party) count += party->second.size();
    others = absl::StrCat("; ", count, " more ranks have ", last - first, " other values");
    by_size.erase(first, last);
  }
  const std::string named = absl::StrJoin(by_size, "; ", [&](std::string* out, const Party& party) {
    const auto& [what, ranks] = party;
    absl::StrAppend(out, RankList(ranks), " ", ranks.size() == 1 ? one : several, " ", what);
  });
  return absl::StrCat(named, others);
}

int Suspect(const Parties& parties) {
  return parties.empty() ? -1 : BySize(parties).front().second.front();
}

absl::Status Disagreement(const Parties& parties, const Wording& wording) {
  FailureInfo info{.kind = FailureKind::kDisagreement};
  const std::vector<Party> by_size = BySize(parties);
  for (const auto& [what, ranks] : by_size) {
    if (ranks.size() > by_size.front().second.size()) break;
    info.ranks.insert(info.ranks.end(), ranks.begin(), ranks.end());
  }
  std::sort(info.ranks.begin(), info.ranks.end());
  return WithFailureInfo(absl::FailedPreconditionError(absl::StrCat(
                             wording.before, Describe(parties, wording.one, wording.several),
                             ": the ranks disagree", wording.after)),
                         info);
}

absl::Status Disagreement(const std::map<int, AtOperation>& ranks) {
  Parties parties;
  for (const auto& [rank, at] : ranks)
    parties[rank] = absl::StrCat("#", at.position, " ", at.operation, at.detail);
  const absl::Status status = Disagreement(parties);
  FailureInfo info = *FailureInfoOf(status);
  const AtOperation& suspects = ranks.at(info.ranks.front());
  info.operation = suspects.operation;
  info.position = suspects.position;
  return WithFailureInfo(status, info);
}

}  // namespace evenkeel::internal
