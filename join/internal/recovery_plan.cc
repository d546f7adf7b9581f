#include "evenkeel/join/internal/recovery_plan.h"

#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "evenkeel/comm/status.h"

namespace evenkeel::internal {
namespace {

// Separates fields; the last one may hold anything.
constexpr char kSeparator = '\x1f';

std::string Describe(const std::vector<RecoveryFacts>& by_rank) {
  std::vector<std::string> ranks;
  for (size_t rank = 0; rank < by_rank.size(); ++rank) {
    ranks.push_back(absl::StrCat("rank ", rank, " has finished ", by_rank[rank].steps, " steps",
                                 by_rank[rank].torn.empty() ? "" : ", ", by_rank[rank].torn));
  }
  return absl::StrJoin(ranks, "; ");
}

}  // namespace

std::string RecoveryFacts::Serialize() const {
  return absl::StrJoin({absl::StrCat(static_cast<int>(error.code())), names, absl::StrCat(steps),
                        absl::StrJoin(counts, ","), torn, patched, std::string(error.message())},
                       std::string(1, kSeparator));
}

absl::StatusOr<RecoveryFacts> RecoveryFacts::Parse(absl::string_view bytes) {
  const std::vector<std::string> fields = absl::StrSplit(bytes, absl::MaxSplits(kSeparator, 6));
  RecoveryFacts facts;
  int code = 0;
  bool good = fields.size() == 7 && absl::SimpleAtoi(fields[0], &code) && absl::SimpleAtoi(fields[2], &facts.steps);
  if (good) {
    for (absl::string_view count : absl::StrSplit(fields[3], ',', absl::SkipEmpty())) {
      good = good && absl::SimpleAtoi(count, &facts.counts.emplace_back());
    }
  }
  if (!good) return absl::InvalidArgumentError("what a rank says before it recovers is malformed");
  facts.error = absl::Status(static_cast<absl::StatusCode>(code), fields[6]);
  facts.names = fields[1];
  facts.torn = fields[4];
  facts.patched = fields[5];
  return facts;
}

absl::StatusOr<RecoveryPlan> PlanRecovery(const std::vector<RecoveryFacts>& by_rank) {
  const RecoveryFacts *source = nullptr, *second_best = nullptr;
  for (size_t rank = 0; rank < by_rank.size(); ++rank) {
    const RecoveryFacts& facts = by_rank[rank];
    EK_RETURN_IF_ERROR(Annotate(facts.error, absl::StrCat("rank ", rank)));
    if (facts.names != by_rank[0].names) {
      return absl::InvalidArgumentError(
          absl::StrCat("rank 0 brings ", by_rank[0].names, ", rank ", rank, " ", facts.names));
    }
    if (!facts.torn.empty()) continue;
    const RecoveryFacts*& best = facts.patched.empty() ? source : second_best;
    // Of two at the same step one may be in the middle of the next, where only some of its optimizers have stepped.
    if (best == nullptr || std::pair(facts.steps, facts.counts) < std::pair(best->steps, best->counts)) best = &facts;
  }
  if (source == nullptr) source = second_best;
  if (source == nullptr) {
    return absl::FailedPreconditionError(absl::StrCat("no rank has a whole state to go on from: ", Describe(by_rank)));
  }
  RecoveryPlan plan{
      .source = static_cast<int>(source - by_rank.data()), .steps = source->steps, .counts = source->counts};
  for (const RecoveryFacts& facts : by_rank) {
    const bool is_whole = facts.torn.empty() && facts.patched.empty();
    const bool is_there = &facts == source || (facts.steps == plan.steps && facts.counts == plan.counts);
    const bool is_ahead = facts.steps > plan.steps;
    plan.ahead.push_back(is_whole && (is_there || is_ahead) ? facts.steps - plan.steps : -1);
  }
  return plan;
}

}  // namespace evenkeel::internal
