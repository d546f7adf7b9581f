#include <algorithm>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "evenkeel/comm/base/clock.h"
#include "evenkeel/comm/base/fields.h"
#include "evenkeel/comm/control/watchdog.h"
#include "evenkeel/comm/internal/communicator_core.h"
#include "evenkeel/comm/ranks/parties.h"
#include "evenkeel/comm/status.h"

namespace evenkeel::internal {
namespace {

constexpr absl::Duration kLeastAttempt =
    absl::Seconds(1);  // The least time to make the next group.

constexpr char kRegroup[] = "Regroup";

// Returns the name of the group that continues one: of "world", "world+1"; of "world+1", "world+2".
std::string NextName(absl::string_view group, int64_t round) {
  const size_t plus = group.find_last_not_of("0123456789");
  int64_t number = 0;
  if (plus != absl::string_view::npos && group[plus] == '+' &&
      absl::SimpleAtoi(group.substr(plus + 1), &number))
    group = group.substr(0, plus);
  return absl::StrCat(group, "+", number + round);
}

int IndexOf(int rank, const std::vector<int>& ranks) {
  const auto found = std::ranges::find(ranks, rank);
  return found == ranks.end() ? -1 : static_cast<int>(found - ranks.begin());
}

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
        MakeOther({&control->link(), rank, control->link().HubRank(), members}, name, ranks,
                  deadline, "Split()", [this] { return end.status(); });
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
    const From& from, const std::string& name, const std::vector<int>& ranks, absl::Time deadline,
    absl::string_view who, std::function<absl::Status()> status) {
  const int next_rank = IndexOf(from.rank, ranks);
  const int next_size = static_cast<int>(ranks.size());
  ControlLink::Origin origin{.hub_rank = IndexOf(from.hub_rank, ranks)};
  for (const int member : ranks) origin.members.push_back(from.members[member]);
  // In the numbers of the new group, whose ranks may get this error from each other.
  std::vector<int> all(from.members.size());
  std::iota(all.begin(), all.end(), 0);
  origin.status = [status = std::move(status), all, ranks] {
    return Renumber(status(), all, ranks);
  };
  EK_ASSIGN_OR_RETURN(std::unique_ptr<ControlLink> link,
                      from.link->Open(name, next_rank, next_size, deadline - SteadyNow(), origin));
  link->SetOrigin(std::move(origin.status));
  EK_ASSIGN_OR_RETURN(
      std::unique_ptr<Communicator> next,
      make_group(name, next_rank, next_size, std::move(link), deadline - SteadyNow()));
  // All ranks or none: otherwise a rank that continues would wait for others that begin again. From
  // now on the new group's hub has every rank, and detects if one is lost.
  EK_RETURN_IF_ERROR(next->core_->agreements
                         .Agree(kMadeTopic, "", deadline - SteadyNow(),
                                absl::StrCat(who, ", in the new group ", name))
                         .status());
  next->core_->control->link().SetOrigin(nullptr);
  next->core_->members = std::move(origin.members);
  return next;
}

absl::StatusOr<Regrouped> GroupCore::Regroup(const RegroupOptions& wanted) {
  const bool is_newcomer = newcomer_link != nullptr;
  const std::string where =
      is_newcomer ? absl::StrCat(kRegroup, ", the process in the place of rank ", rank)
                  : absl::StrCat(kRegroup, ", rank ", rank, " of the group ", group);
  if (!is_newcomer && end.status().ok())
    return absl::FailedPreconditionError(absl::StrCat(where, ": the group has not failed"));
  if (make_group == nullptr)
    return absl::UnimplementedError(
        absl::StrCat(where, ": backend ", backend->name(), " cannot make other groups"));
  const absl::Time deadline = SteadyNow() + wanted.timeout + 3 * wanted.wait_for_replacement;
  end.ReportProvisional(absl::InfiniteFuture());
  if (is_newcomer && newcomer_control == nullptr) {
    absl::StatusOr<std::unique_ptr<ControlLink>> link = newcomer_link(wanted.timeout);
    if (!link.ok()) return Annotate(link.status(), where);
    newcomer_control = std::make_unique<ControlChannel>(rank, world_size, *std::move(link));
  }
  ControlChannel& meeting = is_newcomer ? *newcomer_control : *control;
  // A rank's own heartbeats go on; a newcomer sends some only here.
  Watchdog beats([this, &meeting] { return watch.Beat(meeting); });
  if (is_newcomer && watch.is_on()) EK_RETURN_IF_ERROR(beats.Start());
  const absl::Cleanup end_beats = [&] {
    beats.Stop();
    if (is_newcomer) meeting.Beat("", absl::ZeroDuration());
  };
  // Newcomers that are lost after they were chosen do not begin a whole wait each time; one that is
  // ready always enters.
  absl::Duration waits = 2 * wanted.wait_for_replacement;
  while (true) {
    const absl::Time asks = SteadyNow();
    absl::StatusOr<to_rank::Regrouped> next = meeting.Regroup(
        deadline - asks,
        std::min(std::max(waits, absl::Microseconds(1)), wanted.wait_for_replacement),
        is_newcomer ? std::vector<int>() : members);
    waits -= SteadyNow() - asks;
    if (!next.ok()) return Annotate(next.status(), where);
    From from{&meeting.link(), rank, meeting.link().HubRank(), members};
    if (is_newcomer)
      from = From{&meeting.link(), IndexOf(rank, next->members),
                  IndexOf(meeting.link().HubRank(), next->members), next->members};
    for (const int member : next->ranks) {
      if (member < 0 || member >= static_cast<int>(from.members.size()))
        return absl::InternalError(absl::StrCat(where, ": the new group has the rank ", member,
                                                ", the ended one ", from.members.size(), " ranks"));
    }
    if (IndexOf(from.rank, next->ranks) < 0) {
      return absl::AbortedError(
          absl::StrCat(where, ": the other ranks have declared it lost and continue without it"));
    }
    // Leaves time for another attempt without the missing ranks.
    const absl::Duration attempt = std::max(wanted.timeout / 3, kLeastAttempt);
    absl::StatusOr<std::unique_ptr<Communicator>> comm =
        MakeOther(from, NextName(is_newcomer ? next->group : group, next->round), next->ranks,
                  std::min(SteadyNow() + attempt, deadline), absl::StrCat(kRegroup, "()"),
                  [&meeting] { return meeting.SurvivorsStatus(); });
    if (comm.ok()) {
      Regrouped regrouped{.comm = *std::move(comm)};
      for (int each = 0; each < static_cast<int>(from.members.size()); ++each) {
        if (IndexOf(each, next->ranks) < 0 || IndexOf(each, next->entered) >= 0)
          regrouped.lost.push_back(from.members[each]);
      }
      for (const int each : next->entered) regrouped.entered.push_back(IndexOf(each, next->ranks));
      return regrouped;
    }
    // A rank was lost between the hub's reply and the new group, or has not come.
    const bool is_passing =
        absl::IsUnavailable(comm.status()) || absl::IsDeadlineExceeded(comm.status());
    if (!is_passing || SteadyNow() >= deadline) return Annotate(comm.status(), where);
  }
}

}  // namespace evenkeel::internal
