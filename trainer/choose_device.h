// Where a run computes, and on how many ranks: what --device, --backend and --nproc say, and what the machine has.
//
//   TrainOptions options = ...;                                         // .device = DeviceKind::kAuto
//   EK_ASSIGN_OR_RETURN(const std::string line, ChooseDevice(CountCudaDevices(), /*ranks_here=*/{}, options));
//   // options.device is kCpu or kCuda now; with kCuda options.backend is kNccl. `line`: what a person should hear.
//
//   auto   a GPU for each rank if there are as many, else the CPU; the CPU for a backend of the CPU, and for
//          --on_failure=continue
//   cuda   GPUs, or a sentence that says what is missing
//
// Without --nproc there are as many ranks as GPUs, on the CPU and with --rank_steps two.
//
// Threads: pure function.
// Errors:  FailedPrecondition: too few devices, or none; InvalidArgument for flags that contradict each other.

#ifndef EVENKEEL_TRAINER_CHOOSE_DEVICE_H_
#define EVENKEEL_TRAINER_CHOOSE_DEVICE_H_

#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "evenkeel/trainer/train_options.h"

namespace evenkeel {

// Whether it matters how many devices there are.
bool AsksForDevices(const TrainOptions& options);

// `devices`: how many, or why there are none. `ranks_here`: how many ranks a launcher has started on this host; none:
// this program starts them itself.
absl::StatusOr<std::string> ChooseDevice(const absl::StatusOr<int>& devices, std::optional<int> ranks_here,
                                         TrainOptions& options);

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_CHOOSE_DEVICE_H_
