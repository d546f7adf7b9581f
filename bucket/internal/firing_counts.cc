#include "evenkeel/bucket/internal/firing_counts.h"

#include <algorithm>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "evenkeel/comm/status.h"

namespace evenkeel {

FiringCounts::FiringCounts(const ParameterSet* params)
    : params_(params), expected_(params->size(), 0), fired_(params->size(), 0), last_(params->size(), 0) {}

void FiringCounts::BeginStep() {
  fired_.assign(fired_.size(), 0);
  if (is_recorded_) return;
  last_.assign(last_.size(), 0);
  announcements_ = 0;
}

void FiringCounts::Forget() {
  is_recorded_ = false;
  BeginStep();
}

absl::StatusOr<FiringCounts::Verdict> FiringCounts::Count(int param) {
  ++fired_[param];
  if (!is_recorded_) {
    last_[param] = ++announcements_;
    return Verdict::kRecorded;
  }
  if (fired_[param] > expected_[param]) return Changed(param);
  return fired_[param] == expected_[param] ? Verdict::kLast : Verdict::kMore;
}

std::vector<int> FiringCounts::CompletionOrder() const {
  std::vector<int> order(last_.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [this](int a, int b) {
    if ((last_[a] == 0) != (last_[b] == 0)) return last_[b] == 0;
    return last_[a] < last_[b];
  });
  return order;
}

void FiringCounts::EndRecording() {
  expected_ = fired_;
  is_recorded_ = true;
}

absl::Status FiringCounts::CheckComplete() const {
  for (int param = 0; is_recorded_ && param < params_->size(); ++param) {
    if (fired_[param] < expected_[param]) return Changed(param);
  }
  return absl::OkStatus();
}

absl::Status FiringCounts::Changed(int param) const {
  return absl::FailedPreconditionError(absl::StrCat("the graph has changed, which static_graph excludes: parameter \"",
                                                    (*params_)[param].name, "\" (", param, ") was announced ",
                                                    fired_[param], " times in this step and ", expected_[param],
                                                    " times in the one that was recorded"));
}

}  // namespace evenkeel
