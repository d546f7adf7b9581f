#include "evenkeel/bucket/reducer/announcer.h"

#include <algorithm>
#include <cstddef>
#include <limits>
#include <numeric>
#include <string>

#include "absl/strings/str_cat.h"
#include "evenkeel/bucket/finite_check.h"
#include "evenkeel/bucket/parameter_facts.h"
#include "evenkeel/comm/base/clock.h"
#include "evenkeel/comm/status.h"

namespace evenkeel {
namespace {

constexpr size_t kNamesInMessage = 10;

std::string Name(const ParameterSet& params, int index) {
  return absl::StrCat("\"", params[index].name, "\" (", index, ")");
}

// The gradient that is about to be read is still of its value's count, type and device, and has
// memory.
absl::Status CheckGradient(const Parameter& param) {
  const auto& [name, value, grad] = param;
  if (grad.count != value.count || grad.dtype != value.dtype || grad.device != value.device) {
    return absl::InvalidArgumentError(absl::StrCat("parameter \"", name, "\" is ", ToString(value),
                                                   ", its gradient ", ToString(grad)));
  }
  if (grad.data != nullptr || grad.count == 0) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("parameter \"", name, "\" has a gradient without memory"));
}

}  // namespace

void Announcer::OnPlan(bool is_other_mask) {
  if (is_other_mask) is_recorded_ = false;
  expected_.resize(core_.params->size());
}

absl::Status Announcer::Begin(StepMode mode) {
  mode_ = mode;
  {
    absl::MutexLock lock(&mutex_);
    error_ = absl::OkStatus();
  }
  if (mode == StepMode::kAccumulate) return absl::OkStatus();
  fired_.assign(core_.plan->bucket_of.size(), 0);
  last_.assign(core_.plan->bucket_of.size(), std::numeric_limits<int>::max());
  firings_ = 0;
  claimed_.assign(core_.plan->bucket_of.size(), false);
  pending_ = core_.plan->announcements;
  order_.clear();
  arrivals_.clear();
  longest_launch_ = absl::ZeroDuration();
  unused_hash_ = 0;
  for (int param = 0; is_recorded_ && param < core_.params->size(); ++param) {
    if (is_planned(param) && expected_[param] == 0) EK_RETURN_IF_ERROR(Announce(param));
  }
  return absl::OkStatus();
}

absl::Status Announcer::Fail(const absl::Status& error) {
  error_.Update(Annotate(error, core_.name));
  return error_;
}

absl::Status Announcer::CheckCall(int param) const {
  if (!mode_.has_value()) {
    return absl::FailedPreconditionError(
        absl::StrCat(core_.name, ": the gradient of parameter ", param,
                     " was announced outside of a step; call BeginStep() first"));
  }
  if (param < 0 || param >= core_.params->size()) {
    return absl::InvalidArgumentError(
        absl::StrCat(core_.name, ": gradient of parameter ", param,
                     " was announced, but the number of parameters is ", core_.params->size()));
  }
  return absl::OkStatus();
}

absl::Status Announcer::CheckGradientOf(int param) const {
  const ParameterSet& params = *core_.params;
  if (params.grad_state(param) == GradState::kNone) {
    return absl::FailedPreconditionError(
        absl::StrCat("parameter ", Name(params, param),
                     " was announced without a gradient: backward sets its state to kLocal when "
                     "it has written it, or calls NoGradient()"));
  }
  return params.row_size(param) > 0 ? absl::OkStatus() : CheckGradient(params[param]);
}

absl::Status Announcer::GradientReady(int param) {
  {
    absl::MutexLock lock(&mutex_);
    EK_RETURN_IF_ERROR(CheckCall(param));
    if (const absl::Status there = CheckGradientOf(param); !there.ok()) return Fail(there);
    if (*mode_ == StepMode::kAccumulate) return absl::OkStatus();
    if (core_.options.static_graph && is_planned(param)) {
      const absl::StatusOr<bool> is_complete = CountFiring(param);
      if (!is_complete.ok()) return Fail(is_complete.status());
      EK_RETURN_IF_ERROR(error_);
      if (!*is_complete) return absl::OkStatus();
    }
    EK_RETURN_IF_ERROR(Claim(param));
  }
  return Arrive(param);
}

absl::StatusOr<bool> Announcer::CountFiring(int param) {
  ++fired_[param];
  last_[param] = firings_++;
  if (!is_recorded_) return false;  // It is not known yet whether more will come.
  if (fired_[param] > expected_[param]) return GraphHasChanged(param);
  return fired_[param] == expected_[param];
}

absl::Status Announcer::NoGradient(int param) {
  EK_RETURN_IF_ERROR(CheckCall(param));
  if (core_.params->grad_state(param) != GradState::kNone) {
    return absl::FailedPreconditionError(
        absl::StrCat(core_.name, ": parameter ", Name(*core_.params, param),
                     " has a gradient; announce it with GradientReady()"));
  }
  // With a static graph, what is not announced has none.
  const bool counts = *mode_ == StepMode::kSync && !core_.options.static_graph;
  return counts ? Announce(param) : absl::OkStatus();
}

absl::Status Announcer::MarkUnused(absl::Span<const int> params) {
  for (const int param : params) {
    EK_RETURN_IF_ERROR(CheckCall(param));
    const bool counts = *mode_ == StepMode::kSync && !core_.options.static_graph;
    if (counts && is_planned(param)) EK_RETURN_IF_ERROR(Announce(param));
  }
  if (mode_ != StepMode::kSync || !launcher_.MustAgreeOnUnused()) return absl::OkStatus();
  // This rank uses all that it has not announced without a gradient.
  std::vector<uint8_t> uses(core_.params->size(), 0);
  for (int param = 0; param < core_.params->size(); ++param) {
    uses[param] = is_planned(param) &&
                  (!claimed_[param] || core_.params->grad_state(param) != GradState::kNone);
  }
  launcher_.AgreeOnUnused(uses, /*contributes=*/true);
  return absl::OkStatus();
}

absl::Status Announcer::Announce(int param) {
  {
    absl::MutexLock lock(&mutex_);
    EK_RETURN_IF_ERROR(Claim(param));
  }
  return Arrive(param);
}

absl::Status Announcer::Claim(int param) {
  if (!is_planned(param)) {
    return Fail(absl::FailedPreconditionError(absl::StrCat(
        "parameter ", Name(*core_.params, param),
        " has a new gradient, but it was frozen when the step began",
        core_.params->trainable(param)
            ? "; call RefreshTrainable() after each change of the set of trained parameters"
            : "")));
  }
  if (claimed_[param]) {
    return Fail(absl::FailedPreconditionError(
        absl::StrCat("gradient of parameter ", Name(*core_.params, param),
                     " announced twice in one step: announce it when it is final, or use "
                     "kAccumulate for all but the last backward of a step")));
  }
  claimed_[param] = true;
  return absl::OkStatus();
}

absl::Status Announcer::Arrive(int param) {
  const PlanInForce& plan = *core_.plan;
  const int bucket = plan.bucket_of[param];
  if (core_.checks_finite && core_.device == nullptr &&
      core_.params->grad_state(param) != GradState::kNone) {
    const absl::Status finite = internal::CheckFinite(*core_.comm, *core_.params, param, bucket);
    if (!finite.ok()) {
      absl::MutexLock lock(&mutex_);
      return Fail(finite);
    }
  }
  if (core_.device == nullptr && bucket != PlanInForce::kGathered) {
    plan.storage->CopyIn(*core_.params, param);
    if (core_.options.gradient_as_bucket_view)
      core_.params->SetGradMemory(param, plan.storage->SlotOf(param));
  }
  const bool has_gradient = core_.params->grad_state(param) != GradState::kNone;
  bool is_complete = false, ends_delay = false;
  {
    absl::MutexLock lock(&mutex_);
    order_.push_back(param);
    arrivals_.push_back(SteadyNow());
    if (!has_gradient) unused_hash_ += StableHash(1, static_cast<uint64_t>(param));
    is_complete = bucket >= 0 && --pending_[bucket] == 0;
    ends_delay = param == plan.delay_until && plan.delayed_bucket >= 0 &&
                 --pending_[plan.delayed_bucket] == 0;
    launcher_.pipeline()->CountGradient();
  }
  if (!is_complete && !ends_delay) return absl::OkStatus();
  const absl::Time start = SteadyNow();
  absl::Status launched = is_complete ? launcher_.BucketReady(bucket) : absl::OkStatus();
  if (launched.ok() && ends_delay) launched = launcher_.BucketReady(plan.delayed_bucket);
  {
    absl::MutexLock lock(&mutex_);
    longest_launch_ = std::max(longest_launch_, SteadyNow() - start);
    if (!launched.ok()) launched = Fail(launched);
  }
  // The other ranks wait for buckets that will not come.
  if (!launched.ok()) core_.comm->Abort(launched);
  return launched;
}

absl::Status Announcer::AnnounceTheRest() {
  const bool is_counting = IsCounting();
  {
    absl::MutexLock lock(&mutex_);
    EK_RETURN_IF_ERROR(error_);
    if (!is_counting && core_.plan->planned == static_cast<int>(order_.size()))
      return absl::OkStatus();
  }
  const bool announces_all = is_counting || core_.options.find_unused;
  std::vector<int> rest(core_.params->size());
  std::iota(rest.begin(), rest.end(), 0);
  // Nothing has been announced yet: this is the order that is recorded, that of the last
  // announcements. Parameters without one come last.
  if (is_counting) std::ranges::stable_sort(rest, {}, [this](int param) { return last_[param]; });
  for (const int param : rest) {
    const bool may_be_none = announces_all || IsEmpty(param);
    if (may_be_none && is_planned(param) && !claimed_[param]) EK_RETURN_IF_ERROR(Announce(param));
  }
  if (is_counting) expected_ = fired_;
  is_recorded_ = core_.options.static_graph;
  return absl::OkStatus();
}

absl::Status Announcer::CheckComplete() const {
  if (!mode_.has_value())
    return absl::FailedPreconditionError(absl::StrCat(core_.name, ": no step is running"));
  if (*mode_ == StepMode::kAccumulate) return absl::OkStatus();
  absl::MutexLock lock(&mutex_);
  EK_RETURN_IF_ERROR(error_);
  for (int param = 0; is_recorded_ && param < core_.params->size(); ++param) {
    if (fired_[param] < expected_[param]) return Annotate(GraphHasChanged(param), core_.name);
  }
  // AnnounceTheRest() does so.
  if (core_.options.find_unused || IsCounting()) return absl::OkStatus();
  return Annotate(CheckAllAnnounced(), core_.name);
}

absl::Status Announcer::CheckAllAnnounced() const {
  if (core_.plan->planned == static_cast<int>(order_.size())) return absl::OkStatus();
  std::vector<std::string> missing;
  for (int param = 0; param < core_.params->size(); ++param) {
    if (!is_planned(param) || claimed_[param] || IsEmpty(param)) continue;
    missing.push_back(
        absl::StrCat(Name(*core_.params, param),
                     core_.params->trainable(param) ? "" : " frozen without RefreshTrainable()"));
  }
  if (missing.empty()) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      "the step ended without a gradient of ", missing.size(), " trained parameter",
      missing.size() == 1 ? "" : "s", ": ", internal::Listed(missing, kNamesInMessage),
      ": freeze, before the step, parameters that the loss does not use, or set find_unused"));
}

absl::Status Announcer::GraphHasChanged(int param) const {
  return absl::FailedPreconditionError(absl::StrCat(
      "the graph has changed, which static_graph excludes: parameter ", Name(*core_.params, param),
      " was announced ", fired_[param], " times in this step and ", expected_[param],
      " times in the one that was recorded"));
}

}  // namespace evenkeel
