// The network of a simulated world: files, TCP connections between hosts, and what can happen to
// them.
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
#include <sys/uio.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
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
  virtual void Close() {}

  Host* host = nullptr;
  int fd = -1;
  std::vector<Thread*> waiters;
  std::vector<class Epoll*> watchers;
};

class Network {
 public:
  static constexpr int kFirstFd = 1 << 20;
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
  int Socket(int type);
  int EventFd();
  int EpollCreate();
  int Bind(int fd, const sockaddr_in& address);
  int Listen(int fd);
  int Accept(int fd);
  int Connect(int fd, const sockaddr_in& address);
  int GetName(int fd, bool of_peer, sockaddr_in& address);
  int GetOption(int fd, int level, int option, void* value, socklen_t* size);
  int BytesWaiting(int fd);  // Sent and not acknowledged.
  int Shutdown(int fd, int how);
  int Close(int fd);
  ssize_t Write(int fd, const iovec* parts, int count);
  ssize_t Read(int fd, const iovec* parts, int count);
  int Poll(pollfd* entries, size_t count, Nanos deadline);
  int EpollControl(int epoll, int operation, int fd, const epoll_event* event);
  int EpollWait(int epoll, epoll_event* events, int most, Nanos deadline);

 private:
  friend struct Stream;
  using Address = std::pair<uint32_t, int>;  // IP address in the host's byte order, port.

  template <typename Kind>
  Kind* Find(int fd, const char* use);
  int Add(std::shared_ptr<File> file);
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
  Nanos Delay(size_t bytes);

  World& world_;
  const NetworkOptions options_;
  std::map<int, std::shared_ptr<File>> files_;
  std::vector<std::weak_ptr<Stream>> streams_;
  std::map<Address, std::weak_ptr<struct Listener>> listeners_;
  struct Cuts {
    Nanos since = 0;
    int count = 0;
  };
  std::map<std::pair<int, int>, Cuts> cuts_;  // By the numbers of sender and receiver.
  int next_fd_ = kFirstFd;
  std::string misuse_;
};

}  // namespace evenkeel::simulation

#endif  // EVENKEEL_TESTS_SIMULATION_NETWORK_H_
