#include "evenkeel/comm/shm/meeting.h"

#include <errno.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <optional>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "evenkeel/comm/base/bytes.h"
#include "evenkeel/comm/base/clock.h"
#include "evenkeel/comm/base/hex.h"
#include "evenkeel/comm/base/parties.h"
#include "evenkeel/comm/net/hmac.h"
#include "evenkeel/comm/status.h"

namespace evenkeel::internal {
namespace {

constexpr absl::Duration kFirstPause = absl::Milliseconds(1);
constexpr absl::Duration kLongestPause = absl::Milliseconds(100);
// Connections that have not proved anything, beyond one for each rank; of more the oldest goes.
constexpr size_t kMaxStrangers = 128;
// How many are accepted before those that are here have their turn.
constexpr int kMostAtOnce = 64;
// Without file descriptors accepting again at once would only burn the processor.
constexpr absl::Duration kAcceptPause = absl::Milliseconds(100);
constexpr size_t kMaxMessage = 2048;

// So that what is proved here proves nothing over TCP, and the other way round.
PeerGroup HereOnly(PeerGroup group) {
  group.name = absl::StrCat("shared memory ", group.name);
  return group;
}

UniqueFd NewSocket() {
  UniqueFd fd(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  fd.MakePrivate();
  return fd;
}

// The kernel chooses the name.
absl::StatusOr<UniqueFd> ListenAnywhere() {
  UniqueFd fd = NewSocket();
  if (!fd) return absl::ResourceExhaustedError(ErrnoText("socket"));
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  if (bind(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof(address.sun_family)) !=
      0) {
    return absl::ResourceExhaustedError(ErrnoText("bind"));
  }
  if (listen(fd.get(), 1024) != 0) return absl::ResourceExhaustedError(ErrnoText("listen"));
  return fd;
}

absl::StatusOr<std::string> NameOf(const UniqueFd& fd) {
  sockaddr_un address = {};
  socklen_t size = sizeof(address);
  constexpr socklen_t kFront =
      offsetof(sockaddr_un, sun_path) + 1;  // The zero of the abstract name space.
  if (getsockname(fd.get(), reinterpret_cast<sockaddr*>(&address), &size) != 0 || size <= kFront) {
    return absl::InternalError("the name of a Unix socket is unknown");
  }
  return std::string(address.sun_path + 1, size - kFront);
}

// Who has the other end: since it was connected, or since it has listened.
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

absl::Status SendMessage(const UniqueFd& fd, absl::string_view bytes) {
  while (send(fd.get(), bytes.data(), bytes.size(), MSG_DONTWAIT | MSG_NOSIGNAL) < 0) {
    if (errno != EINTR) return absl::UnavailableError(ErrnoText("send"));
  }
  return absl::OkStatus();
}

// Nothing: it has not come yet. What is too long is cut, and so makes no sense. Descriptors that
//          come are dropped.
absl::StatusOr<std::optional<std::string>> ReceiveMessage(const UniqueFd& fd) {
  char bytes[kMaxMessage];
  while (true) {
    const ssize_t got = recv(fd.get(), bytes, sizeof(bytes), MSG_DONTWAIT);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return std::nullopt;
    if (got <= 0) return absl::UnavailableError("the connection was closed");
    return std::string(bytes, got);
  }
}

std::string Pair(const RankNames& names, int rank, int peer) {
  return absl::StrCat("rank ", names[rank], " and rank ", names[peer]);
}

}  // namespace

std::string ShmAddress::ToString() const {
  return absl::StrCat(absl::BytesToHexString(name), ".", absl::BytesToHexString(nonce));
}

absl::StatusOr<ShmAddress> ShmAddress::Parse(absl::string_view text) {
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
  return ShmAddress{BytesFromHex(parts[0]), BytesFromHex(parts[1])};
}

std::string ShmHello::Serialize() const {
  return ByteWriter().Bytes(listener_nonce).Bytes(hello.Serialize()).Take();
}

absl::StatusOr<ShmHello> ShmHello::Parse(absl::string_view bytes) {
  ByteReader reader(bytes);
  ShmHello message{.listener_nonce = std::string(reader.Bytes())};
  const absl::string_view hello = reader.Bytes();
  EK_RETURN_IF_ERROR(reader.Finish("hello"));
  EK_ASSIGN_OR_RETURN(message.hello, PeerHello::Parse(hello));
  return message;
}

absl::StatusOr<std::unique_ptr<ShmMeeting>> ShmMeeting::Create(int rank, PeerGroup group) {
  ShmAddress address;
  EK_ASSIGN_OR_RETURN(address.nonce, RandomBytes(kPeerNonceSize));
  EK_ASSIGN_OR_RETURN(UniqueFd listener, ListenAnywhere());
  EK_ASSIGN_OR_RETURN(address.name, NameOf(listener));
  EK_ASSIGN_OR_RETURN(WakeUp wake, WakeUp::Create());
  return std::unique_ptr<ShmMeeting>(new ShmMeeting(
      rank, HereOnly(std::move(group)), std::move(listener), std::move(wake), std::move(address)));
}

ShmMeeting::ShmMeeting(int rank, PeerGroup group, UniqueFd listener, WakeUp wake,
                       ShmAddress address)
    : rank_(rank),
      group_(std::move(group)),
      wake_(std::move(wake)),
      address_(std::move(address)),
      address_text_(address_.ToString()),
      listener_(std::move(listener)),
      admitted_(group_.world_size) {
  if (rank_ + 1 == group_.world_size) listener_ = UniqueFd();  // Nobody calls it.
}

void ShmMeeting::Cancel(const absl::Status& why) {
  {
    absl::MutexLock lock(&mutex_);
    if (cancelled_.ok()) cancelled_ = why;
  }
  wake_.Signal();
}

absl::StatusOr<std::vector<UniqueFd>> ShmMeeting::Run(const std::vector<std::string>& addresses,
                                                      absl::Time deadline) {
  const absl::Status status = Meet(addresses, deadline);
  listener_ = UniqueFd();
  callers_.clear();
  std::vector<UniqueFd> connections = std::move(admitted_);
  for (Call& call : calls_) connections[call.to] = std::move(call.fd);
  calls_.clear();
  EK_RETURN_IF_ERROR(status);
  return connections;
}

absl::Status ShmMeeting::Meet(const std::vector<std::string>& addresses, absl::Time deadline) {
  if (static_cast<int>(addresses.size()) != group_.world_size) {
    return absl::InvalidArgumentError(absl::StrCat("rank ", group_.names[rank_], " got ",
                                                   addresses.size(), " addresses of ",
                                                   group_.world_size, " ranks"));
  }
  for (int to = 0; to < rank_; ++to) {
    absl::StatusOr<ShmAddress> address = ShmAddress::Parse(addresses[to]);
    if (!address.ok()) return Annotate(address.status(), absl::StrCat("rank ", group_.names[to]));
    calls_.push_back({.to = to, .address = *std::move(address), .pause = kFirstPause});
  }
  const absl::Time start = SteadyNow();
  while (true) {
    const absl::Time now = SteadyNow();
    EK_RETURN_IF_ERROR(cancelled());
    for (Call& call : calls_) EK_RETURN_IF_ERROR(TurnCall(call, now));
    EK_RETURN_IF_ERROR(Accept(now));
    EK_RETURN_IF_ERROR(TurnCallers());
    if (IsComplete()) return absl::OkStatus();
    if (now >= deadline) return WhoIsMissing(now - start);
    Wait(deadline);
  }
}

// An attempt that fails is made again, a little later each time. Only who was told no, or was
// answered by somebody without the key, gives up.
absl::Status ShmMeeting::TurnCall(Call& call, absl::Time now) {
  if (call.is_done || (!call.fd && now < call.again)) return absl::OkStatus();
  const absl::StatusOr<std::optional<PeerVerdict>> verdict = Advance(call);
  if (absl::IsResourceExhausted(verdict.status())) EK_RETURN_IF_ERROR(Lack(now, verdict.status()));
  if (!verdict.ok()) {
    call.obstacle = verdict.status();
    call.fd = UniqueFd();
    call.again = now + call.pause;
    call.pause = std::min(call.pause * 1.5, kLongestPause);
  } else if (verdict->has_value()) {
    EK_RETURN_IF_ERROR(Annotate(Judge(call, **verdict), Pair(group_.names, rank_, call.to)));
    call.is_done = true;
  }
  return absl::OkStatus();
}

absl::StatusOr<std::optional<PeerVerdict>> ShmMeeting::Advance(Call& call) const {
  if (!call.fd) EK_RETURN_IF_ERROR(Start(call));
  EK_ASSIGN_OR_RETURN(const std::optional<std::string> answer, ReceiveMessage(call.fd));
  if (!answer) return std::nullopt;
  return PeerVerdict::Parse(*answer);
}

absl::Status ShmMeeting::Start(Call& call) const {
  UniqueFd fd = NewSocket();
  if (!fd) return absl::ResourceExhaustedError(ErrnoText("socket"));
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path + 1, call.address.name.data(), call.address.name.size());
  const socklen_t size = offsetof(sockaddr_un, sun_path) + 1 + call.address.name.size();
  if (connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), size) != 0) {
    return absl::UnavailableError(ErrnoText("connect"));
  }
  EK_RETURN_IF_ERROR(CheckSameUser(fd));
  call.hello.rank = rank_;
  EK_ASSIGN_OR_RETURN(call.hello.nonce, RandomBytes(kPeerNonceSize));
  call.hello.proof = HelloProof(group_, call.to, {call.address.nonce}, call.hello);
  EK_RETURN_IF_ERROR(SendMessage(fd, ShmHello{call.address.nonce, call.hello}.Serialize()));
  call.fd = std::move(fd);
  return absl::OkStatus();
}

absl::Status ShmMeeting::Judge(const Call& call, const PeerVerdict& verdict) const {
  EK_RETURN_IF_ERROR(verdict.status);
  if (IsDigest(verdict.proof, VerdictProof(group_, call.to, {call.address.nonce}, call.hello))) {
    return absl::OkStatus();
  }
  return absl::PermissionDeniedError(
      absl::StrCat("the process that accepted the connection is not rank ", group_.names[call.to]));
}

absl::Status ShmMeeting::Lack(absl::Time now, const absl::Status& why) {
  lacks_since_ = std::min(lacks_since_, now);
  return now - lacks_since_ < kDescriptorPatience ? absl::OkStatus() : why;
}

absl::Status ShmMeeting::Accept(absl::Time now) {
  if (!listener_ || now < accept_again_) return absl::OkStatus();
  accept_again_ = absl::InfinitePast();
  for (int i = 0; i < kMostAtOnce; ++i) {
    // Without a descriptor accept4() fails even if no connection waits.
    pollfd entry = {listener_.get(), POLLIN, 0};
    if (poll(&entry, 1, 0) <= 0) return absl::OkStatus();
    UniqueFd fd(accept4(listener_.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    fd.MakePrivate();
    if (!fd && (errno == EINTR || errno == ECONNABORTED)) continue;
    if (!fd && (errno == EAGAIN || errno == EWOULDBLOCK)) return absl::OkStatus();
    if (!fd) {
      accept_again_ = now + kAcceptPause;
      return Lack(now, absl::ResourceExhaustedError(ErrnoText("accept")));
    }
    lacks_since_ = absl::InfiniteFuture();
    if (!CheckSameUser(fd).ok()) {
      ++refused_;
      continue;
    }
    callers_.push_back(std::move(fd));
    if (callers_.size() <= kMaxStrangers + group_.world_size) continue;
    callers_.pop_front();
    ++refused_;
  }
  return absl::OkStatus();
}

absl::Status ShmMeeting::TurnCallers() {
  for (auto caller = callers_.begin(); caller != callers_.end();) {
    const absl::StatusOr<std::optional<std::string>> bytes = ReceiveMessage(*caller);
    if (bytes.ok() && !bytes->has_value()) {
      ++caller;
      continue;
    }
    absl::Status status;
    if (bytes.ok()) {
      status = Answer(*caller, **bytes);
    } else {
      ++refused_;
    }
    caller = callers_.erase(caller);
    EK_RETURN_IF_ERROR(status);
  }
  return absl::OkStatus();
}

absl::Status ShmMeeting::Answer(UniqueFd& caller, absl::string_view bytes) {
  const absl::StatusOr<ShmHello> message = ShmHello::Parse(bytes);
  if (!message.ok() || !IsDigest(message->listener_nonce, address_.nonce)) {
    ++refused_;
    return absl::OkStatus();
  }
  const PeerHello& hello = message->hello;
  PeerVerdict verdict;
  absl::Status over;
  if (!IsDigest(hello.proof, HelloProof(group_, rank_, {address_.nonce}, hello))) {
    verdict.status =
        absl::PermissionDeniedError("their keys, or their descriptions of the group, differ");
    over = Annotate(verdict.status, Pair(group_.names, rank_, hello.rank));
  } else if (hello.rank <= rank_ || hello.rank >= group_.world_size) {
    verdict.status = absl::InvalidArgumentError(absl::StrCat(
        "rank ", group_.names[hello.rank], " does not connect to rank ", group_.names[rank_]));
  } else if (admitted_[hello.rank]) {
    verdict.status = absl::AlreadyExistsError(
        absl::StrCat("rank ", group_.names[hello.rank], " is connected already"));
  } else {
    verdict.proof = VerdictProof(group_, rank_, {address_.nonce}, hello);
  }
  const bool is_told = SendMessage(caller, verdict.Serialize()).ok();
  if (is_told && verdict.status.ok()) {
    admitted_[hello.rank] = std::move(caller);
  } else {
    ++refused_;
  }
  return over;
}

bool ShmMeeting::IsComplete() const {
  return std::all_of(calls_.begin(), calls_.end(), [](const Call& call) { return call.is_done; }) &&
         std::all_of(admitted_.begin() + rank_ + 1, admitted_.end(),
                     [](const UniqueFd& fd) { return bool{fd}; });
}

void ShmMeeting::Wait(absl::Time deadline) const {
  std::vector<pollfd> entries = {{wake_.fd(), POLLIN, 0}};
  for (const Call& call : calls_) {
    if (call.is_done) continue;
    if (call.fd) entries.push_back({call.fd.get(), POLLIN, 0});
    if (!call.fd) deadline = std::min(deadline, call.again);
  }
  if (accept_again_ == absl::InfinitePast()) {
    if (listener_) entries.push_back({listener_.get(), POLLIN, 0});
  } else {
    deadline = std::min(deadline, accept_again_);
  }
  for (const UniqueFd& caller : callers_) entries.push_back({caller.get(), POLLIN, 0});
  poll(entries.data(), entries.size(), PollTimeout(deadline));
}

absl::Status ShmMeeting::WhoIsMissing(absl::Duration waited) const {
  std::vector<int> missing;
  std::string obstacles;
  for (const Call& call : calls_) {
    if (call.is_done) continue;
    missing.push_back(call.to);
    if (!call.obstacle.ok()) {
      absl::StrAppend(&obstacles, "; rank ", group_.names[call.to], ": ", call.obstacle.message());
    }
  }
  for (int rank = rank_ + 1; rank < group_.world_size; ++rank) {
    if (!admitted_[rank]) missing.push_back(rank);
  }
  if (refused_ > 0) {
    absl::StrAppend(&obstacles, "; ", refused_,
                    " callers did not prove that they belong to the group");
  }
  return absl::DeadlineExceededError(
      absl::StrCat("rank ", group_.names[rank_], " waited ",
                   absl::FormatDuration(absl::Trunc(waited, absl::Milliseconds(1))), " for ",
                   RankList(group_.names.Of(missing)), " to connect", obstacles));
}

absl::Status ShmMeeting::cancelled() const {
  absl::MutexLock lock(&mutex_);
  return cancelled_;
}

}  // namespace evenkeel::internal
