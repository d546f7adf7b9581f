// The calls of the backend to NCCL, as an interface: over the library (library.h), or over a
// simulated one (comm/testing/simulated_nccl.h).
//
//   NcclComm comm = nullptr;
//   // in progress; State() says until when
//   NcclAnswer answer = api.Init(device, id, rank, world_size, &comm);
//   ...
//   api.GroupStart();
//   answer = api.Enqueue({.kind = CollectiveKind::kAllReduce, .in = a, .out = a, .count = n}, comm,
//                        stream);
//   api.GroupEnd(comm);
//   EK_RETURN_IF_ERROR(ToStatus("all_reduce", answer));
//
// Communicators are non-blocking: a call that is kInProgress goes on by itself, and until State()
// says that it has ended nothing else but Abort() may be called. What an older NCCL lacks is done
// otherwise where it can be (all-to-all as messages), and else answers kUnimplemented (memory).
//
// Groups made by ncclCommSplit() are not used: they take all ranks of a parent that does nothing
// meanwhile, and share its fate; nor those of ncclCommShrink(), whose parent must not have been
// aborted. A new id makes groups that are as independent as others.
//
// Threads: one call at a time for each communicator, Abort() excepted; GroupStart() to GroupEnd()
//          on one thread.

#ifndef EVENKEEL_COMM_NCCL_API_H_
#define EVENKEEL_COMM_NCCL_API_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "evenkeel/comm/collective.h"
#include "evenkeel/comm/types.h"

namespace evenkeel::internal {

using NcclComm = void*;

enum class NcclCode : uint8_t {
  kSuccess,
  kUnhandledCudaError,
  kSystemError,
  kInternalError,
  kInvalidArgument,
  kInvalidUsage,
  kRemoteError,
  kInProgress,
  kUnimplemented,  // By the NCCL that is loaded.
  kUnknown,
};

struct NcclAnswer {
  NcclCode code = NcclCode::kSuccess;
  std::string text;  // NCCL's own text for a failure.

  bool is_failure() const { return code != NcclCode::kSuccess && code != NcclCode::kInProgress; }
};

// OK for success and for what is in progress; else "<what>: <NCCL's text>": Unavailable if a peer
// or the network is gone, InvalidArgument for a wrong call, Unimplemented, and Internal for the
// rest.
absl::Status ToStatus(absl::string_view what, const NcclAnswer& answer);

// NCCL's reductions; MakeScaledSum() gives more.
enum NcclReduction : int {
  kNcclSum = 0,
  kNcclProduct = 1,
  kNcclMax = 2,
  kNcclMin = 3,
  kNcclAverage = 4
};

struct NcclCall {
  CollectiveKind kind = CollectiveKind::kAllReduce;  // Any but kBarrier.
  const void* in = nullptr;
  void* out = nullptr;
  int64_t count = 0;  // As Collective::count.
  DType dtype = DType::kFloat32;
  int op = kNcclSum;
  int root = -1;  // Or peer.
};

// Where a rank is, as NCCL sees it. It refuses two ranks of one host on one device.
struct NcclPlace {
  std::string host;    // Equal on ranks of one host. NCCL_HOSTID, if that is set.
  std::string device;  // Unique among the host's devices: its bus address.
  bool may_share_device = false;
};

class NcclApi {
 public:
  virtual ~NcclApi() = default;

  // Returns the version of the loaded library, as 22809 for 2.28.9.
  virtual int version() = 0;
  virtual absl::StatusOr<NcclPlace> PlaceOf(Device device) = 0;

  virtual NcclAnswer GetUniqueId(std::string* id) = 0;
  virtual NcclAnswer Init(Device device, const std::string& id, int rank, int world_size,
                          NcclComm* comm) = 0;
  // Returns the result of the last call, and asynchronous errors.
  virtual NcclAnswer State(NcclComm comm) = 0;
  // Ends what runs, and frees the communicator; from any thread.
  virtual NcclAnswer Abort(NcclComm comm) = 0;

  virtual NcclAnswer GroupStart() = 0;
  // All calls since GroupStart() are one operation of this communicator.
  virtual NcclAnswer GroupEnd(NcclComm comm) = 0;
  virtual NcclAnswer Enqueue(const NcclCall& call, NcclComm comm, StreamRef stream) = 0;
  // A sum of values that are multiplied first, by `scale` as a `dtype`.
  virtual NcclAnswer MakeScaledSum(double scale, DType dtype, NcclComm comm, int* op) = 0;
  virtual NcclAnswer DropReduction(int op, NcclComm comm) = 0;

  // Memory that can be registered with a communicator, which then uses it without a copy. A null
  // handle: it is not, as NCCL was told (NCCL_LOCAL_REGISTER=0, for one).
  virtual NcclAnswer AllocateMemory(Device device, int64_t bytes, void** data) = 0;
  virtual NcclAnswer FreeMemory(Device device, void* data) = 0;
  virtual NcclAnswer Register(NcclComm comm, void* data, int64_t bytes, void** handle) = 0;
  virtual NcclAnswer Deregister(NcclComm comm, void* handle) = 0;
};

// "2.28.9".
std::string NcclVersionText(int version);

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_NCCL_API_H_
