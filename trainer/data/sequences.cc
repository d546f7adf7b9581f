#include "evenkeel/trainer/data/sequences.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace evenkeel {

void SequencePlan::AddRun(const TokenRun& run) {
  runs_.push_back({.first = size_, .run = run});
  const int64_t predictions = run.tokens - 1;
  if (predictions >= context_) size_ += (predictions - 1) / context_ + 1;
}

absl::Status SequencePlan::Check() const {
  if (size_ == 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("the data has no sequence of ", context_, " inputs and their targets, ",
                     "which needs ", context_, " + 1 tokens in a row; use a shorter ", "context"));
  }
  if (size_ <= INT32_MAX) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("a context of ", context_, " gives ", size_, " sequences, more than ", "the ",
                   INT32_MAX, " that can be assigned to ranks; use a longer context"));
}

SequencePlace SequencePlan::At(int64_t sequence) const {
  // A run without sequences has the same first sequence as the next one: the last of them has it.
  const auto after = std::ranges::upper_bound(runs_, sequence, {}, &PlannedRun::first);
  const PlannedRun& planned = *(after - 1);
  const int64_t last_begin = planned.run.tokens - 1 - context_;
  return {.run = static_cast<size_t>(after - 1 - runs_.begin()),
          .begin = planned.run.begin + std::min((sequence - planned.first) * context_, last_begin)};
}

}  // namespace evenkeel
