// The environment variables with which a launcher describes a job to its ranks.
//
//   EK_ASSIGN_OR_RETURN(Environment environment, ReadEnvironment());
//   // comm/factory.h
//   EK_ASSIGN_OR_RETURN(std::unique_ptr<Communicator> comm, CreateCommunicator(environment));
//
// Other libraries of evenkeel read variables of their own with ReadNumber(), except that the
// backend nccl reads EVENKEEL_NCCL and three of NCCL's own by itself: NCCL_HOSTID,
// NCCL_MULTI_RANK_GPU_ENABLE and NCCL_COMM_BLOCKING. Supported launchers: torchrun and all that set
// RANK and WORLD_SIZE, Slurm, Open MPI, and MPICH with its derivatives. The first one found in this
// order counts, except that an MPI comes before Slurm. Without any, the job is one process.
//
// These variables take precedence over those of the launchers:
//
//   EVENKEEL_STORE         host:port of rank 0's host, or a folder that all ranks can see (any
//                          value with a '/'). Ranks of one host may give port 0, here or in
//                          MASTER_PORT: the system chooses the port, and the ranks read it in a
//                          folder of their user.
//   EVENKEEL_STORE_HOSTED  1: another process hosts the store, such as our launcher; else rank 0.
//   EVENKEEL_SECRET        the secret with which ranks authenticate each other; or
//   EVENKEEL_SECRET_FILE   a file that contains it. Ranks of one host need neither: they share a
//                          file that only their user can read, named after the job.
//   EVENKEEL_ADDRESS       the address of this host for the other ranks. Default: the local address
//                          of the route to the store.
//   EVENKEEL_HOST_PARTS    N: each host counts as N hosts that share no memory; its rank r is on
//                          part r modulo N. For a trial of a job for several hosts on one host.
//   EVENKEEL_JOB           a name, equal on all ranks, that no other job has at the same time.
//   EVENKEEL_RESTART       the number of restarts of this job, set by our launcher. torchrun has a
//                          variable of its own.
//   EVENKEEL_NEWCOMER      N, from 1: this process takes the place of its rank, which the job has
//                          lost (docs/replacement.md). N counts such processes of this rank. Our
//                          launcher sets it.
//   EVENKEEL_VERIFY        off, positions or every: the checks of comm/verify.h, unless the program
//                          sets them.
//   EVENKEEL_FLIGHT        a folder for the flight records of a group that fails
//                          (comm/flight_dump.h).
//   EVENKEEL_NCCL          the path of the libnccl.so.2 that the backend nccl loads, unless the
//                          process has loaded one. Default: the system's, else that of the CUDA
//                          toolkit of the build.
//
// Errors: InvalidArgument, with the variable, its value, and what to set.

#ifndef EVENKEEL_COMM_ENVIRONMENT_H_
#define EVENKEEL_COMM_ENVIRONMENT_H_

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "evenkeel/comm/verify.h"

namespace evenkeel {

struct Environment {
  std::string launcher;  // "torchrun", "variables" (RANK, WORLD_SIZE), "slurm", "openmpi", "mpich";
                         // "": none.
  std::string job;       // Empty: the job has no name.
  int rank = 0;
  int world_size = 1;
  int local_rank = 0;       // This rank's number among the ranks of its host.
  bool is_one_host = true;  // All ranks are on this host.
  int host_parts = 1;       // See EVENKEEL_HOST_PARTS.
  int restarts = 0;         // Not 0: a program that saves its state resumes from it.
  int newcomer = 0;         // Not 0: see EVENKEEL_NEWCOMER.

  // The addresses at which the job's store may be, or the folder in which its address will be
  // published.
  std::vector<std::string> store_addresses;
  std::string store_folder;
  bool folder_is_ours = false;  // The folder was made for this job, and is removed after it.
  bool hosts_store = false;     // This process must start the server of the store.
  bool rank_zero_hosts = true;  // Rank 0 hosts the store; false: another process, such as the
                                // launcher.
  std::string address;          // See EVENKEEL_ADDRESS; empty: the default.
  // If the store's address is only in a store of the program: the folder in which rank 0 also
  // writes it, for observers of the job on its host, while the job runs.
  std::string observer_folder;

  // At most one of these is set.
  std::string secret;
  std::string secret_file;    // A file that contains the secret.
  std::string secret_folder;  // The ranks of one host agree on a secret in this folder.

  std::optional<VerifyLevel> verify;
  std::string flight_folder;
};

// Facts about a process that are not in its environment.
struct ProcessFacts {
  int user = 0;
  int parent = 0;  // Process id, equal for the ranks of an MPI on one host.
};

using Variables = std::map<std::string, std::string>;

// Parses the variables of any process; a pure function.
absl::StatusOr<Environment> ParseEnvironment(const Variables& variables,
                                             const ProcessFacts& process);

// Parses the variables of this process.
absl::StatusOr<Environment> ReadEnvironment();

// Returns the environment of a rank whose job is described by other means: of the variables of this
// process only EVENKEEL_ADDRESS, EVENKEEL_HOST_PARTS, EVENKEEL_VERIFY and EVENKEEL_FLIGHT count,
// and the ranks find each other through a store (Rendezvous::JoinThrough()).
absl::StatusOr<Environment> EnvironmentOfRank(int rank, int world_size);

// Returns the number in a variable of this process; `otherwise` if it is not set.
absl::StatusOr<int> ReadNumber(const std::string& name, int least, int most, int otherwise);

// Returns the folder of this user that contains the folders of jobs, and those for observers, whose
// names begin with kObserverFolder and the number of rank 0's process.
std::string FolderOfJobs();
inline constexpr char kObserverFolder[] = "process-";

}  // namespace evenkeel

#endif  // EVENKEEL_COMM_ENVIRONMENT_H_
