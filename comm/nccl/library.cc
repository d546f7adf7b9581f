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

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "evenkeel/comm/device/cuda_context.h"
#include "evenkeel/comm/types.h"

// Null where the NCCL that is loaded is older.
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 19, 3)
#pragma weak ncclMemAlloc
#pragma weak ncclMemFree
#pragma weak ncclCommRegister
#pragma weak ncclCommDeregister
#endif
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 28, 3)
#pragma weak ncclAlltoAll
#endif

namespace evenkeel::internal {
namespace {

static_assert(ncclSum == static_cast<int>(kNcclSum) && ncclProd == static_cast<int>(kNcclProduct) &&
              ncclMax == static_cast<int>(kNcclMax) && ncclMin == static_cast<int>(kNcclMin) &&
              ncclAvg == static_cast<int>(kNcclAverage));

// What an NcclComm points to.
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
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 13, 4)
    case ncclRemoteError:
      return NcclCode::kRemoteError;
#endif
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 14, 3)
    case ncclInProgress:
      return NcclCode::kInProgress;
#endif
    default:
      return NcclCode::kUnknown;
  }
}

NcclAnswer AnswerOf(ncclResult_t result, ncclComm_t comm) {
  NcclAnswer answer{.code = CodeOf(result)};
  if (!answer.is_failure()) return answer;
  answer.text = ncclGetErrorString(result);
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 13, 4)
  const char* const detail = ncclGetLastError(comm);
  if (detail != nullptr && *detail != '\0') absl::StrAppend(&answer.text, " (", detail, ")");
#endif
  return answer;
}

[[maybe_unused]] NcclAnswer NoDevice(const absl::Status& status) {
  return {NcclCode::kUnhandledCudaError, std::string(status.message())};
}

[[maybe_unused]] NcclAnswer Lacks(absl::string_view what) {
  int loaded = 0;
  (void)ncclGetVersion(&loaded);
  return {NcclCode::kUnimplemented,
          absl::StrCat("built with NCCL ", NcclVersionText(NCCL_VERSION_CODE), ", and run with ",
                       NcclVersionText(loaded), ": there is no ", what)};
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

ncclResult_t AllToAll(const NcclCall& call, size_t count, ncclDataType_t type, ncclComm_t comm,
                      cudaStream_t stream) {
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 28, 3)
  if (ncclAlltoAll != nullptr) return ncclAlltoAll(call.in, call.out, count, type, comm, stream);
#endif
  int ranks = 0;
  ncclResult_t result = ncclCommCount(comm, &ranks);
  const int64_t part = call.count * SizeOf(call.dtype);
  for (int rank = 0; rank < ranks && result == ncclSuccess; ++rank) {
    result =
        ncclSend(static_cast<const char*>(call.in) + rank * part, count, type, rank, comm, stream);
    if (result == ncclSuccess) {
      result =
          ncclRecv(static_cast<char*>(call.out) + rank * part, count, type, rank, comm, stream);
    }
  }
  return result;
}

ncclResult_t Put(const NcclCall& call, ncclComm_t comm, cudaStream_t stream) {
  const ncclDataType_t type = TypeOf(call.dtype);
  const auto count = static_cast<size_t>(call.count) * (call.dtype == DType::kInt16 ? 2 : 1);
  const auto op = static_cast<ncclRedOp_t>(call.op);
  switch (call.kind) {
    case CollectiveKind::kAllReduce:
      return ncclAllReduce(call.in, call.out, count, type, op, comm, stream);
    case CollectiveKind::kReduce:
      return ncclReduce(call.in, call.out, count, type, op, call.root, comm, stream);
    case CollectiveKind::kBroadcast:
      return ncclBroadcast(call.in, call.out, count, type, call.root, comm, stream);
    case CollectiveKind::kAllGather:
      return ncclAllGather(call.in, call.out, count, type, comm, stream);
    case CollectiveKind::kReduceScatter:
      return ncclReduceScatter(call.in, call.out, count, type, op, comm, stream);
    case CollectiveKind::kAllToAll:
      return AllToAll(call, count, type, comm, stream);
    case CollectiveKind::kSend:
      return ncclSend(call.in, count, type, call.root, comm, stream);
    case CollectiveKind::kRecv:
      return ncclRecv(call.out, count, type, call.root, comm, stream);
    case CollectiveKind::kBarrier:
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
  int version() override {
    int version = 0;
    (void)ncclGetVersion(&version);
    return version;
  }
  int built_version() override { return NCCL_VERSION_CODE; }

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
    const NcclAnswer answer = AnswerOf(ncclGetUniqueId(&bytes), nullptr);
    if (!answer.is_failure()) id->assign(reinterpret_cast<const char*>(&bytes), sizeof(bytes));
    return answer;
  }

  NcclAnswer Init(Device device, const std::string& id, int rank, int world_size,
                  NcclComm* comm) override {
#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 14, 3)
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
    const NcclAnswer answer = AnswerOf(
        ncclCommInitRankConfig(&handle->comm, world_size, bytes, rank, &config), handle->comm);
    if (handle->comm != nullptr) *comm = handle.release();
    return answer;
#else
    return Lacks("non-blocking communicators (2.14)");
#endif
  }

  NcclAnswer State(NcclComm comm) override {
    const ncclComm_t of = HandleOf(comm).comm;
    ncclResult_t state = ncclSuccess;
    const ncclResult_t asked = ncclCommGetAsyncError(of, &state);
    return AnswerOf(asked != ncclSuccess ? asked : state, of);
  }

  NcclAnswer Abort(NcclComm comm) override {
    const std::unique_ptr<Handle> handle(static_cast<Handle*>(comm));
    const ScopedCudaDevice scope(handle->device);
    return AnswerOf(ncclCommAbort(handle->comm), nullptr);
  }

  NcclAnswer GroupStart() override { return AnswerOf(ncclGroupStart(), nullptr); }
  NcclAnswer GroupEnd(NcclComm comm) override {
    const Handle of = HandleOf(comm);
    const ScopedCudaDevice scope(of.device);
    return AnswerOf(ncclGroupEnd(), of.comm);
  }
  NcclAnswer Enqueue(const NcclCall& call, NcclComm comm, StreamRef stream) override {
    const Handle of = HandleOf(comm);
    const ScopedCudaDevice scope(of.device);
    return AnswerOf(Put(call, of.comm, static_cast<cudaStream_t>(stream.handle)), of.comm);
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
    const NcclAnswer answer = AnswerOf(
        ncclRedOpCreatePreMulSum(&made, scalar, TypeOf(dtype), ncclScalarHostImmediate, of.comm),
        of.comm);
    *op = static_cast<int>(made);
    return answer;
  }
  NcclAnswer DropReduction(int op, NcclComm comm) override {
    const Handle of = HandleOf(comm);
    return AnswerOf(ncclRedOpDestroy(static_cast<ncclRedOp_t>(op), of.comm), of.comm);
  }

#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 19, 3)
  NcclAnswer AllocateMemory(Device device, int64_t bytes, void** data) override {
    if (ncclMemAlloc == nullptr || ncclCommRegister == nullptr)
      return Lacks("ncclMemAlloc and ncclCommRegister (2.19)");
    const ScopedCudaDevice scope(device);
    if (!scope.status().ok()) return NoDevice(scope.status());
    return AnswerOf(ncclMemAlloc(data, static_cast<size_t>(bytes)), nullptr);
  }
  // The rest is for what AllocateMemory() gave.
  NcclAnswer FreeMemory(Device device, void* data) override {
    const ScopedCudaDevice scope(device);
    return AnswerOf(ncclMemFree(data), nullptr);
  }
  NcclAnswer Register(NcclComm comm, void* data, int64_t bytes, void** handle) override {
    const Handle of = HandleOf(comm);
    const ScopedCudaDevice scope(of.device);
    return AnswerOf(ncclCommRegister(of.comm, data, static_cast<size_t>(bytes), handle), of.comm);
  }
  NcclAnswer Deregister(NcclComm comm, void* handle) override {
    const Handle of = HandleOf(comm);
    const ScopedCudaDevice scope(of.device);
    return AnswerOf(ncclCommDeregister(of.comm, handle), of.comm);
  }
#else
  NcclAnswer AllocateMemory(Device, int64_t, void**) override {
    return Lacks("ncclMemAlloc (2.19)");
  }
  NcclAnswer FreeMemory(Device, void*) override { return Lacks("ncclMemFree (2.19)"); }
  NcclAnswer Register(NcclComm, void*, int64_t, void**) override {
    return Lacks("ncclCommRegister (2.19)");
  }
  NcclAnswer Deregister(NcclComm, void*) override { return Lacks("ncclCommDeregister (2.19)"); }
#endif
};

}  // namespace

NcclApi& NcclLibrary() {
  static NcclApi& library = *new Library();
  return library;
}

}  // namespace evenkeel::internal
