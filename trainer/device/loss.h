// The results of a forward pass on the device: plain numbers, which kernels write (nvcc sees this
// header).

#ifndef EVENKEEL_TRAINER_DEVICE_LOSS_H_
#define EVENKEEL_TRAINER_DEVICE_LOSS_H_

#include <cstdint>

namespace evenkeel {

struct DeviceLoss {
  double sum = 0;       // Over the predictions.
  int64_t correct = 0;  // How many of them have their highest score where they should.
};

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_DEVICE_LOSS_H_
