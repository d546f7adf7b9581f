// The loop of a store server: accepts connections, authenticates them, and carries frames between
// them and the store or the hub.
//
// A connection goes through these states, forwards only:
//   kGreeting   has received the challenge; must answer it before its deadline, in one small frame
//   kStore      sends requests to the key-value table
//   kControl    is a rank of a group
//   kObserver   sends empty frames; each gets the state of all groups. At the end it receives the
//               last state and an empty frame
//   kLinks      has many links, each of them a rank of a group
//   kLeaving    receives the remaining output, no input is read; disconnected at its deadline
//
// No connection can delay another one: all sockets are non-blocking, each connection has buffers of
// its own with a limit, and a turn of the loop reads at most 64 KiB from each. The cost of a turn
// depends on the connections with events; idle ones, of which there may be thousands, cost nothing.
//
// Threads: Run() on one thread, which owns the rest of the class.

#ifndef EVENKEEL_COMM_CONTROL_SERVER_LOOP_H_
#define EVENKEEL_COMM_CONTROL_SERVER_LOOP_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "evenkeel/comm/control/key_value.h"
#include "evenkeel/comm/control/seats.h"
#include "evenkeel/comm/net/frame.h"
#include "evenkeel/comm/net/greet.h"
#include "evenkeel/comm/net/handshake.h"
#include "evenkeel/comm/net/socket.h"

namespace evenkeel::internal {

struct ServerOptions {
  JobSecret job;
  int world_size = 0;  // The world size of the job; 0: any.
  std::string host;    // "rank 0".
  bool has_store = true;
  absl::Duration greeting_timeout;
  absl::Duration linger;
  // If this process has had no descriptor left for this time, ranks that connect are refused.
  absl::Duration refuse_after = absl::Seconds(5);
};

class ServerLoop {
 public:
  // Receives the function that sends to peers.
  using MakeSeats = std::function<std::unique_ptr<ControlSeats>(ControlSeats::SendFunction send)>;
  static absl::StatusOr<std::unique_ptr<ServerLoop>> Create(UniqueFd listener,
                                                            ServerOptions options,
                                                            const MakeSeats& make_seats);

  // Returns when Stop() was called and every living group has left, or `linger` after Stop().
  void Run();
  // From any thread.
  void Stop();
  // From any thread: the seats have something to send.
  void Wake() { wake_.Signal(); }

 private:
  using PeerId = int64_t;
  enum class State { kGreeting, kStore, kControl, kObserver, kLinks, kLeaving };
  struct Peer {
    UniqueFd fd;
    State state = State::kGreeting;
    Challenge challenge;
    absl::Status refusal;  // Not OK: it is refused, because no descriptor is left.
    FrameParser received{kMaxGreetingFrame};
    std::string outgoing;
    size_t sent = 0;
    absl::Time deadline = absl::InfiniteFuture();  // For kGreeting and kLeaving.
    bool waits_for_room = false;                   // The socket is full.
    bool said_goodbye = false;
    bool is_over = false;
    bool is_touched = false;                       // In `touched_`.
    std::map<uint32_t, PeerId> links;              // By number: the seat of each.
    absl::Time hear_again = absl::InfinitePast();  // When bytes count for all links again.
  };

  ServerLoop(UniqueFd listener, WakeUp wake, Poller poller, ServerOptions options,
             const MakeSeats& make_seats);

  absl::Time StopBy();
  void Turn();
  // Returns the time at which the next turn must begin, even without an event.
  absl::Time NextAction(absl::Time now);
  void Accept(absl::Time now);
  void PauseAccepting(absl::Time now, const absl::Status& why);
  // Marks the peer for Sweep(): it has output, has ended, or may have reached its deadline.
  void Touch(PeerId id, Peer& peer);
  void SetDeadline(PeerId id, Peer& peer, absl::Time deadline);
  // Disconnects peers that have been silent for too long.
  void CutOffSilent(absl::Time now);
  void Read(PeerId id, Peer& peer);
  void HandleFrame(PeerId id, Peer& peer, const std::string& frame);
  void HandleHello(PeerId id, Peer& peer, const Hello& hello);
  absl::Status Judge(const Peer& peer, const Hello& hello) const;
  absl::Status JudgeRank(const Hello& hello) const;
  void HandleLink(PeerId id, Peer& peer, absl::string_view frame);
  void OpenLink(PeerId id, Peer& peer, uint32_t number, absl::string_view payload);
  void CloseLink(PeerId seat);
  void HandleRequest(PeerId id, Peer& peer, const std::string& frame);
  // Returns a recent state of all groups: many observers cost as much as one.
  const std::string& Status();
  // `to` may be the seat of a link.
  void Send(PeerId to, absl::string_view payload);
  void Flush(PeerId id, Peer& peer);
  // Lets the peer read what was sent to it, then disconnects it.
  void Dismiss(PeerId id, Peer& peer);
  // Disconnects it at the end of this turn.
  void CutOff(PeerId id, Peer& peer);
  // Notifies the table or the seats that the peer is gone.
  void Detach(PeerId id, const Peer& peer);
  void Sweep(absl::Time now);

  UniqueFd listener_;
  const WakeUp wake_;
  Poller poller_;
  const ServerOptions options_;
  absl::Time accept_again_ = absl::InfiniteFuture();  // Finite: accepting pauses until then.
  bool has_warned_ = false;
  UniqueFd spare_;  // Released to accept, and refuse, a rank when no other descriptor is left.
  absl::Time out_since_ = absl::InfiniteFuture();  // Finite: no descriptor is left.
  absl::Time last_turn_ = absl::InfiniteFuture();  // The first turn counts for nothing.
  PeerId next_id_ = 0;
  std::map<PeerId, Peer> peers_;
  std::map<PeerId, std::pair<PeerId, uint32_t>> links_;  // By seat: the peer, the link's number.
  std::set<PeerId> strangers_;  // Without proof, by age, also refused ones.
  std::vector<PeerId> touched_;
  // Deadlines of connections in kGreeting and kLeaving; an entry may be out of date.
  std::set<std::pair<absl::Time, PeerId>> deadlines_;
  KeyValueTable table_;
  std::string status_;
  absl::Time status_until_ = absl::InfinitePast();
  const std::unique_ptr<ControlSeats> seats_;

  absl::Mutex mutex_;
  absl::Time stop_by_ ABSL_GUARDED_BY(mutex_) =
      absl::InfiniteFuture();  // Finite: Stop() was called.
};

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_CONTROL_SERVER_LOOP_H_
