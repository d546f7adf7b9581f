// The residual network of trainer/cnn.h on a device, in float32.
//
//   EK_ASSIGN_OR_RETURN(std::unique_ptr<Model> host, MakeCnn(options));        // and what weights it is to begin with
//   EK_ASSIGN_OR_RETURN(std::unique_ptr<Model> model, MakeDeviceCnn(options, *host, place));
//
// Parameters, buffers, their order, and what is computed are the host model's, whose values it begins with.
//
// Errors: the runtime's own; Unimplemented if cuDNN has no algorithm for a shape.

#ifndef EVENKEEL_TRAINER_DEVICE_DEVICE_CNN_H_
#define EVENKEEL_TRAINER_DEVICE_DEVICE_CNN_H_

#include <memory>

#include "absl/status/statusor.h"
#include "evenkeel/trainer/cnn.h"
#include "evenkeel/trainer/device/place.h"
#include "evenkeel/trainer/model.h"

namespace evenkeel {

// `host` is what MakeCnn(options) made.
absl::StatusOr<std::unique_ptr<Model>> MakeDeviceCnn(const CnnOptions& options, const Model& host,
                                                     const DevicePlace& place);

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_DEVICE_DEVICE_CNN_H_
