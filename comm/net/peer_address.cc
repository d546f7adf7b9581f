#include "evenkeel/comm/net/peer_address.h"

#include <netdb.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstddef>
#include <cstring>
#include <utility>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "evenkeel/comm/base/errno_text.h"
#include "evenkeel/comm/base/hex.h"
#include "evenkeel/comm/net/hmac.h"
#include "evenkeel/comm/net/peer_greeting.h"
#include "evenkeel/comm/net/socket.h"
#include "evenkeel/comm/status.h"

namespace evenkeel::internal {
namespace {

// The bytes before a name in the abstract name space; the last one is zero.
constexpr socklen_t kNameBegin = offsetof(sockaddr_un, sun_path) + 1;

absl::StatusOr<std::string> NameOf(const UniqueFd& fd) {
  sockaddr_un address = {};
  socklen_t size = sizeof(address);
  if (getsockname(fd.get(), reinterpret_cast<sockaddr*>(&address), &size) != 0 ||
      size <= kNameBegin) {
    return absl::InternalError("the name of a Unix socket is unknown");
  }
  return std::string(address.sun_path + 1, size - kNameBegin);
}

}  // namespace

absl::StatusOr<PeerAddress> PeerAddress::ParseTcp(absl::string_view text) {
  EK_ASSIGN_OR_RETURN(const HostPort parsed, HostPort::Parse(text));
  addrinfo hints = {};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
  addrinfo* info = nullptr;
  const int error =
      getaddrinfo(parsed.host.c_str(), absl::StrCat(parsed.port).c_str(), &hints, &info);
  if (error == EAI_SYSTEM) return absl::UnavailableError(ErrnoText(text));
  if (error == EAI_MEMORY)
    return absl::UnavailableError(absl::StrCat(text, ": ", gai_strerror(error)));
  if (error != 0) return absl::InvalidArgumentError(absl::StrCat(text, " is not an address"));
  PeerAddress address{.text = std::string(text), .size = info->ai_addrlen};
  std::memcpy(&address.socket, info->ai_addr, info->ai_addrlen);
  freeaddrinfo(info);
  return address;
}

absl::StatusOr<PeerAddress> PeerAddress::ParseUnix(absl::string_view text) {
  const std::vector<absl::string_view> parts = absl::StrSplit(text, '.');
  const auto is_hex = [](absl::string_view part, size_t max_bytes) {
    return !part.empty() && part.size() % 2 == 0 && part.size() <= 2 * max_bytes &&
           part.find_first_not_of("0123456789abcdef") == absl::string_view::npos;
  };
  if (parts.size() != 2 || !is_hex(parts[0], sizeof(sockaddr_un::sun_path) - 1) ||
      !is_hex(parts[1], kPeerNonceSize) || parts[1].size() != 2 * kPeerNonceSize) {
    return absl::InvalidArgumentError(absl::StrCat(
        "\"", absl::CHexEscape(text), "\" is not an address of a rank that shares memory"));
  }
  return OfUnix(BytesFromHex(parts[0]), BytesFromHex(parts[1]));
}

PeerAddress PeerAddress::OfUnix(absl::string_view name, absl::string_view nonce) {
  PeerAddress address{
      .text = absl::StrCat(absl::BytesToHexString(name), ".", absl::BytesToHexString(nonce)),
      .size = static_cast<socklen_t>(kNameBegin + name.size()),
      .nonce = std::string(nonce)};
  sockaddr_un socket = {};
  socket.sun_family = AF_UNIX;
  std::memcpy(socket.sun_path + 1, name.data(), name.size());
  std::memcpy(&address.socket, &socket, address.size);
  return address;
}

absl::StatusOr<UniqueFd> PeerAddress::StartToConnect() const {
  return internal::StartToConnect(reinterpret_cast<const sockaddr&>(socket), size);
}

absl::StatusOr<PeerListener> ListenOverTcp(const std::string& bind_address) {
  EK_ASSIGN_OR_RETURN(UniqueFd fd, ListenOn({bind_address, 0}));
  EK_ASSIGN_OR_RETURN(const HostPort local, LocalAddress(fd));
  EK_ASSIGN_OR_RETURN(PeerAddress address, PeerAddress::ParseTcp(local.ToString()));
  return PeerListener{std::move(fd), std::move(address)};
}

absl::StatusOr<PeerListener> ListenOnThisHost() {
  EK_ASSIGN_OR_RETURN(const std::string nonce, RandomBytes(kPeerNonceSize));
  const sockaddr any = {.sa_family = AF_UNIX, .sa_data = {}};  // The kernel chooses the name.
  absl::StatusOr<UniqueFd> fd = ListenAt(any, sizeof(any.sa_family));
  if (!fd.ok()) return absl::ResourceExhaustedError(fd.status().message());
  EK_ASSIGN_OR_RETURN(const std::string name, NameOf(*fd));
  return PeerListener{*std::move(fd), PeerAddress::OfUnix(name, nonce)};
}

absl::Status CheckSameUser(const UniqueFd& fd) {
  ucred other = {};
  socklen_t size = sizeof(other);
  if (getsockopt(fd.get(), SOL_SOCKET, SO_PEERCRED, &other, &size) != 0) {
    return absl::UnavailableError(ErrnoText("SO_PEERCRED"));
  }
  if (other.uid == geteuid()) return absl::OkStatus();
  return absl::UnavailableError(
      absl::StrCat("the process there runs as user ", other.uid, ", this one as user ", geteuid()));
}

}  // namespace evenkeel::internal
