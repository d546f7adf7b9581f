#include "evenkeel/tests/simulation/network.h"

#include <errno.h>
#include <linux/tcp.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstring>
#include <functional>

#include "absl/strings/str_cat.h"

namespace evenkeel::simulation {

class Epoll : public File {
 public:
  short Ready() const override { return 0; }
  void Queue(int fd) {
    if (queued.insert(fd).second) queue.push_back(fd);
  }

  std::map<int, std::pair<File*, epoll_event>> watched;
  // The descriptors that may be ready: those that have changed since they were last found idle.
  std::deque<int> queue;
  std::set<int> queued;
};

struct EventCounter : File {
  short Ready() const override { return static_cast<short>(POLLOUT | (count > 0 ? POLLIN : 0)); }

  uint64_t count = 0;
};

// A socket that neither listens nor is connected, or one for datagrams: it only has addresses.
struct Unconnected : File {
  short Ready() const override { return POLLOUT | POLLHUP; }

  std::pair<uint32_t, int> local = {0, 0}, peer = {0, 0};
};

struct Listener : Unconnected {
  short Ready() const override { return waiting.empty() ? 0 : POLLIN; }

  std::deque<std::shared_ptr<Stream>> waiting;
};

// One end of a connection.
struct Stream : Unconnected {
  short Ready() const override {
    short ready = 0;
    if (!inbox.empty() || has_peer_ended || error != 0) ready |= POLLIN;
    if (is_connected && HasRoom() > 0) ready |= POLLOUT;
    if (error != 0) ready |= POLLERR | POLLHUP | POLLOUT;
    if (has_ended && has_peer_ended) ready |= POLLHUP;
    return ready;
  }
  size_t HasRoom() const {
    if (other == nullptr) return 0;
    const size_t used = on_the_way + other->inbox.size();
    return used < window ? window - used : 0;
  }

  std::shared_ptr<Stream> other;  // Null before the connection is made.
  size_t window = 0;
  std::string inbox;
  size_t on_the_way = 0;  // Sent from this end.
  uint64_t acknowledged = 0;
  Nanos last_arrival = 0;  // When the last bytes arrive at the other end.
  // Sent from this end and lost in a cut, in order.
  std::deque<std::function<void(Stream&)>> lost;
  bool is_connected = false;
  bool has_ended = false;       // Sends no more.
  bool has_peer_ended = false;  // The end of the peer's bytes has arrived.
  bool is_closed = false;
  int error = 0;  // Reported by the next call.
  bool is_broken = false;
};

namespace {

Network* the_network = nullptr;

uint32_t NumberOf(const Host& host) { return 0x0a000001u + static_cast<uint32_t>(host.id); }
constexpr uint32_t kLoopback = 0x7f000001u;

int Fail(int error) {
  errno = error;
  return -1;
}

}  // namespace

Network::Network(World* world, const NetworkOptions& options) : world_(*world), options_(options) {
  the_network = this;
  world->on_death = [this](Host* host) { OnDeath(host); };
}

Network* Network::Get() { return the_network; }

std::string Network::AddressOf(const Host& host) {
  const uint32_t number = NumberOf(host);
  return absl::StrCat(number >> 24, ".", number >> 16 & 255, ".", number >> 8 & 255, ".",
                      number & 255);
}

File* Network::FindFile(int fd, const char* use) {
  File* const file = OpenFile(fd);
  Host* const host = World::Current()->host;
  if (file == nullptr || (file->host != host && !host->is_dead)) {
    // The files of a dead process are closed before its last thread ends.
    if (!host->is_dead) {
      absl::StrAppend(&misuse_, host->name, " calls ", use,
                      "() with a descriptor that is not open; ");
    }
    errno = EBADF;
    return nullptr;
  }
  return file;
}

int Network::Add(std::shared_ptr<File> file) {
  file->host = World::Current()->host;
  file->fd = kFirstFd + static_cast<int>(files_.size());
  return files_.emplace_back(std::move(file))->fd;
}

void Network::Changed(File& file) {
  for (Thread* const thread : file.waiters) world_.Wake(thread);
  for (Epoll* const watcher : file.watchers) {
    watcher->Queue(file.fd);
    for (Thread* const thread : watcher->waiters) world_.Wake(thread);
  }
}

void Network::Replace(int fd, std::shared_ptr<File> file) {
  std::shared_ptr<File>& old = FileOf(fd);
  if (!old->watchers.empty()) {
    // Their pointers to it would remain.
    absl::StrAppend(&misuse_, old->host->name, " watches a socket before it connects or listens; ");
  }
  old = std::move(file);
}

Nanos Network::Delay(size_t bytes, const Host* from, const Host* to) {
  if (from != to && to != nullptr && from->machine == to->machine) {
    return kLocalLatency +
           static_cast<Nanos>(world_.draws().Next() % static_cast<uint64_t>(kLocalJitter));
  }
  Nanos delay = options_.latency + static_cast<Nanos>(bytes) * kSecond / options_.bytes_per_second;
  if (options_.jitter > 0)
    delay += static_cast<Nanos>(world_.draws().Next() % static_cast<uint64_t>(options_.jitter));
  if (options_.lost_one_in > 0 && world_.draws().OneIn(options_.lost_one_in))
    delay += options_.retransmission;
  return delay;
}

void Network::Carry(const std::shared_ptr<Stream>& from, size_t bytes,
                    std::function<void(Stream&)> arrive) {
  from->last_arrival =
      std::max(from->last_arrival, world_.now() + Delay(bytes, from->host, from->other->host));
  world_.At(from->last_arrival, [this, from, arrive = std::move(arrive)] { Arrive(from, arrive); });
}

void Network::Arrive(const std::shared_ptr<Stream>& from, std::function<void(Stream&)> arrive) {
  if (from->lost.empty() && !IsCut(from->host, from->other->host)) return arrive(*from->other);
  from->lost.push_back(std::move(arrive));
}

void Network::Break(Stream& stream, int error) {
  if (stream.is_broken) return;
  stream.is_broken = true;
  stream.error = error;
  world_.Trace("is broken", stream.fd, error);
  Changed(stream);
}

void Network::CutOneWay(const Host* from, const Host* to) {
  world_.Trace("is cut", from->id, to->id);
  Cuts& cuts = cuts_[{from->id, to->id}];
  if (++cuts.count > 1) return;
  cuts.since = world_.now();
  world_.At(world_.now() + kIdlePatience, [this, from, to, since = world_.now()] {
    const auto cut = cuts_.find({from->id, to->id});
    if (cut == cuts_.end() || cut->second.since != since) return;
    for (const std::shared_ptr<Stream>& stream : StreamsBetween(from, to)) {
      if (stream->on_the_way == 0) Break(*stream, ETIMEDOUT);
    }
  });
}

void Network::Cut(const Host* a, const Host* b) {
  CutOneWay(a, b);
  CutOneWay(b, a);
}

void Network::HealOneWay(const Host* from, const Host* to) {
  world_.Trace("is healed", from->id, to->id);
  const auto cut = cuts_.find({from->id, to->id});
  if (cut == cuts_.end() || --cut->second.count > 0) return;
  // The interval between retransmissions doubles each time.
  const auto lasted = static_cast<double>(world_.now() - cut->second.since);
  cuts_.erase(cut);
  for (const std::shared_ptr<Stream>& stream : StreamsBetween(from, to)) {
    if (stream->host != from || stream->lost.empty()) continue;
    const Nanos pause = static_cast<Nanos>(world_.draws().Fraction() * lasted);
    world_.At(world_.now() + pause, [this, stream] { Retransmit(*stream); });
  }
}

void Network::Retransmit(Stream& stream) {
  while (!stream.lost.empty() && !IsCut(stream.host, stream.other->host)) {
    const std::function<void(Stream&)> arrive = std::move(stream.lost.front());
    stream.lost.pop_front();
    arrive(*stream.other);
  }
  Changed(*stream.other);  // It may have got acknowledgements only.
}

std::vector<std::shared_ptr<Stream>> Network::StreamsBetween(const Host* a, const Host* b) const {
  std::vector<std::shared_ptr<Stream>> found;
  const auto streams = streams_.find(std::minmax(a->id, b->id));
  if (streams == streams_.end()) return found;
  for (const std::weak_ptr<Stream>& weak : streams->second) {
    if (std::shared_ptr<Stream> stream = weak.lock()) found.push_back(std::move(stream));
  }
  return found;
}

void Network::Reset(const Host* a, const Host* b) {
  world_.Trace("is reset", a->id, b->id);
  for (const std::shared_ptr<Stream>& stream : StreamsBetween(a, b)) Break(*stream, ECONNRESET);
}

void Network::OnDeath(Host* host) {
  std::vector<std::shared_ptr<File>> files;
  for (const std::shared_ptr<File>& file : files_) {
    if (file != nullptr && file->host == host) files.push_back(file);
  }
  for (const std::shared_ptr<File>& file : files) Release(file);
}

// Closes a file as the kernel does: the peer of a connection with unread bytes receives a reset.
void Network::Release(const std::shared_ptr<File>& file) {
  FileOf(file->fd) = nullptr;
  ReleaseUnix(*file);
  for (Epoll* const watcher : file->watchers) watcher->watched.erase(file->fd);
  file->watchers.clear();
  file->waiters.clear();
  if (Epoll* const epoll = dynamic_cast<Epoll*>(file.get())) {
    for (auto& [fd, entry] : epoll->watched) std::erase(entry.first->watchers, epoll);
  }
  if (Listener* const listener = dynamic_cast<Listener*>(file.get())) {
    for (const std::shared_ptr<Stream>& stream : listener->waiting) {
      stream->is_closed = true;
      Carry(stream, 0, [this](Stream& end) { Break(end, ECONNRESET); });
    }
  }
  const std::shared_ptr<Stream> stream = std::dynamic_pointer_cast<Stream>(file);
  if (stream == nullptr) return;
  stream->is_closed = true;
  if (stream->other == nullptr || stream->is_broken) return;
  const bool has_unread = !stream->inbox.empty();
  Carry(stream, 0, [this, has_unread](Stream& end) {
    if (has_unread) return Break(end, ECONNRESET);
    end.has_peer_ended = true;
    Changed(end);
  });
}

int Network::OpenFiles() const {
  return static_cast<int>(std::count_if(files_.begin(), files_.end(), [](const auto& file) {
    return file != nullptr && !file->host->is_dead && !file->host->is_stopped;
  }));
}

int Network::Socket(int domain) {
  if (domain == AF_UNIX) return MakeUnix();
  return domain == AF_INET ? Add(std::make_shared<Unconnected>()) : Fail(EAFNOSUPPORT);
}

int Network::EventFd() { return Add(std::make_shared<EventCounter>()); }

int Network::EpollCreate() { return Add(std::make_shared<Epoll>()); }

int Network::Bind(int fd, const sockaddr& to) {
  if (UnixSocket* const socket = FindUnix(fd)) return BindUnix(*socket);
  Unconnected* const socket = Find<Unconnected>(fd, "bind");
  if (socket == nullptr) return -1;
  const sockaddr_in& address = reinterpret_cast<const sockaddr_in&>(to);
  const uint32_t number = ntohl(address.sin_addr.s_addr);
  if (number != INADDR_ANY && number != kLoopback && number != NumberOf(*socket->host))
    return Fail(EADDRNOTAVAIL);
  int port = ntohs(address.sin_port);
  if (port == 0) port = socket->host->next_port++;
  socket->local = {number, port};
  const auto taken = listeners_.find({NumberOf(*socket->host), port});
  return taken != listeners_.end() && !taken->second.expired() ? Fail(EADDRINUSE) : 0;
}

int Network::Listen(int fd) {
  if (UnixSocket* const socket = FindUnix(fd)) return ListenUnix(*socket);
  Unconnected* const socket = Find<Unconnected>(fd, "listen");
  if (socket == nullptr) return -1;
  auto listener = std::make_shared<Listener>();
  listener->host = socket->host;
  listener->fd = fd;
  listener->local = socket->local;
  listeners_[{NumberOf(*listener->host), listener->local.second}] = listener;
  Replace(fd, std::move(listener));
  return 0;
}

int Network::Accept(int fd) {
  if (UnixSocket* const socket = FindUnix(fd)) return AcceptUnix(*socket);
  Listener* const listener = Find<Listener>(fd, "accept");
  if (listener == nullptr) return -1;
  if (listener->waiting.empty()) return Fail(EAGAIN);
  std::shared_ptr<Stream> stream = std::move(listener->waiting.front());
  listener->waiting.pop_front();
  const int accepted = Add(std::move(stream));
  world_.Trace("accepts", fd, accepted);
  return accepted;
}

int Network::Connect(int fd, const sockaddr& to, socklen_t size) {
  if (UnixSocket* const socket = FindUnix(fd)) return ConnectUnix(*socket, to, size);
  Unconnected* const socket = Find<Unconnected>(fd, "connect");
  if (socket == nullptr) return -1;
  const sockaddr_in& address = reinterpret_cast<const sockaddr_in&>(to);
  uint32_t number = ntohl(address.sin_addr.s_addr);
  socket->peer = {number, ntohs(address.sin_port)};
  socket->local = {number == kLoopback ? kLoopback : NumberOf(*socket->host),
                   socket->host->next_port++};
  if (number == kLoopback) number = NumberOf(*socket->host);
  auto stream = std::make_shared<Stream>();
  static_cast<Unconnected&>(*stream) = *socket;
  stream->window = options_.window;
  Replace(fd, stream);
  world_.Trace("connects", fd, number);
  TryToConnect(stream, {number, stream->peer.second}, kSecond);
  return Fail(EINPROGRESS);
}

void Network::TryToConnect(const std::shared_ptr<Stream>& stream, const Address& to, Nanos pause) {
  const size_t index = to.first - 0x0a000001u;
  Host* const host = index < world_.hosts().size() ? world_.hosts()[index].get() : nullptr;
  const Nanos delay = Delay(0, stream->host, host);
  world_.At(world_.now() + delay, [this, stream, to, host, pause] {
    if (stream->is_closed || stream->is_broken) return;
    if (host == nullptr || IsCutAnyWay(stream->host, host)) {
      if (pause > kConnectPatience / 2) return Break(*stream, ETIMEDOUT);
      world_.At(world_.now() + pause,
                [this, stream, to, pause] { TryToConnect(stream, to, 2 * pause); });
      return;
    }
    const auto found = listeners_.find(to);
    const std::shared_ptr<Listener> listener =
        found == listeners_.end() ? nullptr : found->second.lock();
    if (listener == nullptr || host->is_dead) {
      world_.At(world_.now() + Delay(0, host, stream->host),
                [this, stream] { Break(*stream, ECONNREFUSED); });
      return;
    }
    auto end = std::make_shared<Stream>();
    end->host = host;
    end->local = {to.first, to.second};
    end->peer = stream->local;
    end->window = options_.window;
    end->is_connected = true;
    end->other = stream;
    stream->other = end;
    std::vector<std::weak_ptr<Stream>>& streams = streams_[std::minmax(stream->host->id, host->id)];
    streams.insert(streams.end(), {stream, end});
    listener->waiting.push_back(end);
    Changed(*listener);
    Carry(end, 0, [this](Stream& caller) {
      caller.is_connected = true;
      Changed(caller);
    });
  });
}

int Network::GetName(int fd, bool of_peer, sockaddr& name, socklen_t& size) {
  if (UnixSocket* const socket = FindUnix(fd)) return NameOfUnix(*socket, name, size);
  const Unconnected* const socket = Find<Unconnected>(fd, of_peer ? "getpeername" : "getsockname");
  if (socket == nullptr) return -1;
  const auto& [number, port] = of_peer ? socket->peer : socket->local;
  if (of_peer && port == 0) return Fail(ENOTCONN);
  size = sizeof(sockaddr_in);
  sockaddr_in& address = reinterpret_cast<sockaddr_in&>(name);
  address = {};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(number);
  return 0;
}

int Network::GetOption(int fd, int level, int option, void* value, socklen_t* size) {
  if (FindUnix(fd) != nullptr) return OptionOfUnix(option, value, *size);
  Stream* const stream = Find<Stream>(fd, "getsockopt");
  if (stream == nullptr) return -1;
  if (level == SOL_SOCKET && option == SO_ERROR) {
    std::memcpy(value, &stream->error, sizeof(int));
    if (!stream->is_broken) stream->error = 0;
    return 0;
  }
  if (level == IPPROTO_TCP && option == TCP_INFO) {
    tcp_info info = {};
    info.tcpi_unacked = stream->on_the_way > 0 ? 1 : 0;
    info.tcpi_bytes_acked = stream->acknowledged;
    *size = std::min<socklen_t>(*size, sizeof(info));
    std::memcpy(value, &info, *size);
    return 0;
  }
  return Fail(ENOPROTOOPT);
}

int Network::BytesWaiting(int fd) {
  const Stream* const stream = Find<Stream>(fd, "ioctl");
  return stream == nullptr ? -1 : static_cast<int>(stream->on_the_way);
}

int Network::Shutdown(int fd, int how) {
  Stream* const stream = Find<Stream>(fd, "shutdown");
  if (stream == nullptr) return -1;
  if (stream->is_broken || !stream->is_connected) return Fail(ENOTCONN);
  if (how != SHUT_RD && !stream->has_ended) {
    stream->has_ended = true;
    Carry(std::static_pointer_cast<Stream>(FileOf(fd)), 0, [this](Stream& end) {
      end.has_peer_ended = true;
      Changed(end);
    });
  }
  if (how != SHUT_WR) stream->has_peer_ended = true;
  Changed(*stream);
  return 0;
}

int Network::Close(int fd) {
  if (Find<File>(fd, "close") == nullptr) return -1;
  world_.Trace("closes", fd);
  Release(std::shared_ptr<File>(FileOf(fd)));
  return 0;
}

ssize_t Network::Send(int fd, const msghdr& message) {
  if (UnixSocket* const socket = FindUnix(fd)) return SendUnix(*socket, message);
  return Write(fd, message.msg_iov, static_cast<int>(message.msg_iovlen));
}

ssize_t Network::Receive(int fd, msghdr& message) {
  if (UnixSocket* const socket = FindUnix(fd)) return ReceiveUnix(*socket, message);
  return Read(fd, message.msg_iov, static_cast<int>(message.msg_iovlen));
}

ssize_t Network::Write(int fd, const iovec* parts, int count) {
  File* const file = Find<File>(fd, "write");
  if (file == nullptr) return -1;
  if (EventCounter* const counter = dynamic_cast<EventCounter*>(file)) {
    uint64_t add;
    std::memcpy(&add, parts[0].iov_base, sizeof(add));
    counter->count += add;
    Changed(*counter);
    return sizeof(add);
  }
  Stream* const stream = dynamic_cast<Stream*>(file);
  if (stream == nullptr) return Fail(EPIPE);
  if (stream->error != 0 && stream->is_broken) return Fail(std::exchange(stream->error, EPIPE));
  if (stream->has_ended) return Fail(EPIPE);
  if (!stream->is_connected) return Fail(EAGAIN);
  std::string bytes;
  size_t room = stream->HasRoom();
  if (room == 0) return Fail(EAGAIN);
  for (int i = 0; i < count && room > 0; ++i) {
    const size_t take = std::min(room, parts[i].iov_len);
    bytes.append(static_cast<const char*>(parts[i].iov_base), take);
    room -= take;
  }
  stream->on_the_way += bytes.size();
  // The bytes go in one or two packets, which a reader may receive one after the other.
  const std::shared_ptr<Stream> owner = std::static_pointer_cast<Stream>(FileOf(fd));
  const auto send = [this, &owner](std::string packet) {
    const size_t size = packet.size();
    Carry(owner, size, [this, owner, packet = std::move(packet)](Stream& end) {
      Arrive(owner->other, [size = packet.size()](Stream& sender) {
        sender.on_the_way -= size;
        sender.acknowledged += size;
      });
      if (end.is_closed || end.is_broken || end.host->is_dead) {
        world_.At(world_.now() + Delay(0, end.host, owner->host),
                  [this, owner] { Break(*owner, ECONNRESET); });
        return;
      }
      end.inbox += packet;
      Changed(end);
    });
  };
  const ssize_t sent = static_cast<ssize_t>(bytes.size());
  world_.Trace("writes", fd, sent);
  if (sent > 1 && world_.draws().OneIn(4)) {
    const int first = 1 + world_.draws().Below(static_cast<int>(sent) - 1);
    send(bytes.substr(0, first));
    send(bytes.substr(first));
  } else {
    send(std::move(bytes));
  }
  return sent;
}

ssize_t Network::Read(int fd, const iovec* parts, int count) {
  File* const file = Find<File>(fd, "read");
  if (file == nullptr) return -1;
  if (EventCounter* const counter = dynamic_cast<EventCounter*>(file)) {
    if (counter->count == 0) return Fail(EAGAIN);
    std::memcpy(parts[0].iov_base, &counter->count, sizeof(counter->count));
    counter->count = 0;
    return sizeof(counter->count);
  }
  Stream* const stream = dynamic_cast<Stream*>(file);
  if (stream == nullptr) return Fail(ENOTCONN);
  if (stream->is_broken) {
    const int error = std::exchange(stream->error, 0);
    return error == 0 || error == EPIPE ? 0 : Fail(error);
  }
  if (stream->inbox.empty()) return stream->has_peer_ended ? 0 : Fail(EAGAIN);
  size_t done = 0;
  for (int i = 0; i < count && done < stream->inbox.size(); ++i) {
    const size_t take = std::min(parts[i].iov_len, stream->inbox.size() - done);
    std::memcpy(parts[i].iov_base, stream->inbox.data() + done, take);
    done += take;
  }
  stream->inbox.erase(0, done);
  world_.Trace("reads", fd, static_cast<int64_t>(done));
  if (stream->other != nullptr) Changed(*stream->other);  // There is room again.
  return static_cast<ssize_t>(done);
}

int Network::Poll(pollfd* entries, size_t count, Nanos deadline) {
  Thread* const self = World::Current();
  while (true) {
    int ready = 0;
    std::vector<File*> files(count);
    for (size_t i = 0; i < count; ++i) {
      entries[i].revents = 0;
      if (entries[i].fd < 0) continue;
      files[i] = Find<File>(entries[i].fd, "poll");
      entries[i].revents = static_cast<short>(
          files[i] == nullptr ? POLLNVAL
                              : files[i]->Ready() & (entries[i].events | POLLERR | POLLHUP));
      if (entries[i].revents != 0) ++ready;
    }
    if (ready > 0 || world_.now() >= deadline) return ready;
    for (File* const file : files) {
      if (file != nullptr) file->waiters.push_back(self);
    }
    (void)world_.Block(deadline, "polls");
    for (size_t i = 0; i < count; ++i) {
      // The file may have been closed meanwhile.
      if (files[i] != nullptr && OpenFile(entries[i].fd) == files[i])
        std::erase(files[i]->waiters, self);
    }
  }
}

int Network::EpollControl(int epoll_fd, int operation, int fd, const epoll_event* event) {
  Epoll* const epoll = Find<Epoll>(epoll_fd, "epoll_ctl");
  File* const file = epoll == nullptr ? nullptr : Find<File>(fd, "epoll_ctl");
  if (file == nullptr) return -1;
  if (operation == EPOLL_CTL_DEL) {
    std::erase(file->watchers, epoll);
    return epoll->watched.erase(fd) > 0 ? 0 : Fail(ENOENT);
  }
  if (epoll->watched.contains(fd) != (operation == EPOLL_CTL_MOD))
    return Fail(operation == EPOLL_CTL_MOD ? ENOENT : EEXIST);
  if (operation == EPOLL_CTL_ADD) file->watchers.push_back(epoll);
  epoll->watched[fd] = {file, *event};
  if (file->Ready() != 0) Changed(*file);
  return 0;
}

int Network::EpollWait(int epoll_fd, epoll_event* events, int most, Nanos deadline) {
  Epoll* const epoll = Find<Epoll>(epoll_fd, "epoll_wait");
  if (epoll == nullptr) return -1;
  const std::shared_ptr<File> held = FileOf(epoll_fd);  // Another thread may close it.
  while (true) {
    int count = 0;
    for (size_t left = epoll->queue.size(); left > 0 && count < most; --left) {
      const int fd = epoll->queue.front();
      epoll->queue.pop_front();
      epoll->queued.erase(fd);
      const auto found = epoll->watched.find(fd);
      if (found == epoll->watched.end()) continue;
      const auto& [file, event] = found->second;
      const uint32_t ready =
          static_cast<uint32_t>(file->Ready()) & (event.events | EPOLLERR | EPOLLHUP);
      if (ready == 0) continue;
      events[count++] = {.events = ready, .data = event.data};
      epoll->Queue(fd);  // At the end, so that each has its turn.
    }
    if (count > 0 || world_.now() >= deadline) return count;
    epoll->waiters.push_back(World::Current());
    (void)world_.Block(deadline, "polls");
    std::erase(epoll->waiters, World::Current());
    if (OpenFile(epoll_fd) != epoll) return Fail(EBADF);
  }
}

}  // namespace evenkeel::simulation
