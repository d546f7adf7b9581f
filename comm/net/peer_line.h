// One end of a connection between two ranks during their handshake.
//
//   line.Say(challenge.Serialize());
//   ... whenever poll() reports an event of line.ToPoll():
//   EK_RETURN_IF_ERROR(line.Flush());
//   EK_ASSIGN_OR_RETURN(std::optional<std::string> message, line.Hear());  // none: incomplete
//
// A message is a frame of a TCP connection, or a packet of a Unix socket. No byte after it is read:
// the next ones belong to the transport.

#ifndef EVENKEEL_COMM_NET_PEER_LINE_H_
#define EVENKEEL_COMM_NET_PEER_LINE_H_

#include <errno.h>
#include <poll.h>
#include <sys/socket.h>

#include <cstddef>
#include <optional>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "evenkeel/comm/base/bytes.h"
#include "evenkeel/comm/net/frame.h"
#include "evenkeel/comm/net/socket.h"

namespace evenkeel::internal {

struct PeerLine {
  UniqueFd fd;
  bool is_unix = false;
  std::string outgoing = {};
  std::string incoming = {};  // The bytes of one frame.

  void Say(absl::string_view payload) {
    outgoing += is_unix ? std::string(payload) : Frame(payload);
  }

  absl::Status Flush() {
    const Transfer sent = SendSome(fd, outgoing);
    outgoing.erase(0, sent.bytes);
    return sent.is_over ? absl::UnavailableError("the connection was closed") : absl::OkStatus();
  }

  // Returns the next message. A packet that is too long is cut, so parsing it fails.
  absl::StatusOr<std::optional<std::string>> Hear() {
    char bytes[kFrameHeader + kMaxGreetingFrame];
    while (true) {
      size_t whole = is_unix ? kMaxGreetingFrame : kFrameHeader;
      if (incoming.size() >= kFrameHeader) whole += ByteReader(incoming).U32();
      if (whole > sizeof(bytes)) return absl::InvalidArgumentError("too long for a greeting");
      if (incoming.size() == whole && whole > kFrameHeader) {
        return std::exchange(incoming, std::string()).substr(kFrameHeader);
      }
      const ssize_t got = recv(fd.get(), bytes, whole - incoming.size(), 0);
      if (got < 0 && errno == EINTR) continue;
      if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return std::nullopt;
      if (got <= 0) return absl::UnavailableError("the connection was closed");
      if (is_unix) return std::string(bytes, got);
      incoming.append(bytes, got);
    }
  }

  pollfd ToPoll() const {
    return {fd.get(), static_cast<short>(POLLIN | (outgoing.empty() ? 0 : POLLOUT)), 0};
  }
};

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_NET_PEER_LINE_H_
