// Serves the state of a job over HTTP: /status.json, and /metrics for Prometheus (GET and HEAD).
//
//   EK_ASSIGN_OR_RETURN(std::unique_ptr<StatusServer> server,
//                       StatusServer::Create({.address = "127.0.0.1:9400", .token = token},
//                                            [&] { return observer->Status(absl::Seconds(2)); }));
//
// Each request needs the header "Authorization: Bearer <token>"; without it the reply to a
// well-formed request is 401, for any path, and `status` is not called. HTTP is not encrypted: bind
// to a loopback address, or to a network that you trust.
//
// A connection has one request of at most 8 KiB, and is closed after 6 seconds without progress.
// At most an eighth of the files that this process may open are connections, and at most 256. At
// this limit the oldest connection without the token is closed; others wait to be accepted.
//
// Threads: one thread of the server serves all connections, and calls `status`, which must return
//          within 4 seconds: the server closes connections whose reply takes longer.
// Errors:  InvalidArgument for a malformed address or an empty token; Unavailable if it cannot
//          listen on the address. If `status` fails, the reply is 503 with its message.

#ifndef EVENKEEL_LAUNCH_STATUS_SERVER_H_
#define EVENKEEL_LAUNCH_STATUS_SERVER_H_

#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"

namespace evenkeel {

// Returns the job's state, which is what TcpObserver::Status() returns, in Prometheus's text
// format. InternalError if it is anything else.
absl::StatusOr<std::string> PrometheusText(const std::string& status);

class StatusServer {
 public:
  struct Options {
    std::string address;  // "host:port"; port 0: the system chooses one.
    std::string token;
  };
  static absl::StatusOr<std::unique_ptr<StatusServer>> Create(
      const Options& options, std::function<absl::StatusOr<std::string>()> status);
  ~StatusServer();
  StatusServer(const StatusServer&) = delete;
  StatusServer& operator=(const StatusServer&) = delete;

  // Returns "host:port", with the actual port.
  const std::string& address() const;

 private:
  struct State;
  explicit StatusServer(std::unique_ptr<State> state);

  const std::unique_ptr<State> state_;
};

}  // namespace evenkeel

#endif  // EVENKEEL_LAUNCH_STATUS_SERVER_H_
