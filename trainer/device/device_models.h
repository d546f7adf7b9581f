// The models of this trainer on a device: the perceptron of trainer/models/mlp.h, the residual
// network of trainer/models/cnn.h and the GPT-2 of trainer/gpt.
//
//   EK_ASSIGN_OR_RETURN(const DevicePlace place, MakeDevicePlace(*comm.runtime(), comm.device()));
//   // has the initial weights; may be destroyed afterwards
//   EK_ASSIGN_OR_RETURN(std::unique_ptr<Model> host, MakeMlp(options));
//   EK_ASSIGN_OR_RETURN(std::unique_ptr<Model> model, MakeDeviceMlp(options, *host, place));
//   // neither waits for the device
//   EK_ASSIGN_OR_RETURN(PendingResult loss, model->StartForward(batch, Mode::kTraining));
//   EK_RETURN_IF_ERROR(model->Backward(on_gradient));
//
// Parameters, buffers, their order, and what is computed are the host model's, whose values at that
// time it begins with. Gradients come in the order of the host's model, announced when what writes
// them is on the stream. Masks of dropout are the host's, bit for bit.
//
// Precision: products are of float32, or of bfloat16 or float16 (GPT: bfloat16): then matrices and
//            filters are rounded once in each pass, and what goes from layer to layer of the
//            perceptron and the network is of that type. Parameters, their gradients, statistics,
//            the loss and all sums are float32. Small gradients in float16 need a loss scale
//            (PassOptions::weight). Of the GPT, equal arguments give equal bits on one kind of
//            device: no sum depends on which thread comes first, as long as the products of the
//            device's library don't.
// Memory:    of the GPT: one block for activations, of a size that follows from the first pass of
//            each size; kept.
// Host:      waits when memory has to grow, when asked for a loss, and in NextToken().
// Ownership: `place` is copied; its runtime outlives the model.
// Threads:   thread-compatible.
// Errors:    InvalidArgument for other types and for a width of a GPT above kMostNormWidth
//            (gpt_layers.h); ResourceExhausted, with the sizes, where the device's memory does not
//            hold a pass of the GPT; Unimplemented, with what is missing, in a build without cuBLAS
//            for CUDA's runtime, for convolutions in one without cuDNN, and if cuDNN has no
//            algorithm for a shape; the libraries' and the runtime's own.

#ifndef EVENKEEL_TRAINER_DEVICE_DEVICE_MODELS_H_
#define EVENKEEL_TRAINER_DEVICE_DEVICE_MODELS_H_

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "evenkeel/comm/device/runtime.h"
#include "evenkeel/comm/types.h"
#include "evenkeel/trainer/gpt/gpt.h"
#include "evenkeel/trainer/models/cnn.h"
#include "evenkeel/trainer/models/mlp.h"
#include "evenkeel/trainer/models/model.h"
#include "evenkeel/trainer/models/place.h"

namespace evenkeel {

// Makes a place with a new stream and with the libraries that multiply there: cuBLAS and cuDNN for
// CUDA's runtime. Unimplemented for a runtime without libraries.
absl::StatusOr<DevicePlace> MakeDevicePlace(DeviceRuntime& runtime, Device device);

// Gives runtimes of that name their libraries (those of simulated devices:
// testing/simulated_math.h). Called before main().
using MakeDeviceMath = absl::StatusOr<std::unique_ptr<DeviceMath>> (*)(DeviceRuntime&, Device);
void UseDeviceMath(absl::string_view runtime_name, MakeDeviceMath make);

// Makes the model of `host`, a result of MakeMlp(options); products take `dtype`.
absl::StatusOr<std::unique_ptr<Model>> MakeDeviceMlp(const MlpOptions& options, const Model& host,
                                                     const DevicePlace& place,
                                                     DType dtype = DType::kFloat32);

// Makes the model of `host`, a result of MakeCnn(options); products take `dtype`.
absl::StatusOr<std::unique_ptr<Model>> MakeDeviceCnn(const CnnOptions& options, const Model& host,
                                                     const DevicePlace& place,
                                                     DType dtype = DType::kFloat32);

struct DeviceGptOptions {
  // Rows of a sequence's attention that are computed together, without the columns after the last
  // of them.
  int64_t attention_rows = 256;
};

// Makes the model of `host`. Products take the type of the host's GptOptions::compute, which may
// not be kFloat64.
absl::StatusOr<std::unique_ptr<Gpt>> MakeDeviceGpt(const Gpt& host, const DevicePlace& place,
                                                   const DeviceGptOptions& options = {});

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_DEVICE_DEVICE_MODELS_H_
