#include "evenkeel/comm/control/server_loop.h"

#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <algorithm>
#include <optional>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "evenkeel/comm/net/hmac.h"
#include "evenkeel/comm/status.h"

namespace evenkeel::internal {
namespace {

// The maximum number of unauthenticated connections; above it, the oldest is disconnected. A
// quarter of this process's file limit, so that strangers cannot take the files that the rank
// itself needs.
size_t MaxGreeting() {
  constexpr size_t kMost = 1024, kLeast = 16, kShare = 4;
  rlimit files = {};
  if (getrlimit(RLIMIT_NOFILE, &files) != 0) return kLeast;
  return std::clamp<size_t>(files.rlim_cur / kShare, kLeast, kMost);
}
// After so many, other connections have their turn, and the oldest ones are disconnected if needed.
constexpr int kMaxAcceptsPerTurn = 16;
// The most bytes that a peer may leave unread.
constexpr size_t kMaxBacklog = 2 * kMaxFrame;
// The time for a refused peer to read the reason.
constexpr absl::Duration kDismissal = absl::Seconds(1);
// While ranks send heartbeats, no turn takes longer, and none counts for more: any longer time was
// time in which the loop did not run, and it may have to read first what has arrived meanwhile.
constexpr absl::Duration kListening = absl::Milliseconds(500);
// Without file descriptors, accepting again at once would only burn the processor.
constexpr absl::Duration kAcceptPause = absl::Milliseconds(100);
// The same state serves observers for this time, or for this many times what it took: the loop has
// other work.
constexpr absl::Duration kStatusAge = absl::Milliseconds(50);
constexpr int kStatusRest = 20;
// The most bytes that an observer may leave unread when it asks again.
constexpr size_t kObserverBacklog = size_t{1} << 20;

}  // namespace

ServerLoop::ServerLoop(UniqueFd listener, WakeUp wake, ServerOptions options,
                       const MakeSeats& make_seats)
    : listener_(std::move(listener)),
      wake_(std::move(wake)),
      options_(std::move(options)),
      seats_(make_seats([this](PeerId peer, const std::string& payload) { Send(peer, payload); })) {
}

void ServerLoop::Stop() {
  {
    absl::MutexLock lock(&mutex_);
    stop_by_ = absl::Now() + options_.linger;
  }
  wake_.Signal();
}

void ServerLoop::Run() {
  while (StopBy() == absl::InfiniteFuture()) Turn();
  listener_ = UniqueFd();
  while (seats_->HasLivingGroup() && absl::Now() < StopBy()) Turn();
  seats_->SendWaiting();
  for (auto& [id, peer] : peers_) {
    peer.state = State::kLeaving;
    peer.deadline = absl::Now() + kDismissal;
  }
  while (!peers_.empty()) Turn();
}

absl::Time ServerLoop::StopBy() {
  absl::MutexLock lock(&mutex_);
  return stop_by_;
}

void ServerLoop::Turn() {
  for (const auto& [id, events] : Wait(absl::Now())) {
    if ((events & ~POLLOUT) != 0) Read(id, peers_.at(id));
  }
  Accept();
  const absl::Time now = absl::Now();
  CutOffSilent(now);
  seats_->SendWaiting();
  Sweep(now);
}

void ServerLoop::CutOffSilent(absl::Time now) {
  const absl::Duration time = std::clamp(now - last_turn_, absl::ZeroDuration(), kListening);
  last_turn_ = now;
  if (!seats_->ListensForBeats()) return;
  for (const PeerId id : seats_->PassTime(time)) Dismiss(id, peers_.at(id));
}

std::vector<std::pair<ServerLoop::PeerId, short>> ServerLoop::Wait(absl::Time now) {
  absl::Time deadline = absl::InfiniteFuture();
  std::vector<pollfd> entries = {{wake_.fd(), POLLIN, 0}};
  const bool may_accept = now >= accept_again_;
  if (!may_accept) deadline = accept_again_;
  entries.push_back({may_accept ? listener_.get() : -1, POLLIN, 0});
  std::vector<PeerId> ids;
  for (const auto& [id, peer] : peers_) {
    entries.push_back(
        {peer.fd.get(), static_cast<short>(POLLIN | (peer.outgoing.empty() ? 0 : POLLOUT)), 0});
    ids.push_back(id);
    deadline = std::min(deadline, peer.deadline);
  }
  if (seats_->HasLivingGroup()) deadline = std::min(deadline, StopBy());
  if (seats_->ListensForBeats()) deadline = std::min(deadline, now + kListening);
  std::vector<std::pair<PeerId, short>> events;
  if (poll(entries.data(), entries.size(), PollTimeout(deadline)) <= 0) return events;
  if (entries[0].revents != 0) wake_.Clear();
  for (size_t i = 0; i < ids.size(); ++i) {
    if (entries[i + 2].revents != 0) events.emplace_back(ids[i], entries[i + 2].revents);
  }
  return events;
}

void ServerLoop::Accept() {
  const absl::Time now = absl::Now();
  for (int i = 0; i < kMaxAcceptsPerTurn && listener_ && now >= accept_again_; ++i) {
    absl::StatusOr<UniqueFd> fd = AcceptFrom(listener_);
    absl::StatusOr<std::string> nonce = RandomBytes(kNonceSize);
    if (!fd.ok() || !nonce.ok()) {
      accept_again_ = now + kAcceptPause;
      return;
    }
    if (!*fd) return;
    const PeerId id = next_id_++;
    Peer& peer = peers_[id];
    peer.fd = *std::move(fd);
    peer.challenge = {.job = options_.job.job, .nonce = *std::move(nonce)};
    peer.deadline = now + options_.greeting_timeout;
    Send(id, peer.challenge.Serialize());
    if (++greeting_ <= MaxGreeting()) continue;
    for (auto& [other, oldest] : peers_) {
      if (oldest.state != State::kGreeting || oldest.is_over) continue;
      oldest.is_over = true;
      break;
    }
  }
}

void ServerLoop::Read(PeerId id, Peer& peer) {
  if (peer.is_over) return;
  std::string bytes;
  const bool is_over = ReceiveSome(peer.fd, bytes).is_over;
  if (peer.state != State::kLeaving) peer.received.Append(bytes);
  if (peer.state == State::kControl && !bytes.empty()) seats_->OnBytes(id);
  while (peer.state != State::kLeaving) {
    absl::StatusOr<std::optional<std::string>> frame = peer.received.Next();
    if (!frame.ok()) return Dismiss(id, peer);
    if (!frame->has_value()) break;
    HandleFrame(id, peer, **frame);
  }
  if (is_over) peer.is_over = true;
}

void ServerLoop::HandleFrame(PeerId id, Peer& peer, const std::string& frame) {
  switch (peer.state) {
    case State::kGreeting: {
      const absl::StatusOr<Hello> hello = Hello::Parse(frame);
      return hello.ok() ? HandleHello(id, peer, *hello) : Dismiss(id, peer);
    }
    case State::kStore:
      return HandleRequest(id, peer, frame);
    case State::kControl:
      if (!seats_->OnFrame(id, frame).ok()) Dismiss(id, peer);
      return;
    case State::kObserver:
      // It reads a state before it asks for the next one.
      if (peer.outgoing.size() - peer.sent > kObserverBacklog) return Dismiss(id, peer);
      return Send(id, Status());
    case State::kLeaving:
      return;
  }
}

const std::string& ServerLoop::Status() {
  if (const absl::Time now = absl::Now(); now >= status_until_) {
    status_ = seats_->StatusJson();
    const absl::Time done = absl::Now();
    status_until_ = done + std::max(kStatusAge, kStatusRest * (done - now));
  }
  return status_;
}

void ServerLoop::HandleHello(PeerId id, Peer& peer, const Hello& hello) {
  Verdict verdict{.status = Judge(peer, hello)};
  if (verdict.status.ok()) {
    verdict.host = options_.host;
    verdict.proof = ProofOf(options_.job.secret, peer.challenge, hello, verdict);
  }
  Send(id, verdict.Serialize());
  if (!verdict.status.ok()) return Dismiss(id, peer);
  --greeting_;
  peer.deadline = absl::InfiniteFuture();
  // An observer has nothing to say.
  peer.received.set_max_payload(hello.kind == Hello::Kind::kObserver ? 0 : kMaxFrame);
  peer.state = hello.kind == Hello::Kind::kStore     ? State::kStore
               : hello.kind == Hello::Kind::kControl ? State::kControl
                                                     : State::kObserver;
  if (peer.state == State::kControl) seats_->Join(id, hello);
}

absl::Status ServerLoop::Judge(const Peer& peer, const Hello& hello) const {
  EK_RETURN_IF_ERROR(CheckSameBuild("the rank", hello.version, hello.build, "the store"));
  if (!IsDigest(hello.proof, ProofOf(options_.job.secret, peer.challenge, hello))) {
    return absl::PermissionDeniedError(
        "the secrets differ: set EVENKEEL_SECRET or EVENKEEL_SECRET_FILE to the same value for "
        "every rank");
  }
  const bool is_control = hello.kind == Hello::Kind::kControl;
  if (!is_control && !options_.has_store)
    return absl::InvalidArgumentError("this server has no store");
  if (hello.kind == Hello::Kind::kObserver) return absl::OkStatus();
  if (hello.world_size < 1 || hello.rank < 0 || hello.rank >= hello.world_size) {
    return absl::InvalidArgumentError(
        absl::StrCat("rank ", hello.rank, " is out of range for ", hello.world_size, " ranks"));
  }
  const int most = options_.world_size > 0 ? options_.world_size : hello.world_size;
  if (is_control ? hello.world_size > most : hello.world_size != most) {
    return absl::InvalidArgumentError(
        absl::StrCat("rank ", hello.rank, " expects that the ", is_control ? "group" : "job",
                     " has ", hello.world_size, " ranks, but the job has ", most));
  }
  return is_control ? seats_->Check(hello) : absl::OkStatus();
}

void ServerLoop::HandleRequest(PeerId id, Peer& peer, const std::string& frame) {
  absl::StatusOr<StoreRequest> request = StoreRequest::Parse(frame);
  if (!request.ok()) return Dismiss(id, peer);
  for (const auto& [client, reply] : table_.Handle(id, *std::move(request)))
    Send(client, reply.Serialize());
}

void ServerLoop::Send(PeerId id, absl::string_view payload) {
  const auto found = peers_.find(id);
  if (found == peers_.end() || found->second.is_over || found->second.state == State::kLeaving)
    return;
  Peer& peer = found->second;
  if (payload.size() > kMaxFrame || peer.outgoing.size() - peer.sent > kMaxBacklog) {
    peer.is_over = true;  // Sweep() notifies the others.
    return;
  }
  peer.outgoing += Frame(payload);
}

void ServerLoop::Flush(Peer& peer) {
  const Transfer sent = SendSome(peer.fd, absl::string_view(peer.outgoing).substr(peer.sent));
  peer.sent += sent.bytes;
  if (sent.is_over) peer.is_over = true;
  if (peer.sent >= peer.outgoing.size() / 2) {
    peer.outgoing.erase(0, peer.sent);
    peer.sent = 0;
  }
  if (peer.state == State::kLeaving && peer.outgoing.empty() && !peer.said_goodbye) {
    peer.said_goodbye = true;
    shutdown(peer.fd.get(), SHUT_WR);
  }
}

void ServerLoop::Dismiss(PeerId id, Peer& peer) {
  Detach(id, peer);
  peer.state = State::kLeaving;
  peer.deadline = absl::Now() + kDismissal;
}

void ServerLoop::Detach(PeerId id, Peer& peer) {
  switch (peer.state) {
    case State::kGreeting:
      --greeting_;
      return;
    case State::kStore:
      return table_.Forget(id);
    case State::kControl:
      return seats_->OnDisconnect(id);
    case State::kObserver:
    case State::kLeaving:
      return;
  }
}

// Sends the output of the turn, and removes ended connections. This can produce more output, so it
// repeats until nothing changes.
void ServerLoop::Sweep(absl::Time now) {
  bool has_changed = true;
  while (has_changed) {
    has_changed = false;
    for (auto it = peers_.begin(); it != peers_.end();) {
      auto& [id, peer] = *it;
      Flush(peer);
      if (!peer.is_over && now < peer.deadline) {
        ++it;
        continue;
      }
      Peer gone = std::move(peer);
      const PeerId gone_id = id;
      it = peers_.erase(it);
      Detach(gone_id, gone);
      has_changed = true;
    }
  }
}

}  // namespace evenkeel::internal
