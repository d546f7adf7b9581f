#include "evenkeel/comm/control/server_loop.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <algorithm>
#include <optional>

#include "absl/memory/memory.h"
#include "absl/strings/str_cat.h"
#include "evenkeel/comm/base/clock.h"
#include "evenkeel/comm/base/warn.h"
#include "evenkeel/comm/net/hmac.h"
#include "evenkeel/comm/status.h"

namespace evenkeel::internal {
namespace {

// Tags of the poller; the other tags are numbers of peers.
constexpr uint64_t kWakeTag = UINT64_MAX, kListenerTag = UINT64_MAX - 1;
// The maximum number of connections without proof; above it, the oldest is disconnected. A quarter
// of this process's file limit, so that strangers cannot take the files that the rank itself needs.
size_t MaxStrangers() {
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
// Without file descriptors, accepting again at once would only burn the processor.
constexpr absl::Duration kAcceptPause = absl::Milliseconds(100);
// The same state serves observers for this time, or for this many times what it took: the loop has
// other work.
constexpr absl::Duration kStatusAge = absl::Milliseconds(50);
constexpr int kStatusRest = 20;
// The most bytes that an observer may leave unread when it asks again.
constexpr size_t kObserverBacklog = size_t{1} << 20;

}  // namespace

absl::StatusOr<std::unique_ptr<ServerLoop>> ServerLoop::Create(UniqueFd listener,
                                                               ServerOptions options,
                                                               const MakeSeats& make_seats) {
  EK_ASSIGN_OR_RETURN(WakeUp wake, WakeUp::Create());
  EK_ASSIGN_OR_RETURN(Poller poller, Poller::Create());
  EK_RETURN_IF_ERROR(poller.Add(wake.fd(), kWakeTag, EPOLLIN));
  EK_RETURN_IF_ERROR(poller.Add(listener.get(), kListenerTag, EPOLLIN));
  return absl::WrapUnique(new ServerLoop(std::move(listener), std::move(wake), std::move(poller),
                                         std::move(options), make_seats));
}

ServerLoop::ServerLoop(UniqueFd listener, WakeUp wake, Poller poller, ServerOptions options,
                       const MakeSeats& make_seats)
    : listener_(std::move(listener)),
      wake_(std::move(wake)),
      poller_(std::move(poller)),
      options_(std::move(options)),
      seats_(make_seats([this](PeerId peer, const std::string& payload) { Send(peer, payload); })) {
}

void ServerLoop::Stop() {
  {
    absl::MutexLock lock(&mutex_);
    stop_by_ = SteadyNow() + options_.linger;
  }
  wake_.Signal();
}

void ServerLoop::Run() {
  while (StopBy() == absl::InfiniteFuture()) Turn();
  poller_.Forget(listener_.get());
  listener_ = UniqueFd();
  accept_again_ = absl::InfiniteFuture();
  while (seats_->HasLivingGroup() && SteadyNow() < StopBy()) Turn();
  seats_->SendWaiting();
  for (auto& [id, peer] : peers_) {
    if (peer.state == State::kObserver) {
      Send(id, seats_->LastStatusJson());
      Send(id, "");
    }
    peer.state = State::kLeaving;
    SetDeadline(id, peer, SteadyNow() + kDismissal);
    Touch(id, peer);
  }
  while (!peers_.empty()) Turn();
}

absl::Time ServerLoop::StopBy() {
  absl::MutexLock lock(&mutex_);
  return stop_by_;
}

void ServerLoop::Turn() {
  bool is_called = false;
  for (const epoll_event& event : poller_.Wait(NextAction(SteadyNow()))) {
    if (event.data.u64 == kWakeTag) {
      wake_.Clear();
    } else if (event.data.u64 == kListenerTag) {
      is_called = true;
    } else {
      const auto id = static_cast<PeerId>(event.data.u64);
      Peer& peer = peers_.at(id);
      Touch(id, peer);
      if ((event.events & ~EPOLLOUT) != 0) Read(id, peer);
    }
  }
  const absl::Time now = SteadyNow();
  if (!spare_) spare_ = UniqueFd(open("/dev/null", O_RDONLY | O_CLOEXEC));
  if (is_called) Accept(now);
  if (now >= accept_again_) {
    accept_again_ = absl::InfiniteFuture();
    // Without a waiting connection nothing shows whether the lack of descriptors lasts.
    if (!WaitFor(listener_, POLLIN, now).ok()) out_since_ = absl::InfiniteFuture();
    poller_.Change(listener_.get(), kListenerTag, EPOLLIN);
  }
  CutOffSilent(now);
  seats_->SendWaiting();
  Sweep(now);
}

void ServerLoop::CutOffSilent(absl::Time now) {
  const absl::Duration time = now - last_turn_;
  last_turn_ = now;
  if (!seats_->ListensForBeats()) return;
  for (const PeerId id : seats_->PassTime(time)) {
    const auto link = links_.find(id);
    const PeerId of = link == links_.end() ? id : link->second.first;
    if (link != links_.end()) {
      Send(id, "");
      CloseLink(id);
    }
    // While the server ends, connections leave their seats behind.
    const auto peer = peers_.find(of);
    if (peer != peers_.end() && peer->second.links.empty()) Dismiss(of, peer->second);
  }
}

absl::Time ServerLoop::NextAction(absl::Time now) {
  absl::Time action = accept_again_;
  if (!deadlines_.empty()) action = std::min(action, deadlines_.begin()->first);
  if (seats_->HasLivingGroup()) action = std::min(action, StopBy());
  if (seats_->ListensForBeats()) action = std::min(action, now + ControlSeats::kListening);
  return action;
}

void ServerLoop::Accept(absl::Time now) {
  for (int i = 0; i < kMaxAcceptsPerTurn; ++i) {
    // Without a descriptor accept() fails even if no connection waits.
    if (!WaitFor(listener_, POLLIN, now).ok()) return;
    absl::StatusOr<UniqueFd> fd = AcceptFrom(listener_);
    if (fd.ok() && !*fd) return;
    absl::Status refusal;
    if (absl::IsResourceExhausted(fd.status()) && now - out_since_ > options_.refuse_after) {
      refusal = Annotate(fd.status(), absl::StrCat(options_.host, " cannot accept a connection"));
      spare_ = UniqueFd();
      fd = AcceptFrom(listener_);
    } else if (fd.ok()) {
      out_since_ = absl::InfiniteFuture();
    }
    absl::StatusOr<std::string> nonce = RandomBytes(kNonceSize);
    const PeerId id = next_id_++;
    absl::Status status = fd.status();
    status.Update(nonce.status());
    if (status.ok()) status = poller_.Add(fd->get(), id, EPOLLIN);
    if (!status.ok()) return PauseAccepting(now, status);
    Peer& peer = peers_[id];
    peer.fd = *std::move(fd);
    peer.challenge = {.job = options_.job.job, .nonce = *std::move(nonce)};
    peer.refusal = refusal;
    SetDeadline(id, peer, now + options_.greeting_timeout);
    Send(id, peer.challenge.Serialize());
    strangers_.insert(id);
    if (!refusal.ok()) return PauseAccepting(now, refusal);
    if (strangers_.size() <= MaxStrangers()) continue;
    const PeerId oldest = strangers_.extract(strangers_.begin()).value();
    CutOff(oldest, peers_.at(oldest));
  }
}

void ServerLoop::PauseAccepting(absl::Time now, const absl::Status& why) {
  if (!std::exchange(has_warned_, true)) {
    Warn(nullptr, absl::StrCat(options_.host, " cannot accept the connection of a rank: ",
                               why.message(), "; it retries, and the rank waits"));
  }
  out_since_ = std::min(out_since_, now);
  accept_again_ = now + kAcceptPause;
  poller_.Change(listener_.get(), kListenerTag, 0);
}

void ServerLoop::Touch(PeerId id, Peer& peer) {
  if (!std::exchange(peer.is_touched, true)) touched_.push_back(id);
}

void ServerLoop::SetDeadline(PeerId id, Peer& peer, absl::Time deadline) {
  peer.deadline = deadline;
  deadlines_.emplace(deadline, id);
}

void ServerLoop::Read(PeerId id, Peer& peer) {
  if (peer.is_over) return;
  std::string bytes;
  const bool is_over = ReceiveSome(peer.fd, bytes).is_over;
  if (peer.state != State::kLeaving) peer.received.Append(bytes);
  if (peer.state == State::kControl && !bytes.empty()) seats_->OnBytes(id);
  // A part of a long frame of one link shows that the ranks of all links live.
  if (const absl::Time now = SteadyNow();
      !bytes.empty() && !peer.links.empty() && now >= peer.hear_again) {
    peer.hear_again = now + ControlSeats::kListening;
    for (const auto& [number, seat] : peer.links) seats_->OnBytes(seat);
  }
  while (peer.state != State::kLeaving && !peer.is_over) {
    absl::StatusOr<std::optional<std::string>> frame = peer.received.Next();
    if (!frame.ok()) return peer.state == State::kGreeting ? CutOff(id, peer) : Dismiss(id, peer);
    if (!frame->has_value()) break;
    HandleFrame(id, peer, **frame);
  }
  if (is_over) peer.is_over = true;
}

void ServerLoop::HandleFrame(PeerId id, Peer& peer, const std::string& frame) {
  switch (peer.state) {
    case State::kGreeting: {
      const absl::StatusOr<Hello> hello = Hello::Parse(frame);
      return hello.ok() ? HandleHello(id, peer, *hello) : CutOff(id, peer);
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
    case State::kLinks:
      return HandleLink(id, peer, frame);
    case State::kLeaving:
      return;
  }
}

void ServerLoop::HandleLink(PeerId id, Peer& peer, absl::string_view frame) {
  const std::optional<uint32_t> number = TakeLink(&frame);
  if (!number.has_value()) return Dismiss(id, peer);
  const auto link = peer.links.find(*number);
  if (link == peer.links.end()) return OpenLink(id, peer, *number, frame);
  const PeerId seat = link->second;
  if (frame.empty()) return CloseLink(seat);
  seats_->OnBytes(seat);
  if (!seats_->OnFrame(seat, frame).ok()) Dismiss(id, peer);
}

void ServerLoop::OpenLink(PeerId id, Peer& peer, uint32_t number, absl::string_view payload) {
  const absl::StatusOr<Hello> hello = Hello::Parse(payload);
  if (!hello.ok()) return;  // A late frame of a link that this server has closed.
  if (hello->kind != Hello::Kind::kControl) return Dismiss(id, peer);
  Verdict verdict{.status = JudgeRank(*hello), .host = options_.host};
  Send(id, OnLink(number, verdict.Serialize()));
  if (!verdict.status.ok()) return;
  const PeerId seat = next_id_++;
  peer.links[number] = seat;
  links_[seat] = {id, number};
  seats_->Join(seat, *hello);
}

void ServerLoop::CloseLink(PeerId seat) {
  const auto [id, number] = links_.extract(seat).mapped();
  if (const auto peer = peers_.find(id); peer != peers_.end()) peer->second.links.erase(number);
  seats_->OnDisconnect(seat);
}

const std::string& ServerLoop::Status() {
  if (const absl::Time now = SteadyNow(); now >= status_until_) {
    status_ = seats_->StatusJson();
    const absl::Time done = SteadyNow();
    status_until_ = done + std::max(kStatusAge, kStatusRest * (done - now));
  }
  return status_;
}

void ServerLoop::HandleHello(PeerId id, Peer& peer, const Hello& hello) {
  Verdict verdict{.status = Judge(peer, hello), .host = options_.host};
  verdict.proof = ProofOf(options_.job.secret, peer.challenge, hello, verdict);
  Send(id, verdict.Serialize());
  if (!verdict.status.ok()) return Dismiss(id, peer);
  strangers_.erase(id);
  peer.deadline = absl::InfiniteFuture();
  // An observer has nothing to say.
  peer.received.set_max_payload(hello.kind == Hello::Kind::kObserver ? 0 : kMaxLinkFrame);
  peer.state = hello.kind == Hello::Kind::kStore     ? State::kStore
               : hello.kind == Hello::Kind::kControl ? State::kControl
               : hello.kind == Hello::Kind::kLinks   ? State::kLinks
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
  EK_RETURN_IF_ERROR(peer.refusal);
  if (hello.kind != Hello::Kind::kControl && !options_.has_store)
    return absl::InvalidArgumentError("this server has no store");
  if (hello.kind == Hello::Kind::kObserver || hello.kind == Hello::Kind::kLinks)
    return absl::OkStatus();
  return JudgeRank(hello);
}

absl::Status ServerLoop::JudgeRank(const Hello& hello) const {
  const bool is_control = hello.kind == Hello::Kind::kControl;
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

void ServerLoop::Send(PeerId to, absl::string_view payload) {
  if (const auto link = links_.find(to); link != links_.end())
    return Send(link->second.first, OnLink(link->second.second, payload));
  const auto found = peers_.find(to);
  if (found == peers_.end() || found->second.is_over || found->second.state == State::kLeaving)
    return;
  Peer& peer = found->second;
  const PeerId id = found->first;
  Touch(id, peer);
  if (payload.size() > kMaxLinkFrame || peer.outgoing.size() - peer.sent > kMaxBacklog) {
    peer.is_over = true;  // Sweep() notifies the others.
    return;
  }
  peer.outgoing += Frame(payload);
}

void ServerLoop::Flush(PeerId id, Peer& peer) {
  const Transfer sent = SendSome(peer.fd, absl::string_view(peer.outgoing).substr(peer.sent));
  peer.sent += sent.bytes;
  if (sent.is_over) peer.is_over = true;
  if (peer.sent >= peer.outgoing.size() / 2) {
    peer.outgoing.erase(0, peer.sent);
    peer.sent = 0;
  }
  if (peer.waits_for_room == peer.outgoing.empty()) {
    peer.waits_for_room = !peer.outgoing.empty();
    poller_.Change(peer.fd.get(), id, peer.waits_for_room ? EPOLLIN | EPOLLOUT : EPOLLIN);
  }
  if (peer.state == State::kLeaving && peer.outgoing.empty() && !peer.said_goodbye) {
    peer.said_goodbye = true;
    shutdown(peer.fd.get(), SHUT_WR);
  }
}

void ServerLoop::Dismiss(PeerId id, Peer& peer) {
  Detach(id, peer);
  peer.state = State::kLeaving;
  SetDeadline(id, peer, SteadyNow() + kDismissal);
  Touch(id, peer);
}

void ServerLoop::CutOff(PeerId id, Peer& peer) {
  peer.is_over = true;
  Touch(id, peer);
}

void ServerLoop::Detach(PeerId id, const Peer& peer) {
  switch (peer.state) {
    case State::kStore:
      return table_.Forget(id);
    case State::kControl:
      return seats_->OnDisconnect(id);
    case State::kLinks:
      for (const auto& [number, seat] : peer.links) {
        links_.erase(seat);
        seats_->OnDisconnect(seat);
      }
      return;
    case State::kGreeting:
    case State::kObserver:
    case State::kLeaving:
      return;
  }
}

// Sends the output of the turn, and removes ended connections. This can produce more output, so it
// repeats until nothing changes.
void ServerLoop::Sweep(absl::Time now) {
  while (!deadlines_.empty() && deadlines_.begin()->first <= now) {
    const auto peer = peers_.find(deadlines_.extract(deadlines_.begin()).value().second);
    if (peer != peers_.end()) Touch(peer->first, peer->second);
  }
  while (!touched_.empty()) {
    for (const PeerId id : std::exchange(touched_, {})) {
      const auto found = peers_.find(id);
      Peer& peer = found->second;
      peer.is_touched = false;
      Flush(id, peer);
      if (!peer.is_over && now < peer.deadline) continue;
      poller_.Forget(peer.fd.get());
      const Peer gone = std::move(peer);
      peers_.erase(found);
      strangers_.erase(id);
      Detach(id, gone);
    }
  }
}

}  // namespace evenkeel::internal
