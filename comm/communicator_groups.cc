// Other groups of this one's ranks: some of them beside it, or those that are left after it has failed.

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/status.h"

namespace evenkeel {
namespace {

constexpr absl::Duration kLeastAttempt = absl::Seconds(1);  // Of making the next group.

// What each rank says to Split().
struct Choice {
  int color = kNoColor;
  int key = 0;

  std::string Serialize() const { return absl::StrCat(color, " ", key); }
  static absl::StatusOr<Choice> Parse(absl::string_view text) {
    const std::vector<absl::string_view> words = absl::StrSplit(text, ' ');
    Choice choice;
    if (words.size() != 2 || !absl::SimpleAtoi(words[0], &choice.color) || !absl::SimpleAtoi(words[1], &choice.key)) {
      return absl::InternalError("Split: what a rank says is malformed");
    }
    return choice;
  }
};

// Ranks with `color`, in the order of the new group.
std::vector<int> RanksOf(int color, const std::vector<Choice>& choices) {
  std::vector<int> ranks;
  for (size_t rank = 0; rank < choices.size(); ++rank) {
    if (choices[rank].color == color) ranks.push_back(static_cast<int>(rank));
  }
  std::stable_sort(ranks.begin(), ranks.end(), [&](int a, int b) { return choices[a].key < choices[b].key; });
  return ranks;
}

}  // namespace

absl::StatusOr<std::unique_ptr<Communicator>> Communicator::Split(int color, int key, absl::Duration timeout) {
  const std::string here = absl::StrCat("Split, rank ", rank_, " of the group ", group_);
  if (make_group_ == nullptr) return absl::UnimplementedError(absl::StrCat(here, ": its backend makes no other group"));
  const absl::Time deadline = absl::Now() + timeout;
  EK_ASSIGN_OR_RETURN(const ControlChannel::Parts parts,
                      AgreeAndWait("split", Choice{color, key}.Serialize(), timeout, "Split()"));
  std::vector<Choice> choices;
  for (const std::string& part : parts) {
    EK_ASSIGN_OR_RETURN(const Choice choice, Choice::Parse(part));
    choices.push_back(choice);
  }
  const int number = splits_++;
  for (size_t rank = 0; rank < choices.size(); ++rank) {
    if (choices[rank].color >= 0 || choices[rank].color == kNoColor) continue;
    return absl::InvalidArgumentError(absl::StrCat("Split: rank ", rank, " gives the color ", choices[rank].color,
                                                   "; a color is 0 or more, or kNoColor"));
  }
  std::unique_ptr<Communicator> mine;
  if (color != kNoColor) {
    const std::string name = absl::StrCat(group_, "-", number, ".", color);
    absl::StatusOr<std::unique_ptr<Communicator>> group = MakeGroup(name, RanksOf(color, choices), deadline, "Split()");
    if (group.ok()) {
      mine = *std::move(group);
    } else {
      // The other ranks wait for the one that got no group.
      Abort(group.status(), absl::StrCat("could not make the group ", name, " (Split)"));
      return Annotate(group.status(), here);
    }
  }
  EK_RETURN_IF_ERROR(AgreeAndWait("split made", "", std::max(deadline - absl::Now(), kLeastAttempt),
                                  "Split(), until all ranks have their new groups")
                         .status());
  return mine;
}

absl::StatusOr<std::unique_ptr<Communicator>> Communicator::MakeGroup(const std::string& name,
                                                                      const std::vector<int>& ranks,
                                                                      absl::Time deadline, absl::string_view who) {
  const int rank = static_cast<int>(std::find(ranks.begin(), ranks.end(), rank_) - ranks.begin());
  const int world_size = static_cast<int>(ranks.size());
  EK_ASSIGN_OR_RETURN(std::unique_ptr<ControlLink> link, control_->link().Open(name, rank, world_size));
  EK_ASSIGN_OR_RETURN(std::unique_ptr<Communicator> next,
                      make_group_(name, rank, world_size, std::move(link), deadline - absl::Now()));
  // All or nobody: a rank that went on would wait for others that begin anew. From here on the new group's hub knows
  // every rank, and notices if one is lost.
  EK_RETURN_IF_ERROR(
      next->AgreeAndWait("made", "", deadline - absl::Now(), absl::StrCat(who, ", in the new group ", name)).status());
  for (int i = 0; i < world_size; ++i) next->members_[i] = members_[ranks[i]];
  return next;
}

absl::StatusOr<std::unique_ptr<Communicator>> Communicator::Shrink(absl::Duration timeout) {
  const std::string here = absl::StrCat("Shrink, rank ", rank_, " of the group ", group_);
  if (status().ok()) return absl::FailedPreconditionError(absl::StrCat(here, ": the group has not failed"));
  if (make_group_ == nullptr) return absl::UnimplementedError(absl::StrCat(here, ": its backend makes no other group"));
  const absl::Time deadline = absl::Now() + timeout;
  while (true) {
    const absl::StatusOr<ControlChannel::Survivors> survivors = control_->Regroup(deadline - absl::Now());
    if (!survivors.ok()) return Annotate(survivors.status(), here);
    if (std::find(survivors->ranks.begin(), survivors->ranks.end(), rank_) == survivors->ranks.end()) {
      return absl::AbortedError(absl::StrCat(here, ": the other ranks have taken it for lost and go on without it"));
    }
    absl::StatusOr<std::unique_ptr<Communicator>> next = MakeNext(*survivors, deadline - absl::Now());
    if (next.ok()) return next;
    // A rank has gone between the hub's answer and the new group: this group's hub knows of it, the new one's need not.
    const bool is_passing = absl::IsUnavailable(next.status()) || absl::IsDeadlineExceeded(next.status());
    if (!is_passing || absl::Now() >= deadline) return Annotate(next.status(), here);
  }
}

absl::StatusOr<std::unique_ptr<Communicator>> Communicator::MakeNext(const ControlChannel::Survivors& survivors,
                                                                     absl::Duration left) {
  // So that others, without whoever does not come, still fit into what is left.
  const absl::Time deadline = absl::Now() + std::min(left, std::max(left / 3, kLeastAttempt));
  return MakeGroup(absl::StrCat(group_, "+", survivors.round), survivors.ranks, deadline, "Shrink()");
}

}  // namespace evenkeel
