// Products of many matrices at once, each seen through strides: parts of wider matrices, transposed
// or not.
//
//   const StridedShape shape{.rows = 1024, .columns = 384, .inner = 128,
//                            .left = {.row = 128}, .right = {.row = 384}, .output = {.row = 384}};
//
// left [outer, heads, rows, inner] times right [outer, heads, inner, columns] is output [outer,
// heads, rows, columns]. Element (o, h, r, c) of each lies at o * outer + h * head + r * row + c *
// column of its strides.
//
// Units:   elements.
// Threads: values.

#ifndef EVENKEEL_TRAINER_LAYERS_STRIDED_SHAPE_H_
#define EVENKEEL_TRAINER_LAYERS_STRIDED_SHAPE_H_

#include <cstdint>

namespace evenkeel {

struct MatrixStrides {
  int64_t outer = 0;
  int64_t head = 0;
  int64_t row = 0;
  int64_t column = 1;
  bool operator==(const MatrixStrides&) const = default;
};

struct StridedShape {
  int64_t outer = 1;
  int64_t heads = 1;
  int64_t rows = 0;
  int64_t columns = 0;
  int64_t inner = 0;
  MatrixStrides left, right, output;
  bool add = false;  // Adds the product to the output.
  bool operator==(const StridedShape&) const = default;
};

// A fully connected layer whose weight lies as [inputs, outputs]. One whose weight lies as
// [outputs, inputs] is the layer from its outputs to its inputs (FromOutputs()): Forward() of one
// is BackwardInput() of the other.
struct LinearShape {
  int64_t rows = 0;
  int64_t inputs = 0;
  int64_t outputs = 0;
  int64_t input_stride = inputs;  // From row to row of the input and its gradient.

  static LinearShape FromOutputs(int64_t rows, int64_t inputs, int64_t outputs) {
    return {.rows = rows, .inputs = outputs, .outputs = inputs};
  }

  // The products of the three passes.
  StridedShape Forward() const {
    return {.rows = rows,
            .columns = outputs,
            .inner = inputs,
            .left = {.row = input_stride},
            .right = {.row = outputs},
            .output = {.row = outputs}};
  }
  StridedShape BackwardInput() const {
    return {.rows = rows,
            .columns = inputs,
            .inner = outputs,
            .left = {.row = outputs},
            .right = {.row = 1, .column = outputs},
            .output = {.row = input_stride}};
  }
  StridedShape BackwardWeight(bool add) const {
    return {.rows = inputs,
            .columns = outputs,
            .inner = rows,
            .left = {.row = 1, .column = input_stride},
            .right = {.row = outputs},
            .output = {.row = outputs},
            .add = add};
  }
};

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_LAYERS_STRIDED_SHAPE_H_
