// The objects that processes of one machine share: Unix sockets, the files in memory that they pass
// over these, and futexes in that memory.
//
// A message arrives at once, and whole. Files in memory are real ones, so each rank has a mapping
// of its own; what a rank wrote before it died remains. Their pages are allocated when they are
// used.

#include <errno.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstring>
#include <deque>
#include <utility>

#include "absl/strings/str_format.h"
#include "evenkeel/tests/simulation/network.h"

namespace evenkeel::simulation {

struct MemoryFile {
  MemoryFile(int fd, uint64_t number) : fd(fd), number(number) {}
  ~MemoryFile() { close(fd); }
  MemoryFile(const MemoryFile&) = delete;
  MemoryFile& operator=(const MemoryFile&) = delete;

  const int fd;  // The real one.
  const uint64_t number;
};

namespace {

// As many small messages as Linux lets a socket have that are not received.
constexpr size_t kMostUnread = 200;
constexpr size_t kPathBegin = offsetof(sockaddr_un, sun_path);

struct MemoryDescriptor : File {
  explicit MemoryDescriptor(std::shared_ptr<MemoryFile> file) : file(std::move(file)) {}
  short Ready() const override { return POLLIN | POLLOUT; }

  const std::shared_ptr<MemoryFile> file;
};

int Fail(int error) {
  errno = error;
  return -1;
}

}  // namespace

struct UnixSocket : File {
  struct Message {
    std::string bytes;
    std::shared_ptr<MemoryFile> memory;  // Null: there is no descriptor in it.
  };

  short Ready() const override {
    short ready = 0;
    if (!waiting.empty() || !unread.empty() || has_peer_closed) ready |= POLLIN;
    if (other != nullptr && other->unread.size() < kMostUnread) ready |= POLLOUT;
    if (has_peer_closed) ready |= POLLOUT | POLLHUP;
    return ready;
  }

  std::string name;  // Empty: none.
  bool is_listening = false;
  std::deque<std::shared_ptr<UnixSocket>> waiting;  // At a listener.
  std::shared_ptr<UnixSocket> other;                // Null: not connected, or no longer.
  std::deque<Message> unread;
  bool has_peer_closed = false;
  int error = 0;  // Reported by the next call.
};

UnixSocket* Network::FindUnix(int fd) {
  File* const file = OpenFile(fd);
  if (file == nullptr || file->host != World::Current()->host) return nullptr;
  return dynamic_cast<UnixSocket*>(file);
}

int Network::MakeUnix() { return Add(std::make_shared<UnixSocket>()); }

// The kernel chooses the name, in the abstract name space.
int Network::BindUnix(UnixSocket& socket) {
  socket.name = absl::StrFormat("%05x", ++unix_names_);
  return 0;
}

int Network::ListenUnix(UnixSocket& socket) {
  socket.is_listening = true;
  unix_listeners_[{socket.host->machine, socket.name}] =
      std::static_pointer_cast<UnixSocket>(FileOf(socket.fd));
  return 0;
}

int Network::AcceptUnix(UnixSocket& listener) {
  if (!listener.is_listening) return Fail(EINVAL);
  if (listener.waiting.empty()) return Fail(EAGAIN);
  const int accepted = Add(listener.waiting.front());
  listener.waiting.pop_front();
  world_.Trace("accepts", listener.fd, accepted);
  return accepted;
}

int Network::ConnectUnix(UnixSocket& socket, const sockaddr& address, socklen_t size) {
  const char* const path = reinterpret_cast<const sockaddr_un&>(address).sun_path;
  if (size <= kPathBegin + 1 || path[0] != '\0') return Fail(ENOENT);
  const std::string name(path + 1, size - kPathBegin - 1);
  const auto found = unix_listeners_.find({socket.host->machine, name});
  const std::shared_ptr<UnixSocket> listener =
      found == unix_listeners_.end() ? nullptr : found->second.lock();
  if (listener == nullptr) return Fail(ECONNREFUSED);
  auto end = std::make_shared<UnixSocket>();
  end->host = listener->host;
  end->other = std::static_pointer_cast<UnixSocket>(FileOf(socket.fd));
  socket.other = end;
  listener->waiting.push_back(std::move(end));
  world_.Trace("connects", socket.fd, listener->fd);
  Changed(*listener);
  return 0;
}

int Network::NameOfUnix(const UnixSocket& socket, sockaddr& address, socklen_t& size) {
  sockaddr_un name = {};
  name.sun_family = AF_UNIX;
  const size_t length = std::min(socket.name.size(), sizeof(name.sun_path) - 1);
  std::memcpy(name.sun_path + 1, socket.name.data(), length);
  const socklen_t all =
      static_cast<socklen_t>(socket.name.empty() ? kPathBegin : kPathBegin + 1 + length);
  std::memcpy(&address, &name, std::min(size, all));
  size = all;
  return 0;
}

int Network::OptionOfUnix(int option, void* value, socklen_t& size) {
  if (option != SO_PEERCRED) return Fail(ENOPROTOOPT);
  const ucred peer = {.pid = getpid(), .uid = geteuid(), .gid = getegid()};
  size = std::min<socklen_t>(size, sizeof(peer));
  std::memcpy(value, &peer, size);
  return 0;
}

ssize_t Network::SendUnix(UnixSocket& socket, const msghdr& message) {
  if (socket.error != 0) return Fail(std::exchange(socket.error, 0));
  if (socket.has_peer_closed) return Fail(EPIPE);
  if (socket.other == nullptr) return Fail(ENOTCONN);
  if (socket.other->unread.size() >= kMostUnread) return Fail(EAGAIN);
  UnixSocket::Message sent;
  for (size_t i = 0; i < message.msg_iovlen; ++i)
    sent.bytes.append(static_cast<const char*>(message.msg_iov[i].iov_base),
                      message.msg_iov[i].iov_len);
  if (const cmsghdr* const item = CMSG_FIRSTHDR(&message); item != nullptr) {
    int fd = -1;
    std::memcpy(&fd, CMSG_DATA(item), sizeof(fd));
    const MemoryDescriptor* const memory = Find<MemoryDescriptor>(fd, "sendmsg");
    if (memory == nullptr) return Fail(EBADF);
    sent.memory = memory->file;
  }
  const ssize_t bytes = static_cast<ssize_t>(sent.bytes.size());
  socket.other->unread.push_back(std::move(sent));
  world_.Trace("sends", socket.fd, bytes);
  Changed(*socket.other);
  return bytes;
}

ssize_t Network::ReceiveUnix(UnixSocket& socket, msghdr& message) {
  if (socket.error != 0) return Fail(std::exchange(socket.error, 0));
  if (socket.unread.empty() && !socket.has_peer_closed) return Fail(EAGAIN);
  message.msg_flags = 0;
  const size_t room = std::exchange(message.msg_controllen, 0);
  if (socket.unread.empty()) return 0;
  const UnixSocket::Message received = std::move(socket.unread.front());
  socket.unread.pop_front();
  size_t done = 0;
  for (size_t i = 0; i < message.msg_iovlen && done < received.bytes.size(); ++i) {
    const size_t part = std::min(message.msg_iov[i].iov_len, received.bytes.size() - done);
    std::memcpy(message.msg_iov[i].iov_base, received.bytes.data() + done, part);
    done += part;
  }
  if (done < received.bytes.size()) message.msg_flags |= MSG_TRUNC;
  if (received.memory != nullptr && room < CMSG_LEN(sizeof(int))) {
    message.msg_flags |= MSG_CTRUNC;
  } else if (received.memory != nullptr) {
    const int fd = Add(std::make_shared<MemoryDescriptor>(received.memory));
    cmsghdr* const item = static_cast<cmsghdr*>(message.msg_control);
    *item = {.cmsg_len = CMSG_LEN(sizeof(int)), .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS};
    std::memcpy(CMSG_DATA(item), &fd, sizeof(fd));
    message.msg_controllen = CMSG_LEN(sizeof(int));
  }
  world_.Trace("receives", socket.fd, static_cast<int64_t>(done));
  if (socket.other != nullptr) Changed(*socket.other);  // There is room again.
  return static_cast<ssize_t>(done);
}

// The peer of a socket with unread messages, and of one that was not accepted, receives a reset.
void Network::ReleaseUnix(File& file) {
  UnixSocket* const socket = dynamic_cast<UnixSocket*>(&file);
  if (socket == nullptr) return;
  const auto end_peer = [this](UnixSocket& closed, bool is_reset) {
    if (closed.other == nullptr) return;
    const std::shared_ptr<UnixSocket> peer = std::exchange(closed.other, nullptr);
    peer->other = nullptr;
    peer->has_peer_closed = true;
    if (is_reset) peer->error = ECONNRESET;
    Changed(*peer);
  };
  if (socket->is_listening) unix_listeners_.erase({socket->host->machine, socket->name});
  for (const std::shared_ptr<UnixSocket>& caller : socket->waiting) end_peer(*caller, true);
  socket->waiting.clear();
  end_peer(*socket, !socket->unread.empty());
}

int Network::AddMemory(int real_fd) {
  if (real_fd < 0) return -1;
  return Add(
      std::make_shared<MemoryDescriptor>(std::make_shared<MemoryFile>(real_fd, ++memory_files_)));
}

int Network::RealMemory(int fd, const char* use) {
  const MemoryDescriptor* const memory = Find<MemoryDescriptor>(fd, use);
  return memory == nullptr ? -1 : memory->file->fd;
}

void Network::AddMapping(void* address, size_t bytes, int fd, int64_t offset) {
  const MemoryDescriptor* const memory = Find<MemoryDescriptor>(fd, "mmap");
  if (memory == nullptr) return;
  mappings_[reinterpret_cast<uintptr_t>(address)] = {reinterpret_cast<uintptr_t>(address) + bytes,
                                                     memory->file->number, offset};
}

void Network::RemoveMapping(void* address) {
  mappings_.erase(reinterpret_cast<uintptr_t>(address));
}

std::optional<Network::Place> Network::PlaceOf(const void* address) const {
  const uintptr_t at = reinterpret_cast<uintptr_t>(address);
  const auto after = mappings_.upper_bound(at);
  if (after == mappings_.begin()) return std::nullopt;
  const auto& [begin, mapping] = *std::prev(after);
  if (at >= mapping.end) return std::nullopt;
  return Place{mapping.file, mapping.offset + static_cast<int64_t>(at - begin)};
}

int Network::AwaitFutex(const Place& place, const uint32_t* word, uint32_t value, Nanos deadline) {
  if (__atomic_load_n(word, __ATOMIC_SEQ_CST) != value) return Fail(EAGAIN);
  futexes_[place].push_back(World::Current());
  const bool is_woken = world_.Block(deadline, "waits in a futex");
  const auto found = futexes_.find(place);
  if (found != futexes_.end()) {
    std::erase(found->second, World::Current());
    if (found->second.empty()) futexes_.erase(found);
  }
  return is_woken ? 0 : Fail(ETIMEDOUT);
}

int Network::WakeFutex(const Place& place, int most) {
  const auto found = futexes_.find(place);
  int woken = 0;
  while (found != futexes_.end() && woken < most && !found->second.empty()) {
    world_.Wake(found->second.front());
    found->second.erase(found->second.begin());
    ++woken;
  }
  if (found != futexes_.end() && found->second.empty()) futexes_.erase(found);
  world_.Trace("wakes", static_cast<int64_t>(place.first), place.second);
  return woken;
}

}  // namespace evenkeel::simulation
