// Convolutions of 16-bit images that a library has no algorithm for, by way of float32: so that it depends on neither the
// number of channels nor the library's version whether a model can be trained.
//
//   WideningConvolutions convolutions(runtime, device, std::move(cudnn));
//
// Another one's convolutions are asked first. Where it answers Unimplemented for a shape in 16 bits, that shape is from
// then on copied to float32, computed there, and rounded once.
//
// Host:      waits when its own memory has to grow: the first time that it sees a larger shape.
// Threads:   thread-compatible.
// Ownership: `runtime` outlives it.

#ifndef EVENKEEL_TRAINER_DEVICE_INTERNAL_WIDENING_CONVOLUTIONS_H_
#define EVENKEEL_TRAINER_DEVICE_INTERNAL_WIDENING_CONVOLUTIONS_H_

#include <memory>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "evenkeel/comm/device/runtime.h"
#include "evenkeel/comm/memory.h"
#include "evenkeel/comm/types.h"
#include "evenkeel/trainer/device/internal/cuda_parts.h"
#include "evenkeel/trainer/device/math.h"

namespace evenkeel::internal {

class WideningConvolutions : public CudaConvolutions {
 public:
  WideningConvolutions(DeviceRuntime& runtime, Device device, std::unique_ptr<CudaConvolutions> library)
      : runtime_(runtime), device_(device), library_(std::move(library)) {}

  absl::Status Forward(const DeviceConvolution& shape, const void* images, const void* weight, void* output,
                       StreamRef stream) override;
  absl::Status BackwardImages(const DeviceConvolution& shape, const void* weight, const void* diff_output,
                              void* diff_images, StreamRef stream) override;
  absl::Status BackwardWeight(const DeviceConvolution& shape, const void* images, const void* diff_output,
                              float* diff_weight, bool add, StreamRef stream) override;

 private:
  // What one of the three does, for whom the library has nothing.
  enum class Pass { kForward, kBackwardImages, kBackwardWeight };
  struct Widened {
    DeviceConvolution shape;
    Pass pass;
    friend bool operator==(const Widened&, const Widened&) = default;
  };
  absl::Status LibraryOr(const DeviceConvolution& shape, Pass pass, absl::FunctionRef<absl::Status()> of_library,
                         absl::FunctionRef<absl::Status()> otherwise);

  absl::StatusOr<float*> Room(int place, int64_t count, StreamRef stream);
  absl::StatusOr<const float*> Wide(int place, const void* from, DType dtype, int64_t count, StreamRef stream);
  absl::Status Round(const float* from, void* to, DType dtype, int64_t count, StreamRef stream);

  DeviceRuntime& runtime_;
  const Device device_;
  const std::unique_ptr<CudaConvolutions> library_;
  std::vector<Widened> widened_;
  Memory places_[3];
};

}  // namespace evenkeel::internal

#endif  // EVENKEEL_TRAINER_DEVICE_INTERNAL_WIDENING_CONVOLUTIONS_H_
