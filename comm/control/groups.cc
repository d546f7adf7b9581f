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

// Returns the key of the first of the groups that continue each other: of "world+2", "world".
std::string FamilyOf(const Hello& hello) {
  absl::string_view name = hello.group;
  const size_t plus = name.find_last_not_of("0123456789");
  if (plus != absl::string_view::npos && plus + 1 < name.size() && name[plus] == '+')
    name = name.substr(0, plus);
  return absl::StrCat(name, "\n", hello.id);
}

absl::Status TooLate(int place) {
  return absl::FailedPreconditionError(
      absl::StrCat("the process in the place of rank ", place,
                   " comes too late: the group has gone on without that rank; a longer "
                   "wait_for_replacement gives it more time"));
}

}  // namespace

absl::Status ControlGroups::CheckNewcomer(const Hello& hello) const {
  const auto family = families_.find(FamilyOf(hello));
  if (family == families_.end()) {
    return absl::FailedPreconditionError(absl::StrCat(
        "the job has no group ", hello.group, " in which rank ", hello.rank,
        " could be replaced: all its ranks have ended, or it has not begun (EVENKEEL_NEWCOMER)"));
  }
  if (hello.world_size != family->second.world_size) {
    return absl::InvalidArgumentError(absl::StrCat(
        "the process in the place of rank ", hello.rank, " expects that the group ", hello.group,
        " began with ", hello.world_size, " ranks, but it had ", family->second.world_size));
  }
  if (family->second.places_left_out.contains(hello.rank)) return TooLate(hello.rank);
  const auto newest = family->second.incarnations.find(hello.rank);
  if (newest != family->second.incarnations.end() && newest->second >= hello.incarnation) {
    return absl::FailedPreconditionError(absl::StrCat(
        "the process number ", hello.incarnation, " in the place of rank ", hello.rank,
        " is refused: number ", newest->second, " has come already (EVENKEEL_NEWCOMER)"));
  }
  return absl::OkStatus();
}

absl::Status ControlGroups::Check(const Hello& hello) const {
  if (hello.incarnation > 0) return CheckNewcomer(hello);
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
  const std::string family = FamilyOf(hello);
  if (hello.incarnation > 0) {
    families_[family].incarnations[hello.rank] = hello.incarnation;
    for (auto& [other, newcomer] : newcomers_) {
      if (newcomer.family != family || newcomer.place != hello.rank || newcomer.is_holder) continue;
      Refuse(other, newcomer,
             absl::FailedPreconditionError(absl::StrCat(
                 "another process, number ", hello.incarnation, ", has come to the place of rank ",
                 hello.rank, " (EVENKEEL_NEWCOMER)")));
    }
    newcomers_[peer] = {.family = family, .place = hello.rank, .silence = {.heard = clock_}};
    return;
  }
  const std::string key = KeyOf(hello);
  Group& group = groups_[key];
  if (group.hub == nullptr) {
    ForgetFailures();
    group.name = hello.group;
    group.has_id = !hello.id.empty();
    group.members_text = hello.members;
    group.members.resize(hello.world_size);
    group.family = family;
    group.number = ++created_;
    Family& its = families_[family];
    if (its.groups++ == 0) its.world_size = hello.world_size;
    group.hub = std::make_unique<ControlHub>(
        hello.world_size,
        [this, key](absl::Span<const int> to, const ToRank& message) { Deliver(key, to, message); },
        HubOptions{.admits_newcomers = true});
    offers_due_.insert(family);
  }
  Member& member = group.members[hello.rank];
  member.has_connected = member.is_connected = true;
  member.peer = peer;
  ++group.connected;
  seats_[peer] = {.group = key, .rank = hello.rank, .silence = {.heard = clock_}};
  for (const std::string& payload : std::exchange(member.waiting, {})) send_(peer, payload);
  if (on_group_ != nullptr && group.connected == hello.world_size && !group.has_failed)
    on_group_(hello.group, hello.world_size, absl::OkStatus());
  OfferNewcomers();
}

absl::Status ControlGroups::OnFrame(PeerId peer, absl::string_view frame) {
  const auto found = seats_.find(peer);
  const auto newcomer = newcomers_.find(peer);
  if (found == seats_.end() && newcomer == newcomers_.end())
    return absl::InternalError("a control message from an unknown peer");
  EK_ASSIGN_OR_RETURN(ToHub message, ParseControlMessage<ToHub>(frame));
  if (newcomer != newcomers_.end()) {
    OnNewcomersFrame(peer, newcomer->second, message);
    OfferNewcomers();
    return absl::OkStatus();
  }
  Seat& seat = found->second;
  if (const auto* beat = std::get_if<to_hub::Beat>(&message)) {
    OnBeat(seat.silence, *beat);
  } else if (std::holds_alternative<to_hub::Leave>(message)) {
    Limit(seat.silence, absl::InfiniteDuration());
  } else if (auto* failed = std::get_if<to_hub::Failed>(&message);
             failed != nullptr && failed->unheard_us > 0) {
    const bool has_run = SteadyNow() - turned_at_ <= 2 * kListening &&
                         clock_ - runs_since_ >= absl::Microseconds(failed->unheard_us);
    if (has_run && seat.silence.longest != absl::InfiniteDuration()) {
      seat.report = std::move(*failed);
      seat.reported_at = clock_;
      seat.judge_at = std::min(seat.judge_at, clock_ + kOthersReport);  // It may report again.
      look_at_ = std::min(look_at_, seat.judge_at);
      return absl::OkStatus();
    }
  }
  const Group& group = groups_.at(seat.group);
  if (const auto* regroup = std::get_if<to_hub::Regroup>(&message);
      regroup != nullptr && IsContinued(group)) {
    // It has missed that the next group was made. If it met others here, there would be two.
    send_(peer, Serialize(ToRank(to_rank::Regrouped{.request = regroup->request})));
    return absl::OkStatus();
  }
  group.hub->OnMessage(seat.rank, std::move(message));
  OfferNewcomers();
  return absl::OkStatus();
}

bool ControlGroups::IsContinued(const Group& group) const {
  return std::ranges::any_of(groups_, [&group](const auto& entry) {
    const Group& other = entry.second;
    return other.family == group.family && other.number > group.number && other.hub->IsMade();
  });
}

void ControlGroups::OnNewcomersFrame(PeerId peer, Newcomer& newcomer, const ToHub& message) {
  if (const auto* beat = std::get_if<to_hub::Beat>(&message))
    return OnBeat(newcomer.silence, *beat);
  if (const auto* question = std::get_if<to_hub::WhoIsMissing>(&message))
    return send_(peer, Serialize(ToRank(to_rank::Missing{.request = question->request})));
  const auto* regroup = std::get_if<to_hub::Regroup>(&message);
  if (regroup == nullptr) return;
  TakeBack(newcomer);
  newcomer.is_ready = true;
  newcomer.request = regroup->request;
  if (!newcomer.refusal.ok()) return Refuse(peer, newcomer, newcomer.refusal);
  offers_due_.insert(newcomer.family);
}

void ControlGroups::Refuse(PeerId peer, Newcomer& newcomer, absl::Status why) {
  newcomer.refusal = std::move(why);
  if (!std::exchange(newcomer.is_ready, false)) return;
  send_(peer, Serialize(ToRank(
                  to_rank::Regrouped{.request = newcomer.request, .refusal = newcomer.refusal})));
}

void ControlGroups::TakeBack(Newcomer& newcomer) {
  const int rank = std::exchange(newcomer.rank, -1);
  const auto group = groups_.find(newcomer.group);
  if (rank < 0 || group == groups_.end()) return;
  group->second.entered.erase(rank);
  if (IsContinued(group->second)) return;  // It has come to the next group.
  group->second.hub->OnNewcomerLost(rank);
}

bool ControlGroups::HoldsPlace(const Newcomer& newcomer) const {
  const auto group = groups_.find(newcomer.group);
  return newcomer.is_holder && group != groups_.end() && !IsContinued(group->second);
}

bool ControlGroups::MayEnter(const Newcomer& newcomer) const {
  return newcomer.is_ready &&
         (newcomer.is_holder || std::ranges::none_of(newcomers_, [&](const auto& entry) {
            const Newcomer& other = entry.second;
            return other.family == newcomer.family && other.place == newcomer.place &&
                   HoldsPlace(other);
          }));
}

void ControlGroups::OfferNewcomers() {
  while (!offers_due_.empty()) {
    const std::string name = *offers_due_.begin();
    offers_due_.erase(offers_due_.begin());
    const auto family = families_.find(name);
    std::set<int> ready;
    for (auto& [peer, newcomer] : newcomers_) {
      if (newcomer.family != name || !newcomer.is_ready) continue;
      if (family == families_.end()) {
        Refuse(
            peer, newcomer,
            absl::FailedPreconditionError(absl::StrCat(
                "the job has ended, and with it the wait for the place of rank ", newcomer.place)));
      } else if (family->second.places_left_out.contains(newcomer.place)) {
        Refuse(peer, newcomer, TooLate(newcomer.place));
      } else if (MayEnter(newcomer)) {
        ready.insert(newcomer.place);
      }
    }
    for (auto& [key, group] : groups_) {
      if (group.family == name) group.hub->OnNewcomers(ready);
    }
  }
}

void ControlGroups::Enter(Group& group, const std::string& key, absl::Span<const int> ranks,
                          const to_rank::Regrouped& regrouped) {
  for (const int rank : ranks) {
    const auto found = std::ranges::find_if(newcomers_, [&](const auto& entry) {
      const Newcomer& newcomer = entry.second;
      return MayEnter(newcomer) && newcomer.family == group.family &&
             newcomer.place == regrouped.members[rank];
    });
    if (found == newcomers_.end()) continue;  // It is offered as long as it is ready.
    auto& [peer, newcomer] = *found;
    newcomer.is_ready = false;
    newcomer.is_holder = true;
    newcomer.group = key;
    newcomer.rank = rank;
    group.entered[rank] = peer;
    to_rank::Regrouped reply = regrouped;
    reply.request = newcomer.request;
    reply.group = group.name;
    send_(peer, Serialize(ToRank(std::move(reply))));
  }
  offers_due_.insert(group.family);
}

void ControlGroups::RemoveGroup(const std::string& key) {
  const std::string family = groups_.at(key).family;
  groups_.erase(key);
  if (--families_.at(family).groups > 0) return;
  families_.erase(family);
  offers_due_.insert(family);
}

void ControlGroups::OnBytes(PeerId peer) {
  const auto found = seats_.find(peer);
  if (found != seats_.end()) found->second.silence.heard = clock_;
  const auto newcomer = newcomers_.find(peer);
  if (newcomer != newcomers_.end()) newcomer->second.silence.heard = clock_;
}

void ControlGroups::OnDisconnect(PeerId peer) {
  if (const auto newcomer = newcomers_.find(peer); newcomer != newcomers_.end()) {
    Limit(newcomer->second.silence, absl::InfiniteDuration());
    TakeBack(newcomer->second);
    offers_due_.insert(newcomer->second.family);
    newcomers_.erase(newcomer);
    return OfferNewcomers();
  }
  const auto found = seats_.find(peer);
  if (found == seats_.end()) return;
  Limit(found->second.silence, absl::InfiniteDuration());
  const Seat seat = std::move(found->second);
  seats_.erase(found);
  Group& group = groups_.at(seat.group);
  group.members[seat.rank].is_connected = false;
  --group.connected;
  ++group.disconnected;
  group.hub->OnDisconnect(seat.rank);
  const bool is_given_up = group.has_id && group.has_failed && group.connected == 0;
  if (is_given_up || group.disconnected >= group.hub->world_size()) {
    if (!group.has_failed) {
      ForgetFailures();
    } else if (failure_.empty()) {
      failure_ = std::move(group.failure);
    }
    RemoveGroup(seat.group);
  }
  OfferNewcomers();
}

void ControlGroups::Limit(Silence& silence, absl::Duration longest) {
  listening_to_ -= silence.longest != absl::InfiniteDuration();
  silence.longest = longest;
  listening_to_ += silence.longest != absl::InfiniteDuration();
  look_at_ = std::min(look_at_, silence.lost_at());
}

void ControlGroups::OnBeat(Silence& silence, const to_hub::Beat& beat) {
  Limit(silence,
        beat.silence_us > 0 ? absl::Microseconds(beat.silence_us) : absl::InfiniteDuration());
}

std::vector<ControlGroups::PeerId> ControlGroups::PassTime(absl::Duration time) {
  // Any longer time was time in which the loop did not run, and it may have to read first what has
  // arrived meanwhile.
  clock_ += std::clamp(time, absl::ZeroDuration(), kListening);
  turned_at_ = SteadyNow();
  if (time > 2 * kListening) runs_since_ = clock_;
  for (auto& [key, group] : groups_) {
    if (group.has_failed && group.hub->AwaitsNewcomers()) group.hub->OnTime();
  }
  OfferNewcomers();
  std::vector<PeerId> lost;
  if (clock_ <= look_at_) return lost;
  look_at_ = absl::InfiniteDuration();
  for (auto& [peer, newcomer] : newcomers_) {
    if (clock_ > newcomer.silence.lost_at()) lost.push_back(peer);
    look_at_ = std::min(look_at_, newcomer.silence.lost_at());
  }
  for (auto& [peer, seat] : seats_) {
    const absl::Duration lost_at = std::min(seat.silence.lost_at(), seat.judge_at);
    if (clock_ <= lost_at) {
      look_at_ = std::min(look_at_, lost_at);
      continue;
    }
    ControlHub& hub = *groups_.at(seat.group).hub;
    const bool is_silent = clock_ > seat.silence.lost_at();
    seat.judge_at = absl::InfiniteDuration();
    if (is_silent) {
      hub.OnSilence(seat.rank, seat.silence.longest);
    } else if (!AreAllDeaf(seat.group)) {
      hub.OnDeafness(seat.rank, absl::Microseconds(seat.report.unheard_us));
    } else {  // The hub's network is at fault.
      hub.OnMessage(seat.rank, std::move(seat.report));
      look_at_ = std::min(look_at_, seat.silence.lost_at());
      continue;
    }
    lost.push_back(peer);
    Limit(seat.silence, absl::InfiniteDuration());  // It is reported once.
  }
  return lost;
}

bool ControlGroups::AreAllDeaf(const std::string& group) const {
  return std::none_of(seats_.begin(), seats_.end(), [&](const auto& entry) {
    const Seat& seat = entry.second;
    return seat.group == group && seat.silence.longest != absl::InfiniteDuration() &&
           clock_ - seat.reported_at > 2 * kOthersReport;
  });
}

bool ControlGroups::ListensForBeats() const {
  return listening_to_ > 0 || std::ranges::any_of(groups_, [](const auto& entry) {
           return entry.second.has_failed && entry.second.hub->AwaitsNewcomers();
         });
}

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
      fields.Add("\"silent_ms\":", (clock_ - seat->second.silence.heard) / absl::Milliseconds(1));
    }
    if (!seen.details.empty()) fields.Add("\"steps\":", seen.details);
  }
}

void ControlGroups::Deliver(const std::string& key, absl::Span<const int> to,
                            const ToRank& message) {
  Group& group = groups_.at(key);
  if (const auto* regrouped = std::get_if<to_rank::Regrouped>(&message)) {
    ForgetFailures();
    if (!regrouped->members.empty()) return Enter(group, key, to, *regrouped);
    for (const int place : group.hub->PlacesLeftOut())
      families_[group.family].places_left_out.insert(place);
    offers_due_.insert(group.family);
  }
  if (const auto* exchanged = std::get_if<to_rank::Exchanged>(&message);
      exchanged != nullptr && exchanged->id.topic == kMadeTopic)
    offers_due_.insert(group.family);
  if (const auto* failed = std::get_if<to_rank::Failed>(&message)) {
    if (!std::exchange(group.has_failed, true)) AppendGroup(group, &group.failure);
    const bool is_to_all = !failed->is_cut_off;  // A lost rank gets another text.
    // A rank leaves an attempt to make a further group when another one is lost, and makes the
    // next.
    const bool is_attempt = key != group.family && !group.hub->IsMade();
    if (is_to_all && !is_attempt && on_group_ != nullptr &&
        !std::exchange(group.has_reported, true))
      on_group_(group.name, static_cast<int>(group.members.size()), failed->why);
  }
  const std::string payload = Serialize(message);
  for (const int rank : to) {
    Member& member = group.members[rank];
    if (member.is_connected) {
      send_(member.peer, payload);
    } else if (!member.has_connected) {
      member.waiting.push_back(payload);
    } else if (const auto entered = group.entered.find(rank);
               entered != group.entered.end() &&
               std::holds_alternative<to_rank::SurvivorLost>(message)) {
      send_(entered->second, payload);
    }
  }
}

}  // namespace evenkeel::internal
