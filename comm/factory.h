// Makes the communicator of this process, from the launcher's variables and the name of a backend.
//
//   EK_ASSIGN_OR_RETURN(Environment environment, ReadEnvironment());
//   EK_ASSIGN_OR_RETURN(std::unique_ptr<Communicator> comm, CreateCommunicator(environment));
//
// Backends:
//   "auto"          "local" for a job of one rank, "shm" if all ranks are on one host, "tcp" if no
//                   host has two of them, else "hierarchical"
//   "shm"           CPU, shared memory, one host
//   "tcp"           CPU, TCP, one host or several; "gloo" is an alias
//   "hierarchical"  CPU, shared memory inside each host, TCP between hosts; becomes shm or tcp
//                   where one of them is enough
//   "nccl"          a GPU per rank: the one with the number LOCAL_RANK, or the only one that the
//                   process sees
//   "local"         a job of one rank
//   "none"          the control plane alone: operations on data are Unimplemented
//
// Errors: InvalidArgument for any other name; Unimplemented for a backend that is not in this
//         build, with what it needs; else those of comm/rendezvous/rendezvous.h and of the backend.

#ifndef EVENKEEL_COMM_FACTORY_H_
#define EVENKEEL_COMM_FACTORY_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/environment.h"
#include "evenkeel/comm/rendezvous/rendezvous.h"

namespace evenkeel {

struct FactoryOptions {
  std::string backend = "auto";
  std::string group = "world";  // The group of all ranks of the job. Each group needs its own name.
  absl::Duration connect_timeout = absl::Minutes(2);
  // The environment sets the verification level and the flight records that are unset here.
  CommunicatorOptions communicator;
  // The ranks of the job that form the group, in the group's order. All ranks must pass the same
  // list, which is compared; empty on all ranks: no comparison.
  std::vector<int> members;
  // From Rendezvous::Join(), for several groups in one job, or to use the job's store; or from
  // Rendezvous::JoinThrough(), for one group. Null: the function joins the rendezvous itself.
  std::shared_ptr<Rendezvous> rendezvous;
};

// Waits until all ranks of the job have called it.
absl::StatusOr<std::unique_ptr<Communicator>> CreateCommunicator(
    const Environment& environment, const FactoryOptions& options = {});

}  // namespace evenkeel

#endif  // EVENKEEL_COMM_FACTORY_H_
