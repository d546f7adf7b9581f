#include <algorithm>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "evenkeel/comm/base/clock.h"
#include "evenkeel/comm/base/fields.h"
#include "evenkeel/comm/internal/communicator_core.h"
#include "evenkeel/comm/ranks/parties.h"
#include "evenkeel/comm/status.h"

namespace evenkeel::internal {
namespace {

constexpr absl::Duration kLeastAttempt =
    absl::Seconds(1);  // The least time to make the next group.

// The arguments of one rank to Split().
struct Choice {
  int color = kNoColor;
  int key = 0;

  static void VisitFields(auto& self, auto& visit) { visit(self.color, self.key); }
};

// Returns the ranks with `color`, in the order of the new group.
std::vector<int> RanksOf(int color, const std::vector<Choice>& choices) {
  std::vector<int> ranks;
  for (size_t rank = 0; rank < choices.size(); ++rank) {
    if (choices[rank].color == color) ranks.push_back(static_cast<int>(rank));
  }
  std::stable_sort(ranks.begin(), ranks.end(),
                   [&](int a, int b) { return choices[a].key < choices[b].key; });
  return ranks;
}

}  // namespace

absl::StatusOr<std::unique_ptr<Communicator>> GroupCore::Split(int color, int key,
                                                               absl::Duration timeout) {
  const std::string where = absl::StrCat("Split, rank ", rank, " of the group ", group);
  if (make_group == nullptr)
    return absl::UnimplementedError(
        absl::StrCat(where, ": backend ", backend->name(), " cannot make other groups"));
  const absl::Time deadline = SteadyNow() + timeout;
  EK_ASSIGN_OR_RETURN(const ControlChannel::Parts parts,
                      agreements.Agree("split", ToBytes(Choice{color, key}), timeout, "Split()"));
  std::vector<Choice> choices;
  for (const std::string& part : parts) {
    EK_ASSIGN_OR_RETURN(const Choice choice, FromBytes<Choice>(part, "Split"));
    choices.push_back(choice);
  }
  const int number = splits++;
  for (size_t each = 0; each < choices.size(); ++each) {
    if (choices[each].color >= 0 || choices[each].color == kNoColor) continue;
    return absl::InvalidArgumentError(absl::StrCat("Split: rank ", each, " gives the color ",
                                                   choices[each].color,
                                                   "; a color is 0 or more, or kNoColor"));
  }
  std::unique_ptr<Communicator> mine;
  if (color != kNoColor) {
    const std::string name = absl::StrCat(group, "-", number, ".", color);
    const std::vector<int> ranks = RanksOf(color, choices);
    absl::StatusOr<std::unique_ptr<Communicator>> made =
        MakeOther(name, ranks, deadline, "Split()", [this] { return end.status(); });
    if (made.ok()) {
      mine = *std::move(made);
    } else if (!end.status().ok()) {
      return Annotate(end.status(), where);  // This group has failed; the error has its ranks.
    } else {
      std::vector<int> all(world_size);
      std::iota(all.begin(), all.end(), 0);
      const absl::Status why = Renumber(made.status(), ranks, all);
      // The other ranks wait for this one.
      end.Abort(why, absl::StrCat("could not make the group ", name, " (Split)"));
      return Annotate(why, where);
    }
  }
  EK_RETURN_IF_ERROR(agreements
                         .Agree("split made", "", std::max(deadline - SteadyNow(), kLeastAttempt),
                                "Split(), until all ranks have their new groups")
                         .status());
  return mine;
}

absl::StatusOr<std::unique_ptr<Communicator>> GroupCore::MakeOther(
    const std::string& name, const std::vector<int>& ranks, absl::Time deadline,
    absl::string_view who, std::function<absl::Status()> status) {
  const int next_rank =
      static_cast<int>(std::find(ranks.begin(), ranks.end(), rank) - ranks.begin());
  const int next_size = static_cast<int>(ranks.size());
  ControlLink::Origin origin;
  const auto hub = std::ranges::find(ranks, control->link().HubRank());
  if (hub != ranks.end()) origin.hub_rank = static_cast<int>(hub - ranks.begin());
  for (const int member : ranks) origin.members.push_back(members[member]);
  // In the numbers of the new group, whose ranks may get this error from each other.
  std::vector<int> all(members.size());
  std::iota(all.begin(), all.end(), 0);
  origin.status = [status = std::move(status), all, ranks] {
    return Renumber(status(), all, ranks);
  };
  EK_ASSIGN_OR_RETURN(
      std::unique_ptr<ControlLink> link,
      control->link().Open(name, next_rank, next_size, deadline - SteadyNow(), origin));
  link->SetOrigin(std::move(origin.status));
  EK_ASSIGN_OR_RETURN(
      std::unique_ptr<Communicator> next,
      make_group(name, next_rank, next_size, std::move(link), deadline - SteadyNow()));
  // All ranks or none: otherwise a rank that continues would wait for others that begin again. From
  // now on the new group's hub has every rank, and detects if one is lost.
  EK_RETURN_IF_ERROR(
      next->core_->agreements
          .Agree("made", "", deadline - SteadyNow(), absl::StrCat(who, ", in the new group ", name))
          .status());
  next->core_->control->link().SetOrigin(nullptr);
  next->core_->members = std::move(origin.members);
  return next;
}

absl::StatusOr<std::unique_ptr<Communicator>> GroupCore::Shrink(absl::Duration timeout) {
  const std::string where = absl::StrCat("Shrink, rank ", rank, " of the group ", group);
  if (end.status().ok())
    return absl::FailedPreconditionError(absl::StrCat(where, ": the group has not failed"));
  if (make_group == nullptr)
    return absl::UnimplementedError(
        absl::StrCat(where, ": backend ", backend->name(), " cannot make other groups"));
  const absl::Time deadline = SteadyNow() + timeout;
  end.ReportProvisional(absl::InfiniteFuture());
  while (true) {
    const absl::StatusOr<ControlChannel::Survivors> survivors =
        control->Regroup(deadline - SteadyNow());
    if (!survivors.ok()) return Annotate(survivors.status(), where);
    if (std::find(survivors->ranks.begin(), survivors->ranks.end(), rank) ==
        survivors->ranks.end()) {
      return absl::AbortedError(
          absl::StrCat(where, ": the other ranks have declared it lost and continue without it"));
    }
    // So that there is time for another attempt without the missing ranks.
    const absl::Duration left = deadline - SteadyNow();
    absl::StatusOr<std::unique_ptr<Communicator>> next =
        MakeOther(absl::StrCat(group, "+", survivors->round), survivors->ranks,
                  SteadyNow() + std::min(left, std::max(left / 3, kLeastAttempt)), "Shrink()",
                  [this] { return control->SurvivorsStatus(); });
    if (next.ok()) return next;
    // A rank was lost between the hub's reply and the new group, or has not come.
    const bool is_passing =
        absl::IsUnavailable(next.status()) || absl::IsDeadlineExceeded(next.status());
    if (!is_passing || SteadyNow() >= deadline) return Annotate(next.status(), where);
  }
}

}  // namespace evenkeel::internal
