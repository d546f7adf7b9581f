#include "evenkeel/zero_optim/optimizer_in_backward.h"

#include <cstdint>
#include <cstring>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "evenkeel/comm/collective.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/internal/bytes.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/types.h"

namespace evenkeel {
namespace internal {

class OptimizerInBackward : public BucketReduction {
 public:
  OptimizerInBackward(Optimizer* optimizer, std::vector<bool> updates, std::unique_ptr<BucketReduction> inner)
      : optimizer_(optimizer), updates_(std::move(updates)), inner_(std::move(inner)) {}

  std::vector<Collective> CollectivesFor(const BucketInfo& bucket) const override {
    return inner_->CollectivesFor(bucket);
  }
  absl::StatusOr<RoundBuffers> BeginRound(const BucketInfo& bucket, int round, const ReductionStep& step) override {
    return inner_->BeginRound(bucket, round, step);
  }
  bool HasThread() const override { return true; }
  UsedFlags used_flags() const override { return inner_->used_flags(); }
  int64_t CountMultiple() const override { return inner_->CountMultiple(); }
  int64_t CollectivesVersion() const override { return inner_->CollectivesVersion(); }
  void OnGroup(const Communicator& comm) override { inner_->OnGroup(comm); }

  absl::Status OnPlan(absl::Span<const BucketInfo> buckets) override {
    if (inner_->used_flags() == UsedFlags::kSeparate) {
      return absl::InvalidArgumentError(
          absl::StrCat(optimizer_->join_name(),
                       " can't update in backward with a reduction that leaves to the reducer "
                       "which gradients exist (UsedFlags::kSeparate)"));
    }
    return inner_->OnPlan(buckets);
  }

  absl::StatusOr<GradFate> OnReduced(const BucketInfo& bucket, const ReductionStep& step) override {
    EK_ASSIGN_OR_RETURN(const GradFate fate, inner_->OnReduced(bucket, step));
    if (fate != GradFate::kReduced) {
      return absl::InvalidArgumentError(
          absl::StrCat(optimizer_->join_name(), " has nothing to update by: the reduction inside left no gradients"));
    }
    if (optimizer_->updater_.is_on_device()) return UpdateThere(bucket, step);
    for (size_t i = 0; i < bucket.params.size(); ++i) {
      const int param = bucket.params[i];
      const TensorView used = bucket.used.Slice(static_cast<int64_t>(i), 1);
      if (!Updates(param) || !IsSet(used)) continue;
      const int64_t count = (*optimizer_->params_)[param].value.count;
      optimizer_->is_torn_ = true;
      optimizer_->updater_.Update(param, bucket.data.Slice(bucket.offsets[i], count), /*grad_scale=*/1.0);
      std::memset(used.data, 0, used.bytes());  // So that the reducer takes the gradient for none, as it is used up.
    }
    return GradFate::kReduced;
  }

  absl::Status OnStepEnd() override {
    EK_RETURN_IF_ERROR(inner_->OnStepEnd());
    optimizer_->is_torn_ = false;
    if (updates_.empty()) optimizer_->CountStep(Settings());  // Otherwise Step() does.
    return absl::OkStatus();
  }
  void PrepareStep() override {
    inner_->PrepareStep();
    optimizer_->DeclareSettings(Settings());
  }

  std::string StepMessage() override {
    const internal::StepMessage settings{.rules = optimizer_->groups().rules()};
    return ByteWriter().Bytes(settings.Serialize()).Bytes(inner_->StepMessage()).Take();
  }
  absl::Status OnShadow(absl::string_view message) override {
    ByteReader reader(message);
    const absl::string_view own = reader.Bytes(), inner = reader.Bytes();
    EK_RETURN_IF_ERROR(reader.Finish(absl::StrCat("the settings of ", optimizer_->join_name())));
    EK_ASSIGN_OR_RETURN(const internal::StepMessage settings, internal::StepMessage::Parse(own, /*param_count=*/0));
    EK_RETURN_IF_ERROR(optimizer_->updater_.groups().Adopt(settings.rules));
    return inner_->OnShadow(inner);
  }

  static absl::StatusOr<std::unique_ptr<BucketReduction>> Create(Optimizer* optimizer, InBackwardOptions options) {
    if (optimizer->in_backward_ != Optimizer::InBackward::kNothing) {
      return absl::FailedPreconditionError(absl::StrCat(optimizer->join_name(), " updates in backward already"));
    }
    const int size = optimizer->params_->size();
    std::vector<bool> updates(options.params.empty() ? 0 : size, false);
    for (int param : options.params) {
      if (param < 0 || param >= size || !optimizer->groups().contains(param) || updates[param]) {
        return absl::InvalidArgumentError(absl::StrCat(optimizer->join_name(), " can't update parameter ", param,
                                                       " in backward: it is not the optimizer's, or is named twice"));
      }
      updates[param] = true;
    }
    for (int param = 0; param < size; ++param) {
      const bool is_chosen = updates.empty() ? optimizer->groups().contains(param) : static_cast<bool>(updates[param]);
      if (!is_chosen || optimizer->params_->row_size(param) == 0) continue;
      return absl::InvalidArgumentError(absl::StrCat(
          optimizer->join_name(), " can't update parameter ", param, " \"", (*optimizer->params_)[param].name,
          "\" in backward: it is sparse, and its rows come after the buckets"));
    }
    std::unique_ptr<BucketReduction> inner = std::move(options.inner);
    if (inner == nullptr) inner = std::make_unique<AllReduceBuckets>();
    optimizer->in_backward_ = updates.empty() ? Optimizer::InBackward::kAll : Optimizer::InBackward::kPart;
    return std::make_unique<OptimizerInBackward>(optimizer, std::move(updates), std::move(inner));
  }

 private:
  // On a device; which gradients exist is known there, and nobody waits.
  absl::StatusOr<GradFate> UpdateThere(const BucketInfo& bucket, const ReductionStep& step) {
    std::vector<ParameterUpdater::Gradient> gradients;
    for (size_t i = 0; i < bucket.params.size(); ++i) {
      const int param = bucket.params[i];
      if (!Updates(param)) continue;
      const int64_t count = (*optimizer_->params_)[param].value.count;
      gradients.push_back({param, bucket.data.Slice(bucket.offsets[i], count), static_cast<int>(i)});
    }
    if (gradients.empty()) return GradFate::kReduced;
    if (gradients.size() < bucket.params.size()) {
      return absl::UnimplementedError(absl::StrCat(optimizer_->join_name(),
                                                   " updates in backward, on a device, whole buckets only: bucket ",
                                                   bucket.index, " has parameters that are to keep their gradients"));
    }
    ParameterUpdater& updater = optimizer_->updater_;
    optimizer_->is_torn_ = true;
    const int list = 1 + bucket.index;
    EK_RETURN_IF_ERROR(updater.SetGradients(list, gradients, step.stream));
    EK_RETURN_IF_ERROR(updater.PrepareThere(list, {}, /*is_measured=*/false, step.stream, bucket.used, !step.has_all));
    EK_RETURN_IF_ERROR(updater.ApplyThere(list, step.stream));
    return GradFate::kNone;
  }

  std::string Settings() const { return SettingsText(optimizer_->groups(), optimizer_->groups().rules()); }

  static bool IsSet(const TensorView& flag) {
    return flag.dtype == DType::kFloat64 ? flag.as<double>()[0] != 0 : flag.as<float>()[0] != 0;
  }

  bool Updates(int param) const {
    return updates_.empty() ? optimizer_->groups().contains(param) : static_cast<bool>(updates_[param]);
  }

  Optimizer* const optimizer_;
  const std::vector<bool> updates_;  // By parameter; empty: all of the optimizer's.
  const std::unique_ptr<BucketReduction> inner_;
};

}  // namespace internal

absl::StatusOr<std::unique_ptr<BucketReduction>> UpdateInBackward(Optimizer* optimizer, InBackwardOptions options) {
  return internal::OptimizerInBackward::Create(optimizer, std::move(options));
}

}  // namespace evenkeel
