#include "evenkeel/tests/simulation/observed_store.h"

#include <algorithm>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/memory/memory.h"
#include "absl/strings/numbers.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "evenkeel/comm/base/start_thread.h"
#include "evenkeel/comm/control/groups.h"
#include "evenkeel/comm/control/messages.h"
#include "evenkeel/comm/net/socket.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/tests/simulation/world.h"

namespace evenkeel::simulation {
namespace {

using internal::ControlGroups;
using internal::ControlSeats;
using internal::Hello;
using Kind = TraceEvent::Kind;

class ObservedSeats : public ControlSeats {
 public:
  ObservedSeats(SendFunction send, const decltype(TcpStoreServerOptions::on_group)& on_group,
                ReplacementTrace* trace)
      : trace_(*trace),
        groups_(
            [this, send = std::move(send)](PeerId peer, const std::string& payload) {
              OnSent(peer, payload);
              send(peer, payload);
            },
            on_group) {}

  absl::Status Check(const Hello& hello) const override { return groups_.Check(hello); }

  void Join(PeerId peer, const Hello& hello) override {
    const int number = NumberOf(hello.group);
    if (hello.incarnation > 0) {
      newcomers_[peer] = {hello.rank, hello.incarnation};
      current_[newcomers_[peer]] = peer;
    } else if (number >= 0) {
      if (number == 0 && !members_.contains(0)) {
        std::vector<Process> members;
        for (int rank = 0; rank < hello.world_size; ++rank) members.push_back({.place = rank});
        Decide(0, std::move(members));
      }
      // A connection to a group that was not decided changes nothing.
      if (const auto members = members_.find(number);
          members != members_.end() && hello.rank < static_cast<int>(members->second.size())) {
        seats_[peer] = {number, hello.rank};
        current_[members->second[hello.rank]] = peer;
      }
    }
    groups_.Join(peer, hello);
    Conclude();
  }

  absl::Status OnFrame(PeerId peer, absl::string_view frame) override {
    const absl::StatusOr<ToHub> message = internal::ParseControlMessage<ToHub>(frame);
    if (message.ok()) OnReceived(peer, *message);
    const absl::Status status = groups_.OnFrame(peer, frame);
    Conclude();
    return status;
  }

  void OnBytes(PeerId peer) override { groups_.OnBytes(peer); }

  void OnDisconnect(PeerId peer) override {
    if (newcomers_.contains(peer)) {
      const Process process = newcomers_[peer];
      newcomers_.erase(peer);
      if (!HasMovedOn(process, /*group=*/-1)) Lose(process);
    } else if (seats_.contains(peer)) {
      const auto [group, rank] = seats_[peer];
      const Process process = members_[group][rank];
      seats_.erase(peer);
      gone_[group].insert(rank);
      if (current_[process] == peer && !left_.contains({group, process})) Lose(process);
    }
    groups_.OnDisconnect(peer);
    Conclude();
  }

  std::vector<PeerId> PassTime(absl::Duration time) override {
    const std::vector<PeerId> silent = groups_.PassTime(time);
    Conclude();
    return silent;
  }

  bool ListensForBeats() const override { return groups_.ListensForBeats(); }
  bool HasLivingGroup() const override { return groups_.HasLivingGroup(); }
  std::string StatusJson() override { return groups_.StatusJson(); }
  std::string LastStatusJson() override { return groups_.LastStatusJson(); }
  void SendWaiting() override { groups_.SendWaiting(); }

 private:
  void Add(TraceEvent event) { Record(std::move(event), trace_); }

  void Decide(int number, std::vector<Process> members) {
    Add({.kind = Kind::kDecided, .group = number, .members = members});
    members_[number] = std::move(members);
  }

  void Lose(const Process& process) {
    lost_at_[process] = trace_.events.size();
    Add({.kind = Kind::kLost, .process = process});
  }

  void OnReceived(PeerId peer, const ToHub& message) {
    const bool asks = std::holds_alternative<to_hub::Regroup>(message);
    if (const auto newcomer = newcomers_.find(peer); newcomer != newcomers_.end()) {
      if (!asks) return;
      Return(peer, newcomer->second);
      return Add({.kind = Kind::kAnnounced, .process = newcomer->second});
    }
    const auto seat = seats_.find(peer);
    if (seat == seats_.end()) return;
    const auto [group, rank] = seat->second;
    const Process process = members_[group][rank];
    if (asks) Return(peer, process);
    if (asks) asked_[group].insert(rank);
    if (std::holds_alternative<to_hub::Leave>(message)) {
      left_.emplace(group, process);
      gone_[group].insert(rank);
    }
  }

  // Returns whether it has a connection to a later group that is made: the hub of that group
  // decides whether it is lost.
  bool HasMovedOn(const Process& process, int group) {
    const auto seat = seats_.find(current_[process]);
    return seat != seats_.end() && seat->second.first > group &&
           exchanges_.contains({seat->second.first, kMadeTopic});
  }

  // If it has given up in a later group, whose connection has ended already, it is not lost.
  void Return(PeerId peer, const Process& process) {
    current_[process] = peer;
    const auto lost = lost_at_.find(process);
    if (lost == lost_at_.end()) return;
    trace_.events[lost->second].kind = Kind::kGaveUp;
    lost_at_.erase(lost);
  }

  void OnSent(PeerId peer, const std::string& payload) {
    const absl::StatusOr<ToRank> message = internal::ParseControlMessage<ToRank>(payload);
    if (!message.ok()) return;
    const auto* const regrouped = std::get_if<to_rank::Regrouped>(&*message);
    if (const auto newcomer = newcomers_.find(peer); newcomer != newcomers_.end()) {
      if (regrouped == nullptr) return;
      if (!regrouped->refusal.ok())
        return Add({.kind = Kind::kRefused, .process = newcomer->second});
      entered_[newcomer->second.place] = newcomer->second;
      return;
    }
    const auto seat = seats_.find(peer);
    if (seat == seats_.end()) return;
    const auto [group, rank] = seat->second;
    if (regrouped != nullptr && !regrouped->ranks.empty()) {
      OnDecision(group, *regrouped);
    } else if (const auto* failed = std::get_if<to_rank::Failed>(&*message);
               failed != nullptr && failed->is_cut_off) {
      gone_[group].insert(rank);
      const Process process = members_[group][rank];
      if (HasMovedOn(process, group)) return;
      Lose(process);
      lost_at_.erase(process);  // It is lost for good.
    } else if (const auto* exchanged = std::get_if<to_rank::Exchanged>(&*message);
               exchanged != nullptr) {
      const std::string& topic = exchanged->id.topic;
      if (!exchanges_.emplace(group, topic).second) return;
      if (topic == "recovered") Add({.kind = Kind::kRecovered, .group = group});
      if (topic == "finalize") Add({.kind = Kind::kLastStep, .group = group});
    }
  }

  // The messages to the newcomers of the group precede those to other ranks, of which this is one.
  void OnDecision(int from, const to_rank::Regrouped& regrouped) {
    const std::pair decision(from, regrouped.round);
    if (!decisions_.insert(decision).second) return;
    std::vector<Process> members;
    for (const int rank : regrouped.ranks) {
      Process member = members_[from][rank];
      if (std::ranges::count(regrouped.entered, rank) > 0) {
        const auto entered = entered_.find(member.place);
        member = entered == entered_.end() ? Process{member.place, -1} : entered->second;
      }
      members.push_back(member);
    }
    entered_.clear();
    asked_.erase(from);
    Decide(from + static_cast<int>(regrouped.round), std::move(members));
  }

  // Called at the end of each call: groups that could be continued wait for newcomers.
  void Conclude() {
    for (const auto& [group, ranks] : asked_) {
      if (gathered_ == std::pair(group, members_.rbegin()->first)) continue;
      std::set<int> here = ranks;
      here.insert(gone_[group].begin(), gone_[group].end());
      if (here.size() < members_[group].size()) continue;
      gathered_ = {group, members_.rbegin()->first};
      Add({.kind = Kind::kGathered, .group = group});
    }
  }

  ReplacementTrace& trace_;
  std::map<int, std::vector<Process>> members_;  // By the number of the group.
  std::map<int, std::set<int>> asked_, gone_;    // By that number: ranks.
  std::pair<int, int> gathered_ = {-1, -1};      // The group, and the newest one then.
  std::map<PeerId, std::pair<int, int>> seats_;  // The group's number and the rank.
  std::map<PeerId, Process> newcomers_;
  std::map<Process, PeerId> current_;                // By which it has joined or asked last.
  std::set<std::pair<int, Process>> left_;           // With the number of the group.
  std::map<Process, size_t> lost_at_;                // The event.
  std::set<std::pair<int, int64_t>> decisions_;      // The group that ended, and the round.
  std::map<int, Process> entered_;                   // By place: those of the next decision.
  std::set<std::pair<int, std::string>> exchanges_;  // Complete ones.
  ControlGroups groups_;
};

}  // namespace

void Record(TraceEvent event, ReplacementTrace& trace) {
  World& world = *World::Get();
  event.when = world.now();
  world.Trace(ToText(event));
  trace.events.push_back(std::move(event));
}

int NumberOf(absl::string_view group) {
  int number = 0;
  if (!absl::ConsumePrefix(&group, "world")) return -1;
  if (group.empty()) return 0;
  return absl::ConsumePrefix(&group, "+") && absl::SimpleAtoi(group, &number) ? number : -1;
}

absl::StatusOr<std::unique_ptr<ObservedStore>> ObservedStore::Create(
    const TcpStoreServerOptions& options, ReplacementTrace* trace) {
  EK_ASSIGN_OR_RETURN(const internal::HostPort address, internal::HostPort::Parse(options.address));
  EK_ASSIGN_OR_RETURN(internal::UniqueFd listener, internal::ListenOn(address));
  EK_ASSIGN_OR_RETURN(auto loop,
                      internal::ServerLoop::Create(
                          std::move(listener),
                          internal::ServerOptions{.job = {options.job, options.secret},
                                                  .world_size = options.world_size,
                                                  .host = options.host,
                                                  .greeting_timeout = options.greeting_timeout,
                                                  .linger = options.linger},
                          [&](ControlSeats::SendFunction send) {
                            return std::make_unique<ObservedSeats>(std::move(send),
                                                                   options.on_group, trace);
                          }));
  auto store = absl::WrapUnique(new ObservedStore(std::move(loop)));
  EK_ASSIGN_OR_RETURN(store->thread_, internal::StartThread("the job's store", [raw = store.get()] {
                        raw->loop_->Run();
                      }));
  return store;
}

ObservedStore::~ObservedStore() {
  loop_->Stop();
  if (thread_.joinable()) thread_.join();
}

}  // namespace evenkeel::simulation
