// The cases of bench_device: work on a device that is bound by its memory, with the bytes that it
// must move.
//
//   // plain memory to memory, for scale
//   EK_ASSIGN_OR_RETURN(DeviceCase copy, CopyCase(bench, bytes));
//   EK_ASSIGN_OR_RETURN(DeviceCase pack, PackCase(bench, bytes, DType::kBFloat16));
//   EK_RETURN_IF_ERROR(pack.run());  // puts it on the bench's stream, and returns
//
// Parameters: tensors of a transformer's sizes, from 1 Ki to 1 Mi elements, with as many elements
//             as `bytes` of float32.

#ifndef EVENKEEL_TOOLS_GPU_DEVICE_CASES_H_
#define EVENKEEL_TOOLS_GPU_DEVICE_CASES_H_

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "evenkeel/comm/types.h"
#include "evenkeel/tools/gpu/open_device.h"

namespace evenkeel {

struct DeviceCase {
  std::string name;
  int64_t bytes = 0;                  // Read and written by a run.
  std::function<absl::Status()> run;  // Holds its memory.
};

// `bytes` are read and written in all: half as many are copied.
absl::StatusOr<DeviceCase> CopyCase(const BenchDevice& bench, int64_t bytes);
// Gradients of type `from` into a float32 bucket of `bytes`, scaled; and back again.
absl::StatusOr<DeviceCase> PackCase(const BenchDevice& bench, int64_t bytes, DType from);
absl::StatusOr<DeviceCase> UnpackCase(const BenchDevice& bench, int64_t bytes, DType to);
// A step of AdamW, of as many elements as `bytes` of float32; with a master copy if values and
// gradients are bfloat16.
absl::StatusOr<DeviceCase> AdamWCase(const BenchDevice& bench, int64_t bytes, DType dtype);

// The elements of each tensor.
std::vector<int64_t> BenchTensors(int64_t elements);

}  // namespace evenkeel

#endif  // EVENKEEL_TOOLS_GPU_DEVICE_CASES_H_
