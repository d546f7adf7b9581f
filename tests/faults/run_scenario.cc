#include "evenkeel/tests/faults/run_scenario.h"

#include <dirent.h>
#include <netinet/in.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdint>
#include <filesystem>
#include <memory>
#include <system_error>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "evenkeel/comm/environment.h"
#include "evenkeel/comm/factory.h"
#include "evenkeel/comm/local/local.h"
#include "evenkeel/comm/rendezvous/tcp_store_server.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/testing/tested_group.h"
#include "evenkeel/tests/child_processes.h"
#include "evenkeel/tests/faults/faulty_rank.h"
#include "evenkeel/tests/faults/store_proxy.h"

namespace evenkeel {
namespace {

constexpr char kSecret[] = "of the injected faults";

// In one piece, whatever other threads write.
void Say(const RankReport& report) {
  const std::string line = ToLine(report);
  (void)!write(STDOUT_FILENO, line.data(), line.size());
}

// ---- Ranks that are processes -------------------------------------------------------------------

int PortOf(const sockaddr_in& address) { return ntohs(address.sin_port); }

// Ends the connections of this process to others, but the one to its store.
void ShutDownDataConnections() {
  int store_port = 0;
  const char* const store = getenv("EVENKEEL_STORE");
  const std::vector<std::string> parts = absl::StrSplit(store == nullptr ? "" : store, ':');
  if (!absl::SimpleAtoi(parts.back(), &store_port)) return;
  DIR* const folder = opendir("/proc/self/fd");
  if (folder == nullptr) return;
  while (const dirent* entry = readdir(folder)) {
    int fd = -1;
    sockaddr_in peer = {};
    socklen_t size = sizeof(peer);
    if (!absl::SimpleAtoi(entry->d_name, &fd) ||
        getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &size) != 0 ||
        peer.sin_family != AF_INET || PortOf(peer) == store_port) {
      continue;
    }
    shutdown(fd, SHUT_RDWR);
  }
  closedir(folder);
}

absl::Status RunAsRank(const Scenario& scenario) {
  EK_ASSIGN_OR_RETURN(const Environment environment, ReadEnvironment());
  EK_ASSIGN_OR_RETURN(std::unique_ptr<Communicator> comm,
                      CreateCommunicator(environment, {.backend = BackendOfProcesses(),
                                                       .communicator = OptionsOf(scenario)}));
  FaultSite site{.say = Say};
  site.die = [] { kill(getpid(), SIGKILL); };
  site.stop = [] { kill(getpid(), SIGSTOP); };
  site.cut = [&] {
    if (scenario.fault == Fault::kDataCut) return ShutDownDataConnections();
    char done;
    (void)!read(
        STDIN_FILENO, &done,
        1);  // Who has the proxy has heard that the fault is due, and tells when it is done.
  };
  Say(RunFaultyRank(scenario, *comm, site));
  return absl::OkStatus();
}

// ---- Ranks that are threads ---------------------------------------------------------------------

struct Dead {};  // Thrown by a thread that drops everything.

absl::Status RunAsThreads(const Scenario& scenario) {
  EK_ASSIGN_OR_RETURN(auto group, CreateLocalGroup(scenario.world_size(), OptionsOf(scenario)));
  absl::Mutex mutex;
  int ended = 0;
  FaultSite site{.say = Say};
  site.die = [] { throw Dead(); };
  site.stop = [&] {
    absl::MutexLock lock(&mutex);
    const auto all_others = [&] { return ended == scenario.world_size() - 1; };
    mutex.Await(absl::Condition(&all_others));
  };
  std::vector<std::thread> threads;
  for (std::unique_ptr<Communicator>& comm : group) {
    threads.emplace_back([&] {
      try {
        Say(RunFaultyRank(scenario, *comm, site));
      } catch (const Dead&) {
      }
      comm.reset();
      absl::MutexLock lock(&mutex);
      ++ended;
    });
  }
  for (std::thread& thread : threads) thread.join();
  return absl::OkStatus();
}

// ---- Who starts them ----------------------------------------------------------------------------

// A folder of its own, as long as it lives.
class Folder {
 public:
  Folder() {
    const char* const parent = getenv("TEST_TMPDIR");
    std::string pattern = absl::StrCat(parent == nullptr ? "/tmp" : parent, "/faultsXXXXXX");
    if (mkdtemp(pattern.data()) != nullptr) path_ = pattern;
  }
  ~Folder() {
    std::error_code ignored;
    if (!path_.empty()) std::filesystem::remove_all(path_, ignored);
  }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

class ScenarioRun {
 public:
  explicit ScenarioRun(const Scenario& scenario) : scenario_(scenario) {
    outcome_.reports.resize(scenario.world_size());
    for (int rank = 0; rank < scenario.world_size(); ++rank) outcome_.reports[rank].rank = rank;
  }

  absl::StatusOr<Outcome> Run(absl::Duration patience) {
    EK_RETURN_IF_ERROR(scenario_.as_processes ? StartRanks() : StartThreads());
    const int victim =
        scenario_.as_processes && scenario_.fault == Fault::kStopped ? scenario_.victim : -1;
    // A stopped rank never ends by itself.
    auto others_have_ended = [&] {
      for (int child = 0; child < children_.count(); ++child) {
        if (child != victim && children_.is_running(child)) return false;
      }
      return true;
    };
    outcome_.is_over = children_.Listen(
        absl::Now() + patience, [&](int, absl::string_view line) { OnLine(line); },
        others_have_ended);
    const bool is_killed = scenario_.as_processes && scenario_.fault == Fault::kKilled;
    for (int child = 0; child < children_.count(); ++child) {
      const bool may_fail = children_.is_running(child) || (is_killed && child == scenario_.victim);
      if (children_.exit_code(child) != 0 && !may_fail) {
        absl::StrAppend(&outcome_.crash, "process ", child, " ended with code ",
                        children_.exit_code(child), "; ");
      }
      if (!children_.complaints(child).empty()) {
        absl::StrAppend(&outcome_.complaints, "[", child, "] ", children_.complaints(child));
      }
    }
    return std::move(outcome_);
  }

 private:
  std::vector<std::string> Command(absl::string_view role) const {
    return {ThisProgram(), absl::StrCat("--role=", role), absl::StrCat("--seed=", scenario_.seed),
            absl::StrCat("--only=", scenario_.index)};
  }

  absl::Status StartThreads() { return children_.Start(Command("threads"), {}); }

  absl::Status StartRanks() {
    const int world_size = scenario_.world_size();
    std::string store = folder_.path();
    if (!scenario_.rank0_hosts) {
      EK_ASSIGN_OR_RETURN(server_,
                          TcpStoreServer::Create({.secret = kSecret,
                                                  .world_size = world_size,
                                                  .host = "the program that injects faults"}));
      store = server_->address();
      EK_ASSIGN_OR_RETURN(proxy_, StoreProxy::Create(server_->port()));
    }
    for (int rank = 0; rank < world_size; ++rank) {
      const bool is_cut =
          scenario_.cuts() && scenario_.fault != Fault::kDataCut && rank == scenario_.victim;
      EK_RETURN_IF_ERROR(children_.Start(
          Command("rank"),
          RankVariables(rank, world_size, is_cut ? proxy_->address() : store, kSecret)));
    }
    return absl::OkStatus();
  }

  void OnLine(absl::string_view line) {
    absl::StatusOr<RankReport> report = ReportFromLine(line);
    if (!report.ok() || report->rank < 0 || report->rank >= scenario_.world_size()) {
      absl::StrAppend(&outcome_.complaints, line, "\n");
      return;
    }
    const bool is_due = report->ended == 0;
    outcome_.reports[report->rank] = *std::move(report);
    if (!is_due || !scenario_.cuts() || scenario_.fault == Fault::kDataCut) return;
    proxy_->Cut(scenario_.fault == Fault::kStoreReset ? StoreProxy::How::kReset
                                                      : StoreProxy::How::kSilent);
    children_.Tell(scenario_.victim, "x");
  }

  const Scenario& scenario_;
  Outcome outcome_;
  Folder folder_;
  std::unique_ptr<TcpStoreServer> server_;
  std::unique_ptr<StoreProxy> proxy_;
  ChildProcesses children_;  // Last: they end before what they use.
};

}  // namespace

absl::StatusOr<Outcome> RunScenario(const Scenario& scenario, absl::Duration patience) {
  return ScenarioRun(scenario).Run(patience);
}

absl::Status RunAsChild(const Scenario& scenario, absl::string_view role) {
  EndWithParent();
  return role == "rank" ? RunAsRank(scenario) : RunAsThreads(scenario);
}

}  // namespace evenkeel
