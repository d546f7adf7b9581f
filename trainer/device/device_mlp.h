// The perceptron of trainer/mlp.h on a device, in float32.
//
//   EK_ASSIGN_OR_RETURN(std::unique_ptr<Model> host, MakeMlp(options));        // and what weights it is to begin with
//   EK_ASSIGN_OR_RETURN(std::unique_ptr<Model> model, MakeDeviceMlp(options, *host, place));
//
// Parameters, their order, and what is computed are the host model's, whose values it begins with.
//
// Errors: InvalidArgument for another type than float32; the runtime's own.

#ifndef EVENKEEL_TRAINER_DEVICE_DEVICE_MLP_H_
#define EVENKEEL_TRAINER_DEVICE_DEVICE_MLP_H_

#include <memory>

#include "absl/status/statusor.h"
#include "evenkeel/trainer/device/place.h"
#include "evenkeel/trainer/mlp.h"
#include "evenkeel/trainer/model.h"

namespace evenkeel {

// `host` is what MakeMlp(options) made.
absl::StatusOr<std::unique_ptr<Model>> MakeDeviceMlp(const MlpOptions& options, const Model& host,
                                                     const DevicePlace& place);

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_DEVICE_DEVICE_MLP_H_
