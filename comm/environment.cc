#include "evenkeel/comm/environment.h"

#include <unistd.h>

#include <atomic>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "evenkeel/comm/collective.h"
#include "evenkeel/comm/net/socket.h"
#include "evenkeel/comm/status.h"

namespace evenkeel {
namespace {

// The number of ports to try if none was set: rank 0 takes the first free one, the others try all.
constexpr int kCandidates = 8;
// Below the ports that systems choose by themselves.
constexpr int kFirstPort = 20000, kPorts = 10000;

// Reads variables as values of different types; an empty variable counts as not set.
class Reader {
 public:
  explicit Reader(const Variables& variables) : variables_(variables) {}

  std::string Text(const std::string& name) const {
    const auto found = variables_.find(name);
    return found == variables_.end() ? "" : found->second;
  }
  bool Has(const std::string& name) const { return !Text(name).empty(); }
  absl::StatusOr<int> Number(const std::string& name, int least, int most) const {
    const std::string text = Text(name);
    int value = 0;
    if (text.empty())
      return absl::InvalidArgumentError(
          absl::StrCat("the environment variable ", name,
                       " is not set; a launcher such as torchrun, srun, mpirun or evenkeel's "
                       "launch sets it for each rank"));
    if (!absl::SimpleAtoi(text, &value) || value < least || value > most) {
      return absl::InvalidArgumentError(
          absl::StrCat(name, "=", text, " is not a number from ", least, " to ", most));
    }
    return value;
  }
  absl::StatusOr<int> NumberOr(const std::string& name, int least, int most, int otherwise) const {
    return Has(name) ? Number(name, least, most) : absl::StatusOr<int>(otherwise);
  }

 private:
  const Variables& variables_;
};

// Above any real number of ranks.
constexpr int kMost = 10'000'000;

// The names of a launcher's variables.
struct Names {
  const char* launcher;
  std::string rank;
  std::string world_size;
  std::string local_rank;
  std::string local_world_size;  // Empty: it has none.
};

std::optional<Names> LauncherOf(const Reader& read) {
  if (read.Has("RANK") || read.Has("WORLD_SIZE")) {
    return Names{read.Has("TORCHELASTIC_RUN_ID") ? "torchrun" : "variables", "RANK", "WORLD_SIZE",
                 "LOCAL_RANK", "LOCAL_WORLD_SIZE"};
  }
  if (read.Has("OMPI_COMM_WORLD_RANK")) {
    return Names{"openmpi", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
                 "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"};
  }
  // Slurm sets PMI_RANK too, and an MPI that starts its daemons by srun leaves them Slurm's
  // variables.
  const bool is_slurm_step = read.Has("SLURM_STEP_ID") && read.Has("SLURM_PROCID");
  if (read.Has("PMI_RANK") && (read.Has("MPI_LOCALNRANKS") || !is_slurm_step)) {
    return Names{"mpich", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"};
  }
  // A batch script has SLURM_PROCID, too, but only the steps of srun are processes of ranks.
  if (is_slurm_step) {
    return Names{"slurm", "SLURM_PROCID",
                 read.Has("SLURM_STEP_NUM_TASKS") ? "SLURM_STEP_NUM_TASKS" : "SLURM_NTASKS",
                 "SLURM_LOCALID", ""};
  }
  return std::nullopt;
}

absl::StatusOr<bool> IsOneHost(const Reader& read, const Names& names, int world_size) {
  if (world_size == 1) return true;
  if (!names.local_world_size.empty() && read.Has(names.local_world_size)) {
    EK_ASSIGN_OR_RETURN(const int local, read.Number(names.local_world_size, 1, world_size));
    return local == world_size;
  }
  for (const char* nodes : {"SLURM_STEP_NUM_NODES", "SLURM_NNODES"}) {
    if (absl::string_view(names.launcher) != "slurm" || !read.Has(nodes)) continue;
    EK_ASSIGN_OR_RETURN(const int count, read.Number(nodes, 1, kMost));
    return count == 1;
  }
  // No variable states it; an address that only this host can reach does.
  const std::string store = read.Text("EVENKEEL_STORE");
  const absl::StatusOr<internal::HostPort> address = internal::HostPort::Parse(store);
  return internal::IsLoopback(address.ok() ? address->host : read.Text("MASTER_ADDR"));
}

// Returns a name that is safe in a path.
std::string PathSafe(std::string text) {
  for (char& c : text) {
    if (!absl::ascii_isalnum(c) && c != '-' && c != '.') c = '_';
  }
  return text.substr(0, 100);
}

std::string JobName(const Reader& read, absl::string_view launcher, bool is_one_host,
                    const ProcessFacts& process) {
  if (read.Has("EVENKEEL_JOB")) return PathSafe(read.Text("EVENKEEL_JOB"));
  if (launcher == "torchrun") {  // A restart is another job: no rank of the old one may join.
    return PathSafe(absl::StrCat("torchrun-", read.Text("TORCHELASTIC_RUN_ID"), "-",
                                 read.Text("MASTER_PORT"), "-",
                                 read.Text("TORCHELASTIC_RESTART_COUNT")));
  }
  if (launcher == "slurm") {
    return PathSafe(
        absl::StrCat("slurm-", read.Text("SLURM_JOB_ID"), ".", read.Text("SLURM_STEP_ID")));
  }
  for (const char* name : {"PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"}) {
    if (launcher == "openmpi" && read.Has(name))
      return PathSafe(absl::StrCat("openmpi-", read.Text(name)));
  }
  if (read.Has("MASTER_PORT") && read.Text("MASTER_PORT") != "0")
    return PathSafe(absl::StrCat("port-", read.Text("MASTER_PORT")));
  return is_one_host ? absl::StrCat(launcher, "-", process.parent) : "";
}

// Returns the first host of a list of Slurm: "node003" for "node[003-005,9],other".
std::string FirstHost(absl::string_view list) {
  const size_t end = list.find_first_of("[,");
  std::string host(list.substr(0, end));
  if (end == absl::string_view::npos || list[end] == ',') return host;
  const absl::string_view numbers = list.substr(end + 1);
  return host + std::string(numbers.substr(0, numbers.find_first_of("-,]")));
}

// After the last port it continues with the first one for ordinary users.
void AddCandidates(const std::string& host, int first_port, Environment& environment) {
  constexpr int kLeast = 1024, kPastLast = 65536;
  for (int i = 0; i < kCandidates; ++i) {
    const int port =
        first_port + i < kPastLast ? first_port + i : kLeast + first_port + i - kPastLast;
    environment.store_addresses.push_back(internal::HostPort{host, port}.ToString());
  }
}

// Returns a folder that only its user can read, which FileStore ensures.
std::string FolderOfJobs(const Reader& read, int user) {
  return absl::StrCat(read.Has("TMPDIR") ? read.Text("TMPDIR") : "/tmp", "/evenkeel-", user);
}

std::string OurFolder(const Reader& read, const Environment& environment,
                      const ProcessFacts& process) {
  return absl::StrCat(FolderOfJobs(read, process.user), "/", environment.job);
}

// The system chooses the port; on one host the ranks read it in a folder.
absl::Status UseAnyPort(const Reader& read, absl::string_view variable, const std::string& host,
                        const ProcessFacts& process, Environment& environment) {
  const absl::string_view why =
      environment.is_one_host ? "" : ", and the ranks are on several hosts";
  if (!environment.is_one_host || !environment.rank_zero_hosts) {
    return absl::InvalidArgumentError(absl::StrCat(
        variable, "=", read.Text(std::string(variable)), " leaves the port to the system", why,
        ": the other ranks cannot learn which port it chose. Set a port, or set EVENKEEL_STORE to ",
        "a folder that all ranks can see"));
  }
  environment.store_folder = OurFolder(read, environment, process);
  environment.folder_is_ours = true;
  if (environment.address.empty()) environment.address = host;
  return absl::OkStatus();
}

absl::Status FindOurStore(const Reader& read, const ProcessFacts& process,
                          Environment& environment) {
  const std::string store = read.Text("EVENKEEL_STORE");
  if (absl::StrContains(store, '/')) {
    environment.store_folder = store;
    if (environment.is_one_host || read.Has("EVENKEEL_ADDRESS")) return absl::OkStatus();
    return absl::InvalidArgumentError(
        absl::StrCat("EVENKEEL_STORE=", store,
                     " is a folder, and the ranks are on several hosts: set EVENKEEL_ADDRESS ",
                     "on each host to an address at which the others reach it"));
  }
  const absl::StatusOr<internal::HostPort> address = internal::HostPort::Parse(store);
  if (!address.ok()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "EVENKEEL_STORE=", store, " is neither host:port nor a folder (which needs a '/')"));
  }
  if (address->port == 0)
    return UseAnyPort(read, "EVENKEEL_STORE", address->host, process, environment);
  environment.store_addresses = {address->ToString()};
  return absl::OkStatus();
}

absl::Status FindMasterStore(const Reader& read, const ProcessFacts& process,
                             Environment& environment) {
  EK_ASSIGN_OR_RETURN(const int port, read.Number("MASTER_PORT", 0, 65535));
  const std::string host = read.Text("MASTER_ADDR");
  if (host.empty()) return absl::InvalidArgumentError("MASTER_PORT is set, but MASTER_ADDR is not");
  if (port == 0) return UseAnyPort(read, "MASTER_PORT", host, process, environment);
  // torchrun's own store uses that port, and every rank is one of its clients.
  if (!absl::EqualsIgnoreCase(read.Text("TORCHELASTIC_USE_AGENT_STORE"), "true")) {
    environment.store_addresses = {internal::HostPort{host, port}.ToString()};
  } else if (environment.is_one_host) {
    environment.store_folder = OurFolder(read, environment, process);
    environment.folder_is_ours = true;
  } else {
    AddCandidates(host, port + 1, environment);
  }
  return absl::OkStatus();
}

absl::Status FindStore(const Reader& read, const ProcessFacts& process, Environment& environment) {
  EK_ASSIGN_OR_RETURN(const int is_hosted, read.NumberOr("EVENKEEL_STORE_HOSTED", 0, 1, 0));
  environment.rank_zero_hosts = is_hosted == 0;
  environment.hosts_store = environment.rank == 0 && environment.rank_zero_hosts;
  if (read.Has("EVENKEEL_STORE")) return FindOurStore(read, process, environment);
  if (is_hosted == 1)
    return absl::InvalidArgumentError("EVENKEEL_STORE_HOSTED=1 needs EVENKEEL_STORE=host:port");
  if (read.Has("MASTER_ADDR") || read.Has("MASTER_PORT"))
    return FindMasterStore(read, process, environment);
  if (environment.is_one_host) {
    environment.store_folder = OurFolder(read, environment, process);
    environment.folder_is_ours = true;
    return absl::OkStatus();
  }
  const std::string hosts =
      read.Text(read.Has("SLURM_STEP_NODELIST") ? "SLURM_STEP_NODELIST" : "SLURM_JOB_NODELIST");
  if (environment.launcher == "slurm" && !hosts.empty()) {
    AddCandidates(FirstHost(hosts),
                  kFirstPort + static_cast<int>(StableHash(0, environment.job) % kPorts),
                  environment);
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat(
      environment.world_size, " ranks on several hosts, and no address of a store is set: set ",
      "EVENKEEL_STORE=host:port for all of them, with a free port of rank 0's host"));
}

absl::Status FindSecret(const Reader& read, const ProcessFacts& process, Environment& environment) {
  environment.secret = read.Text("EVENKEEL_SECRET");
  if (environment.secret.empty()) environment.secret_file = read.Text("EVENKEEL_SECRET_FILE");
  if (!environment.secret.empty() || !environment.secret_file.empty()) return absl::OkStatus();
  if (environment.is_one_host) {
    environment.secret_folder = environment.store_folder.empty()
                                    ? OurFolder(read, environment, process)
                                    : environment.store_folder;
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrCat(environment.world_size, " ranks on several hosts need a common secret: set ",
                   "EVENKEEL_SECRET=$(openssl rand -hex 32), the same for all ranks, or "
                   "EVENKEEL_SECRET_FILE=<a file ",
                   "that holds it>"));
}

absl::Status FindPlace(const Reader& read, const Names& names, Environment& environment) {
  EK_ASSIGN_OR_RETURN(environment.world_size, read.Number(names.world_size, 1, kMost));
  EK_ASSIGN_OR_RETURN(environment.rank, read.Number(names.rank, 0, kMost));
  if (environment.rank >= environment.world_size) {
    return absl::InvalidArgumentError(absl::StrCat(names.rank, "=", environment.rank,
                                                   " does not fit ", names.world_size, "=",
                                                   environment.world_size, ": ranks count from 0"));
  }
  EK_ASSIGN_OR_RETURN(environment.is_one_host, IsOneHost(read, names, environment.world_size));
  EK_ASSIGN_OR_RETURN(environment.local_rank,
                      read.NumberOr(names.local_rank, 0, environment.world_size - 1,
                                    environment.is_one_host ? environment.rank : 0));
  EK_ASSIGN_OR_RETURN(environment.host_parts, read.NumberOr("EVENKEEL_HOST_PARTS", 1, kMost, 1));
  const char* const restarts =
      read.Has("EVENKEEL_RESTART") ? "EVENKEEL_RESTART" : "TORCHELASTIC_RESTART_COUNT";
  EK_ASSIGN_OR_RETURN(environment.restarts, read.NumberOr(restarts, 0, kMost, 0));
  EK_ASSIGN_OR_RETURN(environment.newcomer, read.NumberOr("EVENKEEL_NEWCOMER", 0, kMost, 0));
  return absl::OkStatus();
}

absl::Status FindDiagnosis(const Reader& read, Environment& environment) {
  environment.flight_folder = read.Text("EVENKEEL_FLIGHT");
  if (!read.Has("EVENKEEL_VERIFY")) return absl::OkStatus();
  const std::string word = read.Text("EVENKEEL_VERIFY");
  absl::StatusOr<VerifyLevel> level = VerifyLevelFromString(word);
  if (!level.ok()) return Annotate(level.status(), absl::StrCat("EVENKEEL_VERIFY=", word));
  environment.verify = *level;
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<Environment> ParseEnvironment(const Variables& variables,
                                             const ProcessFacts& process) {
  const Reader read(variables);
  Environment environment;
  EK_RETURN_IF_ERROR(FindDiagnosis(read, environment));
  const std::optional<Names> names = LauncherOf(read);
  if (!names && read.Has("EVENKEEL_NEWCOMER")) {
    return absl::InvalidArgumentError(
        "EVENKEEL_NEWCOMER needs the variables of the lost rank: RANK, WORLD_SIZE, and those of "
        "the job's store and secret");
  }
  if (!names) return environment;
  environment.launcher = names->launcher;
  environment.address = read.Text("EVENKEEL_ADDRESS");
  EK_RETURN_IF_ERROR(FindPlace(read, *names, environment));
  environment.job = JobName(read, environment.launcher, environment.is_one_host, process);
  if (environment.world_size == 1) return environment;  // No rendezvous.
  EK_RETURN_IF_ERROR(FindStore(read, process, environment));
  if (environment.newcomer > 0 && environment.hosts_store) {
    return absl::InvalidArgumentError(
        "EVENKEEL_NEWCOMER: rank 0 hosted the job's store, which is lost with it: only a job whose "
        "store is hosted by another process, such as our launcher, can replace rank 0");
  }
  EK_RETURN_IF_ERROR(FindSecret(read, process, environment));
  return environment;
}

namespace {

Variables ReadVariables() {
  Variables variables;
  for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) {
    const absl::string_view text = *entry;
    const size_t equals = text.find('=');
    if (equals == absl::string_view::npos) continue;
    variables.emplace(text.substr(0, equals), text.substr(equals + 1));
  }
  return variables;
}

}  // namespace

absl::StatusOr<Environment> ReadEnvironment() {
  return ParseEnvironment(ReadVariables(), {.user = static_cast<int>(geteuid()),
                                            .parent = static_cast<int>(getppid())});
}

absl::StatusOr<Environment> EnvironmentOfRank(int rank, int world_size) {
  const Variables variables = ReadVariables();
  const Reader read(variables);
  Environment environment{.rank = rank,
                          .world_size = world_size,
                          .local_rank = rank,
                          .is_one_host = false,
                          .hosts_store = rank == 0};
  environment.address = read.Text("EVENKEEL_ADDRESS");
  EK_ASSIGN_OR_RETURN(environment.host_parts, read.NumberOr("EVENKEEL_HOST_PARTS", 1, kMost, 1));
  EK_RETURN_IF_ERROR(FindDiagnosis(read, environment));
  if (rank == 0 && world_size > 1) {
    static std::atomic<int> count = 0;  // A process may be in several jobs.
    environment.observer_folder =
        absl::StrCat(FolderOfJobs(), "/", kObserverFolder, getpid(), "-", count++);
  }
  return environment;
}

absl::StatusOr<int> ReadNumber(const std::string& name, int least, int most, int otherwise) {
  const Variables variables = ReadVariables();
  return Reader(variables).NumberOr(name, least, most, otherwise);
}

std::string FolderOfJobs() {
  const Variables variables = ReadVariables();
  return FolderOfJobs(Reader(variables), static_cast<int>(getuid()));
}

}  // namespace evenkeel
