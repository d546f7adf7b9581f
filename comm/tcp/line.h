// One end of a connection between two ranks while it is being greeted.
//
//   line.Say(challenge.Serialize());
//   ... whenever poll() reports something on line.fd:
//   EK_RETURN_IF_ERROR(line.Flush());
//   EK_ASSIGN_OR_RETURN(std::optional<std::string> frame, line.Hear());  // empty: not whole yet
//
// Reads no byte beyond the frame that it gives: what follows belongs to the transport.

#ifndef EVENKEEL_COMM_TCP_LINE_H_
#define EVENKEEL_COMM_TCP_LINE_H_

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

struct TcpLine {
  UniqueFd fd;
  std::string outgoing;
  std::string incoming;  // The bytes of one frame.

  void Say(absl::string_view payload) { outgoing += Frame(payload); }

  absl::Status Flush() {
    const Transfer sent = SendSome(fd, outgoing);
    outgoing.erase(0, sent.bytes);
    return sent.is_over ? absl::UnavailableError("the connection was closed") : absl::OkStatus();
  }

  absl::StatusOr<std::optional<std::string>> Hear() {
    while (true) {
      size_t whole = kFrameHeader;
      if (incoming.size() >= kFrameHeader) whole += ByteReader(incoming).U32();
      if (whole > kFrameHeader + kMaxGreetingFrame)
        return absl::InvalidArgumentError("too long for a greeting");
      if (incoming.size() == whole && whole > kFrameHeader) {
        return std::exchange(incoming, std::string()).substr(kFrameHeader);
      }
      char bytes[kFrameHeader + kMaxGreetingFrame];
      const ssize_t got = recv(fd.get(), bytes, whole - incoming.size(), 0);
      if (got < 0 && errno == EINTR) continue;
      if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return std::nullopt;
      if (got <= 0) return absl::UnavailableError("the connection was closed");
      incoming.append(bytes, got);
    }
  }

  pollfd ToPoll() const {
    return {fd.get(), static_cast<short>(POLLIN | (outgoing.empty() ? 0 : POLLOUT)), 0};
  }
};

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_TCP_LINE_H_
