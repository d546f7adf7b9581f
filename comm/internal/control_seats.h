// What a server loop knows of the ranks that are connected to it: who may come, and what their messages mean.
//
// Threads: the loop's; thread-compatible.

#ifndef EVENKEEL_COMM_INTERNAL_CONTROL_SEATS_H_
#define EVENKEEL_COMM_INTERNAL_CONTROL_SEATS_H_

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "evenkeel/comm/internal/handshake.h"

namespace evenkeel::internal {

class ControlSeats {
 public:
  using PeerId = int64_t;
  using SendFunction = std::function<void(PeerId peer, const std::string& payload)>;

  virtual ~ControlSeats() = default;
  // Whether that rank may come.
  virtual absl::Status Check(const Hello& hello) const = 0;
  // It has come; Check() was OK.
  virtual void Join(PeerId peer, const Hello& hello) = 0;
  // Not OK: those bytes are no control message, so the peer is to be cut off.
  virtual absl::Status OnFrame(PeerId peer, absl::string_view frame) = 0;
  // Something has come from it, if only a piece of a frame.
  virtual void OnBytes(PeerId peer) = 0;
  // The peer's connection is over.
  virtual void OnDisconnect(PeerId peer) = 0;
  // Time goes by in which the peers could have been heard: those of whom nothing was heard for too long are told that
  // they are lost; their connections are to be ended.
  virtual std::vector<PeerId> PassTime(absl::Duration time) = 0;
  // Whether anybody's silence would be noticed.
  virtual bool ListensForBeats() const = 0;
  // Whether a rank is connected whose group goes on.
  virtual bool HasLivingGroup() const = 0;
  // Called in each turn of the loop, for what others want it to send.
  virtual void SendWaiting() = 0;
};

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_INTERNAL_CONTROL_SEATS_H_
