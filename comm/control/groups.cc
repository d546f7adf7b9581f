#include "evenkeel/comm/control/groups.h"

#include <algorithm>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "evenkeel/comm/base/json.h"
#include "evenkeel/comm/control/wire.h"
#include "evenkeel/comm/status.h"

namespace evenkeel::internal {
namespace {

// A turn of the loop counts for less, also when it is the last one before its time is added.
constexpr absl::Duration kHiccup = absl::Seconds(1);

}  // namespace

absl::Status ControlGroups::Check(const Hello& hello) const {
  const auto found = groups_.find(hello.group);
  if (found == groups_.end()) return absl::OkStatus();
  const Group& group = found->second;
  const int world_size = group.hub->world_size();
  if (hello.world_size != world_size) {
    return absl::InvalidArgumentError(absl::StrCat("rank ", hello.rank, " expects that the group ",
                                                   hello.group, " has ", hello.world_size,
                                                   " ranks, the other ranks have ", world_size));
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
  Group& group = groups_[hello.group];
  if (group.hub == nullptr) {
    group.members.resize(hello.world_size);
    group.hub = std::make_unique<ControlHub>(
        hello.world_size, [this, &group](absl::Span<const int> to, const ControlMessage& message) {
          Deliver(group, to, message);
        });
  }
  Member& member = group.members[hello.rank];
  member.has_connected = member.is_connected = true;
  member.peer = peer;
  ++group.connected;
  seats_[peer] = {.group = hello.group, .rank = hello.rank, .heard = clock_};
  for (const std::string& payload : std::exchange(member.waiting, {})) send_(peer, payload);
}

absl::Status ControlGroups::OnFrame(PeerId peer, absl::string_view frame) {
  const auto found = seats_.find(peer);
  if (found == seats_.end()) return absl::InternalError("a control message from an unknown peer");
  EK_ASSIGN_OR_RETURN(ControlMessage message, ParseControlMessage(frame));
  Seat& seat = found->second;
  if (message.type == ControlMessage::Type::kBeat) {
    NoteRunning();
    SetMaxSilence(
        seat, message.request > 0 ? absl::Microseconds(message.request) : absl::InfiniteDuration());
  } else if (message.type == ControlMessage::Type::kLeave) {
    SetMaxSilence(seat, absl::InfiniteDuration());
  } else if (message.type == ControlMessage::Type::kFailed &&
             clock_ - runs_since_ < absl::Microseconds(message.request)) {
    message.request = 0;  // Perhaps the loop did not run, and the rank is not to blame.
  }
  const bool is_deaf = message.type == ControlMessage::Type::kFailed && message.request > 0;
  groups_.at(seat.group).hub->OnMessage(seat.rank, std::move(message));
  // The others must not wait for it in the next group.
  return is_deaf ? absl::UnavailableError("the rank receives nothing") : absl::OkStatus();
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
  if (group.disconnected == group.hub->world_size()) groups_.erase(seat.group);
}

void ControlGroups::NoteRunning() {
  const absl::Time now = absl::Now();
  if (now - beat_at_ > clock_ - beat_clock_ + kHiccup) runs_since_ = clock_;
  beat_at_ = now;
  beat_clock_ = clock_;
}

void ControlGroups::SetMaxSilence(Seat& seat, absl::Duration max_silence) {
  listening_to_ -= seat.max_silence != absl::InfiniteDuration();
  seat.max_silence = max_silence;
  listening_to_ += seat.max_silence != absl::InfiniteDuration();
  look_at_ = std::min(look_at_, seat.heard + max_silence);
}

std::vector<ControlGroups::PeerId> ControlGroups::PassTime(absl::Duration time) {
  clock_ += time;
  std::vector<PeerId> silent;
  if (clock_ <= look_at_) return silent;
  look_at_ = absl::InfiniteDuration();
  for (auto& [peer, seat] : seats_) {
    if (clock_ - seat.heard <= seat.max_silence) {
      look_at_ = std::min(look_at_, seat.heard + seat.max_silence);
      continue;
    }
    silent.push_back(peer);
    groups_.at(seat.group).hub->OnSilence(seat.rank, seat.max_silence);
    SetMaxSilence(seat, absl::InfiniteDuration());  // It is reported once.
  }
  return silent;
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
  AppendStatus(&json);
  return json;
}

void ControlGroups::AppendStatus(std::string* json) {
  JsonJoined groups(json, '[', ']');
  for (auto& [name, group] : groups_) {
    groups.Add("");
    const HubView view = group.hub->View();
    JsonJoined members(json, '{', '}');
    members.Add("\"group\":", JsonQuoted(name));
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
}

void ControlGroups::Deliver(Group& group, absl::Span<const int> to, const ControlMessage& message) {
  if (message.type == ControlMessage::Type::kFailed) group.has_failed = true;
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
