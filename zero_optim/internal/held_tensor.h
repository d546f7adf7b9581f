// A tensor of an optimizer's state with memory of its own, where the parameter lies.
//
//   HeldTensor moment(StateTensor(DType::kFloat32, 100));           // on the CPU
//   HeldTensor there(memory, TensorView(memory.data.get(), 100, DType::kFloat32, Device::Cuda(0)));
//
// Ownership: its view is valid until it is assigned to, moved or destroyed; on a device the memory
//            must stay until what uses it has run (ParameterUpdater::Drop()).
// Threads:   thread-compatible.

#ifndef EVENKEEL_ZERO_OPTIM_INTERNAL_HELD_TENSOR_H_
#define EVENKEEL_ZERO_OPTIM_INTERNAL_HELD_TENSOR_H_

#include <cstdint>
#include <utility>

#include "evenkeel/comm/memory.h"
#include "evenkeel/comm/types.h"
#include "evenkeel/zero_optim/optimizer_state.h"

namespace evenkeel::internal {

class HeldTensor {
 public:
  HeldTensor() = default;
  explicit HeldTensor(StateTensor tensor) : here_(std::move(tensor)) {}
  HeldTensor(Memory memory, TensorView view) : memory_(std::move(memory)), there_(view) {}

  TensorView view() { return memory_.data != nullptr ? there_ : here_.view(); }
  int64_t bytes() const { return memory_.data != nullptr ? there_.bytes() : here_.bytes(); }
  // On the CPU; empty on a device.
  const StateTensor& here() const { return here_; }
  StateTensor& here() { return here_; }
  // On a device; empty on the CPU.
  const Memory& memory() const { return memory_; }

 private:
  StateTensor here_;
  Memory memory_;
  TensorView there_;
};

}  // namespace evenkeel::internal

#endif  // EVENKEEL_ZERO_OPTIM_INTERNAL_HELD_TENSOR_H_
