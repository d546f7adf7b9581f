// The functions of NCCL, found in a library while the program runs.
//
//   EK_ASSIGN_OR_RETURN(const NcclFunctions nccl, LoadNccl(/*path=*/""));
//   nccl.ncclCommAbort(comm);
//
// No program is linked with NCCL, so that one process can contain evenkeel and another user of
// NCCL, such as PyTorch with a library of its own: both use the one that is loaded.

#ifndef EVENKEEL_COMM_NCCL_FUNCTIONS_H_
#define EVENKEEL_COMM_NCCL_FUNCTIONS_H_

#include <cuda_runtime.h>
#include <nccl.h>

#include <cstddef>
#include <string>

#include "absl/status/statusor.h"
#include "evenkeel/comm/device/shared_library.h"

#if NCCL_VERSION_CODE < NCCL_VERSION(2, 14, 3)
#error "evenkeel needs the nccl.h of NCCL 2.14.3 or newer"
#endif

namespace evenkeel::internal {

// The functions that each NCCL must have.
#define EK_NCCL_FUNCTIONS(X)  \
  X(ncclAllGather)            \
  X(ncclAllReduce)            \
  X(ncclBroadcast)            \
  X(ncclCommAbort)            \
  X(ncclCommCount)            \
  X(ncclCommGetAsyncError)    \
  X(ncclCommInitRankConfig)   \
  X(ncclGetErrorString)       \
  X(ncclGetLastError)         \
  X(ncclGetUniqueId)          \
  X(ncclGetVersion)           \
  X(ncclGroupEnd)             \
  X(ncclGroupStart)           \
  X(ncclRecv)                 \
  X(ncclRedOpCreatePreMulSum) \
  X(ncclRedOpDestroy)         \
  X(ncclReduce)               \
  X(ncclReduceScatter)        \
  X(ncclSend)

struct NcclFunctions {
  EK_NCCL_FUNCTIONS(EK_DECLARE_FUNCTION)

  // Null in an older NCCL. The nccl.h of the build may be older as well, so the types are here.
  ncclResult_t (*ncclMemAlloc)(void** data, size_t bytes) = nullptr;  // These four: 2.19.
  ncclResult_t (*ncclMemFree)(void* data) = nullptr;
  ncclResult_t (*ncclCommRegister)(ncclComm_t comm, void* data, size_t bytes,
                                   void** handle) = nullptr;
  ncclResult_t (*ncclCommDeregister)(ncclComm_t comm, void* handle) = nullptr;
  ncclResult_t (*ncclAlltoAll)(const void* in, void* out, size_t count, ncclDataType_t type,
                               ncclComm_t comm, cudaStream_t stream) = nullptr;  // 2.28.
};

// Uses the first of these:
//   1. the NCCL that the process has loaded,
//   2. the library `path`, unless it is empty: then no other is tried,
//   3. libnccl.so.2, as the system finds libraries (LD_LIBRARY_PATH, for one),
//   4. the library that the build found with its CUDA toolkit.
// The library stays loaded. Returns FailedPrecondition if it is missing, is older than 2.18, or
// lacks a function.
absl::StatusOr<NcclFunctions> LoadNccl(const std::string& path);

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_NCCL_FUNCTIONS_H_
