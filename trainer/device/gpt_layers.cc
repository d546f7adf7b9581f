#include "evenkeel/trainer/device/gpt_layers.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "evenkeel/comm/device/kernel.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/trainer/data/stable_random.h"
#include "evenkeel/trainer/device/gpt_kernels_image.h"
#include "evenkeel/trainer/device/gpt_norm_kernels_image.h"
#include "evenkeel/trainer/device/gpt_softmax_kernels_image.h"
#include "evenkeel/trainer/device/internal/gpt_kernels.cuh"
#include "evenkeel/trainer/device/internal/gpt_norm_kernels.cuh"
#include "evenkeel/trainer/device/internal/gpt_softmax_kernels.cuh"

namespace evenkeel {
namespace {

using gpt_kernel::Noise;

constexpr KernelKind kAlone = KernelKind::kIndependent, kTogether = KernelKind::kSynchronises;

// A kernel for each type of operands, of which arguments may hold void pointers.
template <typename OfFloat, typename OfBFloat>
struct ForOperands {
  OfFloat of_float;
  OfBFloat of_bfloat;
};
template <typename OfFloat, typename OfBFloat>
ForOperands(OfFloat, OfBFloat) -> ForOperands<OfFloat, OfBFloat>;

#define EK_GPT_KERNEL(variable, kernel, image, kind)                          \
  const ForOperands variable = {                                              \
      MakeKernel<&gpt_kernel::kernel##_float>(#kernel "_float", image, kind), \
      MakeKernel<&gpt_kernel::kernel##_bfloat>(#kernel "_bfloat", image, kind)};

EK_GPT_KERNEL(kNormForward, ek_gpt_norm_forward, gpt_norm_kernels_image, kTogether)
EK_GPT_KERNEL(kGeluForward, ek_gpt_gelu_forward, gpt_kernels_image, kAlone)
EK_GPT_KERNEL(kGeluBackward, ek_gpt_gelu_backward, gpt_kernels_image, kAlone)
EK_GPT_KERNEL(kDropout, ek_gpt_dropout, gpt_kernels_image, kAlone)
EK_GPT_KERNEL(kDropOperands, ek_gpt_drop_operands, gpt_kernels_image, kAlone)
EK_GPT_KERNEL(kSplitHeads, ek_gpt_split_heads, gpt_kernels_image, kAlone)
EK_GPT_KERNEL(kMergeHeads, ek_gpt_merge_heads, gpt_kernels_image, kAlone)
EK_GPT_KERNEL(kMergeGradients, ek_gpt_merge_gradients, gpt_kernels_image, kAlone)
EK_GPT_KERNEL(kSumRows, ek_gpt_sum_rows, gpt_kernels_image, kTogether)
EK_GPT_KERNEL(kCausalForward, ek_gpt_causal_forward, gpt_softmax_kernels_image, kTogether)
EK_GPT_KERNEL(kCausalBackward, ek_gpt_causal_backward, gpt_softmax_kernels_image, kTogether)
EK_GPT_KERNEL(kTokenLoss, ek_gpt_token_loss, gpt_softmax_kernels_image, kTogether)
#undef EK_GPT_KERNEL

const auto kEmbeddingForward = MakeKernel<&gpt_kernel::ek_gpt_embedding_forward>(
    "ek_gpt_embedding_forward", gpt_kernels_image);
const auto kEmbeddingTokens = MakeKernel<&gpt_kernel::ek_gpt_embedding_backward_tokens>(
    "ek_gpt_embedding_backward_tokens", gpt_kernels_image, kTogether);
const auto kEmbeddingPositions = MakeKernel<&gpt_kernel::ek_gpt_embedding_backward_positions>(
    "ek_gpt_embedding_backward_positions", gpt_kernels_image);
const auto kNormBackward = MakeKernel<&gpt_kernel::ek_gpt_norm_backward>(
    "ek_gpt_norm_backward", gpt_norm_kernels_image, kTogether);
const auto kNormBackwardWide = MakeKernel<&gpt_kernel::ek_gpt_norm_backward_wide>(
    "ek_gpt_norm_backward_wide", gpt_norm_kernels_image, kTogether);
const auto kLossSum = MakeKernel<&gpt_kernel::ek_gpt_loss_sum>(
    "ek_gpt_loss_sum", gpt_softmax_kernels_image, kTogether);

constexpr int64_t kMostBlocks = 132 * 16;     // As ShapeFor().
constexpr int64_t kMostNormBlocks = 132 * 2;  // Each leaves a row of sums.
constexpr int64_t kMostParts = 128;           // Parts of the rows, summed in parallel,
constexpr int64_t kRowsPerPart = 64;          // each at least so many.
constexpr int64_t kRowsInOnePart = 512;       // So few are summed in one launch.
constexpr int kRowsPerBlock = 8;              // Rows that take a warp each.
// Vectors of four elements; longer rows get a second warp.
constexpr int64_t kVectorsPerThread = 8;

int64_t DivideUp(int64_t count, int64_t by) { return (count + by - 1) / by; }

// Returns whether all of these rows may be moved four elements at a time.
template <typename... Pointers>
uint32_t AreAligned(int64_t row_stride, Pointers... pointers) {
  const bool are =
      row_stride % 4 == 0 && ((reinterpret_cast<uintptr_t>(pointers) % 16 == 0) && ...);
  return are ? 1 : 0;
}

Noise NoiseOf(const DropoutNoise& noise) {
  if (noise.probability == 0) return {};
  // Exactly what trainer/gpt/dropout.cc makes of them.
  return {.place = gpt_kernel::Mix64(StableRandom(noise.seed, noise.stream).Next()),
          .first_row = noise.first_row,
          .lowest_kept = static_cast<uint32_t>(noise.probability * 0x1p32),
          .keep_scale = static_cast<float>(1 / (1 - noise.probability)),
          .is_on = 1};
}

// Returns the number of threads that share a row: a warp, or more for long rows.
int ThreadsPerRow(int64_t columns, int most) {
  int threads = kernel::kWarp;
  while (threads < most && DivideUp(columns, 4) > kVectorsPerThread * threads) threads *= 2;
  return threads;
}

LaunchShape ShapeOfRows(int64_t rows, int threads_per_row, int64_t most_blocks = kMostBlocks) {
  const int64_t per_block =
      threads_per_row == kernel::kWarp ? std::min<int64_t>(kRowsPerBlock, rows) : 1;
  return {.blocks = std::min(DivideUp(rows, per_block), most_blocks),
          .threads = threads_per_row * static_cast<int>(per_block)};
}

// A block per row, without waiting.
LaunchShape BlockPerRow(int64_t rows, int64_t width) {
  const int64_t warps = DivideUp(width, 4 * kernel::kWarp);
  return {.blocks = std::min(rows, kMostBlocks),
          .threads = static_cast<int>(std::min<int64_t>(warps, 8)) * kernel::kWarp};
}

int WarpsFor(int64_t rows) {
  return static_cast<int>(std::min<int64_t>(rows, gpt_kernel::kMostWarps));
}

LaunchShape NormBackwardShape(int64_t rows, int64_t width) {
  return ShapeOfRows(rows, ThreadsPerRow(width, gpt_kernel::kMostNormThreads), kMostNormBlocks);
}

int64_t RowsPerPart(int64_t rows) {
  return rows <= kRowsInOnePart ? rows : std::max(kRowsPerPart, DivideUp(rows, kMostParts));
}

absl::Status CheckNorm(int64_t width) {
  if (width <= kMostNormWidth) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("a layer norm on a device may be at most ",
                                                 kMostNormWidth, " wide, got ", width));
}

gpt_kernel::HeadsShape ShapeOf(const AttentionShape& shape, int parts, const void* rows,
                               const void* heads) {
  return {.sequences = shape.sequences,
          .context = shape.context,
          .heads = shape.heads,
          .head_width = shape.head_width,
          .parts = parts,
          .aligned = AreAligned(shape.head_width, rows, heads)};
}

LaunchShape BlockPerRow(const AttentionShape& shape, int parts) {
  return BlockPerRow(shape.sequences * shape.context, parts * shape.width());
}

gpt_kernel::CausalShape ShapeOf(const AttentionRows& rows, int most_threads, uint32_t aligned) {
  const int64_t context = rows.shape.context;
  return {.matrices = rows.shape.matrices(),
          .first_row = rows.begin,
          .rows = rows.count(),
          .columns = rows.end,
          .row_stride = context,
          .score_stride = rows.block_rows * context,
          .probability_stride = context * context,
          .scale = rows.Scale<float>(),
          .threads_per_row = ThreadsPerRow(rows.end, most_threads),
          .aligned = aligned};
}

}  // namespace

template <typename Kernels, typename... Args>
absl::Status DeviceGptLayers::Run(const Kernels& kernels, const LaunchShape& shape,
                                  Args... args) const {
  switch (operand_) {
    case DType::kFloat32:
      return Launch(runtime_, kernels.of_float, shape, stream_, args...);
    case DType::kBFloat16:
      return Launch(runtime_, kernels.of_bfloat, shape, stream_, args...);
    default:
      return absl::InvalidArgumentError(absl::StrCat(
          "a gpt's products on a device take float32 or bfloat16, not ", ToString(operand_)));
  }
}

absl::Status DeviceGptLayers::EmbeddingForward(int64_t rows, int64_t context, int64_t width,
                                               const DropoutNoise& noise, const int32_t* inputs,
                                               const float* token_table,
                                               const float* position_table, float* output) const {
  const gpt_kernel::RowsShape shape{rows, width,
                                    AreAligned(width, token_table, position_table, output)};
  return Launch(runtime_, kEmbeddingForward, BlockPerRow(rows, width), stream_, shape,
                NoiseOf(noise), context, inputs, token_table, position_table, output);
}

absl::Status DeviceGptLayers::EmbeddingBackwardTokens(int64_t width, const DropoutNoise& noise,
                                                      const DeviceTokens& tokens,
                                                      const float* diff_output,
                                                      float* diff_table) const {
  const gpt_kernel::RowsShape shape{tokens.buckets, width,
                                    AreAligned(width, diff_output, diff_table)};
  const LaunchShape launch{.blocks = tokens.buckets,
                           .threads = gpt_kernel::kMostWarps * kernel::kWarp,
                           .rows = DivideUp(width, gpt_kernel::kTileColumns)};
  return Launch(runtime_, kEmbeddingTokens, launch, stream_, shape, NoiseOf(noise), tokens.tokens,
                tokens.ends, tokens.order, diff_output, diff_table);
}

absl::Status DeviceGptLayers::EmbeddingBackwardPositions(int64_t rows, int64_t context,
                                                         int64_t positions, int64_t width,
                                                         const DropoutNoise& noise,
                                                         const float* diff_output,
                                                         GradTarget<float> diff_table) const {
  const gpt_kernel::RowsShape shape{positions, width,
                                    AreAligned(width, diff_output, diff_table.data)};
  return Launch(runtime_, kEmbeddingPositions, BlockPerRow(positions, width), stream_, shape,
                NoiseOf(noise), rows / context, context, diff_output, diff_table.data,
                diff_table.add ? 1 : 0);
}

absl::Status DeviceGptLayers::SumAndNormForward(int64_t rows, int64_t width,
                                                const DropoutNoise& noise, const float* around,
                                                const float* part, float* sum, const float* weight,
                                                const float* bias, Operands* output,
                                                RowStatistics<float> statistics) const {
  EK_RETURN_IF_ERROR(CheckNorm(width));
  const gpt_kernel::NormShape shape{
      .rows = rows,
      .width = width,
      .threads_per_row = ThreadsPerRow(width, gpt_kernel::kMostNormThreads),
      .aligned = AreAligned(width, around, part, sum, weight, bias, output)};
  return Run(kNormForward, ShapeOfRows(rows, shape.threads_per_row), shape, NoiseOf(noise), around,
             part, sum, weight, bias, output, statistics.mean, statistics.inverse_deviation);
}

int64_t DeviceGptLayers::NormWorkspace(int64_t rows, int64_t width) {
  return 2 * NormBackwardShape(rows, width).blocks * width;
}

absl::Status DeviceGptLayers::NormBackward(int64_t rows, int64_t width, const float* input,
                                           RowStatistics<float> statistics, const float* weight,
                                           const float* diff_output, float* diff_input,
                                           float* workspace) const {
  EK_RETURN_IF_ERROR(CheckNorm(width));
  const gpt_kernel::NormShape shape{
      .rows = rows,
      .width = width,
      .threads_per_row = ThreadsPerRow(width, gpt_kernel::kMostNormThreads),
      .aligned = AreAligned(width, input, weight, diff_output, diff_input)};
  const LaunchShape launch = NormBackwardShape(rows, width);
  return Launch(runtime_,
                launch.threads <= gpt_kernel::kUsualNormThreads ? kNormBackward : kNormBackwardWide,
                launch, stream_, shape, input, statistics.mean, statistics.inverse_deviation,
                weight, diff_output, diff_input, workspace);
}

absl::Status DeviceGptLayers::NormBias(int64_t rows, int64_t width, const float* workspace,
                                       GradTarget<float> diff_bias) const {
  const int64_t blocks = NormBackwardShape(rows, width).blocks;
  return NormWeight(rows, width, workspace + blocks * width, diff_bias);
}

absl::Status DeviceGptLayers::NormWeight(int64_t rows, int64_t width, const float* workspace,
                                         GradTarget<float> diff_weight) const {
  static_assert(kMostNormBlocks <= kRowsInOnePart, "the sums over blocks need no workspace");
  const int64_t blocks = NormBackwardShape(rows, width).blocks;
  return DeviceGptLayers(runtime_, stream_, DType::kFloat32)
      .SumRows(blocks, width, workspace, nullptr, diff_weight);
}

absl::Status DeviceGptLayers::GeluForward(int64_t n, const float* input, Operands* output) const {
  return Run(kGeluForward, ShapeFor(n, 4), n, AreAligned(0, input, output), input, output);
}

absl::Status DeviceGptLayers::GeluBackward(int64_t n, const float* input, const float* diff_output,
                                           Operands* diff_input) const {
  return Run(kGeluBackward, ShapeFor(n, 4), n, AreAligned(0, input, diff_output, diff_input), input,
             diff_output, diff_input);
}

absl::Status DeviceGptLayers::Dropout(int64_t rows, int64_t width, const DropoutNoise& noise,
                                      const float* input, Operands* output) const {
  const gpt_kernel::DropoutShape shape{.matrices = 1,
                                       .rows = rows,
                                       .columns = width,
                                       .row_stride = width,
                                       .aligned = AreAligned(width, input, output)};
  return Run(kDropout, BlockPerRow(rows, width), shape, NoiseOf(noise), input, output);
}

int64_t DeviceGptLayers::SumRowsWorkspace(int64_t rows, int64_t columns) {
  const int64_t parts = DivideUp(rows, RowsPerPart(rows));
  return parts == 1 ? 0 : parts * columns;
}

absl::Status DeviceGptLayers::SumRows(int64_t rows, int64_t columns, const Operands* matrix,
                                      float* workspace, GradTarget<float> to) const {
  const int64_t per_part = RowsPerPart(rows), parts = DivideUp(rows, per_part);
  const gpt_kernel::RowsShape shape{rows, columns, AreAligned(columns, matrix)};
  const LaunchShape launch{.blocks = DivideUp(columns, gpt_kernel::kTileColumns),
                           .threads = WarpsFor(per_part) * kernel::kWarp,
                           .rows = parts};
  const bool is_final = parts == 1;
  EK_RETURN_IF_ERROR(Run(kSumRows, launch, shape, per_part, matrix, is_final ? to.data : workspace,
                         is_final && to.add ? 1 : 0));
  if (is_final) return absl::OkStatus();
  return DeviceGptLayers(runtime_, stream_, DType::kFloat32)
      .SumRows(parts, columns, workspace, nullptr, to);
}

absl::Status DeviceGptLayers::SplitHeads(const AttentionShape& shape, int parts,
                                         const Operands* rows, Operands* heads) const {
  return Run(kSplitHeads, BlockPerRow(shape, parts), ShapeOf(shape, parts, rows, heads), rows,
             heads);
}

absl::Status DeviceGptLayers::MergeHeads(const AttentionShape& shape, int parts,
                                         const Operands* heads, Operands* rows) const {
  return Run(kMergeHeads, BlockPerRow(shape, parts), ShapeOf(shape, parts, rows, heads), heads,
             rows);
}

absl::Status DeviceGptLayers::MergeHeadGradients(const AttentionShape& shape, int parts,
                                                 const float* heads, Operands* rows) const {
  return Run(kMergeGradients, BlockPerRow(shape, parts), ShapeOf(shape, parts, rows, heads), heads,
             rows);
}

absl::Status DeviceGptLayers::CausalSoftmaxForward(const AttentionRows& rows,
                                                   const DropoutNoise& noise, const float* scores,
                                                   Operands* probabilities,
                                                   Operands* dropped) const {
  const gpt_kernel::CausalShape shape =
      ShapeOf(rows, 256, AreAligned(rows.shape.context, scores, probabilities, dropped));
  return Run(kCausalForward, ShapeOfRows(shape.matrices * shape.rows, shape.threads_per_row), shape,
             NoiseOf(noise), scores, probabilities, dropped);
}

absl::Status DeviceGptLayers::CausalSoftmaxBackward(const AttentionRows& rows,
                                                    const DropoutNoise& noise,
                                                    const Operands* probabilities,
                                                    const float* diff_dropped,
                                                    Operands* diff_scores) const {
  const gpt_kernel::CausalShape shape =
      ShapeOf(rows, 256, AreAligned(rows.shape.context, probabilities, diff_dropped, diff_scores));
  return Run(kCausalBackward, ShapeOfRows(shape.matrices * shape.rows, shape.threads_per_row),
             shape, NoiseOf(noise), probabilities, diff_dropped, diff_scores);
}

absl::Status DeviceGptLayers::DropProbabilities(const AttentionRows& rows,
                                                const DropoutNoise& noise,
                                                const Operands* probabilities,
                                                Operands* dropped) const {
  const int64_t context = rows.shape.context;
  const gpt_kernel::DropoutShape shape{.matrices = rows.shape.matrices(),
                                       .rows = rows.count(),
                                       .columns = rows.end,
                                       .row_stride = context,
                                       .input_stride = context * context,
                                       .output_stride = rows.block_rows * context,
                                       .first_row = rows.begin,
                                       .noise_rows = context,
                                       .aligned = AreAligned(context, probabilities, dropped)};
  return Run(kDropOperands, BlockPerRow(shape.matrices * shape.rows, rows.end), shape,
             NoiseOf(noise), probabilities, dropped);
}

absl::Status DeviceGptLayers::TokenLoss(int64_t rows, int64_t vocabulary, int64_t stride,
                                        const float* scores, const int32_t* targets,
                                        double gradient_scale, Operands* diff_scores,
                                        void* workspace, double* loss_sum, int64_t* correct) const {
  const gpt_kernel::LossShape shape{.rows = rows,
                                    .vocabulary = vocabulary,
                                    .stride = stride,
                                    .gradient_scale = gradient_scale,
                                    .threads_per_row = ThreadsPerRow(vocabulary, 512),
                                    .aligned = AreAligned(stride, scores, diff_scores)};
  auto* const losses = static_cast<double*>(workspace);
  auto* const are_correct = reinterpret_cast<int32_t*>(losses + rows);
  EK_RETURN_IF_ERROR(Run(kTokenLoss, ShapeOfRows(rows, shape.threads_per_row), shape, scores,
                         targets, diff_scores, losses, are_correct));
  const int threads =
      static_cast<int>(std::min<int64_t>(DivideUp(rows, kernel::kWarp), 8)) * kernel::kWarp;
  return Launch(runtime_, kLossSum, {.blocks = 1, .threads = threads}, stream_, rows, losses,
                are_correct, loss_sum, correct);
}

}  // namespace evenkeel
