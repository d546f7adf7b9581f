// Chooses the device of a run and its number of ranks, from --device, --backend, --nproc and the
// GPUs of the machine.
//
//   TrainOptions options = ...;  // .device = DeviceKind::kAuto
//   const absl::StatusOr<int> devices = CountCudaDevices(CudaUse::kProducts);
//   EK_ASSIGN_OR_RETURN(const std::string line,
//                       ChooseDevice(devices, /*local_ranks=*/{}, options));
//   // options.device is kCpu or kCuda now; with kCuda options.backend is kNccl. `line`: for
//   // the log; may be empty.
//
//   auto   a GPU for each rank if there are enough, else the CPU; also the CPU for a backend of the
//          CPU and for --on_failure=continue
//   cuda   GPUs, or an error
//
// Without --nproc the run has as many ranks as GPUs; on the CPU and with --rank_steps it has two.
//
// Threads: pure function.
// Errors:  FailedPrecondition for too few devices or none; InvalidArgument for flags that
//          contradict each other.

#ifndef EVENKEEL_TRAINER_APP_CHOOSE_DEVICE_H_
#define EVENKEEL_TRAINER_APP_CHOOSE_DEVICE_H_

#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "evenkeel/trainer/app/train_options.h"

namespace evenkeel {

// Returns true if the options depend on the number of devices.
bool AsksForDevices(const TrainOptions& options);

// Settles device, backend and nproc of `options`, and returns a line for the log, which may be
// empty. `devices`: their number, or the error of counting them. `local_ranks`: the number of ranks
// that a launcher has started on this host; none: this program starts them itself.
absl::StatusOr<std::string> ChooseDevice(const absl::StatusOr<int>& devices,
                                         std::optional<int> local_ranks, TrainOptions& options);

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_APP_CHOOSE_DEVICE_H_
