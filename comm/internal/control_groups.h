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
#include "evenkeel/comm/internal/control_seats.h"
#include "evenkeel/comm/internal/handshake.h"

namespace evenkeel::internal {

class ControlGroups : public ControlSeats {
 public:
  explicit ControlGroups(SendFunction send) : send_(std::move(send)) {}

  absl::Status Check(const Hello& hello) const override;
  void Join(PeerId peer, const Hello& hello) override;
  absl::Status OnFrame(PeerId peer, absl::string_view frame) override;
  void OnBytes(PeerId peer) override;
  void OnDisconnect(PeerId peer) override;
  // Only who has promised heartbeats can be silent.
  std::vector<PeerId> PassTime(absl::Duration time) override;
  bool ListensForBeats() const override;
  bool HasLivingGroup() const override;
  void SendWaiting() override {}

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
