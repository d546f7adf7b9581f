// A connection to a job's server that the links of many groups share, with one thread.
//
//   EK_ASSIGN_OR_RETURN(std::shared_ptr<SharedConnection> connection,
//                       SharedConnection::OfProcess(key, connect));
//   EK_ASSIGN_OR_RETURN(std::unique_ptr<SharedConnection::Link> link,
//                       connection->Open(hello, deadline, cancelled));
//   link->Start(on_frame, on_lost);
//   link->Send(payload);
//
// Each link serves one rank of one group. The end of a link does not affect the other links; the
// end of the connection ends all of them.
//
// Threads:   thread-safe. Callbacks of all links run on the connection's thread, one at a time: a
//            callback that waits delays all groups.
// Ownership: links keep the connection; the last one closes it.
// Errors:    those of the server's verdict; DeadlineExceeded without a reply; Unavailable if the
//            connection is lost.

#ifndef EVENKEEL_COMM_RENDEZVOUS_SHARED_CONNECTION_H_
#define EVENKEEL_COMM_RENDEZVOUS_SHARED_CONNECTION_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "evenkeel/comm/net/connection.h"
#include "evenkeel/comm/net/handshake.h"
#include "evenkeel/comm/net/socket.h"

namespace evenkeel::internal {

class SharedConnection : public std::enable_shared_from_this<SharedConnection> {
 public:
  // `connection` has passed the handshake as Hello::Kind::kLinks, and is not started yet.
  explicit SharedConnection(std::unique_ptr<Connection> connection);
  ~SharedConnection();

  // Returns this process's connection with that key. If there is none, or if it is lost or silent,
  // returns a new one from `connect`.
  static absl::StatusOr<std::shared_ptr<SharedConnection>> OfProcess(
      const std::string& key,
      absl::FunctionRef<absl::StatusOr<std::unique_ptr<Connection>>()> connect);

  // Has the functions of Connection.
  class Link;
  // Opens a link, and waits for the server's verdict. `hello` has kind, group, id, members, rank
  // and world size.
  absl::StatusOr<std::unique_ptr<Link>> Open(Hello hello, absl::Time deadline,
                                             const Cancelled& cancelled);

 private:
  // The part of a link that the connection's thread needs.
  struct End {
    absl::Mutex deliver;  // Held while a callback runs.
    std::function<void(std::string)> on_frame ABSL_GUARDED_BY(deliver);  // Null: not started.
    std::function<void(absl::Status)> on_lost ABSL_GUARDED_BY(deliver);
    std::vector<std::string> early ABSL_GUARDED_BY(deliver);
    std::optional<std::string> verdict ABSL_GUARDED_BY(deliver);
    absl::Status lost ABSL_GUARDED_BY(deliver);
    bool is_closed ABSL_GUARDED_BY(deliver) = false;
  };
  absl::StatusOr<std::string> AwaitVerdict(End& end, const Hello& hello, absl::Time deadline,
                                           const Cancelled& cancelled) const;
  static void Lose(End& end, const absl::Status& why);

  void OnFrame(absl::string_view frame);
  void OnLost(const absl::Status& why);
  bool IsUsable() const;

  mutable absl::Mutex mutex_;
  absl::Status lost_ ABSL_GUARDED_BY(mutex_);
  uint32_t next_ ABSL_GUARDED_BY(mutex_) = 0;
  std::map<uint32_t, std::shared_ptr<End>> ends_ ABSL_GUARDED_BY(mutex_);
  const std::unique_ptr<Connection> connection_;  // Last, because its thread uses the rest.
};

class SharedConnection::Link {
 public:
  ~Link() { Close(); }

  void Start(std::function<void(std::string)> on_frame, std::function<void(absl::Status)> on_lost);
  void Send(absl::string_view payload);
  void ExpectAnswer() { connection_->connection_->ExpectAnswer(); }
  absl::Duration Silence() const { return connection_->connection_->Silence(); }
  // No callback runs after it returns. Messages that were sent before are still delivered.
  void Close();

  const HostPort& local_address() const { return connection_->connection_->local_address(); }

 private:
  friend class SharedConnection;
  Link(std::shared_ptr<SharedConnection> connection, uint32_t number, std::shared_ptr<End> end)
      : connection_(std::move(connection)), number_(number), end_(std::move(end)) {}

  const std::shared_ptr<SharedConnection> connection_;
  const uint32_t number_;
  const std::shared_ptr<End> end_;
};

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_RENDEZVOUS_SHARED_CONNECTION_H_
