#include "evenkeel/bucket/value_memory.h"

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "evenkeel/comm/status.h"
#include "evenkeel/comm/types.h"

namespace evenkeel {
namespace {

constexpr int64_t kAlignment = 64;  // A cache line, and the widest vector register.

bool IsMoved(const ParameterSet& params, int index) {
  const TensorView& value = params[index].value;
  return !params.is_ignored(index) && value.bytes() > 0 && value.data != nullptr && value.device == Device::Cpu();
}

int64_t RoomFor(const TensorView& value) { return (value.bytes() + kAlignment - 1) / kAlignment * kAlignment; }

}  // namespace

absl::StatusOr<Memory> MoveValues(Communicator& comm, ParameterSet& params) {
  int64_t bytes = 0;
  for (int i = 0; i < params.size(); ++i) bytes += IsMoved(params, i) ? RoomFor(params[i].value) : 0;
  if (bytes == 0 || comm.device() != Device::Cpu()) return Memory{};
  EK_ASSIGN_OR_RETURN(const Memory memory, comm.Allocate(bytes));
  std::byte* free = static_cast<std::byte*>(memory.data.get());
  for (int i = 0; i < params.size(); ++i) {
    if (!IsMoved(params, i)) continue;
    const TensorView& value = params[i].value;
    std::memcpy(free, value.data, value.bytes());
    params.SetValueMemory(i, free);
    free += RoomFor(value);
  }
  return memory;
}

}  // namespace evenkeel
