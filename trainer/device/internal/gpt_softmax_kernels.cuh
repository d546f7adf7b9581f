// A GPT's two softmaxes, of attention's scores and of the vocabulary (gpt_layers.h).
//
// A row's highest score and the sum of its exponentials are found in one sweep: whenever a thread
// meets a higher score, the sum so far is multiplied by what that changes. A second sweep writes.
// Each thread reads and writes the same elements in both, so results may lie in their argument's
// place.

#ifndef EVENKEEL_TRAINER_DEVICE_INTERNAL_GPT_SOFTMAX_KERNELS_CUH_
#define EVENKEEL_TRAINER_DEVICE_INTERNAL_GPT_SOFTMAX_KERNELS_CUH_

#include <cstdint>

#include "evenkeel/comm/device/kernel.h"
#include "evenkeel/trainer/device/internal/gpt_rows.cuh"

namespace evenkeel::gpt_kernel {

// The highest of the scores so far, and the sum of exp((score - highest) * scale).
struct RunningSum {
  float highest = kLowest;
  float sum = 0;

  // The first `count` of them.
  EK_DEVICE void Add4(const float (&scores)[4], int64_t count, float scale) {
    float most = highest;
    EK_GPT_UNROLL for (int j = 0; j < 4; ++j) most =
        j < count && scores[j] > most ? scores[j] : most;
    if (most > highest) {
      sum *= Exp((highest - most) * scale);
      highest = most;
    }
    EK_GPT_UNROLL for (int j = 0; j < 4; ++j) {
      if (j < count) sum += Exp((scores[j] - highest) * scale);
    }
  }
};

// Rows first_row to first_row + rows - 1 of square matrices, of which row i sees its first i + 1
// columns; columns from there to `columns` become 0. A row begins row_stride after the one before
// in all arguments.
struct CausalShape {
  int64_t matrices;
  int64_t first_row;
  int64_t rows;
  int64_t columns;
  int64_t row_stride;          // Also how many rows a matrix has, which noise counts by.
  int64_t score_stride;        // From matrix to matrix: of scores and what else is as large,
  int64_t probability_stride;  // and of probabilities.
  float scale;
  int threads_per_row;
  uint32_t aligned;
};

struct CausalRow {
  bool is_there;
  int64_t noise_row;
  int64_t seen;
  int64_t in_scores;
  int64_t in_probabilities;

  EK_DEVICE CausalRow(const CausalShape& shape, int64_t index) {
    const int64_t matrix = index / shape.rows, row = index % shape.rows;
    is_there = matrix < shape.matrices;
    noise_row = matrix * shape.row_stride + shape.first_row + row;
    seen = is_there ? shape.first_row + row + 1 : 0;
    in_scores = matrix * shape.score_stride + row * shape.row_stride;
    in_probabilities = matrix * shape.probability_stride + row * shape.row_stride;
  }
};

// `dropped`, where it is not null, gets the probabilities after dropout, as scores lie.
template <typename O>
EK_DEVICE void CausalForward(const CausalShape& shape, const Noise& noise, const float* scores,
                             O* probabilities, O* dropped) {
  EK_SHARED float scratch[kWarp];
  const RowPlace place(shape.threads_per_row);
  const bool aligned = shape.aligned != 0;
  for (int64_t first = place.first; first < shape.matrices * shape.rows; first += place.step) {
    const CausalRow row(shape, first + place.own);
    const float* from = scores + row.in_scores;
    RunningSum own;
    for (int64_t i = 4 * place.lane; i < row.seen; i += 4 * place.threads) {
      float x[4];
      Load4(from, i, shape.columns, aligned, x);
      own.Add4(x, row.seen - i, shape.scale);
    }
    const float highest = RowMax(own.highest, place, scratch);
    const float sum = RowSum(own.sum * Exp((own.highest - highest) * shape.scale), place, scratch);
    if (!row.is_there) continue;
    const float inverse = 1 / sum;
    const RowNoise row_noise(noise, row.noise_row);
    for (int64_t i = 4 * place.lane; i < shape.columns; i += 4 * place.threads) {
      float x[4];
      Load4(from, i, shape.columns, aligned, x);
      EK_GPT_UNROLL for (int j = 0; j < 4; ++j) {
        x[j] = i + j < row.seen ? Exp((x[j] - highest) * shape.scale) * inverse : 0.0f;
      }
      Store4(probabilities + row.in_probabilities, i, shape.columns, aligned, x);
      if (dropped == nullptr) continue;
      EK_GPT_UNROLL for (int j = 0; j < 4; ++j) x[j] =
          row_noise(i + j, ToFloat(FromFloat<O>(x[j])));
      Store4(dropped + row.in_scores, i, shape.columns, aligned, x);
    }
  }
}

// diff_probabilities are those after dropout.
template <typename O>
EK_DEVICE void CausalBackward(const CausalShape& shape, const Noise& noise, const O* probabilities,
                              const float* diff_probabilities, O* diff_scores) {
  EK_SHARED float scratch[kWarp];
  const RowPlace place(shape.threads_per_row);
  const bool aligned = shape.aligned != 0;
  for (int64_t first = place.first; first < shape.matrices * shape.rows; first += place.step) {
    const CausalRow row(shape, first + place.own);
    const RowNoise row_noise(noise, row.noise_row);
    float dot = 0;
    for (int64_t i = 4 * place.lane; i < row.seen; i += 4 * place.threads) {
      float p[4], diff[4];
      Load4(probabilities + row.in_probabilities, i, shape.columns, aligned, p);
      Load4(diff_probabilities + row.in_scores, i, shape.columns, aligned, diff);
      EK_GPT_UNROLL for (int j = 0; j < 4; ++j) dot +=
          i + j < row.seen ? p[j] * row_noise(i + j, diff[j]) : 0.0f;
    }
    dot = RowSum(dot, place, scratch);
    if (!row.is_there) continue;
    for (int64_t i = 4 * place.lane; i < shape.columns; i += 4 * place.threads) {
      float p[4], diff[4];
      Load4(probabilities + row.in_probabilities, i, shape.columns, aligned, p);
      Load4(diff_probabilities + row.in_scores, i, shape.columns, aligned, diff);
      EK_GPT_UNROLL for (int j = 0; j < 4; ++j) {
        diff[j] = i + j < row.seen ? shape.scale * p[j] * (row_noise(i + j, diff[j]) - dot) : 0.0f;
      }
      Store4(diff_scores + row.in_scores, i, shape.columns, aligned, diff);
    }
  }
}

// Rows of scores over the vocabulary.
struct LossShape {
  int64_t rows;
  int64_t vocabulary;
  int64_t stride;  // From row to row, of scores and diff_scores.
  double gradient_scale;
  int threads_per_row;
  uint32_t aligned;
};

// losses: [rows]; correct: [rows], 1 where the first highest score is the target's. No gradient if
// diff_scores is null.
template <typename O>
EK_DEVICE void TokenLoss(const LossShape& shape, const float* scores, const int32_t* targets,
                         O* diff_scores, double* losses, int32_t* correct) {
  EK_SHARED float scratch[kWarp];
  EK_SHARED double wide_scratch[kWarp];
  const RowPlace place(shape.threads_per_row);
  const bool aligned = shape.aligned != 0;
  const int64_t n = shape.vocabulary;
  for (int64_t first = place.first; first < shape.rows; first += place.step) {
    const int64_t row = first + place.own;
    const bool has_row = row < shape.rows;
    const float* from = scores + row * shape.stride;
    const int64_t target = has_row ? targets[row] : -1;
    RunningSum own;
    float target_score = kLowest;
    int64_t where = n;  // Index of this thread's first highest score.
    for (int64_t i = 4 * place.lane; has_row && i < n; i += 4 * place.threads) {
      float x[4];
      Load4(from, i, n, aligned, x);
      EK_GPT_UNROLL for (int j = 0; j < 4; ++j) {
        if (i + j == target) target_score = x[j];
      }
      const float before = own.highest;
      own.Add4(x, n - i, 1);
      if (!(own.highest > before)) continue;
      EK_GPT_UNROLL for (int j = 3; j >= 0; --j) {
        if (i + j < n && x[j] == own.highest) where = i + j;
      }
    }
    const float highest = RowMax(own.highest, place, scratch);
    const float score = RowMax(target_score, place, scratch);
    const double total =
        RowSum(static_cast<double>(own.sum * Exp(own.highest - highest)), place, wide_scratch);
    // A vocabulary has less than 2^24 tokens, which a float counts exactly.
    const float first_highest =
        -RowMax(own.highest == highest ? -static_cast<float>(where) : kLowest, place, scratch);
    if (!has_row) continue;
    if (place.lane == 0) {
      losses[row] = (static_cast<double>(highest) - score) + Log(total);
      correct[row] = first_highest == static_cast<float>(target) ? 1 : 0;
    }
    if (diff_scores == nullptr) continue;
    const auto factor = static_cast<float>(shape.gradient_scale / total);
    const double probability = Exp(score - highest) / total;
    const auto at_target = static_cast<float>(shape.gradient_scale * (probability - 1));
    for (int64_t i = 4 * place.lane; i < n; i += 4 * place.threads) {
      float x[4];
      Load4(from, i, n, aligned, x);
      EK_GPT_UNROLL for (int j = 0; j < 4; ++j) x[j] =
          i + j == target ? at_target : Exp(x[j] - highest) * factor;
      Store4(diff_scores + row * shape.stride, i, n, aligned, x);
    }
  }
}

// One block.
EK_KERNEL(256, ek_gpt_loss_sum)
(int64_t rows, const double* losses, const int32_t* correct, double* loss_sum,
 int64_t* correct_sum) {
  EK_SHARED double scratch[kWarp];
  EK_SHARED int64_t count_scratch[kWarp];
  double loss = 0;
  int64_t count = 0;
  for (int64_t row = ThreadX(); row < rows; row += BlockThreads()) {
    loss += losses[row];
    count += correct[row];
  }
  loss = BlockSum(loss, scratch);
  count = BlockSum(count, count_scratch);
  if (ThreadX() != 0) return;
  *loss_sum = loss;
  *correct_sum = count;
}

#define EK_GPT_KERNELS(O, name)                                                                  \
  EK_KERNEL(256, ek_gpt_causal_forward_##name)                                                   \
  (CausalShape shape, Noise noise, const float* scores, O* probabilities, O* dropped) {          \
    CausalForward(shape, noise, scores, probabilities, dropped);                                 \
  }                                                                                              \
  EK_KERNEL(256, ek_gpt_causal_backward_##name)                                                  \
  (CausalShape shape, Noise noise, const O* probabilities, const float* diff_probabilities,      \
   O* diff_scores) {                                                                             \
    CausalBackward(shape, noise, probabilities, diff_probabilities, diff_scores);                \
  }                                                                                              \
  EK_KERNEL(512, ek_gpt_token_loss_##name)                                                       \
  (LossShape shape, const float* scores, const int32_t* targets, O* diff_scores, double* losses, \
   int32_t* correct) {                                                                           \
    TokenLoss(shape, scores, targets, diff_scores, losses, correct);                             \
  }
EK_GPT_KERNELS(float, float)
EK_GPT_KERNELS(BFloat, bfloat)
#undef EK_GPT_KERNELS

}  // namespace evenkeel::gpt_kernel

#endif  // EVENKEEL_TRAINER_DEVICE_INTERNAL_GPT_SOFTMAX_KERNELS_CUH_
