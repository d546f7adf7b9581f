// The loop of a store server: accepts connections, greets them, and carries frames between them and what they came for.
//
// A connection goes through these states, forwards only:
//   kGreeting   has been sent the challenge; must answer it before its deadline, in one small frame
//   kStore      asks the key-value table
//   kControl    is a rank of a group
//   kLeaving    is sent what is left for it, nothing more is read; cut off at its deadline
//
// Nobody can hold up anybody: all sockets are non-blocking, each connection has buffers of its own with a limit, and a
// turn of the loop reads at most 64 KiB from each.
//
// Threads: Run() on one thread; the rest of the class belongs to it.

#ifndef EVENKEEL_COMM_INTERNAL_SERVER_LOOP_H_
#define EVENKEEL_COMM_INTERNAL_SERVER_LOOP_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "evenkeel/comm/internal/control_seats.h"
#include "evenkeel/comm/internal/frame.h"
#include "evenkeel/comm/internal/greet.h"
#include "evenkeel/comm/internal/handshake.h"
#include "evenkeel/comm/internal/key_value.h"
#include "evenkeel/comm/internal/socket.h"

namespace evenkeel::internal {

struct ServerOptions {
  JobSecret job;
  int world_size = 0;  // Of the job; 0: any.
  std::string host;    // "rank 0".
  bool has_store = true;
  absl::Duration greeting_timeout;
  absl::Duration linger;
};

class ServerLoop {
 public:
  // `make_seats` gets the way to send to the peers.
  using MakeSeats = std::function<std::unique_ptr<ControlSeats>(ControlSeats::SendFunction send)>;
  ServerLoop(UniqueFd listener, WakeUp wake, ServerOptions options, const MakeSeats& make_seats);

  // Until Stop() was called and every living group has left, or `linger` after Stop().
  void Run();
  // From any thread.
  void Stop();
  // From any thread: the seats have something to send.
  void Wake() { wake_.Signal(); }

 private:
  using PeerId = int64_t;
  enum class State { kGreeting, kStore, kControl, kLeaving };
  struct Peer {
    UniqueFd fd;
    State state = State::kGreeting;
    Challenge challenge;
    FrameParser received{kMaxGreetingFrame};
    std::string outgoing;
    size_t sent = 0;
    absl::Time deadline = absl::InfiniteFuture();  // Of kGreeting and kLeaving.
    bool said_goodbye = false;
    bool is_over = false;
  };

  absl::Time StopBy();
  void Turn();
  // Waits for something to do; what has happened on which connection.
  std::vector<std::pair<PeerId, short>> Wait(absl::Time now);
  void Accept();
  // Those of whom nothing was heard for too long.
  void CutOffSilent(absl::Time now);
  void Read(PeerId id, Peer& peer);
  void HandleFrame(PeerId id, Peer& peer, const std::string& frame);
  void HandleHello(PeerId id, Peer& peer, const Hello& hello);
  absl::Status Judge(const Peer& peer, const Hello& hello) const;
  void HandleRequest(PeerId id, Peer& peer, const std::string& frame);
  void Send(PeerId id, absl::string_view payload);
  void Flush(Peer& peer);
  // Lets the peer read what was sent to it, then cuts it off.
  void Dismiss(PeerId id, Peer& peer);
  // What it came for learns that it is gone.
  void Detach(PeerId id, Peer& peer);
  void Sweep(absl::Time now);

  UniqueFd listener_;
  const WakeUp wake_;
  const ServerOptions options_;
  absl::Time accept_again_ = absl::InfinitePast();
  absl::Time last_turn_ = absl::InfiniteFuture();  // The first turn counts for nothing.
  PeerId next_id_ = 0;
  std::map<PeerId, Peer> peers_;  // By age.
  size_t greeting_ = 0;           // How many are in that state.
  KeyValueTable table_;
  const std::unique_ptr<ControlSeats> seats_;

  absl::Mutex mutex_;
  absl::Time stop_by_ ABSL_GUARDED_BY(mutex_) = absl::InfiniteFuture();  // Finite: Stop() was called.
};

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_INTERNAL_SERVER_LOOP_H_
