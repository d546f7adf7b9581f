// The transport of the backend: one TCP connection to each other rank, made and authenticated by
// comm/net/peer_meeting.h.
//
//   EK_ASSIGN_OR_RETURN(std::shared_ptr<TcpTransport> transport,
//                       TcpTransport::Create(rank, std::move(connections)));
//   TcpTransport::Pending send = transport->Send(/*to=*/1, slot, data, bytes);
//   TcpTransport::Pending receive = transport->Receive(/*from=*/1, slot, place, bytes);
//   EK_RETURN_IF_ERROR(receive.Wait(deadline));
//   EK_RETURN_IF_ERROR(send.Wait(deadline));
//   ... on any thread: transport->Abort(why) ...  // every wait, now and later, returns `why`
//
// The sending thread writes as much as the connection takes. One thread of the transport writes the
// rest, and reads each message straight into its place.
//
// Order:     messages between two ranks on one slot meet, and end, in the order of their Send() and
//            Receive(); slots do not wait for each other, whatever is received when.
// Threads:   thread-safe; each Pending belongs to one thread.
// Ownership: memory must live until its operation has ended or its Pending is gone. A receive that
//            goes before its message lets that be dropped. A send that goes before its message has
//            arrived ends the connection that it was for.
// Errors:    Wait() returns DeadlineExceeded at its deadline, Unavailable for a connection that has
//            ended, FailedPrecondition for two ranks that mean messages of different sizes,
//            InvalidArgument for a peer that does not speak this protocol. The last two end the
//            whole transport, and so does a peer whose kernel acknowledges nothing
//            (comm/tcp/delivery.h): Unavailable.

#ifndef EVENKEEL_COMM_TCP_TRANSPORT_H_
#define EVENKEEL_COMM_TCP_TRANSPORT_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "evenkeel/comm/base/warn.h"
#include "evenkeel/comm/net/socket.h"
#include "evenkeel/comm/ranks/rank_names.h"
#include "evenkeel/comm/tcp/delivery.h"
#include "evenkeel/comm/tcp/messages.h"

namespace evenkeel::internal {

struct TcpTransportOptions {
  RankNames names;    // For messages.
  WarnFunction warn;  // Called with a peer that acknowledges nothing.
  // Called with the reason before a connection that delivers nothing ends the transport.
  std::function<void(const absl::Status& why)> on_lost;
  DeliveryLimits delivery;
};

class TcpTransport : public std::enable_shared_from_this<TcpTransport> {
 public:
  // A send or a receive that has begun.
  class Pending {
   public:
    Pending() = default;  // Nothing: Wait() returns OK.
    Pending(Pending&&) noexcept = default;
    Pending& operator=(Pending&& other) noexcept;
    ~Pending();

    // Blocks until the operation has ended. A send has ended when its message has met its receive
    // and its memory can be used again.
    absl::Status Wait(absl::Time deadline);
    // Returns whether Wait() would not block.
    bool HasEnded() const;

   private:
    friend class TcpTransport;
    explicit Pending(std::shared_ptr<TcpTransport> transport);
    void Forget();

    // `t` is *transport_.
    bool HasEnded(const TcpTransport& t) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(t.mutex_);

    std::shared_ptr<TcpTransport> transport_;
    std::unique_ptr<OperationState> operation_;  // Guarded by the transport's mutex.
    bool is_send_ = false;
  };

  // `connections`: by rank; this rank's own is empty.
  static absl::StatusOr<std::shared_ptr<TcpTransport>> Create(int rank,
                                                              std::vector<UniqueFd> connections,
                                                              TcpTransportOptions options = {});
  // Operations keep it alive.
  ~TcpTransport();

  // `on_end`, for a thread that has more to wait for, is called when the operation has ended, on
  // any thread, maybe before this returns, and maybe twice. It must not call the transport.
  using OnEnd = std::function<void()>;
  Pending Send(int to, uint64_t slot, const void* data, size_t bytes, OnEnd on_end = nullptr);
  Pending Receive(int from, uint64_t slot, void* data, size_t bytes, OnEnd on_end = nullptr);

  // Waits until the kernel has all that this rank has to send: acknowledgements are sent after the
  // end of the receive that they are for.
  void Flush(absl::Time deadline);
  // Once it has returned, no operation's memory is touched any more. Only the first `why` counts.
  void Abort(const absl::Status& why);

 private:
  struct Connection;

  TcpTransport(int rank, std::vector<UniqueFd> connections, TcpTransportOptions options,
               Poller poller, WakeUp wake);

  void Loop();
  // Reads of each connection whether what was sent on it arrives.
  void LookAfterDelivery(absl::Duration elapsed);
  void OnEvents(Connection& connection, uint32_t events);
  void Read(Connection& connection) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // `bytes` more have come; where Read() had them put.
  absl::Status Take(Connection& connection, size_t bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status TakeHeaders(Connection& connection) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void FinishBody(Connection& connection) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Writes what the socket takes. Lets go of the lock meanwhile.
  void Write(Connection& connection) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Watch(Connection& connection, bool for_room) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  absl::Status CheckUsable(int peer) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Lose(Connection& connection, const absl::Status& why) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void End(const absl::Status& why) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Returns whether a system call may be using that operation's memory; any operation's, if null.
  bool IsInUse(const OperationState* operation) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void AwaitUnused(const OperationState* operation) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const int rank_;
  const TcpTransportOptions options_;
  const RankNames& names_ = options_.names;
  Poller poller_;
  const WakeUp wake_;

  absl::Mutex mutex_;
  absl::Status ended_ ABSL_GUARDED_BY(mutex_);
  bool is_closing_ ABSL_GUARDED_BY(mutex_) = false;
  MessageTable messages_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::unique_ptr<Connection>> connections_;          // By rank; null for this one.
  std::vector<OperationState*> waiters_ ABSL_GUARDED_BY(mutex_);  // Blocked in a wait.
  absl::CondVar call_over_;
  int waiting_for_calls_ ABSL_GUARDED_BY(mutex_) = 0;
  std::thread thread_;
};

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_TCP_TRANSPORT_H_
