#include "evenkeel/comm/net/socket.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <iterator>
#include <memory>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "evenkeel/comm/base/clock.h"
#include "evenkeel/comm/status.h"

namespace evenkeel::internal {
namespace {

constexpr absl::Duration kGlance = absl::Milliseconds(100);  // Between looks at `cancelled`.

struct AddressListDeleter {
  void operator()(addrinfo* list) const { freeaddrinfo(list); }
};
using AddressList = std::unique_ptr<addrinfo, AddressListDeleter>;

absl::StatusOr<AddressList> Resolve(const HostPort& address, bool to_listen) {
  addrinfo hints = {};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICSERV | (to_listen ? AI_PASSIVE : 0);
  addrinfo* list = nullptr;
  const int error =
      getaddrinfo(address.host.c_str(), absl::StrCat(address.port).c_str(), &hints, &list);
  AddressList owner(list);
  if (error == EAI_NONAME || error == EAI_AGAIN || error == EAI_FAIL) {
    return absl::UnavailableError(
        absl::StrCat("the host name \"", address.host, "\" cannot be resolved"));
  }
  if (error == EAI_SYSTEM) return absl::UnavailableError(ErrnoText(address.ToString()));
  if (error != 0)
    return absl::InvalidArgumentError(absl::StrCat(address.ToString(), ": ", gai_strerror(error)));
  return owner;
}

void SetOption(int fd, int level, int option, int value) {
  setsockopt(fd, level, option, &value, sizeof(value));
}

void PrepareConnection(int fd) {
  SetOption(fd, IPPROTO_TCP, TCP_NODELAY, 1);
  // A host that vanished is detected after about half a minute of silence.
  SetOption(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
  SetOption(fd, IPPROTO_TCP, TCP_KEEPIDLE, 10);
  SetOption(fd, IPPROTO_TCP, TCP_KEEPINTVL, 5);
  SetOption(fd, IPPROTO_TCP, TCP_KEEPCNT, 4);
}

UniqueFd NewSocket(int family) {
  const int type = family == AF_UNIX ? SOCK_SEQPACKET : SOCK_STREAM;
  UniqueFd fd(socket(family, type | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  fd.MakePrivate();
  return fd;
}

// Returns whether it is an error of socket() that ends when descriptors or memory become free.
bool IsLack(int error) {
  return error == EMFILE || error == ENFILE || error == ENOBUFS || error == ENOMEM;
}

absl::Status NoSocket() {
  return IsLack(errno) ? absl::ResourceExhaustedError(ErrnoText("socket"))
                       : absl::UnavailableError(ErrnoText("socket"));
}

// accept() also reports errors of a connection that was waiting.
bool IsOfOneConnection(int error) {
  constexpr int kErrors[] = {EINTR,      ECONNABORTED, EPROTO,     EPERM,
                             ENETDOWN,   ENOPROTOOPT,  ENONET,     EHOSTDOWN,
                             EOPNOTSUPP, EHOSTUNREACH, ENETUNREACH};
  return std::find(std::begin(kErrors), std::end(kErrors), error) != std::end(kErrors);
}

// A connection to a free port in the range of outgoing ports can originate from that very port, and
// connect to itself.
bool IsConnectedToItself(int fd) {
  sockaddr_storage local = {}, peer = {};
  socklen_t local_size = sizeof(local), peer_size = sizeof(peer);
  return getsockname(fd, reinterpret_cast<sockaddr*>(&local), &local_size) == 0 &&
         getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &peer_size) == 0 &&
         local_size == peer_size && std::memcmp(&local, &peer, local_size) == 0;
}

absl::StatusOr<UniqueFd> ConnectOnce(const addrinfo& info, absl::Time deadline,
                                     const Cancelled& cancelled) {
  EK_ASSIGN_OR_RETURN(UniqueFd fd, StartToConnect(*info.ai_addr, info.ai_addrlen));
  EK_RETURN_IF_ERROR(WaitFor(fd, POLLOUT, deadline, cancelled));
  EK_RETURN_IF_ERROR(FinishToConnect(fd));
  return fd;
}

}  // namespace

absl::StatusOr<WakeUp> WakeUp::Create() {
  WakeUp wake;
  wake.fd_ = UniqueFd(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
  if (!wake.fd_) return absl::ResourceExhaustedError(ErrnoText("eventfd"));
  return wake;
}

void WakeUp::Signal() const {
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written =
      write(fd_.get(), &one, sizeof(one));  // Full: signalled already.
}

void WakeUp::Clear() const {
  uint64_t count = 0;
  [[maybe_unused]] const ssize_t got = read(fd_.get(), &count, sizeof(count));
}

absl::StatusOr<Poller> Poller::Create() {
  constexpr size_t kEvents = 256;
  Poller poller;
  poller.fd_ = UniqueFd(epoll_create1(EPOLL_CLOEXEC));
  if (!poller.fd_) return absl::ResourceExhaustedError(ErrnoText("epoll_create"));
  poller.fd_.MakePrivate();
  poller.events_.resize(kEvents);
  return poller;
}

absl::Status Poller::Add(int fd, uint64_t tag, uint32_t events) const {
  epoll_event event = {.events = events, .data = {.u64 = tag}};
  if (epoll_ctl(fd_.get(), EPOLL_CTL_ADD, fd, &event) == 0) return absl::OkStatus();
  return absl::ResourceExhaustedError(ErrnoText("epoll_ctl"));
}

void Poller::Change(int fd, uint64_t tag, uint32_t events) const {
  epoll_event event = {.events = events, .data = {.u64 = tag}};
  epoll_ctl(fd_.get(), EPOLL_CTL_MOD, fd, &event);
}

void Poller::Forget(int fd) const { epoll_ctl(fd_.get(), EPOLL_CTL_DEL, fd, nullptr); }

absl::Span<const epoll_event> Poller::Wait(absl::Time deadline) {
  if (is_full_) events_.resize(2 * events_.size());
  const int count = epoll_wait(fd_.get(), events_.data(), static_cast<int>(events_.size()),
                               PollTimeout(deadline));
  is_full_ = count == static_cast<int>(events_.size());
  return absl::MakeConstSpan(events_.data(), std::max(count, 0));
}

absl::StatusOr<HostPort> HostPort::Parse(absl::string_view text) {
  const size_t colon = text.rfind(':');
  HostPort address;
  if (colon == absl::string_view::npos ||
      !absl::SimpleAtoi(text.substr(colon + 1), &address.port) || address.port < 0 ||
      address.port > 65535) {
    return absl::InvalidArgumentError(
        absl::StrCat("\"", text, "\" is not an address of the form host:port"));
  }
  absl::string_view host = text.substr(0, colon);
  if (host.size() > 2 && host.front() == '[' && host.back() == ']')
    host = host.substr(1, host.size() - 2);
  if (host.empty() || host.find_first_of("[]/ ") != absl::string_view::npos) {
    return absl::InvalidArgumentError(
        absl::StrCat("\"", text, "\" is not an address of the form host:port"));
  }
  address.host = std::string(host);
  return address;
}

std::string HostPort::ToString() const {
  const bool is_ipv6 = host.find(':') != std::string::npos;
  return absl::StrCat(is_ipv6 ? "[" : "", host, is_ipv6 ? "]:" : ":", port);
}

bool IsLoopback(absl::string_view host) {
  return host == "localhost" || host == "::1" || absl::StartsWith(host, "127.");
}

absl::StatusOr<UniqueFd> ListenOn(const HostPort& address) {
  EK_ASSIGN_OR_RETURN(const AddressList list, Resolve(address, true));
  absl::Status last;
  for (const addrinfo* info = list.get(); info != nullptr; info = info->ai_next) {
    absl::StatusOr<UniqueFd> fd = ListenAt(*info->ai_addr, info->ai_addrlen);
    if (fd.ok()) return fd;
    last = Annotate(fd.status(), absl::StrCat("cannot listen on ", address.ToString()));
  }
  return last;
}

absl::StatusOr<UniqueFd> ListenAt(const sockaddr& address, socklen_t size) {
  // All ranks of a job may connect at once, and a rank whose connection finds no room retries a
  // second later. The kernel's own limit, net.core.somaxconn, has the same default.
  constexpr int kBacklog = 4096;
  UniqueFd fd = NewSocket(address.sa_family);
  if (!fd) return NoSocket();
  SetOption(fd.get(), SOL_SOCKET, SO_REUSEADDR,
            1);  // A port with lingering old connections counts as free.
  if (bind(fd.get(), &address, size) != 0) return absl::UnavailableError(ErrnoText("bind"));
  if (listen(fd.get(), kBacklog) != 0) return absl::UnavailableError(ErrnoText("listen"));
  return fd;
}

absl::StatusOr<UniqueFd> AcceptFrom(const UniqueFd& listener) {
  while (true) {
    sockaddr_storage peer = {};
    socklen_t size = sizeof(peer);
    UniqueFd fd(accept4(listener.get(), reinterpret_cast<sockaddr*>(&peer), &size,
                        SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (fd) {
      fd.MakePrivate();
      if (peer.ss_family != AF_UNIX) PrepareConnection(fd.get());
      return fd;
    }
    if (errno == EAGAIN || errno == EWOULDBLOCK) return UniqueFd();
    if (IsOfOneConnection(errno)) continue;
    return absl::ResourceExhaustedError(ErrnoText("accept"));
  }
}

absl::StatusOr<UniqueFd> StartToConnect(const sockaddr& address, socklen_t size) {
  UniqueFd fd = NewSocket(address.sa_family);
  if (!fd) return NoSocket();
  if (connect(fd.get(), &address, size) != 0 && errno != EINPROGRESS && errno != EINTR)
    return absl::UnavailableError(ErrnoText("connect"));
  return fd;
}

absl::Status FinishToConnect(const UniqueFd& fd) {
  int error = 0;
  socklen_t size = sizeof(error);
  getsockopt(fd.get(), SOL_SOCKET, SO_ERROR, &error, &size);
  errno = error;
  if (error != 0) return absl::UnavailableError(ErrnoText("connect"));
  if (IsConnectedToItself(fd.get())) return absl::UnavailableError("connect: Connection refused");
  PrepareConnection(fd.get());
  return absl::OkStatus();
}

absl::StatusOr<UniqueFd> ConnectTo(const HostPort& address, absl::Time deadline,
                                   const Cancelled& cancelled) {
  EK_ASSIGN_OR_RETURN(const AddressList list, Resolve(address, false));
  absl::Status last;
  for (const addrinfo* info = list.get(); info != nullptr; info = info->ai_next) {
    absl::StatusOr<UniqueFd> fd = ConnectOnce(*info, deadline, cancelled);
    if (fd.ok()) return fd;
    last = fd.status();
    if (cancelled != nullptr) EK_RETURN_IF_ERROR(cancelled());
  }
  return last;
}

absl::StatusOr<HostPort> LocalAddress(const UniqueFd& fd) {
  sockaddr_storage address = {};
  socklen_t size = sizeof(address);
  char host[NI_MAXHOST], port[NI_MAXSERV];
  HostPort local;
  if (getsockname(fd.get(), reinterpret_cast<sockaddr*>(&address), &size) != 0 ||
      getnameinfo(reinterpret_cast<sockaddr*>(&address), size, host, sizeof(host), port,
                  sizeof(port), NI_NUMERICHOST | NI_NUMERICSERV) != 0 ||
      !absl::SimpleAtoi(port, &local.port)) {
    return absl::InternalError("the address of a socket is unknown");
  }
  local.host = host;
  return local;
}

absl::StatusOr<std::string> AddressOfRouteTo(const std::string& host) {
  constexpr int kAnyPort = 9;
  EK_ASSIGN_OR_RETURN(const AddressList list, Resolve({host, kAnyPort}, false));
  for (const addrinfo* info = list.get(); info != nullptr; info = info->ai_next) {
    // connect() on a datagram socket chooses the route alone.
    const UniqueFd fd(socket(info->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
    if (!fd && IsLack(errno)) return NoSocket();
    if (!fd || connect(fd.get(), info->ai_addr, info->ai_addrlen) != 0) continue;
    EK_ASSIGN_OR_RETURN(const HostPort local, LocalAddress(fd));
    return local.host;
  }
  return absl::UnavailableError(absl::StrCat("there is no route to the host \"", host, "\""));
}

absl::Status WaitFor(const UniqueFd& fd, short events, absl::Time deadline,
                     const Cancelled& cancelled) {
  while (true) {
    pollfd entry = {fd.get(), events, 0};
    const absl::Time until =
        cancelled == nullptr ? deadline : std::min(deadline, SteadyNow() + kGlance);
    const int ready = poll(&entry, 1, PollTimeout(until));
    if (ready > 0) return absl::OkStatus();
    if (ready < 0 && errno != EINTR) return absl::InternalError(ErrnoText("poll"));
    if (SteadyNow() >= deadline) return absl::DeadlineExceededError("no reply");
    if (cancelled != nullptr) EK_RETURN_IF_ERROR(cancelled());
  }
}

absl::Status SendAll(const UniqueFd& fd, absl::string_view bytes, absl::Time deadline) {
  while (!bytes.empty()) {
    const Transfer sent = SendSome(fd, bytes);
    if (sent.is_over) return absl::UnavailableError("the connection was closed");
    bytes.remove_prefix(sent.bytes);
    if (!bytes.empty()) EK_RETURN_IF_ERROR(WaitFor(fd, POLLOUT, deadline));
  }
  return absl::OkStatus();
}

Transfer SendSome(const UniqueFd& fd, absl::string_view bytes) {
  Transfer total;
  while (!bytes.empty()) {
    const ssize_t sent = send(fd.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0) {
      total.is_over = errno != EAGAIN && errno != EWOULDBLOCK;
      break;
    }
    total.bytes += sent;
    bytes.remove_prefix(sent);
  }
  return total;
}

Transfer ReceiveSome(const UniqueFd& fd, std::string& buffer) {
  constexpr size_t kChunk = 64 << 10;
  char chunk[kChunk];
  while (true) {
    const ssize_t got = recv(fd.get(), chunk, kChunk, 0);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return {.is_over = errno != EAGAIN && errno != EWOULDBLOCK};
    buffer.append(chunk, got);
    return {.bytes = static_cast<size_t>(got), .is_over = got == 0};
  }
}

int PollTimeout(absl::Time deadline) {
  if (deadline == absl::InfiniteFuture()) return -1;
  const absl::Duration left =
      std::clamp(deadline - SteadyNow(), absl::ZeroDuration(), absl::Hours(1));
  return static_cast<int>(absl::ToInt64Milliseconds(absl::Ceil(left, absl::Milliseconds(1))));
}

}  // namespace evenkeel::internal
