// Our own transport under Gloo's algorithms: one TCP connection to each other rank, made and proved by
// comm/internal/gloo_transport_meeting.h.
//
//   EK_ASSIGN_OR_RETURN(std::shared_ptr<GlooTransport> transport, GlooTransport::Create(rank, std::move(connections)));
//   auto buffer = transport->createUnboundBuffer(data, bytes);
//   buffer->send(/*dstRank=*/1, slot);
//   buffer->waitSend(timeout);                                  // throws StatusError
//   ... on any thread: transport->Abort(why) ...                // every wait, now and later, throws `why`
//
// Who sends writes as much as the connection takes; one thread writes the rest, and reads, straight to where it
// belongs.
//
// Of Gloo's interface this is what its algorithms on unbound buffers use: a pair says that there is a connection, and
// can do nothing else.
//
// Order:     messages between two ranks on one slot meet, and end, in the order of their send() and recv(); slots do
//            not wait for each other, whatever is received when.
// Threads:   thread-safe; each buffer belongs to one thread. Several operations of a buffer may be under way.
// Ownership: a buffer that goes while something is still received for it lets that be dropped. Going while something is
//            still sent ends the connection it was for.
// Errors:    waits and calls throw StatusError: DeadlineExceeded after their timeout, Unavailable for a connection that
//            has ended, FailedPrecondition for two ranks that mean messages of different sizes, InvalidArgument for a
//            peer that does not speak this protocol. The last two end the whole transport, and so does a peer whose
//            kernel acknowledges nothing (comm/internal/delivery.h): Unavailable.

#ifndef EVENKEEL_COMM_INTERNAL_GLOO_TRANSPORT_H_
#define EVENKEEL_COMM_INTERNAL_GLOO_TRANSPORT_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "evenkeel/comm/internal/delivery.h"
#include "evenkeel/comm/internal/gloo_transport_messages.h"
#include "evenkeel/comm/internal/rank_names.h"
#include "evenkeel/comm/internal/socket.h"
#include "evenkeel/comm/internal/warn.h"
#include "gloo/transport/context.h"
#include "gloo/transport/pair.h"
#include "gloo/transport/unbound_buffer.h"

namespace evenkeel::internal {

// How a status goes through Gloo's algorithms, which know exceptions only.
class StatusError : public std::exception {
 public:
  explicit StatusError(absl::Status status) : status_(std::move(status)), text_(status_.message()) {}
  const char* what() const noexcept override { return text_.c_str(); }
  const absl::Status& status() const { return status_; }

 private:
  absl::Status status_;
  std::string text_;
};

struct GlooTransportOptions {
  RankNames names;    // For messages.
  WarnFunction warn;  // Is told of a peer that acknowledges nothing.
  // Is called with the reason before a connection that delivers nothing ends the transport.
  std::function<void(const absl::Status& why)> on_lost;
  DeliveryLimits delivery;
};

class GlooTransport : public gloo::transport::Context, public std::enable_shared_from_this<GlooTransport> {
 public:
  // `connections`: by rank; this rank's own is empty.
  static absl::StatusOr<std::shared_ptr<GlooTransport>> Create(int rank, std::vector<UniqueFd> connections,
                                                               GlooTransportOptions options = {});
  // Buffers keep it alive.
  ~GlooTransport() override;

  std::unique_ptr<gloo::transport::UnboundBuffer> createUnboundBuffer(void* data, size_t size) override;
  std::unique_ptr<gloo::transport::Pair>& createPair(int rank) override { return getPair(rank); }

  // Once it has returned, no buffer's memory is touched any more. Only the first `why` counts.
  void Abort(const absl::Status& why);

 private:
  class Buffer;
  class Pair;
  struct Connection;

  GlooTransport(int rank, std::vector<UniqueFd> connections, GlooTransportOptions options, UniqueFd epoll, WakeUp wake);

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
  void WriteAll() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Watch(Connection& connection, bool for_room) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // What a call may go on with, else throws.
  Connection& Usable(int peer) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Lose(Connection& connection, const absl::Status& why) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void End(const absl::Status& why) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Whether a system call may use that buffer's memory at this moment; any buffer's, if null.
  bool IsInUse(const BufferState* buffer) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void AwaitUnused(const BufferState* buffer) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const GlooTransportOptions options_;
  const RankNames& names_ = options_.names;
  const UniqueFd epoll_;
  const WakeUp wake_;

  absl::Mutex mutex_;
  absl::Status ended_ ABSL_GUARDED_BY(mutex_);
  bool is_closing_ ABSL_GUARDED_BY(mutex_) = false;
  MessageTable messages_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::unique_ptr<Connection>> connections_;       // By rank; null for this one.
  std::vector<BufferState*> waiters_ ABSL_GUARDED_BY(mutex_);  // Blocked in a wait.
  absl::CondVar call_over_;
  int waiting_for_calls_ ABSL_GUARDED_BY(mutex_) = 0;
  std::thread thread_;
};

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_INTERNAL_GLOO_TRANSPORT_H_
