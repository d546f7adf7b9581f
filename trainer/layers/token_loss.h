// The loss of a language model or a classifier: minus the logarithm of the softmax probability of
// the next token, or of the label.
//
//   const TokenLossResult loss =
//       TokenLoss(vocabulary, scores, targets, /*gradient_scale=*/1.0 / targets.size(), diff);
//   loss.sum / targets.size()                              // the mean
//   TokenLoss<float, float, uint8_t>(classes, scores, labels, scale, diff);
//
// diff_scores = gradient_scale * (softmax(scores) - 1 at the target). Null: no gradient, scores are
// left alone.
//
// Shapes:    scores and diff_scores [targets.size(), vocabulary], each target below vocabulary.
// Precision: exponentials in T, their sum and the loss in float64; any finite scores are safe. O is
//            T or, for float, BFloat16.
// Threads:   pure function. diff_scores may be the memory of `scores`, which is used up where there
//            is a gradient.

#ifndef EVENKEEL_TRAINER_LAYERS_TOKEN_LOSS_H_
#define EVENKEEL_TRAINER_LAYERS_TOKEN_LOSS_H_

#include <cstdint>
#include <span>
#include <type_traits>

namespace evenkeel {

struct TokenLossResult {
  double sum = 0;       // Over the tokens.
  int64_t correct = 0;  // Tokens whose first highest score is the target's.

  TokenLossResult& operator+=(const TokenLossResult& other) {
    sum += other.sum;
    correct += other.correct;
    return *this;
  }
};

// Target is int32_t or, where O is T, uint8_t.
template <typename T, typename O, typename Target = int32_t>
TokenLossResult TokenLoss(int64_t vocabulary, T* scores,
                          std::type_identity_t<std::span<const Target>> targets,
                          double gradient_scale, O* diff_scores);

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_LAYERS_TOKEN_LOSS_H_
