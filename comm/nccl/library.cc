#include "evenkeel/comm/nccl/library.h"

#include <cuda_runtime.h>
#include <nccl.h>
#include <unistd.h>

#include <array>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <memory>
#include <string>

#include "absl/base/const_init.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "evenkeel/comm/device/cuda_context.h"
#include "evenkeel/comm/nccl/functions.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/types.h"

namespace evenkeel::internal {
namespace {

static_assert(ncclSum == static_cast<int>(kNcclSum) && ncclProd == static_cast<int>(kNcclProduct) &&
              ncclMax == static_cast<int>(kNcclMax) && ncclMin == static_cast<int>(kNcclMin) &&
              ncclAvg == static_cast<int>(kNcclAverage));

// The target of an NcclComm pointer.
struct Handle {
  ncclComm_t comm = nullptr;
  Device device;
};
// A copy: an abort may end the communicator while a call hangs.
Handle HandleOf(NcclComm comm) { return *static_cast<Handle*>(comm); }

NcclCode CodeOf(ncclResult_t result) {
  switch (result) {
    case ncclSuccess:
      return NcclCode::kSuccess;
    case ncclUnhandledCudaError:
      return NcclCode::kUnhandledCudaError;
    case ncclSystemError:
      return NcclCode::kSystemError;
    case ncclInternalError:
      return NcclCode::kInternalError;
    case ncclInvalidArgument:
      return NcclCode::kInvalidArgument;
    case ncclInvalidUsage:
      return NcclCode::kInvalidUsage;
    case ncclRemoteError:
      return NcclCode::kRemoteError;
    case ncclInProgress:
      return NcclCode::kInProgress;
    default:
      return NcclCode::kUnknown;
  }
}

NcclAnswer NoDevice(const absl::Status& status) {
  return {NcclCode::kUnhandledCudaError, std::string(status.message())};
}

// int16 only where bytes are moved as they are: then as twice as many bytes.
ncclDataType_t TypeOf(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return ncclFloat32;
    case DType::kFloat64:
      return ncclFloat64;
    case DType::kFloat16:
      return ncclFloat16;
    case DType::kBFloat16:
      return ncclBfloat16;
    case DType::kInt8:
    case DType::kInt16:
      return ncclInt8;
    case DType::kUint8:
      return ncclUint8;
    case DType::kInt32:
      return ncclInt32;
    case DType::kInt64:
      return ncclInt64;
  }
  return ncclInt8;
}

ncclResult_t AllToAll(const NcclFunctions& nccl, const NcclCall& call, size_t count,
                      ncclDataType_t type, ncclComm_t comm, cudaStream_t stream) {
  if (nccl.ncclAlltoAll != nullptr)
    return nccl.ncclAlltoAll(call.in, call.out, count, type, comm, stream);
  int ranks = 0;
  ncclResult_t result = nccl.ncclCommCount(comm, &ranks);
  const int64_t part = call.count * SizeOf(call.dtype);
  for (int rank = 0; rank < ranks && result == ncclSuccess; ++rank) {
    result = nccl.ncclSend(static_cast<const char*>(call.in) + rank * part, count, type, rank, comm,
                           stream);
    if (result == ncclSuccess) {
      result = nccl.ncclRecv(static_cast<char*>(call.out) + rank * part, count, type, rank, comm,
                             stream);
    }
  }
  return result;
}

ncclResult_t Put(const NcclFunctions& nccl, const NcclCall& call, ncclComm_t comm,
                 cudaStream_t stream) {
  const ncclDataType_t type = TypeOf(call.dtype);
  const auto count = static_cast<size_t>(call.count) * (call.dtype == DType::kInt16 ? 2 : 1);
  const auto op = static_cast<ncclRedOp_t>(call.op);
  switch (call.kind) {
    case CollectiveKind::kAllReduce:
      return nccl.ncclAllReduce(call.in, call.out, count, type, op, comm, stream);
    case CollectiveKind::kReduce:
      return nccl.ncclReduce(call.in, call.out, count, type, op, call.root, comm, stream);
    case CollectiveKind::kBroadcast:
      return nccl.ncclBroadcast(call.in, call.out, count, type, call.root, comm, stream);
    case CollectiveKind::kAllGather:
      return nccl.ncclAllGather(call.in, call.out, count, type, comm, stream);
    case CollectiveKind::kReduceScatter:
      return nccl.ncclReduceScatter(call.in, call.out, count, type, op, comm, stream);
    case CollectiveKind::kAllToAll:
      return AllToAll(nccl, call, count, type, comm, stream);
    case CollectiveKind::kSend:
      return nccl.ncclSend(call.in, count, type, call.root, comm, stream);
    case CollectiveKind::kRecv:
      return nccl.ncclRecv(call.out, count, type, call.root, comm, stream);
    case CollectiveKind::kBarrier:
    case CollectiveKind::kAllGatherV:
    case CollectiveKind::kAllToAllV:
      break;
  }
  return ncclInvalidArgument;
}

// As NCCL knows hosts: NCCL_HOSTID, else the name and the boot.
std::string HostIdentity() {
  if (const char* const given = std::getenv("NCCL_HOSTID"); given != nullptr && *given != '\0')
    return given;
  std::array<char, 256> name = {};
  (void)gethostname(name.data(), name.size() - 1);
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  return absl::StrCat(name.data(), " ", boot);
}

class Library : public NcclApi {
 public:
  explicit Library(const NcclFunctions& nccl) : nccl_(nccl) {}

  int version() override {
    int version = 0;
    (void)nccl_.ncclGetVersion(&version);
    return version;
  }

  absl::StatusOr<NcclPlace> PlaceOf(Device device) override {
    std::array<char, 64> address = {};
    const cudaError_t error =
        cudaDeviceGetPCIBusId(address.data(), static_cast<int>(address.size()), device.index);
    if (error != cudaSuccess) {
      return absl::InternalError(
          absl::StrCat("the bus address of ", ToString(device), ": ", cudaGetErrorString(error)));
    }
    const char* const shared = std::getenv("NCCL_MULTI_RANK_GPU_ENABLE");
    return NcclPlace{.host = HostIdentity(),
                     .device = address.data(),
                     .may_share_device = shared != nullptr && absl::string_view(shared) == "1"};
  }

  NcclAnswer GetUniqueId(std::string* id) override {
    ncclUniqueId bytes;
    const NcclAnswer answer = Answer(nccl_.ncclGetUniqueId(&bytes), nullptr);
    if (!answer.is_failure()) id->assign(reinterpret_cast<const char*>(&bytes), sizeof(bytes));
    return answer;
  }

  NcclAnswer Init(Device device, const std::string& id, int rank, int world_size,
                  NcclComm* comm) override {
    ncclUniqueId bytes;
    if (id.size() != sizeof(bytes)) {
      return {NcclCode::kInvalidArgument,
              absl::StrCat("an NCCL id has ", sizeof(bytes), " bytes, not ", id.size())};
    }
    std::memcpy(&bytes, id.data(), sizeof(bytes));
    if (const char* const blocking = std::getenv("NCCL_COMM_BLOCKING");
        blocking != nullptr && std::atoi(blocking) != 0) {
      return {NcclCode::kInvalidUsage,
              absl::StrCat("NCCL_COMM_BLOCKING=", blocking,
                           " would leave every wait without a deadline: unset it")};
    }
    const ScopedCudaDevice scope(device);
    if (!scope.status().ok()) return NoDevice(scope.status());
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 0;
    auto handle = std::make_unique<Handle>();
    handle->device = device;
    const NcclAnswer answer =
        Answer(nccl_.ncclCommInitRankConfig(&handle->comm, world_size, bytes, rank, &config),
               handle->comm);
    if (handle->comm != nullptr) *comm = handle.release();
    return answer;
  }

  NcclAnswer State(NcclComm comm) override {
    const ncclComm_t of = HandleOf(comm).comm;
    ncclResult_t state = ncclSuccess;
    const ncclResult_t asked = nccl_.ncclCommGetAsyncError(of, &state);
    return Answer(asked != ncclSuccess ? asked : state, of);
  }

  NcclAnswer Abort(NcclComm comm) override {
    const std::unique_ptr<Handle> handle(static_cast<Handle*>(comm));
    const ScopedCudaDevice scope(handle->device);
    return Answer(nccl_.ncclCommAbort(handle->comm), nullptr);
  }

  NcclAnswer GroupStart() override { return Answer(nccl_.ncclGroupStart(), nullptr); }
  NcclAnswer GroupEnd(NcclComm comm) override {
    const Handle of = HandleOf(comm);
    const ScopedCudaDevice scope(of.device);
    return Answer(nccl_.ncclGroupEnd(), of.comm);
  }
  NcclAnswer Enqueue(const NcclCall& call, NcclComm comm, StreamRef stream) override {
    const Handle of = HandleOf(comm);
    const ScopedCudaDevice scope(of.device);
    return Answer(Put(nccl_, call, of.comm, static_cast<cudaStream_t>(stream.handle)), of.comm);
  }

  NcclAnswer MakeScaledSum(double scale, DType dtype, NcclComm comm, int* op) override {
    // Room for any type; NCCL reads as much as the type has.
    alignas(8) std::byte scalar[8] = {};
    const auto write = [&](auto value) { std::memcpy(scalar, &value, sizeof(value)); };
    if (dtype == DType::kFloat64) write(scale);
    if (dtype == DType::kFloat32) write(static_cast<float>(scale));
    if (dtype == DType::kFloat16) write(Float16(static_cast<float>(scale)));
    if (dtype == DType::kBFloat16) write(BFloat16(static_cast<float>(scale)));
    const Handle of = HandleOf(comm);
    ncclRedOp_t made = ncclSum;
    const NcclAnswer answer =
        Answer(nccl_.ncclRedOpCreatePreMulSum(&made, scalar, TypeOf(dtype), ncclScalarHostImmediate,
                                              of.comm),
               of.comm);
    *op = static_cast<int>(made);
    return answer;
  }
  NcclAnswer DropReduction(int op, NcclComm comm) override {
    const Handle of = HandleOf(comm);
    return Answer(nccl_.ncclRedOpDestroy(static_cast<ncclRedOp_t>(op), of.comm), of.comm);
  }

  NcclAnswer AllocateMemory(Device device, int64_t bytes, void** data) override {
    if (nccl_.ncclMemAlloc == nullptr || nccl_.ncclCommRegister == nullptr) {
      return {NcclCode::kUnimplemented,
              absl::StrCat("NCCL ", NcclVersionText(version()),
                           " has no ncclMemAlloc and ncclCommRegister (2.19)")};
    }
    const ScopedCudaDevice scope(device);
    if (!scope.status().ok()) return NoDevice(scope.status());
    return Answer(nccl_.ncclMemAlloc(data, static_cast<size_t>(bytes)), nullptr);
  }
  // The rest is for what AllocateMemory() gave.
  NcclAnswer FreeMemory(Device device, void* data) override {
    const ScopedCudaDevice scope(device);
    return Answer(nccl_.ncclMemFree(data), nullptr);
  }
  NcclAnswer Register(NcclComm comm, void* data, int64_t bytes, void** handle) override {
    const Handle of = HandleOf(comm);
    const ScopedCudaDevice scope(of.device);
    return Answer(nccl_.ncclCommRegister(of.comm, data, static_cast<size_t>(bytes), handle),
                  of.comm);
  }
  NcclAnswer Deregister(NcclComm comm, void* handle) override {
    const Handle of = HandleOf(comm);
    const ScopedCudaDevice scope(of.device);
    return Answer(nccl_.ncclCommDeregister(of.comm, handle), of.comm);
  }

 private:
  NcclAnswer Answer(ncclResult_t result, ncclComm_t comm) const {
    NcclAnswer answer{.code = CodeOf(result)};
    if (!answer.is_failure()) return answer;
    answer.text = nccl_.ncclGetErrorString(result);
    const char* const detail = nccl_.ncclGetLastError(comm);
    if (detail != nullptr && *detail != '\0') absl::StrAppend(&answer.text, " (", detail, ")");
    return answer;
  }

  const NcclFunctions nccl_;
};

}  // namespace

absl::StatusOr<NcclApi*> NcclLibrary() {
  static absl::Mutex mutex(absl::kConstInit);
  static Library* library = nullptr;
  absl::MutexLock lock(&mutex);
  if (library == nullptr) {
    const char* const path = std::getenv("EVENKEEL_NCCL");
    EK_ASSIGN_OR_RETURN(const NcclFunctions nccl, LoadNccl(path == nullptr ? "" : path));
    library = new Library(nccl);
  }
  return library;
}

}  // namespace evenkeel::internal
