// Causal attention of several heads: each position takes a mean of the values up to its own,
// weighted by the match of their keys with its query.
//
//   CausalAttention<float, float> attention(&products, &held);
//   const AttentionShape shape{.sequences = 8, .context = 128, .heads = 4, .head_width = 32};
//   EK_RETURN_IF_ERROR(attention.Forward(shape, noise, qkv, probabilities, output));
//   EK_RETURN_IF_ERROR(attention.Backward(shape, noise, qkv, probabilities, diff_output,
//                                         diff_qkv));
//
// Blocks of rows go through all steps together. The columns after a block's last row, which are
// masked for all its rows, are never computed; the matrices are read in place, side by side in
// `qkv`.
//
// Shapes:    qkv and diff_qkv [sequences * context, 3 * width], width = heads * head_width:
//            queries, keys, values; probabilities [sequences, heads, context, context], after a
//            block's last row unspecified; output and diff_output [sequences * context, width].
// Dropout:   of the probabilities, where noise.probability > 0; Backward wants the noise that
//            Forward had.
// Types:     T is float or double; O, the operand type of products, is T or, for float, BFloat16.
// Ownership: `products` and `held` (buffer.h) outlive it. Nothing is kept from call to call but
//            memory.
// Threads:   thread-compatible, together with `products`.
// Errors:    those of StridedProducts.
// Source:    Vaswani et al., "Attention is all you need", 2017, section 3.2.

#ifndef EVENKEEL_TRAINER_GPT_ATTENTION_H_
#define EVENKEEL_TRAINER_GPT_ATTENTION_H_

#include <cstdint>

#include "absl/status/status.h"
#include "evenkeel/trainer/gpt/attention_rows.h"
#include "evenkeel/trainer/gpt/buffer.h"
#include "evenkeel/trainer/gpt/dropout.h"
#include "evenkeel/trainer/gpt/strided_product.h"

namespace evenkeel {

template <typename T, typename O>
class CausalAttention {
 public:
  CausalAttention(StridedProducts<O>* products, int64_t* held)
      : products_(*products), scores_(held), operands_(held) {}

  absl::Status Forward(const AttentionShape& shape, const DropoutNoise& noise, const O* qkv,
                       O* probabilities, O* output);
  absl::Status Backward(const AttentionShape& shape, const DropoutNoise& noise, const O* qkv,
                        const O* probabilities, const O* diff_output, T* diff_qkv);

 private:
  absl::Status ForwardRows(const AttentionRows& rows, const DropoutNoise& noise, const O* qkv,
                           O* probabilities, O* output);
  absl::Status BackwardRows(const AttentionRows& rows, const DropoutNoise& noise, const O* qkv,
                            const O* probabilities, const O* diff_output, T* diff_qkv);

  StridedProducts<O>& products_;
  Buffer<T> scores_;    // [matrices, rows of a block, context]
  Buffer<O> operands_;  // As large; for dropout, and where O is not T.
};

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_GPT_ATTENTION_H_
