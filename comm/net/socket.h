// TCP sockets, and Unix sockets within a host: addresses, connections, and waits with a deadline.
//
//   EK_ASSIGN_OR_RETURN(HostPort address, HostPort::Parse("10.0.0.7:29400"));
//   EK_ASSIGN_OR_RETURN(UniqueFd fd, ConnectTo(address, SteadyNow() + absl::Seconds(5)));
//
// All sockets made with it are non-blocking, and closed on exec and in children that fork() makes.
// Connections over TCP send small messages at once.
//
// Errors: Unavailable if no process listens at the address, DeadlineExceeded, InvalidArgument for a
//         malformed address; ResourceExhausted if no file descriptor is free, or no memory for a
//         socket.

#ifndef EVENKEEL_COMM_NET_SOCKET_H_
#define EVENKEEL_COMM_NET_SOCKET_H_

#include <sys/epoll.h>
#include <sys/socket.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "evenkeel/comm/base/errno_text.h"
#include "evenkeel/comm/base/unique_fd.h"

namespace evenkeel::internal {

// Wakes a thread that waits for events of sockets.
class WakeUp {
 public:
  static absl::StatusOr<WakeUp> Create();
  void Signal() const;
  void Clear() const;
  int fd() const { return fd_.get(); }

 private:
  UniqueFd fd_;
};

// A process without free file descriptors, or on a host without memory for sockets, retries for
// this long before that is an error: other threads may close some.
inline constexpr absl::Duration kDescriptorPatience = absl::Seconds(3);

// Waits for events of many sockets; the cost of a wait depends on the ready ones alone.
//
// Threads: one thread calls Wait(); other threads may call the other functions at the same time.
class Poller {
 public:
  static absl::StatusOr<Poller> Create();
  // Makes Wait() report `events` (EPOLLIN, EPOLLOUT) of `fd`, and its errors, with `tag`, as long
  // as they last.
  // Errors: ResourceExhausted.
  absl::Status Add(int fd, uint64_t tag, uint32_t events) const;
  // Changes the events of an `fd` that was added; has no effect after Forget().
  void Change(int fd, uint64_t tag, uint32_t events) const;
  // Must be called before `fd` is closed, since a forked child process may have it open, too.
  void Forget(int fd) const;
  // Waits for events until the deadline. Returns at least 256 of them if there are as many, and
  // more at each call that follows a full one. The result is valid until the next call.
  absl::Span<const epoll_event> Wait(absl::Time deadline);

 private:
  UniqueFd fd_;
  std::vector<epoll_event> events_;
  bool is_full_ = false;  // The last wait has filled `events_`.
};

struct HostPort {
  std::string host;
  int port = 0;

  // Parses "host:port" or "[::1]:port".
  static absl::StatusOr<HostPort> Parse(absl::string_view text);
  std::string ToString() const;
  friend bool operator==(const HostPort&, const HostPort&) = default;
};

// Returns whether that name or number is written as a loopback address.
bool IsLoopback(absl::string_view host);

// Listens on that address only; for port 0 the system chooses one.
absl::StatusOr<UniqueFd> ListenOn(const HostPort& address);
// Listens at an address of any family. A Unix socket keeps the boundaries of its messages.
absl::StatusOr<UniqueFd> ListenAt(const sockaddr& address, socklen_t size);
// Returns a connection that waits at the listener, or an empty owner if there is none.
absl::StatusOr<UniqueFd> AcceptFrom(const UniqueFd& listener);

// Called at intervals during a wait. Its error ends the wait, and is returned.
using Cancelled = std::function<absl::Status()>;

// Tries each address of the host name, once.
absl::StatusOr<UniqueFd> ConnectTo(const HostPort& address, absl::Time deadline,
                                   const Cancelled& cancelled = nullptr);

// The same without waiting. A TCP connection is made once poll() reports POLLOUT and
// FinishToConnect() returns OK; a Unix socket is connected at once.
absl::StatusOr<UniqueFd> StartToConnect(const sockaddr& address, socklen_t size);
absl::Status FinishToConnect(const UniqueFd& fd);

// Returns the address of this end of a socket, as a number.
absl::StatusOr<HostPort> LocalAddress(const UniqueFd& fd);

// Returns the address of this host on the route to `host`, as a number. Nothing is sent.
absl::StatusOr<std::string> AddressOfRouteTo(const std::string& host);

// Waits until poll() reports one of `events`.
absl::Status WaitFor(const UniqueFd& fd, short events, absl::Time deadline,
                     const Cancelled& cancelled = nullptr);
absl::Status SendAll(const UniqueFd& fd, absl::string_view bytes, absl::Time deadline);

// The result of one read or write without waiting.
struct Transfer {
  size_t bytes = 0;
  bool is_over = false;  // The peer has closed the connection, or it is broken.
};
Transfer SendSome(const UniqueFd& fd, absl::string_view bytes);
Transfer ReceiveSome(const UniqueFd& fd, std::string& buffer);  // Appends at most 64 KiB.

// Returns the milliseconds until `deadline` for poll(), rounded up; -1 for never.
int PollTimeout(absl::Time deadline);

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_NET_SOCKET_H_
