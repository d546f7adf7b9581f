// A residual network with batch normalisation for square images.
//
//   EK_ASSIGN_OR_RETURN(std::unique_ptr<Model> model, MakeCnn({.seed = 1}));
//   EK_ASSIGN_OR_RETURN(model, MakeCnn({
//   .image = {.channels = 3, .side = 32}, .widths = {32, 64, 128},
//                                       .blocks_per_stage = 2}));
//
// A 3x3 convolution (`stem`), then one stage of residual blocks (`block1`, `block2`, ... over all
// stages) per further width, the first block of which halves the image's side, then batch norm,
// rectifier, the mean over the image, and a fully connected layer (`fc`).
//
// Parameters, in forward order: stem.weight; blockN.norm1.weight, .norm1.bias, .shortcut.weight (of
// a stage's first block), .conv1.weight, .norm2.weight, .norm2.bias, .conv2.weight; norm.weight,
// norm.bias; fc.weight, fc.bias. Convolutions start uniformly in +-sqrt(6 / inputs of a neuron), as
// He proposes.
// With `syncs_norms` passes of training are for a training loop with join, whose scope SetScope()
// gets; all ranks with inputs make the same passes, with batches of any size.
//
// Buffers: running_mean and running_variance of every norm, [channels].
//
// float32 only, on oneDNN. For each of the last few batch sizes the model keeps kernels and
// activations, with the defaults about 600 KB per training sample and 300 KB per evaluated one:
// evaluate in batches of a few hundred.
//
// Errors: FailedPrecondition for a pass of training with `syncs_norms` and without a scope;
//         InvalidArgument unless there are 1 to 5 widths of 1 to 1024 channels, 1 to 32 blocks per
//         stage and an image of 1 to 16 channels with a side of 1 to 512; Unimplemented or Internal
//         if oneDNN has no kernel; ResourceExhausted if memory for parameters and gradients runs
//         out.
// Source: He et al., "Identity mappings in deep residual networks", ECCV 2016.

#ifndef EVENKEEL_TRAINER_MODELS_CNN_H_
#define EVENKEEL_TRAINER_MODELS_CNN_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "evenkeel/trainer/data/image_shape.h"
#include "evenkeel/trainer/layers/residual_block.h"
#include "evenkeel/trainer/models/model.h"

namespace evenkeel {

struct CnnOptions {
  static constexpr size_t kMaxWidths = 5;
  static constexpr int kMaxChannels = 1024;
  static constexpr int kMaxBlocks = 32;

  ImageShape image;
  std::vector<int> widths = {16, 32, 64};  // Channels of the stem, then of each stage.
  int blocks_per_stage = 1;
  bool syncs_norms = false;  // Batch norms have the statistics of all ranks; not on devices.
  uint64_t seed = 0;
  bool is_plan = false;  // See model.h.
};

absl::StatusOr<std::unique_ptr<Model>> MakeCnn(const CnnOptions& options);

// Returns the shape of each residual block, in forward order, for batches of `batch` samples.
std::vector<ResidualBlockShape> BlockShapes(const CnnOptions& options, int batch);

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_MODELS_CNN_H_
