#include "evenkeel/comm/testing/connections.h"

#include <netinet/in.h>
#include <sys/socket.h>

#include <filesystem>

#include "absl/strings/numbers.h"
#include "gtest/gtest.h"

namespace evenkeel::internal {
namespace {

bool IsTcpConnection(int fd) {
  int protocol = 0;
  socklen_t size = sizeof(protocol);
  sockaddr_storage peer = {};
  socklen_t peer_size = sizeof(peer);
  return getsockopt(fd, SOL_SOCKET, SO_PROTOCOL, &protocol, &size) == 0 &&
         protocol == IPPROTO_TCP &&
         getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &peer_size) == 0;
}

void SetOption(int fd, int level, int option, int value) {
  EXPECT_EQ(setsockopt(fd, level, option, &value, sizeof(value)), 0);
}

}  // namespace

std::vector<int> TcpConnections() {
  std::vector<int> connections;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    int fd = -1;
    if (absl::SimpleAtoi(entry.path().filename().string(), &fd) && IsTcpConnection(fd))
      connections.push_back(fd);
  }
  return connections;
}

// Segments whose time to live is below the minimum are dropped without an answer; this host sends
// with 64.
void DropIncoming(int fd) { SetOption(fd, IPPROTO_IP, IP_MINTTL, 255); }
void StopDropping(int fd) { SetOption(fd, IPPROTO_IP, IP_MINTTL, 0); }
void SlowDown(int fd, int bytes_per_second) {
  SetOption(fd, SOL_SOCKET, SO_MAX_PACING_RATE, bytes_per_second);
}

}  // namespace evenkeel::internal
