// Updates each bucket's parameters as soon as its gradients are reduced, with the same results as
// Step() after FinishStep(), bit for bit. Only steps that synchronise update; what was accumulated
// before goes into them.

#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "evenkeel/comm/base/fields.h"
#include "evenkeel/comm/collective.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/types.h"
#include "evenkeel/zero_optim/internal/gradients.h"
#include "evenkeel/zero_optim/internal/placement/replicated.h"
#include "evenkeel/zero_optim/internal/step_message.h"

namespace evenkeel::internal {
namespace {

// The message of a step for exhausted ranks.
struct ShadowedStep {
  StepMessage settings;  // Only its rules.
  std::string inner;     // The message of the inner reduction.

  static void VisitFields(auto& self, auto& visit) { visit(self.settings, self.inner); }
};

}  // namespace

class ReplicatedOptimizer::Reduction : public BucketReduction {
 public:
  using Owner = ReplicatedOptimizer;

  Reduction(const ReplicatedOptimizer& owner, std::vector<bool> updates,
            std::unique_ptr<BucketReduction> inner)
      : name_(owner.join_name()),
        link_(owner.link_),
        updates_(std::move(updates)),
        inner_(std::move(inner)) {}

  std::vector<Collective> CollectivesFor(const BucketInfo& bucket) const override {
    return inner_->CollectivesFor(bucket);
  }
  absl::StatusOr<RoundBuffers> BeginRound(const BucketInfo& bucket, int round,
                                          const ReductionStep& step) override {
    return inner_->BeginRound(bucket, round, step);
  }
  bool HasThread() const override { return true; }
  UsedFlags used_flags() const override { return inner_->used_flags(); }
  int64_t CountMultiple() const override { return inner_->CountMultiple(); }
  int64_t CollectivesVersion() const override { return inner_->CollectivesVersion(); }
  void OnGroup(Communicator& comm) override { inner_->OnGroup(comm); }

  absl::Status OnPlan(absl::Span<const BucketInfo> buckets) override {
    if (inner_->used_flags() == UsedFlags::kSeparate) {
      return absl::InvalidArgumentError(
          absl::StrCat(name_,
                       " cannot update in backward with a reduction whose used_flags() are "
                       "UsedFlags::kSeparate: use kOnWire or kOwn"));
    }
    return inner_->OnPlan(buckets);
  }

  absl::StatusOr<GradFate> OnReduced(const BucketInfo& bucket, const ReductionStep& step) override {
    EK_ASSIGN_OR_RETURN(const GradFate fate, inner_->OnReduced(bucket, step));
    if (fate != GradFate::kReduced) {
      return absl::InvalidArgumentError(
          absl::StrCat(name_,
                       " cannot update in backward: OnReduced() of its inner reduction must "
                       "return GradFate::kReduced"));
    }
    return link_->Call([&](Owner& owner) -> absl::StatusOr<GradFate> {
      if (owner.updater_.is_on_device()) return UpdateThere(owner, bucket, step);
      Update(owner, bucket);
      return fate;
    });
  }

  absl::Status OnStepBegin() override { return inner_->OnStepBegin(); }
  absl::Status OnStepEnd() override {
    EK_RETURN_IF_ERROR(inner_->OnStepEnd());
    return link_->Call([&](Owner& owner) {
      // Otherwise Step() ends the step.
      return updates_.empty() ? owner.EndStep({.rules = owner.groups().rules()}) : absl::OkStatus();
    });
  }
  absl::Status WaitForValues() override { return inner_->WaitForValues(); }
  void PrepareStep() override {
    inner_->PrepareStep();
    (void)link_->Call([](Owner& owner) {  // The step's first bucket has the error.
      owner.DeclareSettings(SettingsOf(owner));
      return absl::OkStatus();
    });
  }

  std::string StepMessage() override {
    ShadowedStep step{.inner = inner_->StepMessage()};
    (void)link_->Call([&](Owner& owner) {
      step.settings.rules = owner.groups().rules();
      return absl::OkStatus();
    });
    return ToBytes(step);
  }
  absl::Status OnShadow(absl::string_view message) override {
    EK_ASSIGN_OR_RETURN(const ShadowedStep step,
                        FromBytes<ShadowedStep>(message, absl::StrCat("the settings of ", name_)));
    EK_RETURN_IF_ERROR(step.settings.CheckFor(/*param_count=*/0));
    EK_RETURN_IF_ERROR(link_->Call(
        [&](Owner& owner) { return owner.updater_.groups().Adopt(step.settings.rules); }));
    return inner_->OnShadow(step.inner);
  }

 private:
  void Update(Owner& owner, const BucketInfo& bucket) const {
    for (size_t i = 0; i < bucket.params.size(); ++i) {
      const int param = bucket.params[i];
      const TensorView used = bucket.used.Slice(static_cast<int64_t>(i), 1);
      if (!Updates(owner, param) || !IsSet(used)) continue;
      owner.is_torn_ = true;
      owner.updater_.Update(param, GradientIn(owner, bucket, i), /*grad_scale=*/1.0);
      // So that the reducer takes the gradient for none, as it is used up.
      std::memset(used.data, 0, used.bytes());
    }
  }

  // Updates on a device, which has the flags of the gradients that exist; the host does not wait.
  absl::StatusOr<GradFate> UpdateThere(Owner& owner, const BucketInfo& bucket,
                                       const ReductionStep& step) const {
    std::vector<ParameterUpdater::Gradient> gradients;
    for (size_t i = 0; i < bucket.params.size(); ++i) {
      const int param = bucket.params[i];
      if (!Updates(owner, param)) continue;
      gradients.push_back({param, GradientIn(owner, bucket, i), static_cast<int>(i)});
    }
    if (gradients.empty()) return GradFate::kReduced;
    if (gradients.size() < bucket.params.size()) {
      return absl::UnimplementedError(
          absl::StrCat(name_, " updates in backward, on a device, whole buckets only: bucket ",
                       bucket.index, " has parameters that are to keep their gradients"));
    }
    ParameterUpdater& updater = owner.updater_;
    owner.is_torn_ = true;
    const int list = kFirstBucketList + bucket.index;
    EK_RETURN_IF_ERROR(updater.SetGradients(list, gradients, step.stream));
    EK_RETURN_IF_ERROR(updater.PrepareThere(list, {}, /*is_measured=*/false, step.stream,
                                            bucket.used, !step.has_all));
    EK_RETURN_IF_ERROR(updater.ApplyThere(list, step.stream));
    return GradFate::kNone;
  }

  static TensorView GradientIn(const Owner& owner, const BucketInfo& bucket, size_t position) {
    return bucket.data.Slice(bucket.offsets[position],
                             owner.WholeOf(bucket.params[position]).count);
  }
  static std::string SettingsOf(const Owner& owner) {
    return SettingsText(owner.groups(), owner.groups().rules());
  }
  bool Updates(const Owner& owner, int param) const {
    return updates_.empty() ? owner.groups().contains(param) : static_cast<bool>(updates_[param]);
  }

  const std::string name_;
  const std::shared_ptr<OwnerLink<Owner>> link_;
  const std::vector<bool> updates_;  // By parameter; empty: all of the optimizer's.
  const std::unique_ptr<BucketReduction> inner_;
};

absl::StatusOr<std::unique_ptr<BucketReduction>> ReplicatedOptimizer::TakeReduction(
    ReductionOptions options) {
  if (!updates_in_backward()) return Lacks("TakeReduction()");
  if (in_backward_ != InBackward::kNothing) {
    return Refusal(" updates in backward already");
  }
  const int size = params_->size();
  std::vector<bool> updates(options.params.empty() ? 0 : size, false);
  for (int param : options.params) {
    if (param < 0 || param >= size || !groups().contains(param) || updates[param]) {
      return absl::InvalidArgumentError(
          absl::StrCat(join_name(), " cannot update parameter ", param,
                       " in backward: it is not the optimizer's, or is named twice"));
    }
    updates[param] = true;
  }
  for (int param = 0; param < size; ++param) {
    const bool is_chosen =
        updates.empty() ? groups().contains(param) : static_cast<bool>(updates[param]);
    if (!is_chosen || params_->row_size(param) == 0) continue;
    return absl::InvalidArgumentError(
        absl::StrCat(join_name(), " cannot update parameter ", param, " \"", (*params_)[param].name,
                     "\" in backward: it is sparse, and its rows come after the buckets"));
  }
  if (options.inner == nullptr) options.inner = std::make_unique<AllReduceBuckets>();
  in_backward_ = updates.empty() ? InBackward::kAll : InBackward::kPart;
  return std::make_unique<Reduction>(*this, std::move(updates), std::move(options.inner));
}

}  // namespace evenkeel::internal
