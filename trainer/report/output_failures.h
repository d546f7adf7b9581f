// Reports outputs of a run that cannot be written. None of them ends the training.
//
//   OutputFailures failures(stderr);
//   failures.Note("--metrics", metrics->Write(line));
//   // train: --metrics: cannot write m.jsonl: No space left on device; the run goes on (reported
//     once)
//
// Threads:   thread-compatible.
// Ownership: `log` outlives it.

#ifndef EVENKEEL_TRAINER_REPORT_OUTPUT_FAILURES_H_
#define EVENKEEL_TRAINER_REPORT_OUTPUT_FAILURES_H_

#include <cerrno>
#include <cstdio>
#include <set>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_format.h"

namespace evenkeel {

class OutputFailures {
 public:
  explicit OutputFailures(std::FILE* log) : log_(log) {}

  // `status` is the outcome of a write to the output of `flag`.
  void Note(const std::string& flag, const absl::Status& status) {
    if (status.ok() || !reported_.insert(flag).second) return;
    absl::FPrintF(log_, "%s: %s: %s; the run continues (reported once)\n",
                  program_invocation_short_name, flag, status.message());
    std::fflush(log_);
  }

 private:
  std::FILE* const log_;
  std::set<std::string> reported_;  // Flags.
};

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_REPORT_OUTPUT_FAILURES_H_
