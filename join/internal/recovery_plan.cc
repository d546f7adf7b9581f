#include "evenkeel/join/internal/recovery_plan.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "evenkeel/comm/status.h"

namespace evenkeel::internal {
namespace {

std::string Describe(const std::vector<RecoveryFacts>& by_rank) {
  std::vector<std::string> ranks;
  for (size_t rank = 0; rank < by_rank.size(); ++rank) {
    if (by_rank[rank].is_newcomer) continue;
    const std::string& why = by_rank[rank].state.why;
    ranks.push_back(absl::StrCat("rank ", rank, " has finished ", by_rank[rank].steps, " steps",
                                 why.empty() ? "" : ", ", why));
  }
  return absl::StrJoin(ranks, "; ");
}

}  // namespace

absl::StatusOr<RecoveryPlan> PlanRecovery(const std::vector<RecoveryFacts>& by_rank) {
  const RecoveryFacts *source = nullptr, *patched = nullptr;
  // The ranks are compared with one that has been there.
  size_t first = 0;
  while (first + 1 < by_rank.size() && by_rank[first].is_newcomer) ++first;
  for (size_t rank = 0; rank < by_rank.size(); ++rank) {
    const RecoveryFacts& facts = by_rank[rank];
    EK_RETURN_IF_ERROR(Annotate(facts.error, absl::StrCat("rank ", rank)));
    if (facts.names != by_rank[first].names) {
      return absl::InvalidArgumentError(absl::StrCat(
          "rank ", first, " passes ", by_rank[first].names, ", rank ", rank, " ", facts.names));
    }
    if (facts.is_newcomer || facts.state.kind == StateKind::kTorn) continue;
    const RecoveryFacts*& best = facts.state.kind == StateKind::kWhole ? source : patched;
    // One of two ranks at the same step may be in the middle of the next, where only some of its
    // optimizers have stepped.
    if (best == nullptr ||
        std::pair(facts.steps, facts.counts) < std::pair(best->steps, best->counts))
      best = &facts;
  }
  if (source == nullptr) source = patched;
  if (source == nullptr) {
    return absl::FailedPreconditionError(
        absl::StrCat("no rank has a complete state to continue from: ", Describe(by_rank)));
  }
  RecoveryPlan plan{.source = static_cast<int>(source - by_rank.data()),
                    .steps = source->steps,
                    .counts = source->counts};
  for (size_t rank = 0; rank < by_rank.size(); ++rank) {
    const RecoveryFacts& facts = by_rank[rank];
    if (facts.is_newcomer) plan.newcomers.push_back(static_cast<int>(rank));
    const bool is_whole = facts.state.kind == StateKind::kWhole && !facts.is_newcomer;
    const bool is_there =
        &facts == source || (facts.steps == plan.steps && facts.counts == plan.counts);
    const bool is_ahead = facts.steps > plan.steps;
    plan.ahead.push_back(is_whole && (is_there || is_ahead) ? facts.steps - plan.steps : -1);
  }
  return plan;
}

}  // namespace evenkeel::internal
