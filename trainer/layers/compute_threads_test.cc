#include "evenkeel/trainer/layers/compute_threads.h"

#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

namespace evenkeel {
namespace {

TEST(ComputeThreadsTest, AreWhatWasSet) {
  SetComputeThreads(3);
  EXPECT_EQ(ComputeThreads(), 3);
  SetComputeThreads(0);
  EXPECT_EQ(ComputeThreads(), 1);
}

// Returns the exit code of a process that has the variable `name` and calls LimitSpinning(): 1 if
// that starts a program with GOMP_SPINCOUNT=1000, 2 if with another one, and 3 if it returns.
int ExitCodeWith(const char* name) {
  const pid_t child = fork();
  if (child == 0) {
    unsetenv("GOMP_SPINCOUNT");
    unsetenv("OMP_WAIT_POLICY");
    setenv(name, "passive", /*overwrite=*/1);
    char shell[] = "sh", flag[] = "-c",
         script[] = "test \"$GOMP_SPINCOUNT\" = 1000 || exit 2; exit 1";
    char* arguments[] = {shell, flag, script, nullptr};
    LimitSpinning("/bin/sh", arguments);
    _exit(3);
  }
  int status = 0;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

TEST(LimitSpinningTest, StartsTheProgramAgainUnlessTheUserHasChosen) {
  EXPECT_EQ(ExitCodeWith("UNRELATED"), 1);
  EXPECT_EQ(ExitCodeWith("OMP_WAIT_POLICY"), 3);
  EXPECT_EQ(ExitCodeWith("GOMP_SPINCOUNT"), 3);
}

}  // namespace
}  // namespace evenkeel
