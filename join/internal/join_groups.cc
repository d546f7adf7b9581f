#include "evenkeel/join/internal/join_groups.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/time/time.h"
#include "evenkeel/comm/base/parties.h"
#include "evenkeel/comm/failure_info.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/join/steps/step_control.h"

namespace evenkeel {
namespace {

constexpr char kTopic[] = "end of the loop";

}  // namespace

JoinGroups::JoinGroups(Communicator* home, std::vector<Joinable*> joinables, int64_t leave_after)
    : home_(home),
      joinables_(std::move(joinables)),
      leave_after_(leave_after),
      is_on_(leave_after < std::numeric_limits<int64_t>::max() && home->world_size() > 1),
      groups_({home}),
      members_(home->world_size()),
      shadowed_(home->world_size(), 0) {
  std::iota(members_.begin(), members_.end(), 0);
  std::sort(joinables_.begin(), joinables_.end(), [](const Joinable* a, const Joinable* b) {
    return std::pair(a->join_phase(), a->join_name()) < std::pair(b->join_phase(), b->join_name());
  });
}

void JoinGroups::Note(const StepAnswer& answer) {
  is_due_ = false;
  if (!is_on_ || answer.active == 0) return;
  bool is_somebody_due = false;
  for (int rank = 0; rank < answer.world_size; ++rank) {
    shadowed_[rank] = answer.record(rank).joined ? shadowed_[rank] + 1 : 0;
    is_somebody_due = is_somebody_due || shadowed_[rank] >= leave_after_;
  }
  // Gradients that are still to be reduced, also those that an exhausted rank has left, keep
  // everybody where he is.
  const std::vector<ParticipantState>& parts = answer.record(answer.lowest_active).participants;
  is_due_ = is_somebody_due &&
            std::all_of(parts.begin(), parts.end(), [](const auto& part) { return part.sync; });
}

absl::StatusOr<bool> JoinGroups::Divide() {
  is_due_ = false;
  Communicator& old = here();
  const bool leaves = shadowed_[old.rank()] >= leave_after_;
  EK_ASSIGN_OR_RETURN(std::unique_ptr<Communicator> made,
                      old.Split(leaves ? kNoColor : 0, 0, old.timeout()));
  if (leaves) {
    has_left_ = true;
    for (Joinable* joinable : joinables_)
      joinable->is_taking_over_ = true;  // Until it is back, its state is behind.
    return false;
  }
  owned_.push_back(std::move(made));
  groups_.push_back(owned_.back().get());
  std::vector<int> members;
  std::vector<int64_t> shadowed;
  std::vector<int> rank_there(members_.size(), -1);
  for (size_t rank = 0; rank < members_.size(); ++rank) {
    if (shadowed_[rank] >= leave_after_) continue;
    rank_there[rank] = static_cast<int>(members.size());
    members.push_back(members_[rank]);
    shadowed.push_back(shadowed_[rank]);
  }
  members_ = std::move(members);
  shadowed_ = std::move(shadowed);
  StepControl::Of(old).ContinueIn(StepControl::Of(here()), rank_there);
  EK_RETURN_IF_ERROR(Move(here(), /*source=*/-1));
  for (Joinable* joinable : joinables_) joinable->loops_group_ = owned_.back();
  return true;
}

absl::Status JoinGroups::Move(Communicator& to, int source) {
  const GroupChange change{.source = source, .between_steps = true};
  for (Joinable* joinable : joinables_) EK_RETURN_IF_ERROR(joinable->ReplaceGroup(&to, change));
  return absl::OkStatus();
}

std::string JoinGroups::Counts() const {
  return absl::StrJoin(joinables_, ",", [](std::string* out, const Joinable* joinable) {
    absl::StrAppend(out, joinable->steps_finished());
  });
}

absl::StatusOr<bool> JoinGroups::Return(bool is_last_joiner, bool has_stopped) {
  if (groups_.size() == 1 && !has_left_) return has_stopped;
  const std::string mine =
      absl::StrCat(is_last_joiner ? "1" : "0", has_stopped ? "1" : "0", Counts());
  ControlChannel::Parts parts;
  for (int level = static_cast<int>(groups_.size()) - (has_left_ ? 1 : 2); level >= 0; --level) {
    // As long as the others' loops take; a failure of the group ends it.
    awaited_ = groups_[level];
    EK_ASSIGN_OR_RETURN(parts,
                        groups_[level]->control().Exchange(kTopic, mine, absl::InfiniteDuration()));
  }
  int source = -1;
  for (size_t rank = 0; rank < parts.size(); ++rank) {
    if (parts[rank].size() < 2)
      return absl::InternalError("the message of a rank at the end of a loop is malformed");
    if (parts[rank][0] == '1') source = static_cast<int>(rank);
    has_stopped = has_stopped || parts[rank][1] == '1';
  }
  if (source < 0)
    return absl::InternalError("no rank had inputs to the end of a loop that others have left");

  EK_RETURN_IF_ERROR(Move(*home_, source));
  StateTransfer transfer{.source = source};
  for (Joinable* joinable : joinables_) {
    EK_RETURN_IF_ERROR(Annotate(joinable->TakeOver(transfer), joinable->join_name()));
  }
  const std::vector<std::string> counts =
      absl::StrSplit(absl::string_view(parts[source]).substr(2), ',');
  for (size_t i = 0; i < joinables_.size() && i < counts.size(); ++i) {
    int64_t count = 0;
    if (!absl::SimpleAtoi(counts[i], &count))
      return absl::InternalError("a count of steps is malformed");
    if (count >= 0) joinables_[i]->steps_finished_ = count;
    joinables_[i]->is_taking_over_ = false;
  }
  for (size_t level = groups_.size() - 1; level > 0; --level) {
    StepControl::Of(*groups_[level - 1]).ComeBackFrom(StepControl::Of(*groups_[level]));
    EK_RETURN_IF_ERROR(groups_[level]->Finalize(groups_[level]->timeout()));
  }
  groups_.resize(1);
  awaited_ = nullptr;
  owned_.clear();
  has_left_ = false;
  members_.resize(home_->world_size());
  std::iota(members_.begin(), members_.end(), 0);
  return has_stopped;
}

absl::Status JoinGroups::CheckOuter() {
  for (size_t level = 0; level + 1 < groups_.size(); ++level) {
    EK_RETURN_IF_ERROR(groups_[level]->status());
  }
  return absl::OkStatus();
}

const Communicator& JoinGroups::SourceOf(const absl::Status& why) const {
  for (const Communicator* group : groups_) {
    const absl::Status status = group->status();
    if (!status.ok() && absl::EndsWith(why.message(), status.message()) &&
        FailureInfoOf(why) == FailureInfoOf(status))
      return *group;
  }
  return awaited_ != nullptr ? *awaited_ : here();
}

absl::Status JoinGroups::Abort(const absl::Status& why, absl::string_view did) {
  const std::vector<int>& from = SourceOf(why).members();
  for (Communicator* group : groups_)
    group->Abort(internal::Renumber(why, from, group->members()), did);
  return internal::Renumber(why, from, home_->members());
}

}  // namespace evenkeel
