#include "evenkeel/bucket/trainability.h"

#include <cstdio>
#include <utility>

#include "absl/strings/str_cat.h"
#include "evenkeel/bucket/parameter_facts.h"
#include "evenkeel/comm/status.h"

namespace evenkeel {
namespace {

// `2 frozen: "fc1.weight" (0), "fc1.bias" (1)`: the parameters that are `trained` after and were
// not before.
std::string Became(bool trained, const TrainableMask& before, const TrainableMask& after,
                   const ParameterSet& params) {
  std::vector<std::string> names;
  for (int i = 0; i < after.size(); ++i) {
    if (before[i] != after[i] && after[i] == trained)
      names.push_back(absl::StrCat("\"", params[i].name, "\" (", i, ")"));
  }
  if (names.empty()) return "";
  return absl::StrCat(names.size(),
                      trained ? " unfrozen: " : " frozen: ", internal::Listed(names, 4));
}

std::string Difference(const TrainableMask& before, const TrainableMask& after,
                       const ParameterSet& params) {
  const std::string frozen = Became(false, before, after, params);
  const std::string unfrozen = Became(true, before, after, params);
  return absl::StrCat(frozen, frozen.empty() || unfrozen.empty() ? "" : "; ", unfrozen);
}

absl::Status CheckInterval(absl::string_view what, int64_t value, int64_t least) {
  if (value >= least) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("trainability.", what, " is ", value, ", not at least ", least));
}

}  // namespace

absl::string_view ToString(TrainabilityPolicy policy) {
  constexpr absl::string_view kNames[] = {"always", "every_n", "on_notification", "never"};
  return kNames[static_cast<int>(policy)];
}

absl::Status TrainabilityWatch::Check(const TrainabilityOptions& options) {
  EK_RETURN_IF_ERROR(CheckInterval("every", options.every, 1));
  EK_RETURN_IF_ERROR(CheckInterval("verify_every", options.verify_every, 0));
  return CheckInterval("wasted_after", options.wasted_after, 0);
}

TrainabilityWatch::TrainabilityWatch(TrainabilityOptions options, ParameterSet* params,
                                     absl::string_view name)
    : options_(std::move(options)),
      params_(params),
      name_(name),
      flags_(options_.reader ? params->size() : 0) {
  Read();
  adopted_ = params_->mask();
  same_version_ = params_->mask_version();
}

bool TrainabilityWatch::HasChanged() {
  if (params_->mask_version() == same_version_) return false;
  if (!(params_->mask() == adopted_)) return true;
  same_version_ = params_->mask_version();
  return false;
}

bool TrainabilityWatch::IsTimeFor(int64_t step) {
  switch (options_.policy) {
    case TrainabilityPolicy::kAlways:
      return true;
    case TrainabilityPolicy::kEveryN:
      return step % options_.every == 0;
    case TrainabilityPolicy::kOnNotification:
      return is_notified_ || HasChanged();
    case TrainabilityPolicy::kNever:
      return false;
  }
  return true;
}

absl::StatusOr<bool> TrainabilityWatch::BeforeStep(int64_t step) {
  if (IsTimeFor(step)) {
    is_notified_ = false;
    Read();
    CountWasted();
    return HasChanged();
  }
  const bool verifies = options_.policy != TrainabilityPolicy::kEveryN &&
                        options_.verify_every > 0 && step % options_.verify_every == 0;
  if (verifies) Read();
  if (!HasChanged()) return false;
  return absl::FailedPreconditionError(absl::StrCat(
      name_, ": the set of trained parameters has changed (",
      Difference(adopted_, params_->mask(), *params_), "), and the policy \"",
      ToString(options_.policy), "\" does not check it before step ", step + 1,
      ": call RefreshTrainable() after each change, on all ranks",
      options_.policy == TrainabilityPolicy::kOnNotification ? ", or TrainableChanged()" : "",
      ", or choose TrainabilityPolicy::kAlways"));
}

void TrainabilityWatch::Read() {
  if (!options_.reader) return;
  for (int i = 0; i < params_->size(); ++i) flags_[i] = options_.reader(i) ? 1 : 0;
  (void)params_->SetTrainable(flags_);  // It has one flag per parameter.
}

void TrainabilityWatch::CountWasted() {
  if (!options_.reader || has_changed_ever_ || HasChanged() || options_.wasted_after == 0) return;
  if (++wasted_ != options_.wasted_after) return;
  Warn(absl::StrCat(
      "the set of trained parameters was read from ", params_->size(), " parameters in ", wasted_,
      " steps, and never changed: TrainabilityPolicy::kOnNotification or kNever saves that",
      options_.wasted_note.empty() ? "" : "; ", options_.wasted_note));
}

void TrainabilityWatch::Adopt(const TrainableMask& mask) {
  if (mask == params_->mask()) same_version_ = params_->mask_version();
  if (mask == adopted_) return;
  // The mask is adopted before the warnings, whatever they are.
  const TrainableMask before = std::exchange(adopted_, mask);
  has_changed_ever_ = true;
  for (int i = 0; options_.writer && i < mask.size(); ++i) {
    if (before[i] != mask[i]) options_.writer(i, mask[i]);
  }
  if (!options_.warn_on_change) return;
  Warn(absl::StrCat("the set of trained parameters has changed: ",
                    Difference(before, adopted_, *params_)));
}

void TrainabilityWatch::Warn(absl::string_view text) const {
  const std::string line = absl::StrCat(name_, ": ", text);
  if (options_.warn) return options_.warn(line);
  std::fputs(absl::StrCat("evenkeel: ", line, "\n").c_str(), stderr);  // One write.
}

}  // namespace evenkeel
