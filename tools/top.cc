// Shows what the ranks of a running job do, and which of them the others wait for.
//
//   bazel run //tools:top                       # the only job of this user on this host
//   bazel run //tools:top -- 10.0.0.7:29400     # with EVENKEEL_SECRET
//
// The process that hosts the job's store replies; the ranks are not asked, so they lose no time,
// and a job that hangs is shown as well as one that trains.

#include <sys/ioctl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "evenkeel/comm/rendezvous/tcp_store.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/files/strict_json.h"
#include "evenkeel/launch/status_server.h"
#include "evenkeel/tools/find_job.h"
#include "evenkeel/tools/program.h"
#include "evenkeel/tools/top_view.h"
#include "gflags/gflags.h"
#include "nlohmann/json.hpp"

DEFINE_bool(json, false, "print the job's state as JSON, one line for each look");
DEFINE_bool(once, false, "look once; without a terminal this is the default, except with --json");
DEFINE_string(serve, "", "serve the job's state over HTTP at this host:port instead");
DEFINE_double(interval, 1, "seconds between two looks, at least 0.1");

namespace evenkeel {
namespace {

constexpr char kUsage[] =
    R"($0: shows what the ranks of a running job do, and which of them the others wait for.

  $0 [--once] [--json] [--interval=SECONDS] [JOB]
  $0 --serve=HOST:PORT [JOB]         GET /status.json, and GET /metrics for Prometheus

JOB is the address of the job's store (host:port), its name (EVENKEEL_JOB), the number of one of
its processes, or the folder that contains its address. Without it: the only job of this user on
this host. The secret is EVENKEEL_SECRET or EVENKEEL_SECRET_FILE, or that of the job's processes on
this host.

--serve needs EVENKEEL_STATUS_TOKEN, and each request the header "Authorization: Bearer TOKEN".

cost is the part of the group's time that it waited for that rank in the last steps; waiting is in
milliseconds a step.

Exit code: 0 after --once; 1 if there is no such job, or when it has ended.
)";

// A process that hosts a store and does not reply within this time hangs.
constexpr absl::Duration kPatience = absl::Seconds(2);

Screen ThisScreen() {
  winsize size = {};
  Screen screen{.columns = 200, .rows = 1000};  // A file.
  if (isatty(STDOUT_FILENO) == 0) return screen;
  screen = {};
  if (ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) != 0 || size.ws_col == 0) return screen;
  return {.columns = size.ws_col, .rows = size.ws_row};
}

bool MayMoveCursor() {
  const char* terminal = std::getenv("TERM");
  return isatty(STDOUT_FILENO) != 0 && terminal != nullptr && std::string(terminal) != "dumb";
}

absl::StatusOr<nlohmann::json> ParseReply(const std::string& text) {
  return internal::ParseStrictJson(text, /*max_depth=*/16, "the reply", internal::JsonRoot::kAny);
}

// All servers of a job as one.
class Job {
 public:
  static absl::StatusOr<std::unique_ptr<Job>> Connect(std::vector<TcpStoreOptions> servers) {
    auto job = std::make_unique<Job>();
    absl::MutexLock lock(&job->mutex_);
    absl::Status last;
    for (TcpStoreOptions& server : servers) {
      server.timeout = kPatience;
      absl::StatusOr<std::unique_ptr<TcpObserver>> observer = TcpObserver::Connect(server);
      last = observer.status();
      if (observer.ok()) job->servers_.push_back({.observer = *std::move(observer)});
    }
    if (job->servers_.empty()) return last;
    return job;
  }

  // The job goes on while any of its servers does. Thread-safe.
  absl::StatusOr<std::string> Status() {
    absl::MutexLock lock(&mutex_);
    std::vector<std::string> groups;
    for (auto it = servers_.begin(); it != servers_.end();) {
      const absl::StatusOr<std::string> json = it->observer->Status(kPatience);
      if (absl::IsDeadlineExceeded(json.status())) return json.status();
      if (!json.ok() && servers_.size() == 1) return Ended(*it, json.status());
      if (json.ok()) it->last = *json;
      it = json.ok() ? it + 1 : servers_.erase(it);
      if (json.ok() && json->size() > 2) groups.push_back(json->substr(1, json->size() - 2));
    }
    return absl::StrCat("[", absl::StrJoin(groups, ","), "]");
  }
  std::string ServerName() {
    absl::MutexLock lock(&mutex_);
    return servers_.front().observer->ServerName();
  }

 private:
  struct Server {
    std::unique_ptr<TcpObserver> observer;
    std::string last = "[]";  // Its newest state.
  };
  // Returns `gone`; if that server has sent its last state, with the error in this.
  static absl::Status Ended(const Server& server, const absl::Status& gone) {
    if (!absl::IsOutOfRange(gone)) return gone;
    const absl::StatusOr<nlohmann::json> last = ParseReply(server.last);
    std::string why;
    for (const nlohmann::json& group : last.ok() ? *last : nlohmann::json::array()) {
      for (absl::string_view finding : Findings(group)) {
        if (absl::ConsumePrefix(&finding, kGroupHasEnded)) absl::StrAppend(&why, ": ", finding);
      }
    }
    return WithMessage(gone, absl::StrCat("the job has ended", why, " (", gone.message(), ")"));
  }

  absl::Mutex mutex_;
  std::vector<Server> servers_ ABSL_GUARDED_BY(mutex_);
};

absl::Status Show(Job& job, bool renews) {
  const absl::StatusOr<std::string> reply = job.Status();
  // It may recover. Without a screen to renew, the error is the result.
  const bool hangs = absl::IsDeadlineExceeded(reply.status()) && !FLAGS_once;
  if (!reply.ok() && !hangs) return reply.status();
  if (FLAGS_json) {
    if (!hangs) return Print(*reply + "\n");
    std::fprintf(stderr, "%s: %s\n", program_invocation_short_name,
                 std::string(reply.status().message()).c_str());
    return absl::OkStatus();
  }
  std::string text = hangs ? absl::StrCat(reply.status().message(), "\n") : "";
  if (!hangs) {
    EK_ASSIGN_OR_RETURN(const nlohmann::json status, ParseReply(*reply));
    text = RenderStatus(status, job.ServerName(), ThisScreen());
  }
  return Print(absl::StrCat(renews ? "\033[H\033[J" : "", text));
}

// Serves the job's state until the job has ended.
absl::Status Serve(Job& job) {
  EK_ASSIGN_OR_RETURN(const std::unique_ptr<StatusServer> server,
                      StatusServer::Create({.address = FLAGS_serve,
                                            .token = EnvironmentVariable("EVENKEEL_STATUS_TOKEN")},
                                           [&] { return job.Status(); }));
  EK_RETURN_IF_ERROR(Print(absl::StrCat("serving http://", server->address(), "/status.json\n")));
  while (true) {
    absl::SleepFor(absl::Seconds(FLAGS_interval));
    if (const absl::Status status = job.Status().status();
        !status.ok() && !absl::IsDeadlineExceeded(status))
      return status;
  }
}

absl::StatusOr<int> Run(const std::string& target) {
  if (FLAGS_interval < 0.1)
    return absl::InvalidArgumentError(
        absl::StrCat("--interval is ", FLAGS_interval, " seconds, expected at least 0.1"));
  if (!FLAGS_serve.empty() && (FLAGS_json || FLAGS_once))
    return absl::InvalidArgumentError(
        "--serve does not print the state: leave out --json and --once");
  EK_ASSIGN_OR_RETURN(std::vector<TcpStoreOptions> servers, FindJob(target));
  EK_ASSIGN_OR_RETURN(const std::unique_ptr<Job> job, Job::Connect(std::move(servers)));
  if (!FLAGS_serve.empty()) return Serve(*job);
  const bool renews = MayMoveCursor() && !FLAGS_json && !FLAGS_once;
  if (!renews && !FLAGS_json) FLAGS_once = true;
  while (true) {
    EK_RETURN_IF_ERROR(Show(*job, renews));
    if (FLAGS_once) return 0;
    absl::SleepFor(absl::Seconds(FLAGS_interval));
  }
}

}  // namespace
}  // namespace evenkeel

int main(int argc, char** argv) {
  if (evenkeel::PrintsHelp(evenkeel::kUsage, argc, argv)) return EXIT_SUCCESS;
  gflags::ParseCommandLineFlags(&argc, &argv, /*remove_flags=*/true);
  return evenkeel::RunProgram([&]() -> absl::StatusOr<int> {
    if (argc > 2)
      return absl::InvalidArgumentError(
          absl::StrCat("expected one job, got ", argc - 1, " arguments"));
    EK_RETURN_IF_ERROR(evenkeel::EnterUserFolder());
    return evenkeel::Run(argc == 2 ? argv[1] : "");
  });
}
