// Ranks that have a GPU each, over NCCL.
//
//   EK_ASSIGN_OR_RETURN(std::unique_ptr<TcpControlLink> link, TcpControlLink::Connect(store_options));
//   EK_ASSIGN_OR_RETURN(std::unique_ptr<Communicator> comm,
//                       CreateNcclGroup(rank, world_size, std::move(link), {.device = local_rank}));
//   Work work = comm->user().AllReduce(gradient, ReduceOp::kSum, {.after = {stream, comm->device()}});
//   EK_RETURN_IF_ERROR(work.OrderBefore({stream, comm->device()}));      // the host goes on
//
// Order:    NCCL carries no header, deadlocks where ranks launch in different orders, and lets different collectives of
//           equal size complete. So all launches of a rank are on one thread, in an order that rank 0 makes of what all
//           have issued, over the control plane, and compares first: collectives that do not match are launched nowhere,
//           and end the group with who is where. A message of a few dozen bytes from each rank to rank 0 and back per
//           operation; the host runs ahead of the device meanwhile.
// Groups:   that share a device (Split() makes such) are not ordered among each other. Each launches on its own thread as
//           soon as its ranks have issued, so two operations may be launched in one order here and in the other there,
//           whatever the order of the calls; if they then wait for each other's room on the devices, or behind an
//           allocation, all ranks hang until a deadline. So of the operations of all groups on a device let only one
//           group's be on their way at a time: before the other group's call either wait on the host, first.Wait(); or
//           put it behind on the device, first.OrderBefore(stream) and {.after = stream}. All ranks that are in several
//           of the groups do so in one order. Within a group there is nothing to mind. NCCL_LAUNCH_ORDER_IMPLICIT=1 is
//           no substitute: to NCCL launches that meet on two threads are an error then. The end of one group may have to
//           wait for what another has on the device: NCCL gives back memory.
// Streams:  the group has one of its own, of high priority. An operation starts after what is on CallOptions::after at
//           the call, and after CallOptions::after_event. OrderBefore() waits on the host until the operation is
//           launched, that is until all ranks have issued it, and never for a device. Not for use while a stream is
//           captured into a graph.
// Sums:     in NCCL's order, and the type's own precision. A scale, and an average of floats, multiplies what each rank
//           contributes; with min, max and product it multiplies the result. NCCL's min and max may pass over a NaN.
// Lacks:    reductions of int16; bit_or.
// Memory:   Allocate() gives memory that NCCL has registered, from 1 MiB on, where it offers that. Any other memory
//           works, and so does a mixture among the ranks. What NCCL refuses to register is plain memory; the first
//           time is told to WatchOptions::warn, on the thread that allocates.
// Errors:   FailedPrecondition "no CUDA device: ..."; InvalidArgument "rank 3 wants CUDA device 3, there are 2". On all
//           ranks alike, before they are connected: FailedPrecondition that names ranks if they have different versions
//           of NCCL, or two of them one device (unless each has its own NCCL_HOSTID, or NCCL_MULTI_RANK_GPU_ENABLE=1,
//           which NCCL 2.28 does not know: its own error follows). InvalidArgument with NCCL_COMM_BLOCKING=1.
//           What NCCL finds out by itself ends the group, with its own words: Unavailable if a peer or the network is
//           gone. No wait is for ever: an abort that a call into NCCL, NCCL itself, or the device does not follow within
//           10 s says so. Then buffers may still be in use: what Allocate() gave, and what the group has, is never
//           freed. Only the destructor waits on, where a launch is inside a call that does not come back at all.

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
