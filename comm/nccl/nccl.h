// A group with one GPU per rank, over NCCL.
//
//   EK_ASSIGN_OR_RETURN(std::unique_ptr<TcpControlLink> link,
//                       TcpControlLink::Connect(store_options));
//   EK_ASSIGN_OR_RETURN(std::unique_ptr<Communicator> comm,
//                      CreateNcclGroup(rank, world_size, std::move(link), {.device = local_rank}));
//   Work work =
//       comm->user().AllReduce(gradient, ReduceOp::kSum, {.after = {stream, comm->device()}});
//   EK_RETURN_IF_ERROR(work.OrderBefore({stream, comm->device()}));      // the host continues
//
// Order:    NCCL carries no header, deadlocks where ranks launch in different orders, and lets
//           different collectives of equal size complete. So all launches of a rank are on one
//           thread, in an order that rank 0 chooses and compares over the control plane: ranks
//           whose collectives do not match launch nothing, and the group ends with their positions.
//           This costs a message of a few dozen bytes from each rank to rank 0 and back per
//           operation; the host runs ahead of the device meanwhile.
// Groups:   operations of several groups that share a device (from Split()) have no common order.
//           Each group launches on its own thread as soon as its ranks have issued, so two ranks
//           may launch two operations in different orders, whatever the order of the calls; if the
//           operations then wait for each other's resources on the devices, or behind an
//           allocation, all ranks hang until a deadline. So let only one of the groups have
//           operations in flight on a device: before a call to another group, either wait on the
//           host, first.Wait(), or order it on the device, first.OrderBefore(stream) and {.after =
//           stream}. All ranks in several of the groups must do so in one order. Within a group no
//           care is needed. NCCL_LAUNCH_ORDER_IMPLICIT=1 does not help: NCCL then reports launches
//           on two threads as an error. The end of one group may have to wait for another's work on
//           the device, because NCCL frees memory.
// Streams:  the group has a stream of its own, of high priority. An operation starts after the work
//           that is on CallOptions::after at the call, and after CallOptions::after_event.
//           OrderBefore() waits on the host until the operation is launched, that is, until all
//           ranks have issued it, and never for a device. Not for use while a stream is captured
//           into a graph.
// Sums:     in NCCL's order, and the type's own precision. A scale, and an average of floats,
//           multiplies each rank's contribution; with min, max and product it multiplies the
//           result. NCCL's min and max may ignore a NaN.
// Lacks:    reductions of int16; bit_or, bit_and, bit_xor; all_gather_v and all_to_all_v; tags.
// Memory:   Allocate() returns memory that is registered with NCCL, from 1 MiB on, if NCCL supports
//           it. Any other memory works, also mixed among the ranks. If NCCL refuses to register,
//           Allocate() returns plain memory; the first time WatchOptions::warn is called, on the
//           thread that allocates.
// Library:  NCCL is loaded when the first group is made: the one that the process has loaded, else
//           that of EVENKEEL_NCCL (comm/environment.h), else the system's libnccl.so.2; 2.18 or
//           newer.
// Errors:   FailedPrecondition "no CUDA device: ..."; "cannot load NCCL: ..."; InvalidArgument
//           "rank 3 wants CUDA device 3, there are 2". On all ranks alike, before they are
//           connected: FailedPrecondition that names ranks if they have different versions of NCCL,
//           or two of them one device (unless each has its own NCCL_HOSTID, or
//           NCCL_MULTI_RANK_GPU_ENABLE=1, which NCCL 2.28 does not support: its own error follows).
//           InvalidArgument with NCCL_COMM_BLOCKING=1. An error of NCCL ends the group with NCCL's
//           text: Unavailable if a peer or the network is lost. No wait is unlimited: if an abort
//           does not take effect within 10 s, the status reports it. Buffers may then still be in
//           use, so memory from Allocate() and of the group is never freed. Only the destructor
//           waits longer, if a launch is inside a call that never returns.

#ifndef EVENKEEL_COMM_NCCL_NCCL_H_
#define EVENKEEL_COMM_NCCL_NCCL_H_

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/control/control.h"

namespace evenkeel {

struct NcclOptions {
  std::string group = "world";  // Its name, equal on all ranks.
  int device = 0;               // This rank's GPU, by CUDA's numbers in this process.
  // The result of MakeNcclUniqueId() on one rank, equal on all; empty: rank 0 makes and sends one.
  std::string unique_id;
  absl::Duration connect_timeout = absl::Minutes(2);
  CommunicatorOptions communicator;
};

// Returns the number of GPUs of this process; FailedPrecondition "no CUDA device: ..." with CUDA's
// reason if there is none.
absl::StatusOr<int> CudaDeviceCount();

// Returns bytes that identify one group to its ranks.
absl::StatusOr<std::string> MakeNcclUniqueId();

// Waits until all ranks of the group have called it. `control` is connected and not started.
absl::StatusOr<std::unique_ptr<Communicator>> CreateNcclGroup(int rank, int world_size,
                                                              std::unique_ptr<ControlLink> control,
                                                              const NcclOptions& options = {});

}  // namespace evenkeel

#endif  // EVENKEEL_COMM_NCCL_NCCL_H_
