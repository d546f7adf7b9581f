// Products and convolutions of simulated devices: plain loops, on the stream's thread. A program
// that is linked with this has them in each MakeDevicePlace() on such devices.
//
//   const std::unique_ptr<DeviceMath> math = MakeSimulatedMath(devices);
//
// Sums are in float32, in the order of the inner index; a bias and what is added to come last.
//
// Ownership: `devices` outlives the result.

#ifndef EVENKEEL_TRAINER_DEVICE_TESTING_SIMULATED_MATH_H_
#define EVENKEEL_TRAINER_DEVICE_TESTING_SIMULATED_MATH_H_

#include <memory>

#include "evenkeel/comm/device/simulated.h"
#include "evenkeel/trainer/device/math.h"

namespace evenkeel {

std::unique_ptr<DeviceMath> MakeSimulatedMath(SimulatedDevices& devices);

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_DEVICE_TESTING_SIMULATED_MATH_H_
