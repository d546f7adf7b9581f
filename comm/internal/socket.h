// TCP sockets of the control plane: an owner, addresses, and waits that have a deadline.
//
//   EK_ASSIGN_OR_RETURN(HostPort address, HostPort::Parse("10.0.0.7:29400"));
//   EK_ASSIGN_OR_RETURN(UniqueFd fd, ConnectTo(address, absl::Now() + absl::Seconds(5)));
//
// All sockets made here are non-blocking, closed on exec, and send small messages at once.
//
// Errors: Unavailable when nobody answers, DeadlineExceeded, InvalidArgument for an address that means nothing.

#ifndef EVENKEEL_COMM_INTERNAL_SOCKET_H_
#define EVENKEEL_COMM_INTERNAL_SOCKET_H_

#include <cstddef>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace evenkeel::internal {

class UniqueFd {
 public:
  UniqueFd() = default;
  explicit UniqueFd(int fd) : fd_(fd) {}
  UniqueFd(UniqueFd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  UniqueFd& operator=(UniqueFd&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~UniqueFd();

  int get() const { return fd_; }
  // From now on the caller's to close.
  [[nodiscard]] int Release() { return std::exchange(fd_, -1); }
  explicit operator bool() const { return fd_ >= 0; }

 private:
  int fd_ = -1;
};

// A pipe to wake a thread up that waits in poll().
class WakeUp {
 public:
  static absl::StatusOr<WakeUp> Create();
  void Signal() const;
  void Clear() const;
  int fd() const { return fd_.get(); }

 private:
  UniqueFd fd_;
};

struct HostPort {
  std::string host;
  int port = 0;

  // "host:port", "[::1]:port".
  static absl::StatusOr<HostPort> Parse(absl::string_view text);
  std::string ToString() const;
  friend bool operator==(const HostPort&, const HostPort&) = default;
};

// Whether that name or number, as it is written, means this host to itself.
bool IsLoopback(absl::string_view host);

// Listens on that address only; port 0 lets the system choose.
absl::StatusOr<UniqueFd> ListenOn(const HostPort& address);
// A connection that waits at the listener; an empty owner if there is none.
absl::StatusOr<UniqueFd> AcceptFrom(const UniqueFd& listener);
// Tries each address that the host name has, once.
absl::StatusOr<UniqueFd> ConnectTo(const HostPort& address, absl::Time deadline);

// Where this end of a socket is; the address as a number.
absl::StatusOr<HostPort> LocalAddress(const UniqueFd& fd);

// Waits until poll() reports one of `events`.
absl::Status WaitFor(const UniqueFd& fd, short events, absl::Time deadline);
absl::Status SendAll(const UniqueFd& fd, absl::string_view bytes, absl::Time deadline);

// What one read or write without waiting came to.
struct Transfer {
  size_t bytes = 0;
  bool is_over = false;  // The peer has closed, or the connection is broken.
};
Transfer SendSome(const UniqueFd& fd, absl::string_view bytes);
Transfer ReceiveSome(const UniqueFd& fd, std::string& buffer);  // Appends at most 64 KiB.

// poll()'s timeout in milliseconds that ends at `deadline`, rounded up; -1 for never.
int PollTimeout(absl::Time deadline);

// "errno" as text: "connect: Connection refused".
std::string ErrnoText(absl::string_view call);

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_INTERNAL_SOCKET_H_
