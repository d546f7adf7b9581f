#include "evenkeel/comm/base/unique_fd.h"

#include <errno.h>
#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>

namespace evenkeel::internal {
namespace {

// One bit per descriptor that children must not keep. A table of atomics, since between fork() and
// exec() nothing may allocate or take a lock. Larger descriptors are inherited.
constexpr int kTracked = 1 << 16;
std::atomic<uint64_t> private_fds[kTracked / 64];

// Returns whether the bit was set.
bool Forget(int fd) {
  const uint64_t bit = uint64_t{1} << (fd % 64);
  return (private_fds[fd / 64].fetch_and(~bit) & bit) != 0;
}

void CloseInChild() {
  for (int word = 0; word < kTracked / 64; ++word) {
    if (private_fds[word].load() == 0) continue;
    for (int fd = word * 64; fd < word * 64 + 64; ++fd) {
      if (Forget(fd)) close(fd);
    }
  }
}

}  // namespace

UniqueFd::~UniqueFd() {
  if (fd_ < 0) return;
  // In a child it has been closed already, and its number may be another descriptor's by now.
  if (is_private_ && !Forget(fd_)) return;
  close(fd_);
}

int UniqueFd::Release() {
  if (is_private_) Forget(fd_);
  is_private_ = false;
  return std::exchange(fd_, -1);
}

void UniqueFd::MakePrivate() {
  if (fd_ < 0 || fd_ >= kTracked) return;
  static const int handler = pthread_atfork(nullptr, nullptr, &CloseInChild);
  if (handler != 0) return;
  private_fds[fd_ / 64].fetch_or(uint64_t{1} << (fd_ % 64));
  is_private_ = true;
}

bool WriteAll(int fd, absl::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t written = write(fd, bytes.data(), bytes.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return false;
    bytes.remove_prefix(written);
  }
  return true;
}

}  // namespace evenkeel::internal
