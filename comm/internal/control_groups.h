// The control side of a store server: which connection is which rank of which group, and a hub for each group. No
// sockets, no threads.
//
//   ControlGroups groups([&](ControlGroups::PeerId peer, const std::string& payload) { ... });
//   EK_RETURN_IF_ERROR(groups.Check(hello));
//   groups.Join(peer, hello);
//   EK_RETURN_IF_ERROR(groups.OnFrame(peer, frame));
//   groups.OnDisconnect(peer);
//
// A group begins with the first rank that comes. Ranks that are told something before they come get it when they come,
// the failure of the group too; a rank comes once. A group is forgotten when all its ranks have come and gone.
//
// Threads: thread-compatible.

#ifndef EVENKEEL_COMM_INTERNAL_CONTROL_GROUPS_H_
#define EVENKEEL_COMM_INTERNAL_CONTROL_GROUPS_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "evenkeel/comm/internal/control_hub.h"
#include "evenkeel/comm/internal/handshake.h"

namespace evenkeel::internal {

class ControlGroups {
 public:
  using PeerId = int64_t;
  using SendFunction = std::function<void(PeerId peer, const std::string& payload)>;

  explicit ControlGroups(SendFunction send) : send_(std::move(send)) {}

  // Whether that rank may come.
  absl::Status Check(const Hello& hello) const;
  // It has come; Check() was OK.
  void Join(PeerId peer, const Hello& hello);
  // Not OK: those bytes are no control message, so the peer is to be cut off.
  absl::Status OnFrame(PeerId peer, absl::string_view frame);
  // Something has come from it, if only a piece of a frame.
  void OnBytes(PeerId peer);
  // The peer's connection is over.
  void OnDisconnect(PeerId peer);
  // Time goes by in which the peers could have been heard: tells those of whom nothing was heard for too long, and their
  // groups, that they are lost; their connections are to be ended. Only who has promised heartbeats can be silent.
  std::vector<PeerId> PassTime(absl::Duration time);
  // Whether anybody has promised heartbeats.
  bool ListensForBeats() const;
  // Whether a rank is connected whose group goes on.
  bool HasLivingGroup() const;

 private:
  struct Member {
    bool has_come = false;
    bool is_here = false;
    PeerId peer = 0;
    std::vector<std::string> waiting;  // Told before it came.
  };
  struct Group {
    std::vector<Member> members;
    int here = 0;
    int gone = 0;
    bool has_failed = false;
    std::unique_ptr<ControlHub> hub;
  };
  struct Seat {
    std::string group;
    int rank = 0;
    absl::Duration borne = absl::InfiniteDuration();  // How long its silence is borne.
    absl::Duration silence = absl::ZeroDuration();    // How long it has lasted.
  };

  void Deliver(Group& group, int rank, const ControlMessage& message);

  const SendFunction send_;
  std::map<std::string, Group> groups_;
  std::map<PeerId, Seat> seats_;
};

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_INTERNAL_CONTROL_GROUPS_H_
