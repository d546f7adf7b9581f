// Cuts runs of consecutive tokens into sequences for training language models.
//
//   SequencePlan plan(/*context=*/4);
//   plan.AddRun({.begin = 100, .tokens = 11});  // sequences that begin at 100, 104 and 106
//   plan.size();                                // 3
//   plan.At(2);                                 // {.run = 0, .begin = 106}
//
// A sequence is `context` inputs, each with the token that follows it: context + 1 tokens in a row,
// of one run. Each sequence of a run begins with the last target of the sequence before it. If the
// run's length is not a multiple, its last sequence is moved back to end with the run. So nothing
// is dropped: every token of a run except its first is predicted, fewer than `context` of them
// twice. A run that is not longer than the context has no sequence.
//
// Threads: thread-compatible; immutable once the runs are added.
// Errors:  InvalidArgument from Check(); the other calls rely on it.

#ifndef EVENKEEL_TRAINER_DATA_SEQUENCES_H_
#define EVENKEEL_TRAINER_DATA_SEQUENCES_H_

#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "evenkeel/trainer/data/batch.h"

namespace evenkeel {

struct TokenRun {
  int64_t begin = 0;  // Position of the first token.
  int64_t tokens = 0;
};

struct SequencePlace {
  size_t run = 0;     // In the order of AddRun.
  int64_t begin = 0;  // Position of the first input.
  friend bool operator==(const SequencePlace&, const SequencePlace&) = default;
};

class SequencePlan {
 public:
  // The context must be positive.
  explicit SequencePlan(int64_t context) : context_(context) {}

  void AddRun(const TokenRun& run);

  int64_t context() const { return context_; }
  int64_t size() const { return size_; }
  // Returns OK if the plan has a sequence, and no more than a sampler can number.
  absl::Status Check() const;
  SequencePlace At(int64_t sequence) const;

 private:
  struct PlannedRun {
    int64_t first = 0;  // The number of its first sequence.
    TokenRun run;
  };

  int64_t context_;
  int64_t size_ = 0;
  std::vector<PlannedRun> runs_;
};

// Returns the given sequences as a batch; token_at(run, position) returns one token.
template <typename TokenAt>
Batch GatherSequences(const SequencePlan& plan, std::span<const int32_t> sequences,
                      BatchMemory& memory, TokenAt token_at) {
  const int64_t context = plan.context();
  memory.inputs.resize(sequences.size() * context);
  memory.targets.resize(sequences.size() * context);
  int32_t* input = memory.inputs.data();
  int32_t* target = memory.targets.data();
  for (const int32_t sequence : sequences) {
    const auto [run, begin] = plan.At(sequence);
    int32_t token = token_at(run, begin);
    for (int64_t position = begin + 1; position <= begin + context; ++position) {
      *input++ = token;
      token = token_at(run, position);
      *target++ = token;
    }
  }
  return TokenBatch{.inputs = memory.inputs, .targets = memory.targets, .context = context};
}

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_DATA_SEQUENCES_H_
