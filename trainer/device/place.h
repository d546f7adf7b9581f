// Where a model lies and computes: on the host, or on a device with a stream of its own and what multiplies there.
//
//   EK_ASSIGN_OR_RETURN(const DevicePlace place, MakeDevicePlace(*comm.runtime(), comm.device()));   // make_place.h
//   EK_ASSIGN_OR_RETURN(std::unique_ptr<Model> model, MakeDeviceMlp(options, *host_model, place));
//
// Ownership: copies share stream and products. The runtime outlives them.
// Threads:   a value; what it shares is for one thread.

#ifndef EVENKEEL_TRAINER_DEVICE_PLACE_H_
#define EVENKEEL_TRAINER_DEVICE_PLACE_H_

#include <memory>

#include "absl/time/time.h"
#include "evenkeel/comm/device/runtime.h"
#include "evenkeel/comm/types.h"

namespace evenkeel {

class DeviceMath;  // device/math.h

struct DevicePlace {
  DeviceRuntime* runtime = nullptr;  // Null: the host, and the rest is unused.
  Device device;
  Stream stream;  // Of the model, the reducer's packing and the optimizer.
  std::shared_ptr<DeviceMath> math;
  absl::Duration timeout = absl::Minutes(10);  // How long the host waits for the device when it has to.

  bool is_host() const { return runtime == nullptr; }
};

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_DEVICE_PLACE_H_
