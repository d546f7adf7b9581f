#include "evenkeel/launch/launcher.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
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

constexpr int kRanks = 3;

template <typename Condition>
absl::Status Await(Condition condition, absl::string_view what) {
  for (const absl::Time deadline = SteadyNow() + absl::Seconds(20); !condition();) {
    if (SteadyNow() > deadline) return absl::DeadlineExceededError(what);
    absl::SleepFor(absl::Milliseconds(1));
  }
  return absl::OkStatus();
}

// Waits until all ranks have come here, which no abort of a group can overtake, and returns their
// processes.
absl::StatusOr<std::vector<pid_t>> Meet(const std::string& place, int rank) {
  const auto file = [&](int r) { return absl::StrCat(place, ".", r); };
  std::ofstream(file(rank) + ".new") << getpid();
  std::filesystem::rename(file(rank) + ".new", file(rank));
  std::vector<pid_t> pids(kRanks);
  for (int r = 0; r < kRanks; ++r) {
    EK_RETURN_IF_ERROR(Await([&] { return std::filesystem::exists(file(r)); }, file(r)));
    std::ifstream(file(r)) >> pids[r];
  }
  return pids;
}

// Ends with code 40 + rank when the processes have ended.
absl::Status EndAfter(int rank, absl::Span<const pid_t> pids) {
  for (const pid_t pid : pids)
    EK_RETURN_IF_ERROR(Await([&] { return kill(pid, 0) != 0; }, "another rank still runs"));
  _exit(40 + rank);
}

// Runs one of three ranks. One of them aborts the group, and ends after the launcher has reaped the
// others, which end with the error: rank 2; or, in the scenario "recover", rank 1 in a group that
// all have made after rank 2 had aborted the first one. In "overcome" no rank aborts that one: the
// ranks end in their order. In "shrink" rank 0 ends first, and rank 2 aborts the group of the
// others, in which it is rank 1. In "gone" all are killed.
absl::Status RunRank(absl::string_view scenario, const std::string& folder) {
  EK_ASSIGN_OR_RETURN(const Environment environment, ReadEnvironment());
  EK_ASSIGN_OR_RETURN(std::unique_ptr<Communicator> comm, CreateCommunicator(environment));
  const int rank = comm->rank();
  if (comm->waiting()) return comm->Regroup({.timeout = absl::Seconds(20)}).status();
  const absl::Status broken = absl::DataLossError("the data is broken");
  EK_ASSIGN_OR_RETURN(std::vector<pid_t> pids, Meet(folder + "/first", rank));
  if (scenario == "gone") raise(SIGKILL);
  if (scenario == "shrink") {
    if (rank == 0) _exit(40);
    if (comm->Barrier().ok()) return absl::InternalError("the group has not ended");
    EK_ASSIGN_OR_RETURN(comm, comm->Shrink());
    if (rank == 2) comm->Abort(broken);
    if (comm->Barrier().ok()) return absl::InternalError("the smaller group has not ended");
    return EndAfter(rank, absl::MakeConstSpan(pids).first(rank));
  }
  if (scenario == "recover" || scenario == "overcome") {
    if (rank == 2) comm->Abort(broken);
    if (comm->Barrier().ok()) return absl::InternalError("the group has not ended");
    EK_ASSIGN_OR_RETURN(comm, comm->Shrink());
    EK_ASSIGN_OR_RETURN(pids, Meet(folder + "/second", rank));
    if (scenario == "overcome") {
      EK_RETURN_IF_ERROR(comm->Finalize());
      return EndAfter(rank, absl::MakeConstSpan(pids).first(rank));
    }
  }
  if (rank != (scenario == "recover" ? 1 : 2)) return comm->Barrier();
  comm->Abort(broken);
  std::erase(pids, getpid());
  return EndAfter(rank, pids);
}

LaunchResult LaunchScenario(const std::string& scenario, OnFailure on_failure = OnFailure::kStop) {
  const std::string folder = absl::StrCat(testing::TempDir(), "/", scenario);
  std::filesystem::remove_all(folder);
  std::filesystem::create_directories(folder);
  const absl::StatusOr<LaunchResult> result =
      Launch({.ranks = kRanks,
              .command = {OwnPath(), "--scenario", scenario, folder},
              .patience = absl::Seconds(on_failure == OnFailure::kStop ? 30 : 1),
              .on_failure = on_failure});
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

TEST(LaunchTest, NamesTheCauseOfTheLastFailure) {
  EXPECT_EQ(LaunchScenario("recover").message, "rank 1 ended with exit code 41");
}

TEST(LaunchTest, NamesNoRankForAnErrorThatWasOvercome) {
  EXPECT_EQ(LaunchScenario("overcome").message, "rank 0 ended with exit code 40");
}

TEST(LaunchTest, NamesNoRankByItsNumberInASmallerGroup) {
  EXPECT_EQ(LaunchScenario("shrink").message, "rank 0 ended with exit code 40");
}

TEST(LaunchTest, ReplacesNoRankOfAGroupThatIsGone) {
  const LaunchResult result = LaunchScenario("gone", OnFailure::kReplace);
  EXPECT_THAT(result.message,
              testing::HasSubstr("; no rank of the group was left, and the job was ended"));
  EXPECT_EQ(result.exit_code, 128 + SIGKILL);
  EXPECT_LE(result.replacements, kRanks);
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
  if (argc == 4 && argv[1] == absl::string_view("--scenario")) {
    const absl::Status status = evenkeel::RunRank(argv[2], argv[3]);
    std::cerr << status << "\n";
    const bool is_rank_0 = std::getenv("RANK") == absl::string_view("0");
    if (argv[2] == absl::string_view("crash") && is_rank_0) raise(SIGKILL);
    return status.ok() ? EXIT_SUCCESS : EXIT_FAILURE;
  }
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
