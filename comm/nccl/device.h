// Which of its devices a rank takes.

#ifndef EVENKEEL_COMM_NCCL_DEVICE_H_
#define EVENKEEL_COMM_NCCL_DEVICE_H_

namespace evenkeel::internal {

// The one that its rank on the host counts to. A process that sees a single device has been given
// that one by whatever launched it (CUDA_VISIBLE_DEVICES for each rank); if it was not, NCCL's
// ranks find out that they share it.
inline int NcclDeviceFor(int local_rank, int visible_devices) {
  return visible_devices == 1 ? 0 : local_rank;
}

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_NCCL_DEVICE_H_
