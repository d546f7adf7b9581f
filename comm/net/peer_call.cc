#include "evenkeel/comm/net/peer_call.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "evenkeel/comm/net/hmac.h"
#include "evenkeel/comm/net/socket.h"
#include "evenkeel/comm/status.h"

namespace evenkeel::internal {
namespace {

// Between two attempts. Within a host an attempt costs less.
constexpr absl::Duration kFirstPause = absl::Milliseconds(5);
constexpr absl::Duration kLongestPause = absl::Milliseconds(250);
constexpr absl::Duration kFirstPauseOnHost = absl::Milliseconds(1);
constexpr absl::Duration kLongestPauseOnHost = absl::Milliseconds(100);

}  // namespace

PeerCall::PeerCall(int rank, const PeerGroup& group, int to, PeerAddress address)
    : rank_(rank),
      group_(group),
      to_(to),
      address_(std::move(address)),
      pause_(address_.IsUnix() ? kFirstPauseOnHost : kFirstPause) {}

void PeerCall::AddTo(std::vector<pollfd>& entries, absl::Time& wake_at) const {
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

absl::Status PeerCall::Turn(absl::Time now) {
  if (state_ == State::kPausing && now < again_) return absl::OkStatus();
  const absl::Status status = Advance();
  if (status.ok()) return absl::OkStatus();
  if (!refusal_.ok())
    return Annotate(refusal_,
                    absl::StrCat("rank ", group_.names[rank_], " and rank ", group_.names[to_]));
  obstacle_ = status;
  line_.fd = UniqueFd();
  state_ = State::kPausing;
  again_ = now + pause_;
  pause_ = std::min(pause_ * 1.5, address_.IsUnix() ? kLongestPauseOnHost : kLongestPause);
  return absl::OkStatus();
}

absl::Status PeerCall::Lack() const {
  return state_ == State::kPausing && absl::IsResourceExhausted(obstacle_) ? obstacle_
                                                                           : absl::OkStatus();
}

absl::Status PeerCall::Advance() {
  if (state_ == State::kPausing) {
    line_ = PeerLine{.is_unix = address_.IsUnix()};
    EK_ASSIGN_OR_RETURN(line_.fd, address_.StartToConnect());
    state_ = State::kConnecting;
    if (address_.IsUnix()) {
      EK_RETURN_IF_ERROR(CheckSameUser(line_.fd));
      EK_RETURN_IF_ERROR(SayHello({address_.nonce}));
    }
  }
  if (state_ == State::kConnecting) {
    pollfd entry = {line_.fd.get(), POLLOUT, 0};
    if (poll(&entry, 1, 0) <= 0) return absl::OkStatus();
    EK_RETURN_IF_ERROR(FinishToConnect(line_.fd));
    state_ = State::kAwaitsChallenge;
  }
  while (state_ != State::kDone) {
    EK_RETURN_IF_ERROR(line_.Flush());
    EK_ASSIGN_OR_RETURN(const std::optional<std::string> message, line_.Hear());
    if (!message) return absl::OkStatus();
    if (state_ == State::kAwaitsVerdict) {
      EK_RETURN_IF_ERROR(HandleVerdict(*message));
    } else {
      EK_ASSIGN_OR_RETURN(PeerChallenge challenge, PeerChallenge::Parse(*message));
      EK_RETURN_IF_ERROR(SayHello(std::move(challenge)));
    }
  }
  return absl::OkStatus();
}

absl::Status PeerCall::SayHello(PeerChallenge challenge) {
  challenge_ = std::move(challenge);
  hello_.rank = rank_;
  EK_ASSIGN_OR_RETURN(hello_.nonce, RandomBytes(kPeerNonceSize));
  hello_.proof = HelloProof(group_, to_, challenge_, hello_);
  line_.Say(address_.IsUnix() ? UnixHello{challenge_.nonce, hello_}.Serialize()
                              : hello_.Serialize());
  state_ = State::kAwaitsVerdict;
  return absl::OkStatus();
}

absl::Status PeerCall::HandleVerdict(const std::string& message) {
  EK_ASSIGN_OR_RETURN(const PeerVerdict verdict, PeerVerdict::Parse(message));
  refusal_ = verdict.status;
  if (refusal_.ok() && !IsDigest(verdict.proof, VerdictProof(group_, to_, challenge_, hello_))) {
    refusal_ = absl::PermissionDeniedError(absl::StrCat(
        "the process ",
        address_.IsUnix() ? "that accepted the connection" : absl::StrCat("at ", address_.text),
        " is not rank ", group_.names[to_]));
  }
  if (refusal_.ok()) state_ = State::kDone;
  return refusal_;
}

}  // namespace evenkeel::internal
