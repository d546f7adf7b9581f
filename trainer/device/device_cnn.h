// The residual network of trainer/models/cnn.h on a device.
//
//   // and what weights it is to begin with
//   EK_ASSIGN_OR_RETURN(std::unique_ptr<Model> host, MakeCnn(options));
//   EK_ASSIGN_OR_RETURN(std::unique_ptr<Model> model, MakeDeviceCnn(options, *host, place));
//
// Parameters, buffers, their order, and what is computed are the host model's, whose values it
// begins with.
//
// Precision: products are of float32, or of bfloat16 or float16: then matrices and filters are
//            rounded once in each pass, and what goes from layer to layer is of that type.
//            Parameters, their gradients, statistics, the loss and all sums are float32. Small
//            gradients in float16 want a loss scale (PassOptions::weight).
//
// Errors: InvalidArgument for other types; the runtime's own; Unimplemented if cuDNN has no
//         algorithm for a shape.

#ifndef EVENKEEL_TRAINER_DEVICE_DEVICE_CNN_H_
#define EVENKEEL_TRAINER_DEVICE_DEVICE_CNN_H_

#include <memory>

#include "absl/status/statusor.h"
#include "evenkeel/comm/types.h"
#include "evenkeel/trainer/models/cnn.h"
#include "evenkeel/trainer/models/model.h"
#include "evenkeel/trainer/models/place.h"

namespace evenkeel {

// `host` is what MakeCnn(options) made; products take `dtype`.
absl::StatusOr<std::unique_ptr<Model>> MakeDeviceCnn(const CnnOptions& options, const Model& host,
                                                     const DevicePlace& place,
                                                     DType dtype = DType::kFloat32);

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_DEVICE_DEVICE_CNN_H_
