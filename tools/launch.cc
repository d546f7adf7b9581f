// Starts N ranks of a program on this host. See launch/launcher.h.

#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <iostream>
#include <map>
#include <memory>
#include <string>
#include <system_error>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "evenkeel/comm/rendezvous/tcp_store.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/launch/flight_folder.h"
#include "evenkeel/launch/launcher.h"
#include "evenkeel/launch/status_server.h"
#include "evenkeel/tools/program.h"
#include "gflags/gflags.h"

DEFINE_int32(nproc, 2, "How many ranks to start.");
DEFINE_string(on_failure, "stop", "What happens when a rank fails: stop, continue or replace.");
DEFINE_double(
    patience_s, 5,
    "Seconds that the other ranks have when one has failed: before SIGTERM, and before SIGKILL.");
DEFINE_double(
    last_patience_s, 60,
    "With --on_failure=continue, seconds that ranks still have when another one has ended well.");
DEFINE_int32(max_replacements, 1000,
             "With --on_failure=replace, how many processes take the places of failed ranks.");
DEFINE_int32(max_restarts, 0, "How often a job that failed is started anew, all ranks of it.");
DEFINE_double(restart_pause_s, 1,
              "Seconds before the first restart; twice as long before each next one, up to 30.");
DEFINE_string(
    status, "",
    "host:port where the job's state is served over HTTP; the default is EVENKEEL_STATUS.");
DEFINE_string(flight, "", "Folder where a rank writes its last collectives when it fails.");

namespace {

constexpr char kUsage[] =
    R"(Starts ranks of a program on this host; when one fails, ends the others or lets them go on.

  $0 [--nproc=2] [--on_failure=stop] [--patience_s=5] [--max_restarts=0] [--flight=FOLDER]
         [--status=HOST:PORT] -- PROGRAM [ARGUMENT...]

Each rank gets RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT as
torchrun sets them, and the variables by which evenkeel's ranks find and trust each other.

--on_failure=stop      When a rank fails, the others have --patience_s to end by themselves. The
                       exit code is that of the rank that the group's error names, else
                       of the first one that failed, or 128 + its signal.
--on_failure=continue  When any rank fails, the others continue: the launcher hosts the store by
                       which they find each other. The exit code is 0 if at least one rank ended
                       well, otherwise that of the first one that failed. After a rank has ended
                       well, the launcher ends those that do not end within --last_patience_s
                       (60).
--on_failure=replace   As continue, and another process takes the place of the rank that failed, for
                       programs that call Enter() (EVENKEEL_NEWCOMER; docs/replacement.md), up to
                       --max_replacements (1000) in all. After three processes of a rank that fail
                       by themselves within a second of their start, the others go on without it.
--max_restarts=N       When the job fails (with continue: no rank ended well), all its ranks are
                       restarted, up to N times; EVENKEEL_RESTART is the number of restarts so far.
                       A program that saves its progress and resumes from there loses little. The
                       exit code is the last attempt's. A job that SIGINT, SIGTERM or SIGHUP
                       interrupts is not restarted.
--restart_pause_s=1    Seconds before the first restart, and before one after an attempt of 10
                       seconds or more; twice as long after each shorter attempt, up to 30.
--flight=FOLDER        Where ranks that fail, or see another one fail, write their last
                       collectives, a file for each rank (EVENKEEL_FLIGHT). The folder is created
                       if it does not exist; one that has records of an earlier job is refused.
                       Restarted ranks write to FOLDER/restart1, and so on.
--status=HOST:PORT     Where the job's state is served over HTTP while it runs: /status.json, and
                       /metrics for Prometheus, for requests with the header "Authorization: Bearer
                       $EVENKEEL_STATUS_TOKEN". The default is EVENKEEL_STATUS; without it, nothing
                       is served.
)";

// One write, so that lines of ranks do not mix with it.
void Log(absl::string_view sentence) {
  std::cerr << absl::StrCat(program_invocation_short_name, ": ", sentence, "\n");
}

int Fail(absl::string_view sentence) {
  Log(sentence);
  return 2;
}

// Returns whether flags follow the program without a "--" before it: they could be for either
// program. All flags of this program have values.
bool LacksDashes(int argc, char** argv) {
  int i = 1;
  while (i < argc && argv[i][0] == '-' && std::string(argv[i]) != "--") {
    i += std::string(argv[i]).find('=') == std::string::npos ? 2 : 1;
  }
  if (i >= argc || std::string(argv[i]) == "--") return false;
  while (++i < argc && argv[i][0] != '-') {
  }
  return i < argc;
}

std::string RestartFolder(const std::string& flight_folder, int restart) {
  return absl::StrCat(flight_folder, "/restart", restart);
}

// Returns the folder of the first attempt, if neither it nor those of restarts have records of an
// earlier job.
absl::StatusOr<std::string> PrepareFlightFolders(const std::string& flight_folder) {
  std::error_code error;
  for (int restart = 1; std::filesystem::exists(RestartFolder(flight_folder, restart), error);
       ++restart) {
    const absl::Status status =
        evenkeel::PrepareFlightFolder(RestartFolder(flight_folder, restart)).status();
    if (!status.ok()) return status;
  }
  return evenkeel::PrepareFlightFolder(flight_folder);
}

// Says that the job is started anew, and keeps the attempts' records apart: together they would be
// read as one job.
absl::Status OnRestart(const evenkeel::Restart& restart,
                       std::map<std::string, std::string>& variables,
                       const std::string& flight_folder) {
  Log(absl::StrCat(restart.why, "; attempt ", restart.number + 1, " of ", FLAGS_max_restarts + 1,
                   " begins in ", absl::FormatDuration(restart.pause)));
  if (flight_folder.empty()) return absl::OkStatus();
  const absl::StatusOr<std::string> folder =
      evenkeel::PrepareFlightFolder(RestartFolder(flight_folder, restart.number));
  if (!folder.ok()) return folder.status();
  variables["EVENKEEL_FLIGHT"] = *folder;
  return absl::OkStatus();
}

// Serves the state of the newest attempt.
class StatusOfAttempts {
 public:
  explicit StatusOfAttempts(std::string address) : address_(std::move(address)) {}

  absl::Status Observe(const std::string& store, const std::string& secret) {
    {
      absl::MutexLock lock(&mutex_);
      newest_ = {.addresses = {store}, .secret = secret, .timeout = kPatience};
    }
    if (server_ != nullptr) return absl::OkStatus();
    // Only now, so that its thread has the signals blocked that the launcher reads.
    EK_ASSIGN_OR_RETURN(
        server_,
        evenkeel::StatusServer::Create(
            {.address = address_, .token = evenkeel::EnvironmentVariable("EVENKEEL_STATUS_TOKEN")},
            [this] { return Status(); }));
    Log(absl::StrCat("serving http://", server_->address(), "/status.json"));
    return absl::OkStatus();
  }

 private:
  static constexpr absl::Duration kPatience = absl::Seconds(2);

  absl::StatusOr<std::string> Status() {
    evenkeel::TcpStoreOptions newest;
    {
      absl::MutexLock lock(&mutex_);
      newest = newest_;
    }
    EK_ASSIGN_OR_RETURN(const std::unique_ptr<evenkeel::TcpObserver> observer,
                        evenkeel::TcpObserver::Connect(newest));
    return observer->Status(kPatience);
  }

  const std::string address_;
  absl::Mutex mutex_;
  evenkeel::TcpStoreOptions newest_ ABSL_GUARDED_BY(mutex_);
  std::unique_ptr<evenkeel::StatusServer> server_;  // Last: its thread uses the rest.
};

}  // namespace

int main(int argc, char** argv) {
  if (LacksDashes(argc, argv)) {
    return Fail(evenkeel::NameIn(
        "put `--` before the program, so that its flags are its own: $0 --nproc=2 -- PROGRAM "
        "[ARGUMENT...]"));
  }
  if (evenkeel::PrintsHelp(kUsage, argc, argv)) return EXIT_SUCCESS;
  gflags::ParseCommandLineFlags(&argc, &argv, /*remove_flags=*/true);
  if (argc < 2)
    return Fail(evenkeel::NameIn(
        "no program to start is given; usage: $0 --nproc=2 -- PROGRAM [ARGUMENT...]"));
  if (FLAGS_nproc < 1) return Fail("--nproc must be at least 1");
  const std::map<std::string, evenkeel::OnFailure> ways = {
      {"stop", evenkeel::OnFailure::kStop},
      {"continue", evenkeel::OnFailure::kContinue},
      {"replace", evenkeel::OnFailure::kReplace}};
  if (!ways.contains(FLAGS_on_failure)) {
    return Fail("--on_failure=" + FLAGS_on_failure +
                " is not known; choose stop, continue, replace");
  }
  if (FLAGS_max_replacements < 0) return Fail("--max_replacements must not be negative");
  if (!(FLAGS_patience_s >= 0)) return Fail("--patience_s must not be negative");
  if (!(FLAGS_last_patience_s >= 0)) return Fail("--last_patience_s must not be negative");
  if (FLAGS_max_restarts < 0) return Fail("--max_restarts must not be negative");
  if (!(FLAGS_restart_pause_s >= 0)) return Fail("--restart_pause_s must not be negative");
  if (const absl::Status entered = evenkeel::EnterUserFolder(); !entered.ok())
    return Fail(std::string(entered.message()));
  evenkeel::LaunchOptions options{.ranks = FLAGS_nproc,
                                  .command = {argv + 1, argv + argc},
                                  .patience = absl::Seconds(FLAGS_patience_s),
                                  .on_failure = ways.at(FLAGS_on_failure),
                                  .last_patience = absl::Seconds(FLAGS_last_patience_s),
                                  .max_replacements = FLAGS_max_replacements,
                                  .max_restarts = FLAGS_max_restarts,
                                  .restart_pause = absl::Seconds(FLAGS_restart_pause_s)};
  std::string flight_folder;
  if (!FLAGS_flight.empty()) {
    // The full path, for programs that go elsewhere.
    const absl::StatusOr<std::string> folder = PrepareFlightFolders(FLAGS_flight);
    if (!folder.ok()) return Fail("--flight=" + std::string(folder.status().message()));
    options.variables["EVENKEEL_FLIGHT"] = flight_folder = *folder;
  }
  options.on_restart = [&](const evenkeel::Restart& restart,
                           std::map<std::string, std::string>& variables) {
    return OnRestart(restart, variables, flight_folder);
  };
  const std::string status_address =
      FLAGS_status.empty() ? evenkeel::EnvironmentVariable("EVENKEEL_STATUS") : FLAGS_status;
  StatusOfAttempts status(status_address);
  if (!status_address.empty()) {
    options.on_store = [&](const std::string& store, const std::string& secret) {
      return status.Observe(store, secret);
    };
    // A rank may be a launcher, too.
    options.variables["EVENKEEL_STATUS"] = options.variables["EVENKEEL_STATUS_TOKEN"] = "";
  }
  const absl::StatusOr<evenkeel::LaunchResult> result = evenkeel::Launch(options);
  if (!result.ok()) return Fail(std::string(result.status().message()));
  const char* const way_out =
      result->has_ended_others ? " (--on_failure=continue lets them go on)" : "";
  if (!result->message.empty()) Log(absl::StrCat(result->message, way_out));
  return result->exit_code;
}
