// Convolutions of 16-bit images that a library has no algorithm for, by way of float32: so that it
// depends on neither the number of channels nor the library's version whether a model can be
// trained.
//
//   WideningConvolutions convolutions(runtime, device, std::move(cudnn));
//
// It first calls the given convolutions. If they return Unimplemented for a shape in 16 bits, that
// shape is from then on copied to float32, computed in float32, and rounded once.
//
// Host:      waits when its own memory has to grow: the first time that it sees a larger shape.
// Threads:   thread-compatible.
// Ownership: `runtime` outlives it.

#ifndef EVENKEEL_TRAINER_DEVICE_WIDENING_CONVOLUTIONS_H_
#define EVENKEEL_TRAINER_DEVICE_WIDENING_CONVOLUTIONS_H_

#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "evenkeel/comm/device/runtime.h"
#include "evenkeel/comm/memory.h"
#include "evenkeel/comm/types.h"
#include "evenkeel/trainer/device/math.h"

namespace evenkeel::internal {

class WideningConvolutions : public ConvolutionLibrary {
 public:
  WideningConvolutions(DeviceRuntime& runtime, Device device,
                       std::unique_ptr<ConvolutionLibrary> library)
      : runtime_(runtime), device_(device), library_(std::move(library)) {}

  absl::Status Convolve(ConvolutionPass pass, const DeviceConvolution& shape,
                        const ConvolutionTensors& tensors, StreamRef stream) override;

 private:
  // A pass for which the library has no algorithm.
  struct Widened {
    DeviceConvolution shape;
    ConvolutionPass pass;
    friend bool operator==(const Widened&, const Widened&) = default;
  };

  absl::StatusOr<float*> Room(Memory& memory, int64_t count, StreamRef stream);
  absl::Status Copy(TypedPointer from, TypedPointer to, int64_t count, StreamRef stream);

  DeviceRuntime& runtime_;
  const Device device_;
  const std::unique_ptr<ConvolutionLibrary> library_;
  std::vector<Widened> widened_;
  Memory places_[3];  // Images, weight and output in float32.
};

}  // namespace evenkeel::internal

#endif  // EVENKEEL_TRAINER_DEVICE_WIDENING_CONVOLUTIONS_H_
