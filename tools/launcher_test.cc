#include "evenkeel/tools/launcher.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "evenkeel/comm/base/clock.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/environment.h"
#include "evenkeel/comm/factory.h"
#include "evenkeel/comm/status.h"

namespace evenkeel {
namespace {

TEST(PauseAfterTest, DoublesUntilAnAttemptLivesLong) {
  const LaunchOptions options;
  absl::Duration pause = absl::ZeroDuration();
  for (int seconds : {1, 2, 4, 8, 16, 30, 30}) {
    pause = PauseAfter(absl::Seconds(9.9), pause, options);
    EXPECT_EQ(pause, absl::Seconds(seconds));
  }
  EXPECT_EQ(PauseAfter(absl::Seconds(10), pause, options), absl::Seconds(1));
  EXPECT_EQ(PauseAfter(absl::Hours(1), absl::ZeroDuration(), options), absl::Seconds(1));
}

TEST(PauseAfterTest, AFirstPauseMayBeLongerThanTheLongest) {
  const LaunchOptions options{.restart_pause = absl::Seconds(60)};
  EXPECT_EQ(PauseAfter(absl::ZeroDuration(), absl::ZeroDuration(), options), absl::Seconds(60));
  EXPECT_EQ(PauseAfter(absl::ZeroDuration(), absl::Seconds(60), options), absl::Seconds(60));
}

// Waits until the launcher has reaped all other ranks.
absl::Status AwaitEndOfOthers(const std::vector<int64_t>& pids) {
  const absl::Time deadline = SteadyNow() + absl::Seconds(20);
  for (const int64_t pid : pids) {
    while (pid != getpid() && kill(static_cast<pid_t>(pid), 0) == 0) {
      if (SteadyNow() > deadline) return absl::DeadlineExceededError("another rank still runs");
      absl::SleepFor(absl::Milliseconds(1));
    }
  }
  return absl::OkStatus();
}

// Runs one of three ranks. Rank 2 aborts the group, and ends after the launcher has reaped the
// others, which end with the error, wherever the abort meets them.
absl::Status RunRank() {
  EK_ASSIGN_OR_RETURN(const Environment environment, ReadEnvironment());
  EK_ASSIGN_OR_RETURN(const std::unique_ptr<Communicator> comm, CreateCommunicator(environment));
  int64_t pid = getpid();
  std::vector<int64_t> pids(comm->world_size());
  EK_RETURN_IF_ERROR(comm->AllGather(absl::MakeSpan(&pid, 1), absl::MakeSpan(pids)));
  if (comm->rank() != 2) return comm->Barrier();
  comm->Abort(absl::DataLossError("the data is broken"));
  EK_RETURN_IF_ERROR(AwaitEndOfOthers(pids));
  _exit(42);
}

LaunchResult LaunchScenario(const std::string& scenario) {
  const absl::StatusOr<LaunchResult> result = Launch(
      {.ranks = 3, .command = {OwnPath(), "--scenario", scenario}, .patience = absl::Seconds(30)});
  EXPECT_TRUE(result.ok()) << result.status();
  return result.ok() ? *result : LaunchResult{};
}

TEST(LaunchTest, NamesTheRankThatAborted) {
  const LaunchResult result = LaunchScenario("abort");
  EXPECT_EQ(result.message, "rank 2 ended with exit code 42");
  EXPECT_EQ(result.exit_code, 42);
  EXPECT_FALSE(result.by_signal);
}

TEST(LaunchTest, NamesARankThatWasKilledBesideTheOneThatAborted) {
  const LaunchResult result = LaunchScenario("crash");
  EXPECT_EQ(result.message, "rank 2 ended with exit code 42, and rank 0 was killed by SIGKILL");
  EXPECT_EQ(result.exit_code, 42);
  EXPECT_TRUE(result.by_signal);
}

TEST(LaunchTest, SaysHowOftenTheJobWasStartedAnew) {
  LaunchOptions options{.command = {"sh", "-c", "exit $((7 - EVENKEEL_RESTART))"},
                        .max_restarts = 2,
                        .restart_pause = absl::ZeroDuration()};
  std::string told;
  options.on_restart = [&](const Restart& restart, std::map<std::string, std::string>&) {
    told += std::to_string(restart.number) + ": " + restart.why + "\n";
    return absl::OkStatus();
  };
  const absl::StatusOr<LaunchResult> result = Launch(options);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->exit_code, 5);
  EXPECT_EQ(result->restarts, 2);
  EXPECT_FALSE(result->was_interrupted);
  EXPECT_EQ(result->message, "rank 0 ended with exit code 5; it was attempt 3 of 3");
  EXPECT_EQ(told,
            "1: rank 0 ended with exit code 7\n2: rank 0 ended with exit code 6; it was attempt 2 "
            "of 3\n");
}

TEST(LaunchTest, EndsWhereARestartIsNotWanted) {
  LaunchOptions options{
      .command = {"false"}, .max_restarts = 5, .restart_pause = absl::ZeroDuration()};
  options.on_restart = [](const Restart&, std::map<std::string, std::string>&) {
    return absl::DataLossError("no, thanks");
  };
  EXPECT_EQ(Launch(options).status(), absl::DataLossError("no, thanks"));
}

TEST(LaunchTest, AnAttemptMayHaveVariablesOfItsOwn) {
  LaunchOptions options{.command = {"sh", "-c", "exit $CODE"},
                        .variables = {{"CODE", "3"}},
                        .max_restarts = 5,
                        .restart_pause = absl::ZeroDuration()};
  options.on_restart = [](const Restart& restart, std::map<std::string, std::string>& variables) {
    variables["CODE"] = restart.number == 3 ? "0" : "4";
    return absl::OkStatus();
  };
  const absl::StatusOr<LaunchResult> result = Launch(options);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->exit_code, 0);
  EXPECT_EQ(result->restarts, 3);
}

}  // namespace
}  // namespace evenkeel

int main(int argc, char** argv) {
  if (argc == 3 && argv[1] == absl::string_view("--scenario")) {
    const absl::Status status = evenkeel::RunRank();
    std::cerr << status << "\n";
    const bool is_rank_0 = std::getenv("RANK") == absl::string_view("0");
    if (argv[2] == absl::string_view("crash") && is_rank_0) raise(SIGKILL);
    return status.ok() ? EXIT_SUCCESS : EXIT_FAILURE;
  }
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
