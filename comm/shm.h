// Ranks that are processes of one host, over memory that they share.
//
//   EK_ASSIGN_OR_RETURN(std::unique_ptr<TcpControlLink> link, TcpControlLink::Connect(store_options));
//   EK_ASSIGN_OR_RETURN(std::unique_ptr<Communicator> comm, CreateShmGroup(rank, world_size, std::move(link)));
//
//   EK_ASSIGN_OR_RETURN(Memory memory, comm->Allocate(bytes));     // registered: reduced where it lies
//
// Most programs let comm/factory.h do this from the environment.
//
// Sums:     each element is added in rank order and rounded once, so results depend neither on timing nor on how tensors
//           are cut into operations, and are those of `local`, bit for bit. A scale is applied to the result.
// Memory:   an all-reduce whose buffers all come from Allocate(), begin with a page (as what Allocate() gives does), and
//           end with one or with what was allocated, is reduced in place, by all ranks; other collectives read
//           registered inputs where they lie. Ordinary pointers work as well, through 1 MiB per channel and rank.
//           Nothing has a name in a file system, so nothing is left after any death, and /dev/shm is not used.
// Threads:  small operations go on in the calling thread and in Wait(); what nobody waits for, in a communication thread,
//           which sleeps while there is nothing to do. Channels do not wait for each other.
// Mismatch: ranks that issue different collectives learn it at once, with who is where.
// Abort:    afterwards no other rank changes this one's memory, even one that was stopped in the middle of writing it.
//           What was in flight then holds garbage; it keeps its address, but is ordinary memory from then on.

#ifndef EVENKEEL_COMM_SHM_H_
#define EVENKEEL_COMM_SHM_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/control.h"

namespace evenkeel {

struct ShmOptions {
  std::string group = "world";  // Its name, equal on all ranks.
  absl::Duration connect_timeout = absl::Minutes(2);
  CommunicatorOptions communicator;
};

// Waits until all ranks of the group have come here. `control` is connected and not started.
// Errors: InvalidArgument names the ranks and hosts if they are not all on one that lets them share memory;
//         ResourceExhausted where it has too little; DeadlineExceeded names the ranks that have not come; Unavailable
//         names a rank that was lost; PermissionDenied names two ranks whose secrets differ.
absl::StatusOr<std::unique_ptr<Communicator>> CreateShmGroup(int rank, int world_size,
                                                             std::unique_ptr<ControlLink> control,
                                                             const ShmOptions& options = {});

// The whole group in this process, one communicator per rank, for tests and measurements.
absl::StatusOr<std::vector<std::unique_ptr<Communicator>>> CreateShmGroupInProcess(
    int world_size, const CommunicatorOptions& options = {});

}  // namespace evenkeel

#endif  // EVENKEEL_COMM_SHM_H_
