#include "evenkeel/bucket/value_memory.h"

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "evenkeel/comm/base/clock.h"
#include "evenkeel/comm/device/runtime.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/types.h"

namespace evenkeel {
namespace {

// A cache line, and the widest vector register; what a device reads at once.
int64_t AlignmentOn(Device device) { return device.is_cpu() ? 64 : 256; }

bool IsMoved(const ParameterSet& params, int index, Device device) {
  const TensorView& value = params[index].value;
  return !params.is_ignored(index) && value.bytes() > 0 && value.data != nullptr &&
         value.device == device;
}

int64_t RoomFor(const TensorView& value) {
  const int64_t alignment = AlignmentOn(value.device);
  return (value.bytes() + alignment - 1) / alignment * alignment;
}

absl::Status CopyOnDevice(Communicator& comm, const ParameterSet& params, std::byte* free) {
  if (params.stream().handle == nullptr) {
    return absl::FailedPreconditionError(
        absl::StrCat("MoveValues: the parameters have no stream on ", ToString(comm.device())));
  }
  for (int i = 0; i < params.size(); ++i) {
    if (!IsMoved(params, i, comm.device())) continue;
    const TensorView& value = params[i].value;
    EK_RETURN_IF_ERROR(comm.runtime()->Copy(free, value.data, value.bytes(), params.stream()));
    free += RoomFor(value);
  }
  return comm.runtime()->Synchronize(params.stream(), SteadyNow() + comm.timeout());
}

}  // namespace

absl::StatusOr<Memory> MoveValues(Communicator& comm, ParameterSet& params) {
  const Device device = comm.device();
  int64_t bytes = 0;
  for (int i = 0; i < params.size(); ++i)
    bytes += IsMoved(params, i, device) ? RoomFor(params[i].value) : 0;
  if (bytes == 0) return Memory{};
  EK_ASSIGN_OR_RETURN(const Memory memory, comm.Allocate(bytes));
  std::byte* free = static_cast<std::byte*>(memory.data.get());
  if (!device.is_cpu()) EK_RETURN_IF_ERROR(CopyOnDevice(comm, params, free));
  for (int i = 0; i < params.size(); ++i) {
    if (!IsMoved(params, i, device)) continue;
    const TensorView& value = params[i].value;
    if (device.is_cpu()) std::memcpy(free, value.data, value.bytes());
    EK_RETURN_IF_ERROR(params.Rebind(i, TensorView(free, value.count, value.dtype, value.device)));
    free += RoomFor(value);
  }
  return memory;
}

}  // namespace evenkeel
