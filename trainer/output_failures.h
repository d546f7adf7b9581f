// Reports outputs of a run that can't be written. None of them ends the training.
//
//   OutputFailures failures(stderr);
//   failures.Note("--metrics", metrics->Write(line));
//   // train: --metrics: cannot write m.jsonl: No space left on device; the run goes on (reported once)
//
// Threads:   thread-compatible.
// Ownership: `log` outlives it.

#ifndef EVENKEEL_TRAINER_OUTPUT_FAILURES_H_
#define EVENKEEL_TRAINER_OUTPUT_FAILURES_H_

#include <cstdio>
#include <set>
#include <string>

#include "absl/status/status.h"

namespace evenkeel {

class OutputFailures {
 public:
  explicit OutputFailures(std::FILE* log) : log_(log) {}

  // `status` is the outcome of a write to the output of `flag`.
  void Note(const std::string& flag, const absl::Status& status);

 private:
  std::FILE* const log_;
  std::set<std::string> reported_;  // Flags.
};

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_OUTPUT_FAILURES_H_
