// The perceptron of trainer/models/mlp.h on a device.
//
//   // and what weights it is to begin with
//   EK_ASSIGN_OR_RETURN(std::unique_ptr<Model> host, MakeMlp(options));
//   EK_ASSIGN_OR_RETURN(std::unique_ptr<Model> model, MakeDeviceMlp(options, *host, place));
//
// Parameters, their order, and what is computed are the host model's, whose values it begins with.
//
// Precision: products are of float32, or of bfloat16 or float16: then matrices are rounded once in
//            each pass, and what goes from layer to layer is of that type. Parameters, their
//            gradients, the loss and all sums are float32. Small gradients in float16 want a loss
//            scale (PassOptions::weight).
//
// Errors: InvalidArgument for other types; the runtime's own.

#ifndef EVENKEEL_TRAINER_DEVICE_DEVICE_MLP_H_
#define EVENKEEL_TRAINER_DEVICE_DEVICE_MLP_H_

#include <memory>

#include "absl/status/statusor.h"
#include "evenkeel/comm/types.h"
#include "evenkeel/trainer/models/mlp.h"
#include "evenkeel/trainer/models/model.h"
#include "evenkeel/trainer/models/place.h"

namespace evenkeel {

// `host` is what MakeMlp(options) made; products take `dtype`.
absl::StatusOr<std::unique_ptr<Model>> MakeDeviceMlp(const MlpOptions& options, const Model& host,
                                                     const DevicePlace& place,
                                                     DType dtype = DType::kFloat32);

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_DEVICE_DEVICE_MLP_H_
