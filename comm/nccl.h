// Ranks that have a GPU each, over NCCL. First form: all-reduce and broadcast.
//
//   EK_ASSIGN_OR_RETURN(std::unique_ptr<TcpControlLink> link, TcpControlLink::Connect(store_options));
//   EK_ASSIGN_OR_RETURN(std::unique_ptr<Communicator> comm,
//                       CreateNcclGroup(rank, world_size, std::move(link), {.device = local_rank}));
//   Work work = comm->user().AllReduce(gradient, ReduceOp::kSum, {.after = {stream, comm->device()}});
//   EK_RETURN_IF_ERROR(work.OrderBefore({stream, comm->device()}));      // the host goes on
//
// Order:    NCCL carries no header and deadlocks where ranks launch in different orders. So all launches of a rank are
//           on one thread, in the order that rank 0 tells over the control plane, and compared there: collectives that
//           do not match are never launched on the rank that finds out.
// Streams:  the group has a stream of its own. An operation starts after what is on CallOptions::after at the call.
//           OrderBefore() waits on the host until the operation is launched, never until it has ended.
// Sums:     in NCCL's order, and the type's own precision; a scale is applied to what each rank contributes.
// Lacks:    all kinds but all-reduce, broadcast; int16; bit_or; a scale with min, max or product (that one
//           ends the group).
// Errors:   FailedPrecondition "no CUDA device: ..."; InvalidArgument for a device that is not there.

#ifndef EVENKEEL_COMM_NCCL_H_
#define EVENKEEL_COMM_NCCL_H_

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/control.h"

namespace evenkeel {

struct NcclOptions {
  std::string group = "world";  // Its name, equal on all ranks.
  int device = 0;               // This rank's GPU, as CUDA numbers those that this process sees.
  // What MakeNcclUniqueId() gave on one rank, equal on all; empty: rank 0 makes and spreads one.
  std::string unique_id;
  absl::Duration connect_timeout = absl::Minutes(2);
  CommunicatorOptions communicator;
};

// How many GPUs this process can use; FailedPrecondition "no CUDA device: ..." with CUDA's reason if there is none.
absl::StatusOr<int> CudaDeviceCount();

// Bytes that bring together the ranks of one group.
absl::StatusOr<std::string> MakeNcclUniqueId();

// Waits until all ranks of the group have come here. `control` is connected and not started.
absl::StatusOr<std::unique_ptr<Communicator>> CreateNcclGroup(int rank, int world_size,
                                                              std::unique_ptr<ControlLink> control,
                                                              const NcclOptions& options = {});

}  // namespace evenkeel

#endif  // EVENKEEL_COMM_NCCL_H_
