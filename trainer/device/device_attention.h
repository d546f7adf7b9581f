// Causal attention on a device: trainer/gpt/attention.h, block of rows by block of rows.
//
//   const DeviceAttention attention(work, layers, shape, noise, block_rows, {scores, operands});
//   EK_RETURN_IF_ERROR(attention.Forward(qkv, probabilities, output));
//   EK_RETURN_IF_ERROR(attention.Backward(qkv, probabilities, diff_output, diff_qkv));
//
// Shapes:    qkv and diff_qkv [3, sequences, heads, context, head_width], output and diff_output
//            one of them: a product of all heads is one of equally spaced matrices, which a
//            device's library computes in one launch. probabilities as there. diff_qkv is float32,
//            all else of the type that products take.
// Memory:    `scores` and `operands` [sequences, heads, block_rows, context]; operands are null
//            without noise in Forward, and in Backward without noise in float32.
// Threads:   thread-compatible, made for one pass.
// Errors:    those of DeviceMath and the runtime.

#ifndef EVENKEEL_TRAINER_DEVICE_DEVICE_ATTENTION_H_
#define EVENKEEL_TRAINER_DEVICE_DEVICE_ATTENTION_H_

#include <cstdint>

#include "absl/status/status.h"
#include "evenkeel/trainer/device/device_work.h"
#include "evenkeel/trainer/device/gpt_layers.h"
#include "evenkeel/trainer/device/math.h"
#include "evenkeel/trainer/gpt/attention_rows.h"
#include "evenkeel/trainer/gpt/dropout.h"
#include "evenkeel/trainer/layers/strided_shape.h"

namespace evenkeel {

class DeviceAttention {
 public:
  using Operands = void;
  struct Memory {
    float* scores = nullptr;
    Operands* operands = nullptr;
  };

  DeviceAttention(const DeviceWork& work, const DeviceGptLayers& layers,
                  const AttentionShape& shape, const DropoutNoise& noise, int64_t block_rows,
                  const Memory& memory)
      : work_(work),
        layers_(layers),
        shape_(shape),
        noise_(noise),
        block_rows_(block_rows),
        memory_(memory) {}

  absl::Status Forward(const Operands* qkv, Operands* probabilities, Operands* output) const;
  absl::Status Backward(const Operands* qkv, const Operands* probabilities,
                        const Operands* diff_output, float* diff_qkv) const;

 private:
  AttentionRows RowsFrom(int64_t begin) const;
  // Elements of queries, of keys, ...
  int64_t size() const { return shape_.matrices() * shape_.context * shape_.head_width; }
  // Elements of operands.
  void* At(const void* operands, int64_t elements) const;

  absl::Status Product(const StridedShape& shape, const Operands* left, const Operands* right,
                       TypedPointer output) const;
  absl::Status Weigh(const AttentionRows& rows, const Operands* qkv, Operands* probabilities) const;
  absl::Status BackwardRows(const AttentionRows& rows, const Operands* qkv,
                            const Operands* probabilities, const Operands* diff_output,
                            float* diff_qkv) const;

  const DeviceWork& work_;
  const DeviceGptLayers& layers_;
  const AttentionShape shape_;
  const DropoutNoise noise_;
  const int64_t block_rows_;
  const Memory memory_;
};

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_DEVICE_DEVICE_ATTENTION_H_
