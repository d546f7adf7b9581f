// The products of causal attention for a block of its rows, on the host (attention.h) and on
// devices (trainer/device/device_attention.h): how each reads its factors in place and where it
// writes.
//
//   const AttentionRows rows{shape, begin, end, block_rows, qkv, output,
//                            /*weights_in_block=*/false};
//   products.Run(rows.Scores(), queries, keys, nullptr, scores);
//   products.Run(rows.Output(), probabilities, values, nullptr, output);
//
// Blocks go backward from the last to the first: the last one's keys are all of them, and what it
// writes of keys and values the others are added to.
//
// Threads: values.

#ifndef EVENKEEL_TRAINER_GPT_ATTENTION_ROWS_H_
#define EVENKEEL_TRAINER_GPT_ATTENTION_ROWS_H_

#include <cmath>
#include <cstdint>
#include <utility>

#include "evenkeel/trainer/layers/strided_shape.h"

namespace evenkeel {

struct AttentionShape {
  int64_t sequences = 0;
  int64_t context = 0;
  int64_t heads = 0;
  int64_t head_width = 0;

  int64_t width() const { return heads * head_width; }
  int64_t matrices() const { return sequences * heads; }
};

struct AttentionRows {
  AttentionShape shape;
  int64_t begin = 0;
  int64_t end = 0;
  int64_t block_rows = 0;  // In a matrix of the block's memory: scores, dropped probabilities.
  MatrixStrides qkv;       // For queries, keys, values and their gradients.
  MatrixStrides output;    // For the output and its gradient.
  bool weights_in_block = false;  // The weights of values are in the block's memory.

  int64_t count() const { return end - begin; }
  template <typename T>
  T Scale() const {
    return 1 / std::sqrt(static_cast<T>(shape.head_width));
  }

  // Queries times keys; weights times values.
  StridedShape Scores() const { return FromKeys(qkv); }
  StridedShape Output() const { return FromWeights(Weights(), output); }
  // The gradients: weights times the output's; the output's times values; the scores' times keys,
  // and times queries.
  StridedShape DiffValues() const { return ToKeys(Weights(), output); }
  StridedShape DiffWeights() const { return FromKeys(output); }
  StridedShape DiffQueries() const { return FromWeights(Memory(), qkv); }
  StridedShape DiffKeys() const { return ToKeys(Memory(), qkv); }

 private:
  MatrixStrides Memory() const { return Square(block_rows * shape.context); }
  MatrixStrides Weights() const {
    return weights_in_block ? Memory() : Square(shape.context * shape.context);
  }
  MatrixStrides Square(int64_t matrix) const {
    return {.outer = shape.heads * matrix, .head = matrix, .row = shape.context};
  }
  static MatrixStrides Transposed(MatrixStrides strides) {
    std::swap(strides.row, strides.column);
    return strides;
  }
  // A product for each head of each sequence.
  StridedShape FromKeys(const MatrixStrides& left) const {
    return {shape.sequences,  shape.heads, count(),         end,
            shape.head_width, left,        Transposed(qkv), Memory()};
  }
  StridedShape FromWeights(const MatrixStrides& weights, const MatrixStrides& to) const {
    return {shape.sequences, shape.heads, count(), shape.head_width, end, weights, qkv, to};
  }
  StridedShape ToKeys(const MatrixStrides& weights, const MatrixStrides& right) const {
    const bool adds = end < shape.context;
    return {shape.sequences, shape.heads, end, shape.head_width, count(), Transposed(weights),
            right,           qkv,         adds};
  }
};

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_GPT_ATTENTION_ROWS_H_
