// The owner of a file descriptor, which closes it, and a function that writes to one.
//
//   UniqueFd fd(open(path, O_WRONLY | O_CLOEXEC));
//   if (!fd || !WriteAll(fd.get(), bytes)) ...  // errno has the reason
//
// Threads: thread-compatible.

#ifndef EVENKEEL_COMM_BASE_UNIQUE_FD_H_
#define EVENKEEL_COMM_BASE_UNIQUE_FD_H_

#include <utility>

#include "absl/strings/string_view.h"

namespace evenkeel::internal {

class UniqueFd {
 public:
  UniqueFd() = default;
  explicit UniqueFd(int fd) : fd_(fd) {}
  UniqueFd(UniqueFd&& other) noexcept
      : fd_(std::exchange(other.fd_, -1)), is_private_(other.is_private_) {}
  UniqueFd& operator=(UniqueFd&& other) noexcept {
    std::swap(fd_, other.fd_);
    std::swap(is_private_, other.is_private_);
    return *this;
  }
  ~UniqueFd();

  int get() const { return fd_; }
  // Returns the descriptor; the caller must close it.
  [[nodiscard]] int Release();
  explicit operator bool() const { return fd_ >= 0; }

  // Keeps it from children: one that fork() makes closes it at once, so that a worker of a data
  // loader, say, does not keep the connection of a dead rank alive. (Closing on exec is a flag of
  // the descriptor itself.)
  void MakePrivate();

 private:
  int fd_ = -1;
  bool is_private_ = false;
};

// Writes all bytes, and resumes after signals. Returns false and sets errno if the system refuses.
[[nodiscard]] bool WriteAll(int fd, absl::string_view bytes);

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_BASE_UNIQUE_FD_H_
