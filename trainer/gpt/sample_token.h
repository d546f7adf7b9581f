// Chooses the next token by the scores of a language model.
//
//   EK_ASSIGN_OR_RETURN(const int32_t token,
//                       SampleToken(scores, {.temperature = 0.8, .top_k = 40}, random.Uniform()));
//
// Token i is taken with a probability proportional to exp(scores[i] / temperature), of the `top_k`
// best alone. At temperature 0 it is the best. Among equal scores those with lower indices count as
// better. A score of -infinity is a token that never comes.
//
// Threads: pure function, the same on each machine up to the rounding of exp().
// Errors:  InvalidArgument for settings out of their range, and for scores with a NaN or an
//          infinity, which it names (the first), or without any possible token.

#ifndef EVENKEEL_TRAINER_GPT_SAMPLE_TOKEN_H_
#define EVENKEEL_TRAINER_GPT_SAMPLE_TOKEN_H_

#include <cstdint>
#include <span>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace evenkeel {

struct SampleOptions {
  double temperature = 1;
  int64_t top_k = 0;  // 0: all.
};

absl::Status Validate(const SampleOptions& options);

// `uniform` is random, evenly from [0, 1).
absl::StatusOr<int32_t> SampleToken(std::span<const float> scores, const SampleOptions& options,
                                    double uniform);

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_GPT_SAMPLE_TOKEN_H_
