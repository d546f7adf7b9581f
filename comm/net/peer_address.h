// Addresses at which the ranks of a group reach each other, and their sockets: TCP between hosts,
// Unix sockets within one host.
//
//   EK_ASSIGN_OR_RETURN(const PeerListener listener, ListenOverTcp("10.0.0.7"));
//   ... listener.address.text to the other ranks, and on each of them:
//   EK_ASSIGN_OR_RETURN(const PeerAddress address, PeerAddress::ParseTcp(text));
//   EK_ASSIGN_OR_RETURN(UniqueFd fd, address.StartToConnect());
//
// A Unix socket's name is chosen by the kernel, in the abstract name space, so no file is left. Its
// address has a nonce, which only the processes that were given the address know.
//
// Errors: InvalidArgument for a text that is not an address of that kind; Unavailable if there is
//         no memory to parse it.

#ifndef EVENKEEL_COMM_NET_PEER_ADDRESS_H_
#define EVENKEEL_COMM_NET_PEER_ADDRESS_H_

#include <sys/socket.h>

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "evenkeel/comm/base/unique_fd.h"

namespace evenkeel::internal {

struct PeerAddress {
  std::string text;  // "10.0.0.7:40961"; of a Unix socket, its name and nonce in hexadecimal.
  sockaddr_storage socket = {};
  socklen_t size = 0;
  std::string nonce;  // Empty over TCP.

  bool IsUnix() const { return socket.ss_family == AF_UNIX; }
  absl::StatusOr<UniqueFd> StartToConnect() const;  // See comm/net/socket.h.
  static absl::StatusOr<PeerAddress> ParseTcp(absl::string_view text);
  static absl::StatusOr<PeerAddress> ParseUnix(absl::string_view text);
  // `name` is without the zero at its beginning.
  static PeerAddress OfUnix(absl::string_view name, absl::string_view nonce);
};

struct PeerListener {
  UniqueFd fd;
  PeerAddress address;
};
// Listens on that address of this host only.
absl::StatusOr<PeerListener> ListenOverTcp(const std::string& bind_address);
// Errors: ResourceExhausted.
absl::StatusOr<PeerListener> ListenOnThisHost();

// Returns an error unless the process at the other end of a Unix socket ran as the user of this
// process when it connected or began to listen.
absl::Status CheckSameUser(const UniqueFd& fd);

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_NET_PEER_ADDRESS_H_
