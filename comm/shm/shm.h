// A group of processes on one host, over shared memory.
//
//   EK_ASSIGN_OR_RETURN(std::unique_ptr<TcpControlLink> link,
//                       TcpControlLink::Connect(store_options));
//   EK_ASSIGN_OR_RETURN(std::unique_ptr<Communicator> comm,
//                       CreateShmGroup(rank, world_size, std::move(link)));
//
//   // registered memory: reduced in place
//   EK_ASSIGN_OR_RETURN(Memory memory, comm->Allocate(bytes));
//
// Most programs use comm/factory.h, which reads the environment.
//
// Sums:     each element is added in rank order and rounded once, so results depend neither on
//           timing nor on the split of tensors into operations, and equal those of `local` bit for
//           bit. A scale is applied to the result.
// Memory:   an all-reduce is done in place, by all ranks, if all its buffers come from Allocate(),
//           begin at a page (as Allocate() does), and end at a page or at the end of the
//           allocation; other collectives read registered inputs in place. Any other memory works,
//           too, through 1 MiB per rank and channel in use; channels, and pairs of ranks that send
//           messages, have no limit. No memory has a name in a file system, so none remains after a
//           process dies, and /dev/shm is not used.
// Threads:  small operations progress in the calling thread and in Wait(), others in a
//           communication thread, which sleeps while idle. Channels do not wait for each other.
// Mismatch: ranks that issue different collectives get an error with their positions at once.
// Abort:    afterwards no other rank writes to this one's memory, not even one that was stopped in
//           the middle of a write. Buffers in flight have unspecified contents; they keep their
//           addresses, but are ordinary memory from then on.

#ifndef EVENKEEL_COMM_SHM_SHM_H_
#define EVENKEEL_COMM_SHM_SHM_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/control/control.h"

namespace evenkeel {

struct ShmOptions {
  std::string group = "world";  // Its name, equal on all ranks.
  absl::Duration connect_timeout = absl::Minutes(2);
  CommunicatorOptions communicator;
};

// Waits until all ranks of the group have called it. `control` is connected and not started.
// Errors: InvalidArgument names the ranks and hosts if they cannot all share memory on one host;
//         ResourceExhausted if it has too little; DeadlineExceeded names the missing ranks;
//         Unavailable names a lost rank; PermissionDenied names two ranks whose secrets differ.
absl::StatusOr<std::unique_ptr<Communicator>> CreateShmGroup(int rank, int world_size,
                                                             std::unique_ptr<ControlLink> control,
                                                             const ShmOptions& options = {});

// Makes the whole group in this process, one communicator per rank, for tests and measurements.
absl::StatusOr<std::vector<std::unique_ptr<Communicator>>> CreateShmGroupInProcess(
    int world_size, const CommunicatorOptions& options = {});

}  // namespace evenkeel

#endif  // EVENKEEL_COMM_SHM_SHM_H_
