#include "evenkeel/comm/tcp/call.h"

#include <errno.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "evenkeel/comm/net/hmac.h"
#include "evenkeel/comm/status.h"

namespace evenkeel::internal {
namespace {

constexpr absl::Duration kFirstPause = absl::Milliseconds(5);
constexpr absl::Duration kLongestPause = absl::Milliseconds(250);

void SetOption(const UniqueFd& fd, int level, int option, int value) {
  setsockopt(fd.get(), level, option, &value, sizeof(value));
}

// A connection in the making. The address is a number, as LocalAddress() gives it.
absl::StatusOr<UniqueFd> StartToConnect(const HostPort& address) {
  addrinfo hints = {};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
  addrinfo* info = nullptr;
  if (getaddrinfo(address.host.c_str(), absl::StrCat(address.port).c_str(), &hints, &info) != 0) {
    return absl::InvalidArgumentError(absl::StrCat(address.ToString(), " is not an address"));
  }
  absl::Status status;
  UniqueFd fd(
      socket(info->ai_family, info->ai_socktype | SOCK_NONBLOCK | SOCK_CLOEXEC, info->ai_protocol));
  if (!fd) {
    status = absl::UnavailableError(ErrnoText("socket"));
  } else if (connect(fd.get(), info->ai_addr, info->ai_addrlen) != 0 && errno != EINPROGRESS &&
             errno != EINTR) {
    status = absl::UnavailableError(ErrnoText("connect"));
  }
  freeaddrinfo(info);
  EK_RETURN_IF_ERROR(status);
  SetOption(fd, IPPROTO_TCP, TCP_NODELAY, 1);
  // A host that has gone without a word shows after about half a minute of silence.
  SetOption(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
  SetOption(fd, IPPROTO_TCP, TCP_KEEPIDLE, 10);
  SetOption(fd, IPPROTO_TCP, TCP_KEEPINTVL, 5);
  SetOption(fd, IPPROTO_TCP, TCP_KEEPCNT, 4);
  return fd;
}

}  // namespace

TcpCall::TcpCall(int rank, const PeerGroup& group, int to, HostPort address)
    : rank_(rank), group_(group), to_(to), address_(std::move(address)), pause_(kFirstPause) {}

void TcpCall::AddTo(std::vector<pollfd>& entries, absl::Time& wake_at) const {
  switch (state_) {
    case State::kPausing:
      wake_at = std::min(wake_at, again_);
      return;
    case State::kConnecting:
      entries.push_back({line_.fd.get(), POLLOUT, 0});
      return;
    case State::kAwaitsChallenge:
    case State::kAwaitsVerdict:
      entries.push_back(line_.ToPoll());
      return;
    case State::kDone:
      return;
  }
}

absl::Status TcpCall::Turn(absl::Time now) {
  if (state_ == State::kPausing && now < again_) return absl::OkStatus();
  const absl::Status status = Advance();
  if (status.ok()) return absl::OkStatus();
  if (!refusal_.ok())
    return Annotate(refusal_,
                    absl::StrCat("rank ", group_.names[rank_], " and rank ", group_.names[to_]));
  obstacle_ = status;
  line_ = TcpLine();
  state_ = State::kPausing;
  again_ = now + pause_;
  pause_ = std::min(pause_ * 1.5, kLongestPause);
  return absl::OkStatus();
}

absl::Status TcpCall::Advance() {
  if (state_ == State::kPausing) {
    EK_ASSIGN_OR_RETURN(line_.fd, StartToConnect(address_));
    state_ = State::kConnecting;
  }
  if (state_ == State::kConnecting) {
    pollfd entry = {line_.fd.get(), POLLOUT, 0};
    if (poll(&entry, 1, 0) <= 0) return absl::OkStatus();
    int error = 0;
    socklen_t size = sizeof(error);
    getsockopt(line_.fd.get(), SOL_SOCKET, SO_ERROR, &error, &size);
    errno = error;
    if (error != 0) return absl::UnavailableError(ErrnoText("connect"));
    state_ = State::kAwaitsChallenge;
  }
  while (state_ != State::kDone) {
    EK_RETURN_IF_ERROR(line_.Flush());
    EK_ASSIGN_OR_RETURN(const std::optional<std::string> frame, line_.Hear());
    if (!frame) return absl::OkStatus();
    EK_RETURN_IF_ERROR(state_ == State::kAwaitsChallenge ? HandleChallenge(*frame)
                                                         : HandleVerdict(*frame));
  }
  return absl::OkStatus();
}

absl::Status TcpCall::HandleChallenge(const std::string& frame) {
  EK_ASSIGN_OR_RETURN(challenge_, PeerChallenge::Parse(frame));
  hello_.rank = rank_;
  EK_ASSIGN_OR_RETURN(hello_.nonce, RandomBytes(kPeerNonceSize));
  hello_.proof = HelloProof(group_, to_, challenge_, hello_);
  line_.Say(hello_.Serialize());
  state_ = State::kAwaitsVerdict;
  return absl::OkStatus();
}

absl::Status TcpCall::HandleVerdict(const std::string& frame) {
  EK_ASSIGN_OR_RETURN(const PeerVerdict verdict, PeerVerdict::Parse(frame));
  refusal_ = verdict.status;
  if (refusal_.ok() && !IsDigest(verdict.proof, VerdictProof(group_, to_, challenge_, hello_))) {
    refusal_ = absl::PermissionDeniedError(
        absl::StrCat("the process at ", address_.ToString(), " is not rank ", group_.names[to_]));
  }
  if (refusal_.ok()) state_ = State::kDone;
  return refusal_;
}

}  // namespace evenkeel::internal
