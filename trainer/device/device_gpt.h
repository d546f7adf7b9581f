// GPT-2 on a device: the model of trainer/gpt, with its parameters, in its order, with its numbers.
//
//   // or from a file (gpt_file.h)
//   EK_ASSIGN_OR_RETURN(std::unique_ptr<Gpt> host, MakeGpt(options));
//   // the host's can go now
//   EK_ASSIGN_OR_RETURN(std::unique_ptr<Gpt> model, MakeDeviceGpt(*host, place));
//   // waits for nothing
//   EK_ASSIGN_OR_RETURN(PendingResult loss, model->StartForward(batch, Mode::kTraining));
//   EK_RETURN_IF_ERROR(model->Backward(on_gradient));  // nor does this
//
// Values are those of `host` when it is made. Gradients come in the order of the CPU's model,
// announced when what writes them is on the stream. Masks of dropout are the CPU's, bit for bit.
//
// Precision: of GptCompute::kFloat32 and kBFloat16, as on the CPU: products take float32 or
//            bfloat16, sums and all else are float32. Equal arguments give equal bits on one kind
//            of device: no sum depends on which thread comes first, as long as the products of the
//            device's library don't.
// Memory:    one block for activations, of a size that follows from the first pass of each size;
//            kept. All of a layer's probabilities are kept for backward unless
//            `keeps_probabilities` is false: then a pass takes the memory of one layer's, and
//            backward computes them once more.
// Host:      waits when memory has to grow, when asked for a loss, and in NextToken().
// Ownership: `place` is copied; its runtime outlives the model.
// Threads:   thread-compatible.
// Errors:    InvalidArgument for kFloat64 and for a width above kMostNormWidth (gpt_layers.h);
//            ResourceExhausted, with the sizes, where the device's memory does not hold a pass;
//            those of DeviceMath and of the runtime.

#ifndef EVENKEEL_TRAINER_DEVICE_DEVICE_GPT_H_
#define EVENKEEL_TRAINER_DEVICE_DEVICE_GPT_H_

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "evenkeel/trainer/gpt/gpt.h"
#include "evenkeel/trainer/models/place.h"

namespace evenkeel {

struct DeviceGptOptions {
  bool keeps_probabilities = true;
  // So many rows of a sequence's attention go together; the columns after their last one are not
  // computed.
  int64_t attention_rows = 256;
};

absl::StatusOr<std::unique_ptr<Gpt>> MakeDeviceGpt(const Gpt& host, const DevicePlace& place,
                                                   const DeviceGptOptions& options = {});

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_DEVICE_DEVICE_GPT_H_
