#include "evenkeel/comm/net/peer_reception.h"

#include <algorithm>
#include <optional>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "evenkeel/comm/net/hmac.h"
#include "evenkeel/comm/net/socket.h"
#include "evenkeel/comm/status.h"

namespace evenkeel::internal {
namespace {

// The most connections that have not proved anything, beyond one for each rank.
constexpr size_t kMaxStrangers = 128;
// After so many, the connected callers have their turn.
constexpr int kMaxAcceptsPerTurn = 64;
// Without file descriptors, accepting again at once would only burn the processor.
constexpr absl::Duration kAcceptPause = absl::Milliseconds(100);

}  // namespace

PeerReception::PeerReception(int rank, const PeerGroup& group, PeerListener listener,
                             absl::Duration greeting_timeout)
    : rank_(rank),
      group_(group),
      listener_(std::move(listener)),
      greeting_timeout_(greeting_timeout),
      admitted_(group.world_size),
      missing_(group.world_size - rank - 1) {
  CloseIfComplete();
}

void PeerReception::CloseIfComplete() {
  if (!IsComplete()) return;
  listener_.fd = UniqueFd();
  callers_.clear();
  // Accept() clears neither without a listener.
  accept_again_ = absl::InfinitePast();
  lack_ = absl::OkStatus();
}

std::vector<int> PeerReception::Missing() const {
  std::vector<int> missing;
  for (int rank = rank_ + 1; rank < group_.world_size; ++rank) {
    if (!admitted_[rank]) missing.push_back(rank);
  }
  return missing;
}

void PeerReception::AddTo(std::vector<pollfd>& entries, absl::Time& wake_at) const {
  wake_at = std::min(
      wake_at, accept_again_ == absl::InfinitePast() ? absl::InfiniteFuture() : accept_again_);
  entries.push_back({accept_again_ == absl::InfinitePast() ? listener_.fd.get() : -1, POLLIN, 0});
  for (const Caller& caller : callers_) {
    entries.push_back(caller.line.ToPoll());
    wake_at = std::min(wake_at, caller.deadline);
  }
}

absl::Status PeerReception::Turn(absl::Time now) {
  Accept(now);
  for (auto caller = callers_.begin(); caller != callers_.end();) {
    const absl::Status status = Advance(*caller);
    const bool is_told = caller->line.outgoing.empty();
    if (status.ok() && is_told && caller->rank >= 0) {
      admitted_[caller->rank] = std::move(caller->line.fd);
      --missing_;
    } else if (status.ok() && now < caller->deadline && !(is_told && caller->is_refused)) {
      ++caller;
      continue;
    } else {
      ++refused_;
    }
    caller = callers_.erase(caller);
  }
  CloseIfComplete();
  return over_;
}

void PeerReception::Accept(absl::Time now) {
  if (!listener_.fd || now < accept_again_) return;
  accept_again_ = absl::InfinitePast();
  lack_ = absl::OkStatus();
  const bool is_unix = listener_.address.IsUnix();
  for (int i = 0; i < kMaxAcceptsPerTurn; ++i) {
    // Without a descriptor accept4() fails even if no connection waits.
    if (!WaitFor(listener_.fd, POLLIN, now).ok()) return;
    absl::StatusOr<UniqueFd> fd = AcceptFrom(listener_.fd);
    absl::StatusOr<std::string> nonce = listener_.address.nonce;
    if (!is_unix) nonce = RandomBytes(kPeerNonceSize);
    if (!fd.ok() || !nonce.ok()) {
      lack_ = fd.status();
      accept_again_ = now + kAcceptPause;
      return;
    }
    if (!*fd) return;
    if (is_unix && !CheckSameUser(*fd).ok()) {
      ++refused_;
      continue;
    }
    Caller& caller = callers_.emplace_back();
    caller.line = {.fd = *std::move(fd), .is_unix = is_unix};
    caller.challenge.nonce = *std::move(nonce);
    caller.deadline = now + greeting_timeout_;
    if (!is_unix) caller.line.Say(caller.challenge.Serialize());
    if (callers_.size() <= kMaxStrangers + group_.world_size) continue;
    callers_.pop_front();
    ++refused_;
  }
}

absl::Status PeerReception::Advance(Caller& caller) {
  EK_RETURN_IF_ERROR(caller.line.Flush());
  if (caller.rank >= 0 || caller.is_refused) return absl::OkStatus();
  EK_ASSIGN_OR_RETURN(const std::optional<std::string> message, caller.line.Hear());
  if (!message) return absl::OkStatus();
  EK_ASSIGN_OR_RETURN(const PeerHello hello, ParseHello(*message));
  PeerVerdict verdict{.status = Judge(caller, hello)};
  if (verdict.status.ok()) {
    caller.rank = hello.rank;
    verdict.proof = VerdictProof(group_, rank_, caller.challenge, hello);
  } else {
    caller.is_refused = true;
  }
  if (listener_.address.IsUnix() && absl::IsPermissionDenied(verdict.status)) {
    over_.Update(Annotate(verdict.status, absl::StrCat("rank ", group_.names[rank_], " and rank ",
                                                       group_.names[hello.rank])));
  }
  caller.line.Say(verdict.Serialize());
  return caller.line.Flush();
}

absl::StatusOr<PeerHello> PeerReception::ParseHello(absl::string_view message) const {
  if (!listener_.address.IsUnix()) return PeerHello::Parse(message);
  EK_ASSIGN_OR_RETURN(UnixHello parsed, UnixHello::Parse(message));
  if (IsDigest(parsed.listener_nonce, listener_.address.nonce)) return std::move(parsed.hello);
  return absl::PermissionDeniedError("a hello for another listener");
}

absl::Status PeerReception::Judge(const Caller& caller, const PeerHello& hello) const {
  if (!IsDigest(hello.proof, HelloProof(group_, rank_, caller.challenge, hello))) {
    return absl::PermissionDeniedError("their keys, or their descriptions of the group, differ");
  }
  if (hello.rank <= rank_ || hello.rank >= group_.world_size) {
    return absl::InvalidArgumentError(absl::StrCat(
        "rank ", group_.names[hello.rank], " does not connect to rank ", group_.names[rank_]));
  }
  if (IsConnected(hello.rank)) {
    return absl::AlreadyExistsError(
        absl::StrCat("rank ", group_.names[hello.rank], " is connected already"));
  }
  return absl::OkStatus();
}

bool PeerReception::IsConnected(int rank) const {
  return admitted_[rank] || std::any_of(callers_.begin(), callers_.end(),
                                        [&](const Caller& caller) { return caller.rank == rank; });
}

}  // namespace evenkeel::internal
