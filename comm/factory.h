// A communicator for this process, from what the launcher of the job says and by the name of a backend.
//
//   EK_ASSIGN_OR_RETURN(Environment environment, ReadEnvironment());
//   EK_ASSIGN_OR_RETURN(std::unique_ptr<Communicator> comm, CreateCommunicator(environment));
//
// Backends: "auto"          what suits: "local" for a job of one rank, "shm" if all ranks are on one host, "gloo" if no
//                           host has two of them, else "hierarchical"
//           "shm"           CPU, shared memory, one host
//           "gloo"          CPU, TCP, one host or several
//           "hierarchical"  CPU, shared memory inside each host, TCP between them; shm or gloo where one is enough
//           "nccl"          a GPU per rank: the one that LOCAL_RANK counts to, or the only one that the process sees
//           "local"         a job of one rank
//
// Errors: InvalidArgument for a name that is none of these; Unimplemented for one that is not in this build, with what
//         it would need; else those of comm/rendezvous.h and of the backend.

#ifndef EVENKEEL_COMM_FACTORY_H_
#define EVENKEEL_COMM_FACTORY_H_

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/environment.h"
#include "evenkeel/comm/rendezvous.h"

namespace evenkeel {

struct FactoryOptions {
  std::string backend = "auto";
  std::string group = "world";  // All ranks of the job; several groups need several names.
  absl::Duration connect_timeout = absl::Minutes(2);
  CommunicatorOptions communicator;  // What it leaves open of verification and flight records, the environment says.
  // To make several groups in one job, or to use its store: from Rendezvous::Join(). Null: one is made.
  std::shared_ptr<Rendezvous> rendezvous;
};

// Waits until all ranks of the job have come here.
absl::StatusOr<std::unique_ptr<Communicator>> CreateCommunicator(const Environment& environment,
                                                                 const FactoryOptions& options = {});

}  // namespace evenkeel

#endif  // EVENKEEL_COMM_FACTORY_H_
