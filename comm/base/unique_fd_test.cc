#include "evenkeel/comm/base/unique_fd.h"

#include <errno.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <utility>

namespace evenkeel::internal {
namespace {

bool IsOpen(int fd) { return fcntl(fd, F_GETFD) >= 0; }

// Runs `body` in a child that fork() makes; returns its exit code.
template <typename Body>
int InChild(Body body) {
  const pid_t child = fork();
  if (child == 0) _exit(body());
  int status = 0;
  waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

struct Pair {
  UniqueFd a, b;
};

Pair SocketPair() {
  int fds[2] = {-1, -1};
  EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM, 0, fds), 0);
  return {UniqueFd(fds[0]), UniqueFd(fds[1])};
}

TEST(UniqueFdTest, AChildKeepsNoPrivateDescriptor) {
  Pair pair = SocketPair();
  pair.a.MakePrivate();
  EXPECT_EQ(
      InChild([&] { return (IsOpen(pair.a.get()) ? 1 : 0) + (IsOpen(pair.b.get()) ? 2 : 0); }), 2);
  EXPECT_TRUE(IsOpen(pair.a.get()));
}

TEST(UniqueFdTest, APeerSeesTheEndThoughAChildLives) {
  Pair pair = SocketPair();
  pair.a.MakePrivate();
  int gate[2];
  ASSERT_EQ(pipe(gate), 0);
  const pid_t child = fork();
  if (child == 0) {
    char byte;
    close(gate[1]);
    [[maybe_unused]] const ssize_t got = read(gate[0], &byte, 1);  // Until the parent is done.
    _exit(0);
  }
  // The child may not have closed its copy yet; the peer waits until it has.
  pair.a = UniqueFd();
  char byte;
  EXPECT_EQ(recv(pair.b.get(), &byte, 1, 0), 0);
  close(gate[1]);
  waitpid(child, nullptr, 0);
  close(gate[0]);
}

TEST(UniqueFdTest, AChildMayEndItsCopyAndReuseTheNumber) {
  Pair pair = SocketPair();
  pair.a.MakePrivate();
  EXPECT_EQ(InChild([&] {
              const int other = dup(pair.b.get());  // Takes the number that has become free.
              if (other != pair.a.get()) return 1;
              { const UniqueFd gone = std::move(pair.a); }
              return IsOpen(other) ? 0 : 2;
            }),
            0);
}

TEST(UniqueFdTest, AReleasedDescriptorIsInherited) {
  Pair pair = SocketPair();
  pair.a.MakePrivate();
  const UniqueFd again(pair.a.Release());
  EXPECT_EQ(InChild([&] { return IsOpen(again.get()) ? 0 : 1; }), 0);
}

TEST(WriteAllTest, WritesAllBytesOrFails) {
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  const UniqueFd read_end(ends[0]), write_end(ends[1]);
  ASSERT_TRUE(WriteAll(write_end.get(), "bytes"));
  char got[8] = {};
  EXPECT_EQ(read(read_end.get(), got, sizeof(got)), 5);
  EXPECT_STREQ(got, "bytes");
  EXPECT_TRUE(WriteAll(write_end.get(), ""));
  EXPECT_FALSE(WriteAll(read_end.get(), "bytes"));
  EXPECT_EQ(errno, EBADF);
}

}  // namespace
}  // namespace evenkeel::internal
