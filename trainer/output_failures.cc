#include "evenkeel/trainer/output_failures.h"

#include "absl/strings/str_format.h"

namespace evenkeel {

void OutputFailures::Note(const std::string& flag, const absl::Status& status) {
  if (status.ok() || !reported_.insert(flag).second) return;
  absl::FPrintF(log_, "train: %s: %s; the run goes on (reported once)\n", flag, status.message());
  std::fflush(log_);
}

}  // namespace evenkeel
