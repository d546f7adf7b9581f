#include "evenkeel/tools/find_job.h"

#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <system_error>
#include <tuple>
#include <utility>

#include "absl/algorithm/container.h"
#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "evenkeel/comm/rendezvous/rendezvous.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/tools/program.h"

namespace evenkeel {
namespace {

namespace fs = std::filesystem;

// Empty if the process is gone, or is not this user's.
Variables VariablesOf(pid_t process) {
  const std::string folder = absl::StrCat("/proc/", process);
  struct stat info = {};
  Variables variables;
  if (stat(folder.c_str(), &info) != 0 || info.st_uid != getuid()) return variables;
  const absl::StatusOr<std::string> text = ReadInput(folder + "/environ");
  if (!text.ok()) return variables;
  for (const absl::string_view entry : absl::StrSplit(*text, '\0', absl::SkipEmpty()))
    variables.insert(
        std::pair<std::string, std::string>(absl::StrSplit(entry, absl::MaxSplits('=', 1))));
  return variables;
}

int ParentOf(pid_t process) {
  const absl::StatusOr<std::string> text = ReadInput(absl::StrCat("/proc/", process, "/stat"));
  int parent = 0;
  if (!text.ok()) return parent;
  // The name in parentheses may contain anything; after it come the state and the parent.
  const std::vector<std::string> fields =
      absl::StrSplit(text->substr(std::min(text->rfind(')') + 1, text->size())), ' ');
  if (fields.size() > 2) (void)absl::SimpleAtoi(fields[2], &parent);
  return parent;
}

std::string AddressOf(const Environment& environment) {
  return environment.store_folder.empty() ? absl::StrJoin(environment.store_addresses, ",")
                                          : environment.store_folder;
}

std::string DescribeJob(const FoundJob& job) {
  const std::string& name = job.environment.job;
  return absl::StrCat(name.empty() ? AddressOf(job.environment) : name, " (process ",
                      job.processes.front(), ")");
}

bool Fits(const FoundJob& job, absl::string_view target) {
  pid_t process = 0;
  if (absl::SimpleAtoi(target, &process) && absl::c_linear_search(job.processes, process))
    return true;
  return target.empty() || target == job.environment.job || target == AddressOf(job.environment) ||
         absl::c_linear_search(job.environment.store_addresses, target);
}

// Returns, by the number of rank 0's process, the folders for observers. That of a process that was
// killed remains, and counts for nothing.
std::multimap<pid_t, std::string> ObserverFolders() {
  std::multimap<pid_t, std::string> folders;
  const std::string jobs = FolderOfJobs();
  struct stat info = {};  // Others may write to the folder above.
  if (lstat(jobs.c_str(), &info) != 0 || !S_ISDIR(info.st_mode) || info.st_uid != getuid() ||
      (info.st_mode & 077) != 0)
    return folders;
  std::error_code error;
  for (fs::directory_iterator entry(jobs, error), end; !error && entry != end;
       entry.increment(error)) {
    const std::string name = entry->path().filename().string();
    absl::string_view rest = name;
    pid_t process = 0;
    if (!absl::ConsumePrefix(&rest, kObserverFolder) ||
        !absl::SimpleAtoi(rest.substr(0, rest.find('-')), &process))
      continue;
    if (kill(process, 0) == 0) folders.emplace(process, entry->path().string());
  }
  return folders;
}

absl::StatusOr<std::vector<TcpStoreOptions>> ServersOf(const FoundJob& job) {
  std::vector<TcpStoreOptions> servers;
  for (const std::string& folder : job.folders) {
    Environment environment;
    environment.store_folder = folder;
    absl::StatusOr<TcpStoreOptions> server = Rendezvous::Find(environment);
    if (server.ok()) servers.push_back(*std::move(server));  // Else the group has just ended.
  }
  if (!servers.empty()) return servers;
  EK_ASSIGN_OR_RETURN(TcpStoreOptions server, Rendezvous::Find(job.environment));
  return std::vector<TcpStoreOptions>{std::move(server)};
}

}  // namespace

std::vector<FoundJob> FindJobs() {
  std::map<std::tuple<std::string, std::string, std::string>, FoundJob> jobs;
  std::error_code error;
  for (fs::directory_iterator entry("/proc", error), end; !error && entry != end;
       entry.increment(error)) {
    pid_t process = 0;
    if (!absl::SimpleAtoi(entry->path().filename().string(), &process) || process == getpid())
      continue;
    absl::StatusOr<Environment> environment = ParseEnvironment(
        VariablesOf(process), {.user = static_cast<int>(getuid()), .parent = ParentOf(process)});
    if (!environment.ok() || environment->world_size < 2) continue;
    FoundJob& job = jobs[{environment->job, AddressOf(*environment), environment->secret}];
    if (job.processes.empty() || environment->rank < job.environment.rank)
      job.environment = *std::move(environment);
    job.processes.push_back(process);
  }
  for (const auto& [process, folder] : ObserverFolders()) {
    const auto owner = absl::c_find_if(jobs, [process = process](const auto& job) {
      return absl::c_linear_search(job.second.processes, process);
    });
    // Rank 0 may have been started without any variables.
    FoundJob& job = owner != jobs.end() ? owner->second
                                        : jobs[{absl::StrCat(kObserverFolder, process), "", ""}];
    if (job.processes.empty()) job.processes.push_back(process);
    job.folders.push_back(folder);
  }
  std::vector<FoundJob> found;
  for (auto& [key, job] : jobs) {
    absl::c_sort(job.folders);
    found.push_back(std::move(job));
  }
  return found;
}

absl::StatusOr<std::vector<TcpStoreOptions>> FindJob(absl::string_view target) {
  FoundJob named;
  Environment& mine = named.environment;
  mine.secret = EnvironmentVariable("EVENKEEL_SECRET");
  mine.secret_file = EnvironmentVariable("EVENKEEL_SECRET_FILE");
  const bool is_folder = absl::StrContains(target, '/');
  const bool has_secret = !mine.secret.empty() || !mine.secret_file.empty();
  std::vector<FoundJob> fitting;
  for (FoundJob& job : FindJobs()) {
    // The ranks may belong to a program that does not use evenkeel.
    if (Fits(job, target) && !absl::IsNotFound(ServersOf(job).status()))
      fitting.push_back(std::move(job));
  }
  if (fitting.size() > 1) {
    return absl::FailedPreconditionError(absl::StrCat(
        "several jobs run on this host: ",
        absl::StrJoin(fitting, ", ",
                      [](std::string* out, const FoundJob& job) { out->append(DescribeJob(job)); }),
        "; name one, or a process of it"));
  }
  if (fitting.size() == 1) {
    Environment& environment = fitting.front().environment;
    if (has_secret) {
      environment.secret = mine.secret;
      environment.secret_file = mine.secret_file;
    }
    return ServersOf(fitting.front());
  }
  if (is_folder) {
    mine.store_folder = std::string(target);
    return ServersOf(named);
  }
  if (target.empty())
    return absl::NotFoundError(
        "no process of this user on this host belongs to a job: give the address of the job's "
        "store, host:port");
  if (!absl::StrContains(target, ':'))
    return absl::NotFoundError(
        absl::StrCat("no process of this user on this host belongs to a job ",
                     "of the name, or with a process, ", target));
  if (!has_secret) {
    return absl::InvalidArgumentError(
        absl::StrCat("the job at ", target,
                     " has no process of this user on this host: set "
                     "EVENKEEL_SECRET or EVENKEEL_SECRET_FILE to the job's secret"));
  }
  mine.store_addresses = {std::string(target)};
  return ServersOf(named);
}

}  // namespace evenkeel
