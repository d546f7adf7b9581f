// The memory of a GPT's passes on the host, by arithmetic: Gpt::ActivationBytes() after a pass.
//
//   GptActivationBytes(options, /*sequences=*/8, Mode::kTraining)
//
// Has a line for each buffer of BlockMemory, BlockTools, CausalAttention and the model; a new
// buffer there needs a line here.
//
// Threads: a pure function.

#ifndef EVENKEEL_TRAINER_GPT_GPT_MEMORY_H_
#define EVENKEEL_TRAINER_GPT_GPT_MEMORY_H_

#include <cstdint>

#include "evenkeel/trainer/gpt/gpt_options.h"
#include "evenkeel/trainer/layers/mode.h"

namespace evenkeel {

// Returns the bytes for sequences of options.context tokens; in training, with the backward pass.
int64_t GptActivationBytes(const GptOptions& options, int64_t sequences, Mode mode);

// Returns how many of `rows` the head takes at once: scores of 16 MiB, or those of 256 rows if that
// is more. Products of fewer rows are slower, because each reads the token table and updates its
// gradient.
int64_t HeadRows(int64_t rows, int64_t vocabulary, int64_t bytes_per_score);

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_GPT_GPT_MEMORY_H_
