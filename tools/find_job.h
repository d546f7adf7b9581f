// Finds a running job, for a program that is not one of its ranks.
//
//   EK_ASSIGN_OR_RETURN(std::vector<TcpStoreOptions> servers, FindJob("42"));
//   for (const TcpStoreOptions& server : servers) TcpObserver::Connect(server) ...
//
// Reads the environments of this user's processes on this host (/proc): a rank's environment names
// its job's store and secret, whichever launcher started it. A PyTorch job has them in torch's
// store; its rank 0 also writes them to a folder that only its user can read
// (Environment::observer_folder). It has one server for all groups of which it is rank 0.
//
// Errors: NotFound if there is no such job; FailedPrecondition if several fit, which it names.

#ifndef EVENKEEL_TOOLS_FIND_JOB_H_
#define EVENKEEL_TOOLS_FIND_JOB_H_

#include <sys/types.h>

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "evenkeel/comm/environment.h"
#include "evenkeel/comm/rendezvous/tcp_store.h"

namespace evenkeel {

struct FoundJob {
  Environment environment;           // That of its lowest rank here.
  std::vector<std::string> folders;  // Those for observers, in order.
  std::vector<pid_t> processes;      // The ranks, and programs that they have started.
};

// Returns the jobs of this user that have a process on this host.
std::vector<FoundJob> FindJobs();

// `target` is "host:port" of a job's store, a folder that contains its address (with a '/'), the
// name of a job, the number of one of its processes, or empty: the only job. The secret is that of
// EVENKEEL_SECRET or EVENKEEL_SECRET_FILE, or else the one that the job's processes have.
absl::StatusOr<std::vector<TcpStoreOptions>> FindJob(absl::string_view target);

}  // namespace evenkeel

#endif  // EVENKEEL_TOOLS_FIND_JOB_H_
