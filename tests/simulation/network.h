// The network of a simulated world: files, TCP connections between hosts, and what can happen to
// them; and between hosts of one machine Unix sockets, memory, and futexes in it (same_machine.cc).
//
//   Network network(&world, {.latency = 20 * kMicrosecond});
//   network.Cut(a, b);             // no data between them arrives any more, until HealOneWay()
//   network.Reset(a, b);           // their connections break, with an error at both ends
//
// A connection carries bytes in order. They arrive in pieces, after a latency; a lost packet delays
// the bytes behind it by the time of a retransmission. A write fails with EAGAIN while the window
// is full. The kernel of a stopped host still receives; the kernel of a dead process closes its
// files; a lost host is cut off and does nothing.
//
// The functions implement those of the C library for libc.cc: on failure they return -1 and set
// errno. Sockets never block. Descriptors are never reused, so that use after close() is detected.

#ifndef EVENKEEL_TESTS_SIMULATION_NETWORK_H_
#define EVENKEEL_TESTS_SIMULATION_NETWORK_H_

#include <netinet/in.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <cerrno>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "evenkeel/tests/simulation/world.h"

namespace evenkeel::simulation {

struct NetworkOptions {
  Nanos latency = 20 * kMicrosecond;
  Nanos jitter = 20 * kMicrosecond;          // Added to each piece, uniformly.
  int64_t bytes_per_second = 1'000'000'000;  // Per connection.
  int window = 256 << 10;                    // Bytes in flight or unread, per direction.
  int lost_one_in = 0;                       // One of so many packets is lost; 0: none.
  Nanos retransmission = 200 * kMillisecond;
};

// The object behind a descriptor.
struct File {
  virtual ~File() = default;
  virtual short Ready() const = 0;  // The events that poll() reports.

  Host* host = nullptr;
  int fd = -1;
  std::vector<Thread*> waiters;
  std::vector<class Epoll*> watchers;
};

class Network {
 public:
  static constexpr int kFirstFd = 1 << 20;
  // The delays between two hosts of one machine.
  static constexpr Nanos kLocalLatency = 5 * kMicrosecond, kLocalJitter = 20 * kMicrosecond;
  // The times after which a kernel ends a new or an idle connection without a reply.
  static constexpr Nanos kConnectPatience = 127 * kSecond, kIdlePatience = 30 * kSecond;

  Network(World* world, const NetworkOptions& options);
  static Network* Get();

  // Returns "10.0.0.1" for the first host.
  static std::string AddressOf(const Host& host);

  // Packets from one host to the other are lost, until HealOneWay() has been called as often. Then
  // they arrive by retransmission, within a time as long as the cut.
  void CutOneWay(const Host* from, const Host* to);
  void HealOneWay(const Host* from, const Host* to);
  void Cut(const Host* a, const Host* b);
  void Reset(const Host* a, const Host* b);

  // Return the number of descriptors that running hosts have not closed, and the wrong uses of
  // descriptors so far.
  int OpenFiles() const;
  const std::string& misuse() const { return misuse_; }
  bool loses_packets() const { return options_.lost_one_in > 0; }

  // ---- Functions of the C library, on threads of the world ----
  int Socket(int domain);
  int EventFd();
  int EpollCreate();
  int Bind(int fd, const sockaddr& address);
  int Listen(int fd);
  int Accept(int fd);
  int Connect(int fd, const sockaddr& address, socklen_t size);
  int GetName(int fd, bool of_peer, sockaddr& address, socklen_t& size);
  int GetOption(int fd, int level, int option, void* value, socklen_t* size);
  int BytesWaiting(int fd);  // Sent and not acknowledged.
  int Shutdown(int fd, int how);
  int Close(int fd);
  ssize_t Write(int fd, const iovec* parts, int count);
  ssize_t Read(int fd, const iovec* parts, int count);
  ssize_t Send(int fd, const msghdr& message);
  ssize_t Receive(int fd, msghdr& message);
  int Poll(pollfd* entries, size_t count, Nanos deadline);
  int EpollControl(int epoll, int operation, int fd, const epoll_event* event);
  int EpollWait(int epoll, epoll_event* events, int most, Nanos deadline);

  // Takes a real file in memory, and returns the descriptor by which the calling host knows it.
  int AddMemory(int real_fd);
  int RealMemory(int fd, const char* use);
  void AddMapping(void* address, size_t bytes, int fd, int64_t offset);
  void RemoveMapping(void* address);
  // A file in memory, by number, and an offset: the same for all mappings.
  using Place = std::pair<uint64_t, int64_t>;
  std::optional<Place> PlaceOf(const void* address) const;
  int AwaitFutex(const Place& place, const uint32_t* word, uint32_t value, Nanos deadline);
  int WakeFutex(const Place& place, int most);

 private:
  friend struct Stream;
  using Address = std::pair<uint32_t, int>;  // IP address in the host's byte order, port.

  std::shared_ptr<File>& FileOf(int fd) { return files_.at(static_cast<size_t>(fd - kFirstFd)); }
  // Returns null for a descriptor that is not open.
  File* OpenFile(int fd) const {
    const auto index = static_cast<size_t>(fd - kFirstFd);
    return index < files_.size() ? files_[index].get() : nullptr;
  }
  File* FindFile(int fd, const char* use);
  template <typename Kind>
  Kind* Find(int fd, const char* use) {
    File* const file = FindFile(fd, use);
    Kind* const found = dynamic_cast<Kind*>(file);
    if (file != nullptr && found == nullptr) errno = EINVAL;
    return found;
  }
  int Add(std::shared_ptr<File> file);
  void Replace(int fd, std::shared_ptr<File> file);
  void Changed(File& file);
  bool IsCut(const Host* from, const Host* to) const { return cuts_.contains({from->id, to->id}); }
  bool IsCutAnyWay(const Host* a, const Host* b) const { return IsCut(a, b) || IsCut(b, a); }
  // Calls `arrive` for the other end of `from` after the arrival of everything sent before, and not
  // while the two hosts are cut off from each other.
  void Carry(const std::shared_ptr<struct Stream>& from, size_t bytes,
             std::function<void(Stream&)> arrive);
  void Arrive(const std::shared_ptr<Stream>& from, std::function<void(Stream&)> arrive);
  void Retransmit(Stream& stream);
  std::vector<std::shared_ptr<Stream>> StreamsBetween(const Host* a, const Host* b) const;
  void Break(Stream& stream, int error);
  void TryToConnect(const std::shared_ptr<Stream>& stream, const Address& to, Nanos pause);
  void OnDeath(Host* host);
  void Release(const std::shared_ptr<File>& file);
  Nanos Delay(size_t bytes, const Host* from, const Host* to);

  struct UnixSocket* FindUnix(int fd);  // Null: it is another file, or none.
  int MakeUnix();
  int BindUnix(UnixSocket& socket);
  int ListenUnix(UnixSocket& socket);
  int AcceptUnix(UnixSocket& listener);
  int ConnectUnix(UnixSocket& socket, const sockaddr& address, socklen_t size);
  static int NameOfUnix(const UnixSocket& socket, sockaddr& address, socklen_t& size);
  static int OptionOfUnix(int option, void* value, socklen_t& size);
  ssize_t SendUnix(UnixSocket& socket, const msghdr& message);
  ssize_t ReceiveUnix(UnixSocket& socket, msghdr& message);
  void ReleaseUnix(File& file);

  World& world_;
  const NetworkOptions options_;
  // From descriptor kFirstFd on; null where one is closed, since none is used again.
  std::vector<std::shared_ptr<File>> files_;
  // Both ends of each connection, by the numbers of the two hosts, the lower one first.
  std::map<std::pair<int, int>, std::vector<std::weak_ptr<Stream>>> streams_;
  std::map<Address, std::weak_ptr<struct Listener>> listeners_;
  struct Cuts {
    Nanos since = 0;
    int count = 0;
  };
  std::map<std::pair<int, int>, Cuts> cuts_;  // By the numbers of sender and receiver.
  std::map<std::pair<int, std::string>, std::weak_ptr<UnixSocket>> unix_listeners_;  // By machine.
  int unix_names_ = 0;
  struct Mapping {
    uintptr_t end = 0;
    uint64_t file = 0;
    int64_t offset = 0;
  };
  std::map<uintptr_t, Mapping> mappings_;  // By address.
  uint64_t memory_files_ = 0;
  std::map<Place, std::vector<Thread*>> futexes_;  // The threads that wait.
  std::string misuse_;
};

}  // namespace evenkeel::simulation

#endif  // EVENKEEL_TESTS_SIMULATION_NETWORK_H_
