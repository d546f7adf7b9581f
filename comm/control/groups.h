// The control side of a store server: maps connections to the ranks of groups, and keeps a hub for
// each group. It has no sockets and no threads.
//
//   ControlGroups groups([&](ControlGroups::PeerId peer, const std::string& payload) { ... });
//   EK_RETURN_IF_ERROR(groups.Check(hello));
//   groups.Join(peer, hello);
//   EK_RETURN_IF_ERROR(groups.OnFrame(peer, frame));
//   groups.OnDisconnect(peer);
//
// The first rank that connects creates its group. Messages for a rank that has not connected yet,
// the failure of the group included, are kept until it does. A rank connects once. A group is
// removed when all its ranks have connected and disconnected; one with an id (Hello::id) also when
// it has failed and no rank is connected.
//
// A newcomer (Hello::incarnation) is in no group. After it has sent to_hub::Regroup, it waits until
// the hub of a group of its family gives it the place of a lost rank. A family is a group with its
// successors: "world", "world+1". Where a group has given up a place, its newcomers are refused.
//
// Threads: thread-compatible.

#ifndef EVENKEEL_COMM_CONTROL_GROUPS_H_
#define EVENKEEL_COMM_CONTROL_GROUPS_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "evenkeel/comm/control/hub.h"
#include "evenkeel/comm/control/messages.h"
#include "evenkeel/comm/control/seats.h"
#include "evenkeel/comm/net/handshake.h"

namespace evenkeel::internal {

class ControlGroups : public ControlSeats {
 public:
  // Called when all ranks of a group have connected, with OK, and once if it ends with an error;
  // not if it continues another one, and has never been made.
  using GroupFunction =
      std::function<void(const std::string& group, int world_size, const absl::Status& status)>;
  explicit ControlGroups(SendFunction send, GroupFunction on_group = nullptr)
      : send_(std::move(send)), on_group_(std::move(on_group)) {}

  absl::Status Check(const Hello& hello) const override;
  void Join(PeerId peer, const Hello& hello) override;
  absl::Status OnFrame(PeerId peer, absl::string_view frame) override;
  void OnBytes(PeerId peer) override;
  void OnDisconnect(PeerId peer) override;
  // Only those that have announced heartbeats can be silent.
  std::vector<PeerId> PassTime(absl::Duration time) override;
  bool ListensForBeats() const override;
  bool HasLivingGroup() const override;
  std::string StatusJson() override;
  std::string LastStatusJson() override;

 private:
  struct Member {
    bool has_connected = false;
    bool is_connected = false;
    PeerId peer = 0;
    std::vector<std::string> waiting;  // Messages from before it connected.
  };
  struct Group {
    std::string name;
    std::string members_text;  // Hello::members of its first rank.
    // After a failure, a group with an id does not wait for further ranks: they find the failure in
    // the store from which they read the id.
    bool has_id = false;
    std::vector<Member> members;
    int connected = 0;
    int disconnected = 0;
    bool has_failed = false;
    bool has_reported = false;  // Its error, to on_group_.
    std::string failure;        // Its status when it failed; empty once it does not matter.
    std::string family;
    int64_t number = 0;             // Among all groups of the job, in the order of their creation.
    std::map<int, PeerId> entered;  // By rank: the newcomers that the hub has chosen last.
    std::unique_ptr<ControlHub> hub;
  };
  struct Family {
    int groups = 0;
    int world_size = 0;                   // Of the first group.
    std::map<int, int32_t> incarnations;  // By place: the highest of its newcomers.
    std::set<int> places_left_out;        // Those without which a group has gone on.
  };
  // When a connection has to send its next bytes.
  struct Silence {
    absl::Duration longest = absl::InfiniteDuration();  // Infinite: it sends no heartbeats.
    absl::Duration heard;  // The value of clock_ when its last bytes came.
    absl::Duration lost_at() const { return heard + longest; }
  };
  struct Newcomer {
    std::string family;
    int place = 0;
    Silence silence;
    bool is_ready = false;
    bool is_holder = false;  // A hub has given it the place.
    int64_t request = 0;     // The number of its last request.
    absl::Status refusal;    // Why it never gets the place.
    // The group (the key in `groups_`) in which the hub has given it the place of `rank`, until it
    // asks again. The group may be gone.
    std::string group;
    int rank = -1;
  };
  struct Seat {
    std::string group;  // The key in `groups_`.
    int rank = 0;
    Silence silence;
    // Its last report that it receives nothing. The values of clock_ when it came, and when it is
    // judged whether this rank or the hub is at fault.
    to_hub::Failed report;
    absl::Duration reported_at = -absl::InfiniteDuration(), judge_at = absl::InfiniteDuration();
  };

  // Returns whether all ranks of the group that send heartbeats have lately reported that they
  // receive nothing.
  bool AreAllDeaf(const std::string& group) const;
  void Limit(Silence& silence, absl::Duration longest);
  void OnBeat(Silence& silence, const to_hub::Beat& beat);
  void AppendGroup(Group& group, std::string* json);
  // The job goes on, or has ended well: no failure up to now is why it ends.
  void ForgetFailures();
  void Deliver(const std::string& key, absl::Span<const int> to, const ToRank& message);
  absl::Status CheckNewcomer(const Hello& hello) const;
  void OnNewcomersFrame(PeerId peer, Newcomer& newcomer, const ToHub& message);
  // Returns whether it has the place, and no seat yet in a group that is made.
  bool HoldsPlace(const Newcomer& newcomer) const;
  // Returns whether it is ready, and no other newcomer holds its place.
  bool MayEnter(const Newcomer& newcomer) const;
  // Informs the hubs of the families in `offers_due_` which newcomers are ready, and refuses those
  // that are too late. Called at the end of each call, when no hub delivers.
  void OfferNewcomers();
  // Gives the newcomers their places.
  void Enter(Group& group, const std::string& key, absl::Span<const int> ranks,
             const to_rank::Regrouped& regrouped);
  void Refuse(PeerId peer, Newcomer& newcomer, absl::Status why);
  // The newcomer disconnected or asked again, so it will not join the group that chose it.
  void TakeBack(Newcomer& newcomer);
  // Returns whether ranks have gone on in a group that continues this one.
  bool IsContinued(const Group& group) const;
  void RemoveGroup(const std::string& key);

  const SendFunction send_;
  const GroupFunction on_group_;
  std::map<std::string, Group> groups_;  // By name and id.
  int64_t created_ = 0;                  // Groups.
  std::map<std::string, Family> families_;
  std::map<PeerId, Newcomer> newcomers_;
  std::set<std::string> offers_due_;  // Families.
  std::string failure_;               // Of the first group that has failed and gone.
  std::map<PeerId, Seat> seats_;
  absl::Duration clock_;  // The sum of PassTime().
  // The loop has run without a long interruption since clock_ had this value.
  absl::Duration runs_since_;
  absl::Time turned_at_ = absl::InfinitePast();  // The time of the last PassTime().
  int64_t listening_to_ = 0;  // The number of connections with a limit to their silence.
  // The value of clock_ before which none can be too silent.
  absl::Duration look_at_ = absl::InfiniteDuration();
};

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_CONTROL_GROUPS_H_
