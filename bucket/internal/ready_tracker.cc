#include "evenkeel/bucket/internal/ready_tracker.h"

#include "absl/strings/str_cat.h"

namespace evenkeel {
namespace {

constexpr int kNamesInMessage = 10;

std::string Name(const ParameterSet& params, int index) {
  return absl::StrCat("\"", params[index].name, "\" (", index, ")");
}

}  // namespace

ReadyTracker::ReadyTracker(const BucketPlan& plan, const ParameterSet* params)
    : params_(params), bucket_of_(params->size(), -1), announced_(params->size(), false) {
  for (size_t b = 0; b < plan.buckets.size(); ++b) {
    sizes_.push_back(static_cast<int>(plan.buckets[b].size()));
    planned_ += sizes_.back();
    for (int param : plan.buckets[b]) bucket_of_[param] = static_cast<int>(b);
  }
  Reset();
}

void ReadyTracker::Reset() {
  pending_ = sizes_;
  announced_.assign(announced_.size(), false);
  order_.clear();
}

absl::StatusOr<int> ReadyTracker::Announce(int param) {
  if (param < 0 || param >= params_->size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("gradient of parameter ", param, " announced; there are ", params_->size()));
  }
  const int bucket = bucket_of_[param];
  if (bucket < 0) {
    return absl::FailedPreconditionError(
        absl::StrCat("gradient of parameter ", Name(*params_, param),
                     " announced, but it is not in the plan: it was frozen when the step began",
                     params_->trainable(param) ? "; call RefreshTrainable() after changing what is trained" : ""));
  }
  if (announced_[param]) {
    return absl::FailedPreconditionError(
        absl::StrCat("gradient of parameter ", Name(*params_, param),
                     " announced twice in one step: announce it when it is final, or use kAccumulate for all but the "
                     "last backward of a step"));
  }
  announced_[param] = true;
  order_.push_back(param);
  return --pending_[bucket] == 0 ? bucket : -1;
}

absl::Status ReadyTracker::CheckComplete() const {
  if (static_cast<int>(order_.size()) == planned_) return absl::OkStatus();
  std::string names;
  int missing = 0;
  for (int param = 0; param < params_->size(); ++param) {
    if (bucket_of_[param] < 0 || announced_[param]) continue;
    if (++missing <= kNamesInMessage) absl::StrAppend(&names, missing == 1 ? "" : ", ", Name(*params_, param));
  }
  if (missing > kNamesInMessage) absl::StrAppend(&names, " and ", missing - kNamesInMessage, " more");
  return absl::FailedPreconditionError(absl::StrCat(
      "the step ended without a gradient of ", missing, " trained parameter", missing == 1 ? "" : "s", ": ", names,
      ": announce every trained parameter, freeze those that are not used, and call "
      "RefreshTrainable() after changing what is trained where that is not checked in each step"));
}

}  // namespace evenkeel
