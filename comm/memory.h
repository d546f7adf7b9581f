// A piece of memory with an owner, on the host or on a device.
//
//   EK_ASSIGN_OR_RETURN(Memory memory, comm.Allocate(bytes));
//   float* data = static_cast<float*>(memory.data.get());
//
// Ownership: freed with the last copy of the handle.

#ifndef EVENKEEL_COMM_MEMORY_H_
#define EVENKEEL_COMM_MEMORY_H_

#include <cstdint>
#include <memory>

namespace evenkeel {

struct Memory {
  std::shared_ptr<void> data;
  int64_t bytes = 0;
};

}  // namespace evenkeel

#endif  // EVENKEEL_COMM_MEMORY_H_
