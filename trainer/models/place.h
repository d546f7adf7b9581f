// The place of a model's memory and work: the host, or a device with a stream and the products and
// convolutions of that device.
//
//   // trainer/device/device_models.h
//   EK_ASSIGN_OR_RETURN(const DevicePlace place, MakeDevicePlace(*comm.runtime(), comm.device()));
//   EK_ASSIGN_OR_RETURN(std::unique_ptr<Model> model, MakeDeviceMlp(options, *host_model, place));
//
// Ownership: copies share stream and products. The runtime outlives them.
// Threads:   a value; stream and products are for one thread.

#ifndef EVENKEEL_TRAINER_MODELS_PLACE_H_
#define EVENKEEL_TRAINER_MODELS_PLACE_H_

#include <cstdint>
#include <memory>

#include "absl/time/time.h"
#include "evenkeel/comm/device/runtime.h"
#include "evenkeel/comm/types.h"

namespace evenkeel {

class DeviceMath;  // trainer/device/math.h

// Returns the room of so many bytes in a block of a device's memory, whose parts begin at multiples
// of 256: what devices read in one go, and more.
constexpr int64_t AlignedBytes(int64_t bytes) { return (bytes + 255) / 256 * 256; }

struct DevicePlace {
  DeviceRuntime* runtime = nullptr;  // Null: the host, and the rest is unused.
  Device device;
  Stream stream;  // Used by the model, the reducer's packing and the optimizer.
  std::shared_ptr<DeviceMath> math;
  absl::Duration timeout = absl::Minutes(10);  // Deadline of the host's waits for the device.

  bool is_host() const { return runtime == nullptr; }
};

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_MODELS_PLACE_H_
