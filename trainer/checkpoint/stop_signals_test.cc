#include "evenkeel/trainer/checkpoint/stop_signals.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include "gtest/gtest.h"

namespace evenkeel {
namespace {

// In a process of its own: how it ends. `body` answers its exit code.
template <typename Body>
int EndOf(Body body) {
  const pid_t pid = fork();
  if (pid == 0) _exit(body());
  int status = 0;
  EXPECT_EQ(waitpid(pid, &status, 0), pid);
  return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
}

TEST(StopSignalsTest, TheFirstOneIsAWish) {
  for (const int signal : {SIGTERM, SIGINT}) {
    EXPECT_EQ(EndOf([&] {
                WatchStopSignals();
                DeferStopSignals();
                if (StopSignal() != 0) return 1;
                kill(getpid(), signal);
                while (StopSignal() == 0) usleep(1000);
                return StopSignal();
              }),
              signal);
  }
}

TEST(StopSignalsTest, TheSecondOneEndsTheProcess) {
  const auto twice = [](int first, int second) {
    WatchStopSignals();
    DeferStopSignals();
    kill(getpid(), first);
    while (StopSignal() == 0) usleep(1000);
    kill(getpid(), second);
    sleep(30);
    return 1;
  };
  EXPECT_EQ(EndOf([&] { return twice(SIGTERM, SIGTERM); }), 128 + SIGTERM);
  EXPECT_EQ(EndOf([&] { return twice(SIGTERM, SIGINT); }), 128 + SIGINT);
}

TEST(StopSignalsTest, BeforeTheyAreDeferredTheFirstOneEndsTheProcess) {
  for (const int signal : {SIGTERM, SIGINT}) {
    EXPECT_EQ(EndOf([&] {
                WatchStopSignals();
                kill(getpid(), signal);
                sleep(30);
                return 1;
              }),
              128 + signal);
  }
}

}  // namespace
}  // namespace evenkeel
