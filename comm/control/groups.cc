#include "evenkeel/comm/control/groups.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "evenkeel/comm/base/clock.h"
#include "evenkeel/comm/base/json.h"
#include "evenkeel/comm/status.h"

namespace evenkeel::internal {
namespace {

// If the hub is at fault, all ranks report within this time that they receive nothing.
constexpr absl::Duration kOthersReport = absl::Seconds(2);

std::string KeyOf(const Hello& hello) { return absl::StrCat(hello.group, "\n", hello.id); }

}  // namespace

absl::Status ControlGroups::Check(const Hello& hello) const {
  const auto found = groups_.find(KeyOf(hello));
  if (found == groups_.end()) return absl::OkStatus();
  const Group& group = found->second;
  const int world_size = group.hub->world_size();
  if (hello.world_size != world_size) {
    return absl::InvalidArgumentError(absl::StrCat("rank ", hello.rank, " expects that the group ",
                                                   hello.group, " has ", hello.world_size,
                                                   " ranks, the other ranks have ", world_size));
  }
  if (hello.members != group.members_text) {
    const auto shown = [](const std::string& text) { return text.empty() ? "no list" : text; };
    return absl::InvalidArgumentError(
        absl::StrCat("rank ", hello.rank, " gives the members of the group ", hello.group, " as ",
                     shown(hello.members), ", the other ranks as ", shown(group.members_text),
                     ": all ranks of a group must pass the same list"));
  }
  const Member& member = group.members[hello.rank];
  if (member.is_connected) {
    return absl::InvalidArgumentError(
        absl::StrCat("two processes claim to be rank ", hello.rank, " of the group ", hello.group));
  }
  if (member.has_connected) {
    return absl::FailedPreconditionError(absl::StrCat(
        "rank ", hello.rank, " of the group ", hello.group, " has left: it cannot come back"));
  }
  return absl::OkStatus();
}

void ControlGroups::Join(PeerId peer, const Hello& hello) {
  const std::string key = KeyOf(hello);
  Group& group = groups_[key];
  if (group.hub == nullptr) {
    ForgetFailures();
    group.name = hello.group;
    group.has_id = !hello.id.empty();
    group.members_text = hello.members;
    group.members.resize(hello.world_size);
    group.hub = std::make_unique<ControlHub>(
        hello.world_size, [this, key](absl::Span<const int> to, const ToRank& message) {
          Deliver(key, to, message);
        });
  }
  Member& member = group.members[hello.rank];
  member.has_connected = member.is_connected = true;
  member.peer = peer;
  ++group.connected;
  seats_[peer] = {.group = key, .rank = hello.rank, .heard = clock_};
  for (const std::string& payload : std::exchange(member.waiting, {})) send_(peer, payload);
  if (on_group_ != nullptr && group.connected == hello.world_size && !group.has_failed)
    on_group_(hello.group, hello.world_size, absl::OkStatus());
}

absl::Status ControlGroups::OnFrame(PeerId peer, absl::string_view frame) {
  const auto found = seats_.find(peer);
  if (found == seats_.end()) return absl::InternalError("a control message from an unknown peer");
  EK_ASSIGN_OR_RETURN(ToHub message, ParseControlMessage<ToHub>(frame));
  Seat& seat = found->second;
  if (const auto* beat = std::get_if<to_hub::Beat>(&message)) {
    SetMaxSilence(seat, beat->silence_us > 0 ? absl::Microseconds(beat->silence_us)
                                             : absl::InfiniteDuration());
  } else if (std::holds_alternative<to_hub::Leave>(message)) {
    SetMaxSilence(seat, absl::InfiniteDuration());
  } else if (auto* failed = std::get_if<to_hub::Failed>(&message);
             failed != nullptr && failed->unheard_us > 0) {
    const bool has_run = SteadyNow() - turned_at_ <= 2 * kListening &&
                         clock_ - runs_since_ >= absl::Microseconds(failed->unheard_us);
    if (has_run && seat.max_silence != absl::InfiniteDuration()) {
      seat.report = std::move(*failed);
      seat.reported_at = clock_;
      seat.judge_at = clock_ + kOthersReport;
      look_at_ = std::min(look_at_, seat.judge_at);
      return absl::OkStatus();
    }
  }
  groups_.at(seat.group).hub->OnMessage(seat.rank, std::move(message));
  return absl::OkStatus();
}

void ControlGroups::OnBytes(PeerId peer) {
  const auto found = seats_.find(peer);
  if (found != seats_.end()) found->second.heard = clock_;
}

void ControlGroups::OnDisconnect(PeerId peer) {
  const auto found = seats_.find(peer);
  if (found == seats_.end()) return;
  SetMaxSilence(found->second, absl::InfiniteDuration());
  const Seat seat = std::move(found->second);
  seats_.erase(found);
  Group& group = groups_.at(seat.group);
  group.members[seat.rank].is_connected = false;
  --group.connected;
  ++group.disconnected;
  group.hub->OnDisconnect(seat.rank);
  const bool is_given_up = group.has_id && group.has_failed && group.connected == 0;
  if (!is_given_up && group.disconnected < group.hub->world_size()) return;
  if (!group.has_failed) {
    ForgetFailures();
  } else if (failure_.empty()) {
    failure_ = std::move(group.failure);
  }
  groups_.erase(seat.group);
}

void ControlGroups::SetMaxSilence(Seat& seat, absl::Duration max_silence) {
  listening_to_ -= seat.max_silence != absl::InfiniteDuration();
  seat.max_silence = max_silence;
  listening_to_ += seat.max_silence != absl::InfiniteDuration();
  look_at_ = std::min(look_at_, seat.heard + max_silence);
}

std::vector<ControlGroups::PeerId> ControlGroups::PassTime(absl::Duration time) {
  // Any longer time was time in which the loop did not run, and it may have to read first what has
  // arrived meanwhile.
  clock_ += std::clamp(time, absl::ZeroDuration(), kListening);
  turned_at_ = SteadyNow();
  if (time > 2 * kListening) runs_since_ = clock_;
  std::vector<PeerId> lost;
  if (clock_ <= look_at_) return lost;
  look_at_ = absl::InfiniteDuration();
  for (auto& [peer, seat] : seats_) {
    const absl::Duration lost_at = std::min(seat.heard + seat.max_silence, seat.judge_at);
    if (clock_ <= lost_at) {
      look_at_ = std::min(look_at_, lost_at);
      continue;
    }
    ControlHub& hub = *groups_.at(seat.group).hub;
    const bool is_silent = clock_ > seat.heard + seat.max_silence;
    seat.judge_at = absl::InfiniteDuration();
    if (is_silent) {
      hub.OnSilence(seat.rank, seat.max_silence);
    } else if (!AreAllDeaf(seat.group)) {
      hub.OnDeafness(seat.rank, absl::Microseconds(seat.report.unheard_us));
    } else {  // The hub's network is at fault.
      hub.OnMessage(seat.rank, std::move(seat.report));
      look_at_ = std::min(look_at_, seat.heard + seat.max_silence);
      continue;
    }
    lost.push_back(peer);
    SetMaxSilence(seat, absl::InfiniteDuration());  // It is reported once.
  }
  return lost;
}

bool ControlGroups::AreAllDeaf(const std::string& group) const {
  return std::none_of(seats_.begin(), seats_.end(), [&](const auto& entry) {
    const Seat& seat = entry.second;
    return seat.group == group && seat.max_silence != absl::InfiniteDuration() &&
           clock_ - seat.reported_at > 2 * kOthersReport;
  });
}

bool ControlGroups::ListensForBeats() const { return listening_to_ > 0; }

bool ControlGroups::HasLivingGroup() const {
  for (const auto& [name, group] : groups_) {
    if (group.connected > 0 && !group.has_failed) return true;
  }
  return false;
}

std::string ControlGroups::StatusJson() {
  std::string json;
  {
    JsonJoined groups(&json, '[', ']');
    for (auto& [key, group] : groups_) {
      groups.Add("");
      AppendGroup(group, &json);
    }
  }
  return json;
}

std::string ControlGroups::LastStatusJson() {
  std::string json;
  {
    JsonJoined groups(&json, '[', ']');
    if (!failure_.empty()) groups.Add(failure_);
    for (auto& [key, group] : groups_) {
      if (group.has_failed && group.failure.empty()) continue;
      groups.Add(group.failure);
      if (!group.has_failed) AppendGroup(group, &json);
    }
  }
  return json;
}

void ControlGroups::ForgetFailures() {
  failure_.clear();
  for (auto& [key, group] : groups_) group.failure.clear();
}

void ControlGroups::AppendGroup(Group& group, std::string* json) {
  const HubView view = group.hub->View();
  JsonJoined members(json, '{', '}');
  members.Add("\"group\":", JsonQuoted(group.name));
  members.Add("\"error\":", JsonQuoted(view.status.message()));
  members.Add("\"ranks\":");
  JsonJoined ranks(json, '[', ']');
  for (size_t rank = 0; rank < view.ranks.size(); ++rank) {
    const HubView::Rank& seen = view.ranks[rank];
    const Member& member = group.members[rank];
    ranks.Add("");
    JsonJoined fields(json, '{', '}');
    fields.Add("\"state\":", JsonQuoted(seen.is_lost           ? "lost"
                                        : seen.has_left        ? "left"
                                        : member.is_connected  ? "connected"
                                        : member.has_connected ? "lost"
                                                               : "not connected"));
    fields.Add("\"doing\":", JsonQuoted(seen.doing));
    fields.Add("\"waited_ms\":", seen.waited_ms);
    fields.Add("\"waits_for\":[", absl::StrJoin(seen.waits_for, ","), "]");
    if (const auto seat = seats_.find(member.peer); member.is_connected && seat != seats_.end()) {
      fields.Add("\"silent_ms\":", (clock_ - seat->second.heard) / absl::Milliseconds(1));
    }
    if (!seen.details.empty()) fields.Add("\"steps\":", seen.details);
  }
}

void ControlGroups::Deliver(const std::string& key, absl::Span<const int> to,
                            const ToRank& message) {
  Group& group = groups_.at(key);
  if (std::holds_alternative<to_rank::Regrouped>(message)) ForgetFailures();
  if (const auto* failed = std::get_if<to_rank::Failed>(&message)) {
    if (!std::exchange(group.has_failed, true)) AppendGroup(group, &group.failure);
    const bool is_to_all = !failed->is_cut_off;  // A lost rank gets another text.
    if (is_to_all && on_group_ != nullptr && !std::exchange(group.has_reported, true))
      on_group_(group.name, static_cast<int>(group.members.size()), failed->why);
  }
  const std::string payload = Serialize(message);
  for (const int rank : to) {
    Member& member = group.members[rank];
    if (member.is_connected) {
      send_(member.peer, payload);
    } else if (!member.has_connected) {
      member.waiting.push_back(payload);
    }
  }
}

}  // namespace evenkeel::internal
