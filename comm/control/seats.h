// The interface by which a server loop asks which ranks may connect, and passes on their messages.
// The defaults are for seats without heartbeats, groups and messages of other threads.
//
// Threads: the loop's thread; thread-compatible.

#ifndef EVENKEEL_COMM_CONTROL_SEATS_H_
#define EVENKEEL_COMM_CONTROL_SEATS_H_

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "evenkeel/comm/net/handshake.h"

namespace evenkeel::internal {

class ControlSeats {
 public:
  using PeerId = int64_t;
  using SendFunction = std::function<void(PeerId peer, const std::string& payload)>;

  // While ranks send heartbeats, no turn of the loop waits for longer.
  static constexpr absl::Duration kListening = absl::Milliseconds(500);

  virtual ~ControlSeats() = default;
  // Returns OK if that rank may connect.
  virtual absl::Status Check(const Hello& hello) const = 0;
  // Called when the rank has connected, after Check() returned OK.
  virtual void Join(PeerId peer, const Hello& hello) = 0;
  // Returns an error if the bytes are not a control message; the loop then disconnects the peer.
  virtual absl::Status OnFrame(PeerId peer, absl::string_view frame) = 0;
  // Called when bytes have arrived from the peer, perhaps only a part of a frame.
  virtual void OnBytes(PeerId /*peer*/) {}
  // Called when the peer's connection has ended.
  virtual void OnDisconnect(PeerId peer) = 0;
  // Called when `time` has passed since the last call; at most kListening of it adds to the silence
  // of all peers, because the loop could have received from them. Peers that have been silent for
  // too long are declared lost; returns those whose connections must be ended.
  virtual std::vector<PeerId> PassTime(absl::Duration /*time*/) { return {}; }
  // Returns whether the silence of any peer would be noticed.
  virtual bool ListensForBeats() const { return false; }
  // Returns whether a rank is connected whose group has not ended.
  virtual bool HasLivingGroup() const { return false; }
  // Returns the state of all groups, for observers (comm/rendezvous/tcp_store.h).
  virtual std::string StatusJson() { return "[]"; }
  // Returns the same for the end of the loop: a group that has failed as it was when it did, also
  // if its ranks have gone, unless its ranks have continued in another one.
  virtual std::string LastStatusJson() { return "[]"; }
  // Called in each turn of the loop, to send what other threads have queued.
  virtual void SendWaiting() {}
};

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_CONTROL_SEATS_H_
