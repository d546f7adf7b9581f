// Devices for tests that run twice: on simulated devices everywhere, and on a GPU where there is
// one.
//
//   TestedDevices devices;  // for SimulatedDevices, with its constructor
//   EK_ASSIGN_OR_RETURN(Memory memory, devices.Allocate(Device::Cuda(0), bytes));
//   ... the host reads and writes that memory as well, once the stream is done ...
//
// In BUILD, device_test() (device_test.bzl) instead of ek_cc_test() makes two tests of one source:
// x_test, in which this is SimulatedDevices, and x_on_gpu_test, in which it is CUDA's devices. So
// nvcc's code must meet the same expectations as a kernel on the host. Without a GPU each test of
// x_on_gpu_test is reported as skipped, by name.
//
// Memory: on CUDA it is managed (or the host's, mapped), and visible to the host and the device. No
//         other memory is: pass a kernel memory from Allocate(), never a vector or the stack.
// Lacks:  SimulatedOptions::delay and count do nothing on CUDA.

#ifndef EVENKEEL_COMM_DEVICE_TESTING_TESTED_DEVICES_H_
#define EVENKEEL_COMM_DEVICE_TESTING_TESTED_DEVICES_H_

#include "evenkeel/comm/device/simulated.h"

#ifdef EK_TEST_ON_CUDA
#include "evenkeel/comm/device/testing/managed_devices.h"
#endif

namespace evenkeel {

#ifdef EK_TEST_ON_CUDA
using TestedDevices = internal::ManagedDevices;
#else
using TestedDevices = SimulatedDevices;
#endif

}  // namespace evenkeel

#endif  // EVENKEEL_COMM_DEVICE_TESTING_TESTED_DEVICES_H_
