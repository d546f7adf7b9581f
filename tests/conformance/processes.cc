#include "evenkeel/tests/conformance/processes.h"

#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "evenkeel/comm/rendezvous/tcp_store.h"
#include "evenkeel/comm/rendezvous/tcp_store_server.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/tests/conformance/tested_backend.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

constexpr char kRank[] = "EVENKEEL_CONFORMANCE_RANK";
constexpr char kStore[] = "EVENKEEL_CONFORMANCE_STORE";
constexpr char kSecret[] = "conformance";

// The processes of the test that runs now.
struct Job {
  int rank = 0;
  int runs = 0;  // Calls of RunTested(), which each make a group.
  std::string store;
  std::unique_ptr<TcpStoreServer> server;  // In rank 0.
  std::vector<pid_t> others;
};
std::unique_ptr<Job>& CurrentJob() {
  static std::unique_ptr<Job>& job = *new std::unique_ptr<Job>();
  return job;
}

// Bazel's report is of the first process alone.
bool IsOfTheReport(const char* variable) {
  for (const char* const name :
       {"XML_OUTPUT_FILE=", "GTEST_", "TEST_SHARD", "TEST_TOTAL_SHARDS", "TEST_PREMATURE_"}) {
    if (absl::StartsWith(variable, name)) return true;
  }
  return false;
}

absl::StatusOr<pid_t> StartRank(int rank, const std::string& store, RankEnvironment environment) {
  const testing::TestInfo& test = *testing::UnitTest::GetInstance()->current_test_info();
  std::vector<std::string> arguments = {
      "/proc/self/exe", absl::StrCat("--gtest_filter=", test.test_suite_name(), ".", test.name()),
      "--gtest_brief=1"};
  std::vector<std::string> variables = environment(rank);
  variables.push_back(absl::StrCat(kRank, "=", rank));
  variables.push_back(absl::StrCat(kStore, "=", store));
  const size_t own = variables.size();
  for (char** variable = environ; *variable != nullptr; ++variable) {
    bool is_kept = !IsOfTheReport(*variable);
    for (size_t i = 0; i < own; ++i) {
      is_kept = is_kept &&
                !absl::StartsWith(*variable, variables[i].substr(0, variables[i].find('=') + 1));
    }
    if (is_kept) variables.emplace_back(*variable);
  }
  std::vector<char*> argv, envp;
  for (std::string& argument : arguments) argv.push_back(argument.data());
  for (std::string& variable : variables) envp.push_back(variable.data());
  argv.push_back(nullptr);
  envp.push_back(nullptr);
  pid_t pid = 0;
  const int error = posix_spawn(&pid, argv[0], nullptr, nullptr, argv.data(), envp.data());
  if (error != 0)
    return absl::InternalError(
        absl::StrCat("rank ", rank, " was not started: ", std::strerror(error)));
  return pid;
}

absl::Status Begin(int world_size, RankEnvironment environment) {
  auto job = std::make_unique<Job>();
  if (const char* const rank = std::getenv(kRank); rank != nullptr) {
    const char* const store = std::getenv(kStore);
    if (!absl::SimpleAtoi(rank, &job->rank) || store == nullptr)
      return absl::InvalidArgumentError("no rank, or store");
    job->store = store;
  } else {
    for (std::string& variable : environment(0)) {
      const size_t equals = variable.find('=');
      setenv(variable.substr(0, equals).c_str(), variable.c_str() + equals + 1, /*overwrite=*/1);
    }
    EK_ASSIGN_OR_RETURN(job->server,
                        TcpStoreServer::Create({.secret = kSecret, .world_size = world_size}));
    job->store = job->server->address();
    for (int rank = 1; rank < world_size; ++rank) {
      EK_ASSIGN_OR_RETURN(const pid_t pid, StartRank(rank, job->store, environment));
      job->others.push_back(pid);
    }
  }
  CurrentJob() = std::move(job);
  return absl::OkStatus();
}

// `status`: how.
bool HasEnded(pid_t pid, int& status) {
  while (true) {
    const pid_t ended = waitpid(pid, &status, WNOHANG);
    if (ended == pid) return true;
    if (ended < 0 && errno == EINTR) continue;
    return ended < 0;
  }
}

}  // namespace

absl::Status RunAsProcesses(int world_size, absl::FunctionRef<absl::Status(Communicator&)> body,
                            const CommunicatorOptions& options, const RankMaker& make,
                            RankEnvironment environment) {
  if (CurrentJob() == nullptr) EK_RETURN_IF_ERROR(Begin(world_size, environment));
  Job& job = *CurrentJob();
  EK_ASSIGN_OR_RETURN(
      std::unique_ptr<TcpControlLink> link,
      TcpControlLink::Connect(
          {.addresses = {job.store}, .secret = kSecret, .rank = job.rank, .world_size = world_size},
          {.name = absl::StrCat("run ", job.runs++)}));
  EK_ASSIGN_OR_RETURN(const std::unique_ptr<Communicator> comm,
                      make(job.rank, world_size, std::move(link), options));
  absl::Status status = body(*comm);
  if (status.ok()) status = comm->Finalize(kPatience);
  if (!status.ok()) comm->Abort(status);
  return status;
}

void EndProcesses() {
  const std::unique_ptr<Job> job = std::move(CurrentJob());
  if (job == nullptr) return;
  const absl::Time deadline = absl::Now() + kPatience;
  for (size_t i = 0; i < job->others.size(); ++i) {
    int status = 0;
    while (!HasEnded(job->others[i], status) && absl::Now() < deadline)
      absl::SleepFor(absl::Milliseconds(5));
    if (absl::Now() >= deadline) {
      (void)kill(job->others[i], SIGKILL);
      (void)waitpid(job->others[i], &status, 0);
      ADD_FAILURE() << "rank " << i + 1 << " did not end";
    }
    EXPECT_EQ(status, 0) << "rank " << i + 1 << " has failed";
  }
}

}  // namespace evenkeel
