// Products and convolutions of simulated devices: plain loops, on the stream's thread.
//
//   SimulatedMath math(devices);
//
// Sums are in float32, in the order of the inner index; a bias and what is added to come last.
//
// Errors: InvalidArgument for what math.h does not allow.

#ifndef EVENKEEL_TRAINER_DEVICE_SIMULATED_MATH_H_
#define EVENKEEL_TRAINER_DEVICE_SIMULATED_MATH_H_

#include "absl/status/status.h"
#include "evenkeel/comm/device/simulated.h"
#include "evenkeel/trainer/device/math.h"

namespace evenkeel {

class SimulatedMath : public DeviceMath {
 public:
  explicit SimulatedMath(SimulatedDevices& devices) : devices_(devices) {}

 private:
  absl::Status DoProduct(const StridedShape& shape, TypedPointer left, const void* right,
                         const float* bias, TypedPointer output, StreamRef stream) override;
  absl::Status DoConvolve(ConvolutionPass pass, const DeviceConvolution& shape,
                          const ConvolutionTensors& tensors, StreamRef stream) override;

  SimulatedDevices& devices_;
};

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_DEVICE_SIMULATED_MATH_H_
