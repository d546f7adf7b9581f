// Agreement between the ranks of a group in a step on devices, without a host that waits: the norm
// of all of their gradients together, and the parameters for which some rank has a gradient.
//
//   // own[i]: 1 if this rank has one
//   EK_RETURN_IF_ERROR(flags.Reduce(own, updater, comm, channel, stream));
//   EK_RETURN_IF_ERROR(updater.MeasureThere(0, norm, updater.stream()));
//   EK_RETURN_IF_ERROR(AddUpMeasure(updater, norm, comm, channel));
//   EK_RETURN_IF_ERROR(updater.PrepareThere(0, options, true, updater.stream(), flags.all(),
//                                           may_be_unset));
//
// Order:     all ranks call the same in the same order. All is work on the updater's stream, or on
//            that which is given: always the same one then.
// Threads:   thread-compatible.
// Ownership: the flags' memory outlives the updater, which waits for what reads it: declare them
//            before it.

#ifndef EVENKEEL_ZERO_OPTIM_INTERNAL_DEVICE_AGREEMENT_H_
#define EVENKEEL_ZERO_OPTIM_INTERNAL_DEVICE_AGREEMENT_H_

#include <vector>

#include "absl/status/status.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/memory.h"
#include "evenkeel/comm/types.h"
#include "evenkeel/zero_optim/internal/parameter_updater.h"

namespace evenkeel::internal {

// Combines this rank's measurement of its part with those of the group.
absl::Status AddUpMeasure(ParameterUpdater& updater, double norm, Communicator& comm,
                          Channel& channel);

class DeviceFlags {
 public:
  // 0 or 1 each, as many on all ranks. They go to the device only when they have changed.
  absl::Status Reduce(const std::vector<float>& own, ParameterUpdater& updater, Communicator& comm,
                      Channel& channel, StreamRef stream);
  // The group's; until the next Reduce().
  TensorView all() const { return Part(1); }
  // Invalidates the values.
  void Forget() { there_.clear(); }

 private:
  TensorView Part(int index) const {
    const TensorView both(memory_.data.get(), 2 * count_, DType::kFloat32, device_);
    return both.Slice(index * count_, count_);
  }

  Memory memory_;  // This rank's, then the group's.
  int64_t count_ = 0;
  Device device_;
  std::vector<float> there_;  // As they were uploaded.
};

}  // namespace evenkeel::internal

#endif  // EVENKEEL_ZERO_OPTIM_INTERNAL_DEVICE_AGREEMENT_H_
