// A SlicesOptimizer's work on the gradients while they are reduced: in backward, on the reducer's
// thread, bucket by bucket.

#include <algorithm>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "evenkeel/bucket/divergence.h"
#include "evenkeel/comm/collective.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/join/steps/step_control.h"
#include "evenkeel/zero_optim/internal/gradients.h"
#include "evenkeel/zero_optim/internal/placement/slices.h"

namespace evenkeel::internal {

// The reducer's view of the optimizer.
class SlicesOptimizer::Reduction : public BucketReduction {
 public:
  using Owner = SlicesOptimizer;

  explicit Reduction(std::shared_ptr<OwnerLink<Owner>> link) : link_(std::move(link)) {}

  void OnGroup(Communicator& comm) override {
    world_size_ = comm.world_size();
    (void)link_->Call([&](Owner& owner) {
      absl::MutexLock lock(&owner.mutex_);
      owner.reducers_group_ = &comm;
      owner.reducers_group_lives_ = StepControl::Of(comm).lifetime();
      return absl::OkStatus();
    });
  }
  int64_t CountMultiple() const override { return world_size_ * kSliceUnit; }
  std::vector<Collective> CollectivesFor(const BucketInfo& bucket) const override {
    return {{.kind = CollectiveKind::kReduceScatter,
             .dtype = bucket.data.dtype,
             .count = bucket.data.count / world_size_}};
  }
  bool HasThread() const override { return true; }
  UsedFlags used_flags() const override { return UsedFlags::kOwn; }
  absl::Status OnPlan(absl::Span<const BucketInfo> buckets) override {
    return link_->Call([&](Owner& owner) { return owner.OnPlan(buckets); });
  }
  absl::StatusOr<RoundBuffers> BeginRound(const BucketInfo& bucket, int /*round*/,
                                          const ReductionStep& step) override {
    return link_->Call([&](Owner& owner) { return owner.BeginReduction(bucket, step); });
  }
  absl::StatusOr<GradFate> OnReduced(const BucketInfo& bucket, const ReductionStep& step) override {
    EK_RETURN_IF_ERROR(
        link_->Call([&](Owner& owner) { return owner.OnReduced(bucket.index, step.stream); }));
    return GradFate::kNone;
  }
  absl::Status OnStepBegin() override {
    return link_->Call([](Owner& owner) { return owner.OnStepBegin(); });
  }
  absl::Status OnStepEnd() override {
    return link_->Call([](Owner& owner) {
      owner.OnStepEnd();
      return absl::OkStatus();
    });
  }
  absl::Status WaitForValues() override {
    return link_->Call([](Owner& owner) { return owner.WaitForGathers(); });
  }
  std::string StepMessage() override {
    const auto message_of = [](Owner& owner) -> absl::StatusOr<std::string> {
      return owner.SettingsMessage();
    };
    return link_->Call(message_of).value_or("");
  }
  absl::Status OnShadow(absl::string_view message) override {
    return link_->Call([&](Owner& owner) { return owner.OnSettings(message); });
  }

 private:
  const std::shared_ptr<OwnerLink<Owner>> link_;
  int world_size_ = 1;
};

absl::StatusOr<std::unique_ptr<BucketReduction>> SlicesOptimizer::TakeReduction(
    ReductionOptions options) {
  if (!options.params.empty() || options.inner != nullptr) {
    return Lacks("updates of a part in backward, and no other reduction inside");
  }
  if (std::exchange(reduction_is_taken_, true)) {
    return Refusal(": TakeReduction() was called twice; it works with one reducer");
  }
  return std::make_unique<Reduction>(link_);
}

absl::Status SlicesOptimizer::OnPlan(absl::Span<const BucketInfo> buckets) {
  absl::MutexLock lock(&mutex_);
  for (const BucketInfo& bucket : buckets) {
    for (int param : bucket.params) {
      if (groups_.contains(param)) continue;
      return absl::InvalidArgumentError(
          absl::StrCat(join_name(), ": parameter \"", (*params_)[param].name,
                       "\" is trained but in none of its groups: its gradient is reduced to "
                       "slices, which only this optimizer can use"));
    }
  }
  Communicator& group = *reducers_group_;  // This optimizer's may be gone.
  EK_ASSIGN_OR_RETURN(SlicePlan plan,
                      PlanSlices(buckets, *params_, group.rank(), group.world_size(),
                                 [&group](int64_t bytes) { return group.Allocate(bytes); }));
  EK_RETURN_IF_ERROR(updater_.Refresh());  // Whose state is to move.
  next_plan_ = std::make_shared<const SlicePlan>(std::move(plan));
  return KeepSlices();
}

absl::Status SlicesOptimizer::KeepSlices() {
  // Most programs have cleared all gradients by then; exhausted ranks have not.
  bool is_used = awaits_step();
  int64_t bytes = 0;
  for (size_t b = 0; b < reduced_.size(); ++b) {
    if (!reduced_[b]) continue;
    bytes += plan_->buckets[b].gradient.bytes();
    for (const int param : plan_->buckets[b].layout.params)
      is_used = is_used || !params_->was_cleared(param);
  }
  if (!is_used) {
    reduced_.assign(reduced_.size(), false);
    return absl::OkStatus();
  }
  auto kept = std::make_shared<SlicePlan>(*plan_);
  EK_ASSIGN_OR_RETURN(kept->gradients, reducers_group_->Allocate(bytes));
  auto* free = static_cast<std::byte*>(kept->gradients.data.get());
  for (size_t b = 0; b < reduced_.size(); ++b) {
    if (!reduced_[b]) continue;
    SlicePlan::Bucket& bucket = kept->buckets[b];
    const TensorView from = bucket.gradient;
    bucket.gradient.data = free;
    EK_RETURN_IF_ERROR(updater_.Copy(bucket.gradient, from));
    for (TensorView& gradient : bucket.gradients) {
      if (gradient.data == nullptr) continue;
      gradient.data =
          free + (static_cast<std::byte*>(gradient.data) - static_cast<std::byte*>(from.data));
    }
    free += from.bytes();
  }
  if (updater_.is_on_device()) EK_RETURN_IF_ERROR(updater_.Synchronize());
  plan_ = std::move(kept);
  return absl::OkStatus();
}

absl::Status SlicesOptimizer::CheckReduction() const {
  if (reducers_group_ != living_group()) {
    return Refusal(
        " and the reducer of its gradients are in different groups: ReplaceGroup() both");
  }
  if (is_open()) return absl::OkStatus();
  return Refusal(": a bucket is reduced outside of a step");
}

absl::Status SlicesOptimizer::OnStepBegin() {
  absl::MutexLock lock(&mutex_);
  if (reducers_group_ != living_group()) {
    ForgetSlices();  // No step may use them in place of those that are not reduced.
    return absl::OkStatus();
  }
  EK_RETURN_IF_ERROR(CheckStepped());
  MoveTo(Phase::kBegun);
  return absl::OkStatus();
}

absl::StatusOr<RoundBuffers> SlicesOptimizer::BeginReduction(const BucketInfo& bucket,
                                                             const ReductionStep& step) {
  EK_RETURN_IF_ERROR(WaitForGathers());  // The last step's, if they were not waited for.
  std::shared_ptr<StateMove> last_move;
  bool is_first = false;
  {
    absl::MutexLock lock(&mutex_);
    EK_RETURN_IF_ERROR(CheckReduction());
    is_first = phase_ == Phase::kBegun;
    if (is_first) {
      MoveTo(Phase::kReducing);
      ForgetSlices();
    }
    if (next_plan_ != nullptr) last_move = move_;
    Settle();
  }
  if (last_move != nullptr) EK_RETURN_IF_ERROR(last_move->Wait());  // Step() has not run since.
  if (is_first && updates_in_backward()) EK_RETURN_IF_ERROR(CheckValuesUnchanged());
  absl::MutexLock lock(&mutex_);
  EK_RETURN_IF_ERROR(CheckReduction());  // It may have left its group meanwhile.
  if (next_plan_ != nullptr) EK_RETURN_IF_ERROR(AdoptPlan());
  SendFlags(bucket, step.contributes);
  return RoundBuffers{
      .in = {bucket.data}, .out = {plan_->buckets[bucket.index].gradient}, .scale = step.scale};
}

// Drops the slices of the last reduction.
void SlicesOptimizer::ForgetSlices() {
  reduced_.assign(reduced_.size(), false);
  sources_.clear();
}

absl::Status SlicesOptimizer::AdoptPlan() {
  if (updater_.is_on_device() && plan_ != nullptr) {
    // The last gathers may still be on their way into it: the stream has been ordered behind them.
    for (const Memory& memory : {plan_->padding, plan_->gradients})
      EK_RETURN_IF_ERROR(updater_.device().Keep(memory, updater_.stream()));
  }
  plan_ = std::move(next_plan_);
  flags_.assign(plan_->flag_count, 0);
  flag_works_.assign(plan_->buckets.size(), Work());
  reduced_.assign(plan_->buckets.size(), false);
  move_ = std::make_shared<StateMove>(&updater_, channel(), communicator().rank());
  for (const SlicePlan::Bucket& bucket : plan_->buckets) {
    std::vector<OwnerChange> changes;
    for (size_t i = 0; i < bucket.layout.params.size(); ++i) {
      const int param = bucket.layout.params[i];
      Holders now = HoldersIn(bucket.layout, i, communicator().world_size());
      if (now == holders_[param]) continue;
      changes.push_back({.param = param, .from = holders_[param], .to = now});
      holders_[param] = std::move(now);
    }
    EK_RETURN_IF_ERROR(move_->Start(changes));
  }
  return absl::OkStatus();
}

void SlicesOptimizer::SendFlags(const BucketInfo& bucket, bool contributes) {
  const int first = plan_->buckets[bucket.index].first_flag,
            count = static_cast<int>(bucket.params.size());
  if (updater_.is_on_device()) {  // They go out together, before the first update.
    for (int i = 0; i < count; ++i) {
      flags_[first + i] = contributes && params_->grad_state(bucket.params[i]) != GradState::kNone;
    }
    return;
  }
  for (int i = 0; i < count; ++i) flags_[first + i] = contributes && IsSet(bucket.used.Slice(i, 1));
  if (communicator().world_size() == 1) return;
  flag_works_[bucket.index] = flag_channel_->AllReduce(
      absl::MakeSpan(flags_).subspan(first, count), ReduceOp::kMax,
      {.role = Role::kShard, .index = bucket.index, .index_count = bucket.bucket_count});
}

void SlicesOptimizer::OnStepEnd() {
  {
    absl::MutexLock lock(&mutex_);
    if (phase_ == Phase::kBegun) ForgetSlices();  // All buckets were skipped.
    if (is_open()) MoveTo(awaits_step() ? Phase::kUpdated : Phase::kReduced);
  }
  NoteGradients();
}

// A program that changes gradients does so from its first steps on. So the memory is read in these,
// and where ranks without inputs can't follow.
void SlicesOptimizer::NoteGradients() {
  constexpr int64_t kFirstSteps = 4;
  const StepControl& steps = StepControl::Of(communicator());
  notes_.clear();
  if (updater_.is_on_device() || steps.is_exhausted() || steps.current() == nullptr) return;
  const absl::StatusOr<StepAnswer> answer = steps.current()->Wait();
  if (!answer.ok() || (answer->everyone_active() && steps_finished() >= kFirstSteps)) return;
  for (int i = 0; i < params_->size(); ++i) {
    const TensorView& gradient = (*params_)[i].grad;
    if (groups_.contains(i) && params_->trainable(i) && gradient.data != nullptr)
      notes_.push_back({i, gradient.data, HashOf(gradient)});
  }
}

absl::Status SlicesOptimizer::OnReduced(int bucket, StreamRef stream) {
  std::shared_ptr<StateMove> move;
  Work flags;
  {
    absl::MutexLock lock(&mutex_);
    EK_RETURN_IF_ERROR(CheckReduction());
    reduced_[bucket] = true;
    if (!updates_in_backward()) return absl::OkStatus();
    if (updater_.is_on_device()) return UpdateInBackwardThere(bucket, stream);
    move = move_;
    flags = flag_works_[bucket];
  }
  if (move != nullptr) EK_RETURN_IF_ERROR(move->Wait());
  EK_RETURN_IF_ERROR(flags.Wait());
  absl::MutexLock lock(&mutex_);
  EK_RETURN_IF_ERROR(CheckReduction());  // It may have left its group meanwhile.
  MoveTo(Phase::kUpdating);
  UpdateBucket(bucket, /*grad_scale=*/1.0);
  return absl::OkStatus();
}

std::string SlicesOptimizer::SettingsMessage() const {
  absl::MutexLock lock(&mutex_);
  return updates_in_backward() ? StepMessage{.rules = updater_.groups().rules()}.Serialize() : "";
}

absl::Status SlicesOptimizer::OnSettings(absl::string_view message) {
  if (!updates_in_backward()) return absl::OkStatus();
  EK_ASSIGN_OR_RETURN(const StepMessage settings, StepMessage::Parse(message, 0));
  EK_RETURN_IF_ERROR(groups_.Adopt(settings.rules));
  absl::MutexLock lock(&mutex_);
  return updater_.groups().Adopt(settings.rules);
}

}  // namespace evenkeel::internal
