// Causal attention of several heads: each position takes a mean of the values up to its own,
// weighted by the match of their keys with its query.
//
//   CausalAttention<float, float> attention(&products, {scores, probabilities, operands});
//   const AttentionShape shape{.sequences = 8, .context = 128, .heads = 4, .head_width = 32};
//   EK_RETURN_IF_ERROR(attention.Forward(shape, noise, qkv, output));
//   EK_RETURN_IF_ERROR(attention.Backward(shape, noise, qkv, diff_output, diff_qkv));
//
// Probabilities are not kept: Backward computes them again, with equal bits. Some matrices go
// through all steps together, one block of rows after another, so that their scores stay in the
// cache. The columns after a block's last row, which are masked for all its rows, are never
// computed; the matrices are read in place, side by side in `qkv`.
//
// Shapes:    qkv and diff_qkv [sequences * context, 3 * width], width = heads * head_width:
//            queries, keys, values; output and diff_output [sequences * context, width].
// Memory:    each work area has WorkSize() elements: at most kAttentionPartBytes, or a block of one
//            matrix (kAttentionRows rows of `context` scores) if that is larger.
// Dropout:   of the probabilities, where noise.probability > 0; Backward requires the noise of
//            Forward.
// Types:     T is float or double; O, the operand type of products, is T or, for float, BFloat16.
// Ownership: `products` and the work areas outlive it; no content is kept from call to call.
// Threads:   thread-compatible, together with `products`.
// Errors:    those of StridedProducts.
// Source:    Vaswani et al., "Attention is all you need", 2017, section 3.2; Dao et al.,
//            "FlashAttention", 2022, for computing the probabilities twice.

#ifndef EVENKEEL_TRAINER_GPT_ATTENTION_H_
#define EVENKEEL_TRAINER_GPT_ATTENTION_H_

#include <cstdint>

#include "absl/status/status.h"
#include "evenkeel/trainer/gpt/attention_rows.h"
#include "evenkeel/trainer/gpt/dropout.h"
#include "evenkeel/trainer/gpt/strided_product.h"

namespace evenkeel {

// A work area of this size and the inputs of a part fit into the second-level cache of a core.
inline constexpr int64_t kAttentionPartBytes = 256 << 10;
// With a context of 128 a quarter of the products is left out, with 1024 nearly half. Smaller
// blocks leave out more, but their products are slower.
inline constexpr int64_t kAttentionRows = 64;

template <typename T, typename O>
class CausalAttention {
 public:
  struct Memory {
    T* scores = nullptr;
    O* probabilities = nullptr;  // Unused in Forward; may be null there.
    O* operands = nullptr;       // May be the scores' memory where T is O.
  };

  CausalAttention(StridedProducts<O>* products, const Memory& memory)
      : products_(*products), memory_(memory) {}

  // Returns the number of elements of each work area.
  static int64_t WorkSize(const AttentionShape& shape);

  absl::Status Forward(const AttentionShape& shape, const DropoutNoise& noise, const O* qkv,
                       O* output);
  absl::Status Backward(const AttentionShape& shape, const DropoutNoise& noise, const O* qkv,
                        const O* diff_output, T* diff_qkv);

 private:
  // A block of rows of some matrices, of which `first_matrix` is the first.
  struct Block {
    AttentionRows rows;
    int64_t first_matrix = 0;
    DropoutNoise noise;
  };

  absl::Status ForwardBlock(const Block& block, const O* qkv, O* output);
  absl::Status BackwardBlock(const Block& block, const O* qkv, const O* diff_output, T* diff_qkv);
  absl::Status Weigh(const Block& block, const O* qkv, O* probabilities);
  template <typename I, typename R>
  void Drop(const Block& block, const I* input, R* output) const;

  StridedProducts<O>& products_;
  const Memory memory_;  // [matrices, rows of a block, context] each
};

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_GPT_ATTENTION_H_
