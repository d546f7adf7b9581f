// What the launcher of a job tells its ranks in environment variables.
//
//   EK_ASSIGN_OR_RETURN(Environment environment, ReadEnvironment());
//   EK_ASSIGN_OR_RETURN(std::unique_ptr<Communicator> comm, CreateCommunicator(environment));     // comm/factory.h
//
// This is the only part of evenkeel that reads environment variables. It knows torchrun and everything that sets RANK
// and WORLD_SIZE, Slurm, Open MPI and MPICH (and what takes after it), in this order but with an MPI before Slurm;
// without any of them the job is one process.
//
// Our own variables come before theirs:
//   EVENKEEL_STORE         host:port of rank 0's host, or a folder that all ranks see (anything with a '/'). Ranks of
//                          one host may give port 0: the system chooses one, and they read it in a folder of their
//                          user's; so they may with MASTER_PORT
//   EVENKEEL_STORE_HOSTED  1: somebody else hosts the store, as our launcher does; else rank 0 does
//   EVENKEEL_SECRET        what ranks prove to each other to know; or
//   EVENKEEL_SECRET_FILE   a file that holds it. Ranks of one host do without: they share a file that only their user
//                          can read, named after the job
//   EVENKEEL_ADDRESS       this host's address for the other ranks; else the one that leads to the store
//   EVENKEEL_HOST_PARTS    N: each host counts as N hosts, which share no memory; its rank r is on the one of number r
//                          modulo N. For trying on one host a job for several
//   EVENKEEL_JOB           a name, equal on all ranks, that two jobs at a time do not share
//   EVENKEEL_RESTART       how often this job was started anew, as our launcher says (and torchrun, by its own name)
//   EVENKEEL_VERIFY        off, positions or every: how much ranks check (comm/verify.h), where a program says nothing
//   EVENKEEL_FLIGHT        a folder: a group that fails leaves its flight records there (comm/flight_dump.h)
//
// Errors: InvalidArgument with a sentence that names the variable, its value, and what to set.

#ifndef EVENKEEL_COMM_ENVIRONMENT_H_
#define EVENKEEL_COMM_ENVIRONMENT_H_

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "evenkeel/comm/verify.h"

namespace evenkeel {

struct Environment {
  std::string launcher;  // "torchrun", "variables" (RANK, WORLD_SIZE), "slurm", "openmpi", "mpich"; "": none.
  std::string job;       // Empty: nobody has named it.
  int rank = 0;
  int world_size = 1;
  int local_rank = 0;       // Among the ranks of this host.
  bool is_one_host = true;  // All ranks are on this host.
  int host_parts = 1;       // Each host counts as so many, see EVENKEEL_HOST_PARTS.
  int restarts = 0;         // A program that has saved where it was goes on from there if this is not 0.

  // Where the job's store is: an address, or one of several; or the folder in which its address will be published.
  std::vector<std::string> store_addresses;
  std::string store_folder;
  bool folder_is_ours = false;  // Made for this job, and to be removed after it.
  bool hosts_store = false;     // This process must make the server.
  bool rank_zero_hosts = true;  // So rank 0 does; false: somebody else, such as the launcher.
  std::string address;          // This host's for the other ranks; empty: the one that leads to the store.

  std::string secret;         // Given, or
  std::string secret_file;    // in this file, or
  std::string secret_folder;  // agreed upon in this folder.

  std::optional<VerifyLevel> verify;
  std::string flight_folder;
};

// What the environment does not say about a process.
struct ProcessFacts {
  int user = 0;
  int parent = 0;  // Process id; the ranks of an MPI on one host have the same one.
};

using Variables = std::map<std::string, std::string>;

// Pure.
absl::StatusOr<Environment> ParseEnvironment(const Variables& variables, const ProcessFacts& process);

// Of this process.
absl::StatusOr<Environment> ReadEnvironment();

}  // namespace evenkeel

#endif  // EVENKEEL_COMM_ENVIRONMENT_H_
