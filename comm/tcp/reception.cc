#include "evenkeel/comm/tcp/reception.h"

#include <algorithm>
#include <optional>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "evenkeel/comm/net/hmac.h"
#include "evenkeel/comm/status.h"

namespace evenkeel::internal {
namespace {

// Connections that have not proved anything, beyond one for each rank.
constexpr size_t kMaxStrangers = 128;
// How many are accepted before those that are here have their turn.
constexpr int kMostAtOnce = 64;
// Without file descriptors accepting again at once would only burn the processor.
constexpr absl::Duration kAcceptPause = absl::Milliseconds(100);

}  // namespace

TcpReception::TcpReception(int rank, const PeerGroup& group, UniqueFd listener,
                           absl::Duration greeting_timeout)
    : rank_(rank),
      group_(group),
      listener_(std::move(listener)),
      greeting_timeout_(greeting_timeout),
      admitted_(group.world_size),
      missing_(group.world_size - rank - 1) {
  CloseIfComplete();
}

void TcpReception::CloseIfComplete() {
  if (!IsComplete()) return;
  listener_ = UniqueFd();
  callers_.clear();
}

std::vector<int> TcpReception::Missing() const {
  std::vector<int> missing;
  for (int rank = rank_ + 1; rank < group_.world_size; ++rank) {
    if (!admitted_[rank]) missing.push_back(rank);
  }
  return missing;
}

void TcpReception::AddTo(std::vector<pollfd>& entries, absl::Time& wake_at) const {
  wake_at = std::min(
      wake_at, accept_again_ == absl::InfinitePast() ? absl::InfiniteFuture() : accept_again_);
  entries.push_back({accept_again_ == absl::InfinitePast() ? listener_.get() : -1, POLLIN, 0});
  for (const Caller& caller : callers_) {
    entries.push_back(caller.line.ToPoll());
    wake_at = std::min(wake_at, caller.deadline);
  }
}

void TcpReception::Turn(absl::Time now) {
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
}

void TcpReception::Accept(absl::Time now) {
  if (!listener_ || now < accept_again_) return;
  accept_again_ = absl::InfinitePast();
  for (int i = 0; i < kMostAtOnce; ++i) {
    absl::StatusOr<UniqueFd> fd = AcceptFrom(listener_);
    absl::StatusOr<std::string> nonce = RandomBytes(kPeerNonceSize);
    if (!fd.ok() || !nonce.ok()) {
      accept_again_ = now + kAcceptPause;
      return;
    }
    if (!*fd) return;
    Caller& caller = callers_.emplace_back();
    caller.line.fd = *std::move(fd);
    caller.challenge.nonce = *std::move(nonce);
    caller.deadline = now + greeting_timeout_;
    caller.line.Say(caller.challenge.Serialize());
    if (callers_.size() <= kMaxStrangers + group_.world_size) continue;
    callers_.pop_front();
    ++refused_;
  }
}

absl::Status TcpReception::Advance(Caller& caller) {
  EK_RETURN_IF_ERROR(caller.line.Flush());
  if (caller.rank >= 0 || caller.is_refused) return absl::OkStatus();
  EK_ASSIGN_OR_RETURN(const std::optional<std::string> frame, caller.line.Hear());
  if (!frame) return absl::OkStatus();
  EK_ASSIGN_OR_RETURN(const PeerHello hello, PeerHello::Parse(*frame));
  PeerVerdict verdict{.status = Judge(caller, hello)};
  if (verdict.status.ok()) {
    caller.rank = hello.rank;
    verdict.proof = VerdictProof(group_, rank_, caller.challenge, hello);
  } else {
    caller.is_refused = true;
  }
  caller.line.Say(verdict.Serialize());
  return caller.line.Flush();
}

absl::Status TcpReception::Judge(const Caller& caller, const PeerHello& hello) const {
  if (!IsDigest(hello.proof, HelloProof(group_, rank_, caller.challenge, hello))) {
    return absl::PermissionDeniedError("their keys, or their descriptions of the group, differ");
  }
  if (hello.rank <= rank_ || hello.rank >= group_.world_size) {
    return absl::InvalidArgumentError(absl::StrCat(
        "rank ", group_.names[hello.rank], " does not connect to rank ", group_.names[rank_]));
  }
  if (IsHere(hello.rank)) {
    return absl::AlreadyExistsError(
        absl::StrCat("rank ", group_.names[hello.rank], " is connected already"));
  }
  return absl::OkStatus();
}

bool TcpReception::IsHere(int rank) const {
  return admitted_[rank] || std::any_of(callers_.begin(), callers_.end(),
                                        [&](const Caller& caller) { return caller.rank == rank; });
}

}  // namespace evenkeel::internal
