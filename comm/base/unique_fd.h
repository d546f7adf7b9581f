// The owner of a file descriptor; it closes it.

#ifndef EVENKEEL_COMM_BASE_UNIQUE_FD_H_
#define EVENKEEL_COMM_BASE_UNIQUE_FD_H_

#include <unistd.h>

#include <utility>

namespace evenkeel::internal {

class UniqueFd {
 public:
  UniqueFd() = default;
  explicit UniqueFd(int fd) : fd_(fd) {}
  UniqueFd(UniqueFd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  UniqueFd& operator=(UniqueFd&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~UniqueFd() {
    if (fd_ >= 0) close(fd_);
  }

  int get() const { return fd_; }
  // Returns the descriptor; the caller must close it.
  [[nodiscard]] int Release() { return std::exchange(fd_, -1); }
  explicit operator bool() const { return fd_ >= 0; }

 private:
  int fd_ = -1;
};

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_BASE_UNIQUE_FD_H_
