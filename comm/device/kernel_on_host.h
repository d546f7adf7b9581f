// A kernel's threads on the host: those of a block take turns on one thread of the host, each on a
// stack of its own where they wait for each other, so that SyncThreads() means what it means on a
// device.
//
//   RunOnHost(kernel, shape, args);      // all blocks, one after the other
//
// A thread that does not come to a SyncThreads() that others of its block wait in ends the process
// with a sentence: on a device that is undefined.

#ifndef EVENKEEL_COMM_DEVICE_KERNEL_ON_HOST_H_
#define EVENKEEL_COMM_DEVICE_KERNEL_ON_HOST_H_

#include <cstdint>

namespace evenkeel {

struct DeviceKernel;
struct LaunchShape;

namespace internal {

// Which of a kernel's threads runs.
struct HostThreadPlace {
  int thread = 0;
  int threads = 1;
  int64_t block = 0;
  int64_t blocks = 1;
  int64_t row = 0;
};
HostThreadPlace& HostThread();

// Until all threads of the block have come here.
void WaitForBlock();
// Returns a thread's mailbox, for its values that others read between two calls of WaitForBlock().
double& Mailbox(int thread);

float HalfToFloat(uint16_t bits);
uint16_t FloatToHalf(float value);

void RunOnHost(const DeviceKernel& kernel, const LaunchShape& shape, void* const* args);

}  // namespace internal
}  // namespace evenkeel

#endif  // EVENKEEL_COMM_DEVICE_KERNEL_ON_HOST_H_
