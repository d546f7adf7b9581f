#include "evenkeel/tests/faults/store_proxy.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "absl/memory/memory.h"
#include "absl/strings/str_cat.h"

namespace evenkeel {
namespace {

sockaddr_in Loopback(int port) {
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  return address;
}

int NewSocket() { return socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0); }

void SendAtOnce(int fd) {
  const int on = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
}

// The other end reads an error, not an end.
void Reset(int fd) {
  const linger at_once = {.l_onoff = 1, .l_linger = 0};
  setsockopt(fd, SOL_SOCKET, SO_LINGER, &at_once, sizeof(at_once));
  close(fd);
}

// False when one of the two is gone.
bool Copy(int from, int to) {
  char bytes[65536];
  const ssize_t size = recv(from, bytes, sizeof(bytes), 0);
  for (ssize_t sent = 0; sent < size;) {
    const ssize_t now = send(to, bytes + sent, size - sent, MSG_NOSIGNAL);
    if (now <= 0) return false;
    sent += now;
  }
  return size > 0;
}

}  // namespace

absl::StatusOr<std::unique_ptr<StoreProxy>> StoreProxy::Create(int port) {
  const int listener = NewSocket();
  sockaddr_in address = Loopback(0);
  socklen_t size = sizeof(address);
  int wake[2];
  if (listener < 0 || bind(listener, reinterpret_cast<sockaddr*>(&address), sizeof(address)) != 0 ||
      listen(listener, 16) != 0 ||
      getsockname(listener, reinterpret_cast<sockaddr*>(&address), &size) != 0 ||
      pipe2(wake, O_CLOEXEC) != 0) {
    return absl::UnavailableError(absl::StrCat("the proxy cannot listen: ", std::strerror(errno)));
  }
  return absl::WrapUnique(new StoreProxy(
      listener, wake[0], wake[1], absl::StrCat("127.0.0.1:", ntohs(address.sin_port)), port));
}

StoreProxy::StoreProxy(int listener, int wake_read, int wake_write, std::string address, int port)
    : listener_(listener),
      wake_read_(wake_read),
      wake_write_(wake_write),
      address_(std::move(address)),
      port_(port),
      thread_([this] { Carry(); }) {}

StoreProxy::~StoreProxy() {
  {
    absl::MutexLock lock(&mutex_);
    is_over_ = true;
    (void)!write(wake_write_, "x", 1);
  }
  thread_.join();
  for (const Pipe& pipe : pipes_) {
    close(pipe.near);
    close(pipe.far);
  }
  for (int fd : {listener_, wake_read_, wake_write_}) close(fd);
}

void StoreProxy::Cut(How how) {
  absl::MutexLock lock(&mutex_);
  is_cut_ = true;
  (void)!write(wake_write_, "x", 1);
  if (how == How::kSilent) return;
  for (const Pipe& pipe : pipes_) {
    Reset(pipe.near);
    Reset(pipe.far);
  }
  pipes_.clear();
}

void StoreProxy::Carry() {
  while (true) {
    std::vector<pollfd> fds = {{.fd = wake_read_, .events = POLLIN, .revents = 0}};
    {
      absl::MutexLock lock(&mutex_);
      if (is_over_) return;
      if (!is_cut_) {
        fds.push_back({.fd = listener_, .events = POLLIN, .revents = 0});
        for (const Pipe& pipe : pipes_) {
          fds.push_back({.fd = pipe.near, .events = POLLIN, .revents = 0});
          fds.push_back({.fd = pipe.far, .events = POLLIN, .revents = 0});
        }
      }
    }
    poll(fds.data(), fds.size(), -1);
    absl::MutexLock lock(&mutex_);
    if (is_over_) return;
    if (fds[0].revents != 0) {
      char byte;
      (void)!read(wake_read_, &byte, 1);
    }
    if (is_cut_ || fds.size() == 1) continue;
    for (size_t i = (fds.size() - 2) / 2; i-- > 0;) {
      Pipe& pipe = pipes_[i];
      const bool goes_on = (fds[2 + 2 * i].revents == 0 || Copy(pipe.near, pipe.far)) &&
                           (fds[3 + 2 * i].revents == 0 || Copy(pipe.far, pipe.near));
      if (goes_on) continue;
      close(pipe.near);
      close(pipe.far);
      pipes_.erase(pipes_.begin() + static_cast<ptrdiff_t>(i));
    }
    if (fds[1].revents != 0) Accept();
  }
}

void StoreProxy::Accept() {
  Pipe pipe{.near = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC), .far = NewSocket()};
  const sockaddr_in address = Loopback(port_);
  if (pipe.near < 0 ||
      connect(pipe.far, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) != 0) {
    if (pipe.near >= 0) close(pipe.near);
    close(pipe.far);
    return;
  }
  SendAtOnce(pipe.near);
  SendAtOnce(pipe.far);
  pipes_.push_back(pipe);
}

}  // namespace evenkeel
