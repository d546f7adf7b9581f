// The server of a job: its key-value store, and the hubs of its control plane.
//
//   EK_ASSIGN_OR_RETURN(std::unique_ptr<TcpStoreServer> server,
//            TcpStoreServer::Create({.address = "10.0.0.7:0", .secret = secret, .world_size = 4}));
//   Publish(server->address());                   // "10.0.0.7:41873"
//
// It runs in rank 0's process or in the launcher; the clients are in comm/rendezvous/tcp_store.h.
// It listens on the given address only, and admits clients that prove that they have the job's
// secret, which is never sent. The later traffic is not encrypted: a network on which others can
// rewrite packets needs a tunnel.
//
// Threads: thread-safe; one thread serves all connections, and no connection can delay another one.
// Errors:  Unavailable if it cannot listen on the address; InvalidArgument without a secret.
// Ending:  destruction waits for clients that are about to leave, at most for `linger`.

#ifndef EVENKEEL_COMM_RENDEZVOUS_TCP_STORE_SERVER_H_
#define EVENKEEL_COMM_RENDEZVOUS_TCP_STORE_SERVER_H_

#include <functional>
#include <memory>
#include <string>
#include <thread>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace evenkeel {

namespace internal {
class ServerLoop;

// Raises this process's limit of open files, up to its hard limit, for the connections of so many
// ranks. ResourceExhausted: the hard limit is too low for them.
absl::Status PrepareForRanks(int world_size);
}  // namespace internal

struct TcpStoreServerOptions {
  std::string address = "127.0.0.1:0";  // Port 0: the system chooses one.
  std::string job;  // Ranks of another job are refused with its name; empty: no check.
  std::string secret;
  int world_size = 0;           // The world size of the job; 0: unknown.
  std::string host = "rank 0";  // The name of this process, for the message when it dies.
  absl::Duration greeting_timeout = absl::Seconds(10);  // For a connection to authenticate.
  absl::Duration linger = absl::Seconds(5);
  // If this process has had no descriptor left for this time, ranks that connect are refused.
  absl::Duration refuse_after = absl::Seconds(5);
  // Called with OK when all ranks of a group have connected, and once if the group ends with an
  // error, with the error that its ranks are sent: FailureInfoOf() has the ranks that caused it.
  // Called on the server's thread until the server is destroyed; must not block.
  std::function<void(const std::string& group, int world_size, const absl::Status& status)>
      on_group;
};

class TcpStoreServer {
 public:
  static absl::StatusOr<std::unique_ptr<TcpStoreServer>> Create(
      const TcpStoreServerOptions& options);
  ~TcpStoreServer();
  TcpStoreServer(const TcpStoreServer&) = delete;
  TcpStoreServer& operator=(const TcpStoreServer&) = delete;

  // Returns "host:port": the given host and the actual port.
  const std::string& address() const { return address_; }
  int port() const { return port_; }
  // Returns whether only this host can reach it.
  bool is_on_loopback() const { return is_on_loopback_; }

 private:
  TcpStoreServer(std::unique_ptr<internal::ServerLoop> loop, std::string address, int port,
                 bool is_on_loopback);

  const std::string address_;
  const int port_;
  const bool is_on_loopback_;
  const std::unique_ptr<internal::ServerLoop> loop_;
  std::thread thread_;
};

}  // namespace evenkeel

#endif  // EVENKEEL_COMM_RENDEZVOUS_TCP_STORE_SERVER_H_
