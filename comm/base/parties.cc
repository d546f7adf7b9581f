#include "evenkeel/comm/base/parties.h"

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
  return absl::StrJoin(BySize(parties), "; ", [&](std::string* out, const Party& party) {
    const auto& [what, ranks] = party;
    absl::StrAppend(out, RankList(ranks), " ", ranks.size() == 1 ? one : several, " ", what);
  });
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
