// One step, bucket by bucket and in bucket order on every rank:
//
//   BeginReduction()   in backward, on the reducer's thread: if the plan is new, state begins to move to its new
//                      places; which gradients exist goes out, beside the reducer's reduce-scatter
//   OnReduced()        the slice is here; updated at once, or noted for Step()
//   UpdateBucket()     what every rank counts (steps), and what this rank's slice holds
//   all-gather         on this optimizer's own channel, which is why it need not end when the reducer's step does
//
// Three channels: the reducer's, the flags', the optimizer's. Within each the order is that of the buckets; between
// them it depends on the rank.

#include "evenkeel/zero_optim/sliced_optimizer.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "evenkeel/comm/internal/bytes.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/zero_optim/internal/agree.h"
#include "evenkeel/zero_optim/internal/gradient_measure.h"

namespace evenkeel {
namespace {

using internal::OwnerChange;
using internal::SlicePlan;
using internal::StateMove;
using internal::StepMessage;

// First byte of what the lowest active rank announces.
enum class Action : char { kStep = 's', kConsolidate = 'c', kSave = 'v' };

absl::Status WaitForEach(const std::vector<Work>& works) {
  absl::Status status;
  for (const Work& work : works) status.Update(work.Wait());
  return status;
}

// By its bits, which are those of +0 where there is no gradient.
bool IsSet(const TensorView& flags, int64_t i) {
  const TensorView flag = flags.Slice(i, 1);
  uint64_t bits = 0;
  std::memcpy(&bits, flag.data, flag.bytes());
  return bits != 0;
}

}  // namespace

// What the reducer sees of it.
class SlicedOptimizer::Reduction : public BucketReduction {
 public:
  Reduction(SlicedOptimizer* owner, bool is_first) : owner_(owner), is_first_(is_first) {}

  void OnGroup(const Communicator& comm) override {
    world_size_ = comm.world_size();
    absl::MutexLock lock(&owner_->mutex_);
    owner_->reducers_group_ = &comm;
  }
  int64_t CountMultiple() const override { return world_size_ * internal::kSliceUnit; }
  std::vector<Collective> CollectivesFor(const BucketInfo& bucket) const override {
    return {
        {.kind = CollectiveKind::kReduceScatter, .dtype = bucket.data.dtype, .count = bucket.data.count / world_size_}};
  }
  bool HasThread() const override { return true; }
  UsedFlags used_flags() const override { return UsedFlags::kOwn; }
  absl::Status OnPlan(absl::Span<const BucketInfo> buckets) override {
    if (is_first_) return owner_->OnPlan(buckets);
    return absl::FailedPreconditionError(
        absl::StrCat(owner_->join_name(), ": TakeReduction() was called twice; it works with one reducer"));
  }
  absl::StatusOr<RoundBuffers> BeginRound(const BucketInfo& bucket, int /*round*/, const ReductionStep& step) override {
    return owner_->BeginReduction(bucket, step);
  }
  absl::StatusOr<GradFate> OnReduced(const BucketInfo& bucket, const ReductionStep& /*step*/) override {
    EK_RETURN_IF_ERROR(owner_->OnReduced(bucket.index));
    return GradFate::kNone;
  }
  absl::Status OnStepEnd() override {
    owner_->OnStepEnd();
    return absl::OkStatus();
  }
  std::string StepMessage() override { return owner_->SettingsMessage(); }
  absl::Status OnShadow(absl::string_view message) override { return owner_->OnSettings(message); }

 private:
  SlicedOptimizer* const owner_;
  const bool is_first_;
  int world_size_ = 1;
};

// Creation -----------------------------------------------------------------------------------------------------------

SlicedOptimizer::SlicedOptimizer(Communicator* comm, ParameterSet* params, ParameterGroups groups,
                                 SlicedOptimizerOptions options)
    : Joinable(comm, "sliced_optimizer"),
      params_(params),
      options_(std::move(options)),
      groups_(groups),
      held_rank_(comm->rank()),
      held_world_size_(comm->world_size()),
      updater_(params, std::move(groups), comm->runtime()),
      holders_(params->size()) {
  for (int i = 0; i < params->size(); ++i) (void)updater_.SetPart(i, 0, 0);
}

absl::StatusOr<std::unique_ptr<SlicedOptimizer>> SlicedOptimizer::Create(Communicator* comm, ParameterSet* params,
                                                                         const UpdateRule& rule,
                                                                         SlicedOptimizerOptions options) {
  return Create(comm, params, AllInOneGroup(*params, rule), std::move(options));
}

absl::StatusOr<std::unique_ptr<SlicedOptimizer>> SlicedOptimizer::Create(Communicator* comm, ParameterSet* params,
                                                                         const std::vector<ParameterGroup>& groups,
                                                                         SlicedOptimizerOptions options) {
  return Make(comm, params, ParameterGroups::Create(params->size(), groups), std::move(options));
}

absl::StatusOr<std::unique_ptr<SlicedOptimizer>> SlicedOptimizer::Make(Communicator* comm, ParameterSet* params,
                                                                       absl::StatusOr<ParameterGroups> groups,
                                                                       SlicedOptimizerOptions options) {
  absl::Status own = groups.status();
  std::unique_ptr<SlicedOptimizer> optimizer(
      new SlicedOptimizer(comm, params, own.ok() ? *groups : ParameterGroups(params->size()), std::move(options)));
  {
    absl::MutexLock lock(&optimizer->mutex_);
    if (own.ok()) own = optimizer->updater_.Check();
    if (own.ok()) own = optimizer->updater_.CheckDense();
    if (own.ok() && optimizer->updater_.is_on_device() && optimizer->updates_in_backward()) {
      own = absl::UnimplementedError("slices are updated in Step() on a device, not in backward (SliceUpdates)");
    }
  }
  if (own.ok()) own = optimizer->TakeChannels();
  EK_RETURN_IF_ERROR(internal::CheckSameOnAllRanks(*comm, optimizer->join_name(), own, *params, optimizer->groups_));
  comm->steps().Register(optimizer.get());
  optimizer->is_registered_ = true;
  return optimizer;
}

absl::Status SlicedOptimizer::TakeChannels() {
  EK_ASSIGN_OR_RETURN(channel_, communicator().OpenChannel(join_name()));
  EK_ASSIGN_OR_RETURN(flag_channel_, communicator().OpenChannel(absl::StrCat(join_name(), ".used")));
  return absl::OkStatus();
}

SlicedOptimizer::~SlicedOptimizer() {
  Communicator* const comm = living_group();
  if (comm == nullptr) return;
  if (is_registered_) comm->steps().Unregister(this);
  (void)WaitForAll();  // At most until the operations' deadline: they use the padding's memory.
  (void)WaitUntilSettled();
}

std::unique_ptr<BucketReduction> SlicedOptimizer::TakeReduction() {
  const bool is_first = !std::exchange(reduction_is_taken_, true);
  return std::make_unique<Reduction>(this, is_first);
}

// The reduction ------------------------------------------------------------------------------------------------------

absl::Status SlicedOptimizer::OnPlan(absl::Span<const BucketInfo> buckets) {
  absl::MutexLock lock(&mutex_);
  for (const BucketInfo& bucket : buckets) {
    for (int param : bucket.params) {
      if (groups_.contains(param)) continue;
      return absl::InvalidArgumentError(absl::StrCat(join_name(), ": parameter \"", (*params_)[param].name,
                                                     "\" is trained and in none of its groups: its gradient is reduced "
                                                     "to slices, which nobody else can use"));
    }
  }
  EK_ASSIGN_OR_RETURN(SlicePlan plan,
                      internal::PlanSlices(buckets, *params_, reducers_group_->rank(), reducers_group_->world_size(),
                                           [this](int64_t bytes) { return communicator().Allocate(bytes); }));
  EK_RETURN_IF_ERROR(updater_.Refresh());  // Whose state is to move.
  // The old buckets go, and with them what waits there for Step().
  gradients_are_lost_ = gradients_are_lost_ || std::find(reduced_.begin(), reduced_.end(), true) != reduced_.end();
  reduced_.assign(reduced_.size(), false);
  next_plan_ = std::make_shared<const SlicePlan>(std::move(plan));
  return absl::OkStatus();
}

absl::Status SlicedOptimizer::CheckGroups() const {
  if (reducers_group_ == &communicator()) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat(join_name(), " and the reducer of its gradients are in different groups: ReplaceGroup() both"));
}

absl::StatusOr<RoundBuffers> SlicedOptimizer::BeginReduction(const BucketInfo& bucket, const ReductionStep& step) {
  EK_RETURN_IF_ERROR(WaitForGathers());  // Of the step before, if they were not waited for.
  std::shared_ptr<StateMove> last_move;
  {
    absl::MutexLock lock(&mutex_);
    if (is_between_reductions_) reduced_.assign(reduced_.size(), false);  // What no Step() has used.
    is_between_reductions_ = false;
    EK_RETURN_IF_ERROR(CheckGroups());
    if (next_plan_ != nullptr) last_move = move_;
    Settle();
  }
  if (last_move != nullptr) EK_RETURN_IF_ERROR(last_move->Wait());  // Nobody called Step() since.
  absl::MutexLock lock(&mutex_);
  if (next_plan_ != nullptr) EK_RETURN_IF_ERROR(AdoptPlan());
  SendFlags(bucket, step.contributes);
  return RoundBuffers{.in = {bucket.data}, .out = {plan_->buckets[bucket.index].gradient}, .scale = step.scale};
}

absl::Status SlicedOptimizer::AdoptPlan() {
  if (updater_.is_on_device() && plan_ != nullptr) {
    // The last gathers may still be on their way into it: the stream has been ordered behind them.
    EK_RETURN_IF_ERROR(updater_.device().Keep(plan_->padding, updater_.stream()));
  }
  plan_ = std::move(next_plan_);
  gradients_are_lost_ = false;  // Others come.
  flags_.assign(plan_->flag_count, 0);
  if (updater_.is_on_device()) {
    EK_RETURN_IF_ERROR(updater_.device().Keep(std::move(device_flags_), updater_.stream()));
    EK_ASSIGN_OR_RETURN(device_flags_, communicator().runtime()->Allocate(
                                           communicator().device(), 2 * plan_->flag_count * int64_t{sizeof(float)}));
    flags_there_.clear();
  }
  flag_works_.assign(plan_->buckets.size(), Work());
  reduced_.assign(plan_->buckets.size(), false);
  move_ = std::make_shared<StateMove>(&updater_, channel_, communicator().rank());
  for (const SlicePlan::Bucket& bucket : plan_->buckets) {
    std::vector<OwnerChange> changes;
    for (size_t i = 0; i < bucket.layout.params.size(); ++i) {
      const int param = bucket.layout.params[i];
      internal::Holders now = internal::HoldersIn(bucket.layout, i, communicator().world_size());
      if (now == holders_[param]) continue;
      changes.push_back({.param = param, .from = holders_[param], .to = now});
      holders_[param] = std::move(now);
    }
    EK_RETURN_IF_ERROR(move_->Start(changes));
  }
  return absl::OkStatus();
}

void SlicedOptimizer::SendFlags(const BucketInfo& bucket, bool contributes) {
  const int first = plan_->buckets[bucket.index].first_flag, count = static_cast<int>(bucket.params.size());
  if (updater_.is_on_device()) {  // Step() sends them all.
    for (int i = 0; i < count; ++i) {
      flags_[first + i] = contributes && params_->grad_state(bucket.params[i]) != GradState::kNone;
    }
    return;
  }
  for (int i = 0; i < count; ++i) flags_[first + i] = contributes && IsSet(bucket.used, i);
  if (communicator().world_size() == 1) return;
  flag_works_[bucket.index] =
      flag_channel_->AllReduce(absl::MakeSpan(flags_).subspan(first, count), ReduceOp::kMax,
                               {.role = Role::kShard, .index = bucket.index, .index_count = bucket.bucket_count});
}

void SlicedOptimizer::OnStepEnd() {
  absl::MutexLock lock(&mutex_);
  if (is_between_reductions_) reduced_.assign(reduced_.size(), false);  // All buckets were skipped.
  is_between_reductions_ = true;
}

absl::Status SlicedOptimizer::OnReduced(int bucket) {
  std::shared_ptr<StateMove> move;
  Work flags;
  {
    absl::MutexLock lock(&mutex_);
    EK_RETURN_IF_ERROR(CheckGroups());
    reduced_[bucket] = true;
    if (!updates_in_backward()) return absl::OkStatus();
    move = move_;
    flags = flag_works_[bucket];
  }
  if (move != nullptr) EK_RETURN_IF_ERROR(move->Wait());
  EK_RETURN_IF_ERROR(flags.Wait());
  absl::MutexLock lock(&mutex_);
  awaits_step_ = true;
  UpdateBucket(bucket, /*grad_scale=*/1.0);
  return absl::OkStatus();
}

std::string SlicedOptimizer::SettingsMessage() const {
  absl::MutexLock lock(&mutex_);
  return updates_in_backward() ? StepMessage{.rules = updater_.groups().rules()}.Serialize() : "";
}

absl::Status SlicedOptimizer::OnSettings(absl::string_view message) {
  if (!updates_in_backward()) return absl::OkStatus();
  EK_ASSIGN_OR_RETURN(const StepMessage settings, StepMessage::Parse(message, 0));
  EK_RETURN_IF_ERROR(groups_.Adopt(settings.rules));
  absl::MutexLock lock(&mutex_);
  return updater_.groups().Adopt(settings.rules);
}

// A step -------------------------------------------------------------------------------------------------------------

absl::StatusOr<ParticipantState> SlicedOptimizer::PrepareStep() {
  absl::MutexLock lock(&mutex_);
  if (awaits_step_) {
    return absl::FailedPreconditionError(
        absl::StrCat(join_name(),
                     ": a step begins, but Step() was not called after the one before, which updated "
                     "parameters in backward"));
  }
  EK_RETURN_IF_ERROR(updater_.groups().Adopt(groups_.rules()));
  return CurrentState();
}

ParticipantState SlicedOptimizer::CurrentState() const {
  return {.schedule_hash = StableHash(static_cast<uint64_t>(options_.updates), uint64_t{options_.overlap_forward})};
}

// What is not a slice was not reduced, or by somebody else.
absl::Status SlicedOptimizer::CheckGradients() const {
  for (int i = 0; i < params_->size(); ++i) {
    const GradState state = params_->grad_state(i);
    if (state == GradState::kNone || !params_->trainable(i) || !groups_.contains(i)) continue;
    return absl::FailedPreconditionError(absl::StrCat(
        join_name(), ": rank ", communicator().rank(), ", parameter \"", (*params_)[i].name, "\" has a gradient that ",
        state == GradState::kLocal ? "was not reduced: call its DataParallel's FinishStep() before Step()"
                                   : "is not a slice: its DataParallel was made without TakeReduction()"));
  }
  return absl::OkStatus();
}

absl::Status SlicedOptimizer::Step(const StepOptions& options) {
  EK_RETURN_IF_ERROR(internal::CheckOptions(options));
  if (updates_in_backward() && !(options == StepOptions())) {
    return absl::InvalidArgumentError(
        absl::StrCat(join_name(), ": Step() has options, but the update was made in backward (SliceUpdates)"));
  }
  EK_ASSIGN_OR_RETURN(std::shared_ptr<StepTicket> ticket, Notify());
  EK_ASSIGN_OR_RETURN(const StepAnswer answer, ticket->Wait());
  EK_RETURN_IF_ERROR(CheckGradients());
  const StepMessage step{.rules = groups_.rules(), .options = options};
  last_step_ = std::move(ticket);
  if (!answer.everyone_active()) {
    const std::string payload = absl::StrCat(std::string(1, static_cast<char>(Action::kStep)), step.Serialize());
    EK_RETURN_IF_ERROR(communicator().steps().Announce(join_name(), payload));
  }
  return Run(step, /*has_inputs=*/true);
}

absl::Status SlicedOptimizer::RepeatStep(absl::string_view message) {
  EK_ASSIGN_OR_RETURN(const StepMessage step, StepMessage::Parse(message, 0));
  EK_RETURN_IF_ERROR(groups_.Adopt(step.rules));
  return Run(step, /*has_inputs=*/false);
}

absl::Status SlicedOptimizer::Run(const StepMessage& step, bool has_inputs) {
  {
    absl::MutexLock lock(&mutex_);
    if (gradients_are_lost_) {
      return absl::FailedPreconditionError(
          absl::StrCat(join_name(), ": the buckets were planned anew between FinishStep() and Step()"));
    }
    if (updates_in_backward() && !(updater_.groups().rules() == step.rules)) {
      return absl::FailedPreconditionError(
          absl::StrCat(join_name(),
                       ": settings were changed after the step began, which has updated by the old ones: "
                       "change them before BeginStep()"));
    }
    EK_RETURN_IF_ERROR(updater_.groups().Adopt(step.rules));
  }
  if (!updates_in_backward()) EK_RETURN_IF_ERROR(UpdateAll(step.options));
  // A rank without inputs has no forward to overlap with.
  if (!options_.overlap_forward || !has_inputs) EK_RETURN_IF_ERROR(WaitForGathers());
  absl::MutexLock lock(&mutex_);
  awaits_step_ = false;
  reduced_.assign(reduced_.size(), false);
  CountStep();
  return absl::OkStatus();
}

absl::Status SlicedOptimizer::UpdateAll(const StepOptions& options) {
  std::vector<Work> flags;
  std::shared_ptr<StateMove> move;
  {
    absl::MutexLock lock(&mutex_);
    if (updater_.is_on_device()) return UpdateAllThere(options);
    flags = flag_works_;
    move = move_;
  }
  if (move != nullptr) EK_RETURN_IF_ERROR(move->Wait());
  EK_RETURN_IF_ERROR(WaitForEach(flags));
  StepOptions decided = options;
  checks_.Begin();
  if (internal::NeedsCheck(options)) {
    EK_ASSIGN_OR_RETURN(GradientCheck check, Measure(internal::NormOf(options), options.grad_scale));
    decided = internal::Decide(options, check);
    check.is_skipped = decided.skip;
    checks_.Set(check);
  }
  if (decided.skip) return absl::OkStatus();
  absl::MutexLock lock(&mutex_);
  for (size_t b = 0; b < reduced_.size(); ++b) {
    if (reduced_[b]) UpdateBucket(static_cast<int>(b), decided.grad_scale);
  }
  return absl::OkStatus();
}

// This rank's flags go to the device when they have changed; the group's lie behind them.
absl::Status SlicedOptimizer::ReduceFlags(StreamRef stream) {
  const int64_t count = plan_->flag_count;
  const TensorView own = DeviceFlags().Slice(0, count), all = DeviceFlags().Slice(count, count);
  DeviceRuntime& runtime = *communicator().runtime();
  if (flags_there_ != flags_) {
    EK_ASSIGN_OR_RETURN(Memory pinned, runtime.AllocatePinned(own.bytes()));
    std::memcpy(pinned.data.get(), flags_.data(), own.bytes());
    EK_RETURN_IF_ERROR(runtime.Copy(own.data, pinned.data.get(), own.bytes(), stream));
    EK_RETURN_IF_ERROR(updater_.device().Keep(std::move(pinned), stream));
    flags_there_ = flags_;
  }
  EK_RETURN_IF_ERROR(updater_.Copy(all, own));
  if (communicator().world_size() == 1) return absl::OkStatus();
  return flag_channel_->AllReduce(all, ReduceOp::kMax, {.role = Role::kShard, .after = stream}).OrderBefore(stream);
}

// Nothing here waits for the device: neither which gradients exist, nor whether the step is skipped, is known on the
// host. So slices go round after a step that changed nothing, too.
absl::Status SlicedOptimizer::UpdateAllThere(const StepOptions& options) {
  checks_.Begin();
  if (plan_ == nullptr || options.skip) return absl::OkStatus();
  const StreamRef stream = updater_.stream();
  if (move_ != nullptr) EK_RETURN_IF_ERROR(move_->OrderBefore(stream));
  std::vector<std::vector<internal::ParameterUpdater::Gradient>> buckets(plan_->buckets.size());
  std::vector<internal::ParameterUpdater::Gradient> all;
  for (size_t b = 0; b < reduced_.size(); ++b) {
    const SlicePlan::Bucket& bucket = plan_->buckets[b];
    for (size_t i = 0; i < bucket.layout.params.size() && reduced_[b]; ++i) {
      buckets[b].push_back({bucket.layout.params[i], bucket.gradients[i], bucket.first_flag + static_cast<int>(i)});
    }
    all.insert(all.end(), buckets[b].begin(), buckets[b].end());
  }
  EK_RETURN_IF_ERROR(ReduceFlags(stream));
  EK_RETURN_IF_ERROR(updater_.SetGradients(0, all, stream));
  const bool is_measured = internal::NeedsCheck(options);
  if (is_measured) {
    const double norm = internal::NormOf(options);
    EK_RETURN_IF_ERROR(updater_.MeasureThere(0, norm, stream));
    if (communicator().world_size() > 1) {
      const Work total =
          channel_->AllReduce(updater_.device().found(), norm == kInfinityNorm ? ReduceOp::kMax : ReduceOp::kSum,
                              {.role = Role::kShard, .after = stream});
      EK_RETURN_IF_ERROR(total.OrderBefore(stream));
    }
  }
  const bool may_be_unset = std::find(flags_.begin(), flags_.end(), 0) != flags_.end();
  const TensorView flags = DeviceFlags().Slice(plan_->flag_count, plan_->flag_count);
  is_torn_ = true;
  EK_RETURN_IF_ERROR(updater_.PrepareThere(0, options, is_measured, stream, flags, may_be_unset));
  if (is_measured) checks_.SetThere(&updater_.device());
  gathers_.assign(plan_->buckets.size(), Work());
  for (size_t b = 0; b < reduced_.size(); ++b) {
    if (!reduced_[b]) continue;
    const int list = 1 + static_cast<int>(b);
    EK_RETURN_IF_ERROR(updater_.SetGradients(list, buckets[b], stream));
    EK_RETURN_IF_ERROR(updater_.ApplyThere(list, stream));
    if (communicator().world_size() == 1) continue;
    const SlicePlan::Bucket& bucket = plan_->buckets[b];
    gathers_[b] = channel_->Issue(bucket.gather, TensorList(bucket.own_values.begin(), bucket.own_values.end()),
                                  TensorList(bucket.all_values.begin(), bucket.all_values.end()), {.after = stream});
  }
  return absl::OkStatus();
}

void SlicedOptimizer::Settle() {
  if (settling_.empty()) return;
  for (const Work& work : settling_) {
    if (!work.IsDone() || !work.Wait().ok()) return;
  }
  settling_.clear();
  if (!gathers_.empty()) return;
  move_.reset();
  is_torn_ = false;
}

absl::Status SlicedOptimizer::WaitUntilSettled() {
  if (!is_on_device()) return absl::OkStatus();
  std::vector<Work> works;
  std::shared_ptr<StateMove> move;
  {
    absl::MutexLock lock(&mutex_);
    works = settling_;
    move = move_;
  }
  EK_RETURN_IF_ERROR(WaitForEach(works));
  if (move != nullptr) EK_RETURN_IF_ERROR(move->Wait());
  absl::MutexLock lock(&mutex_);
  Settle();
  return absl::OkStatus();
}

// Each rank measures its slices, ranks without inputs too; the sum is over this optimizer's own group.
absl::StatusOr<GradientCheck> SlicedOptimizer::Measure(double norm, double grad_scale) {
  internal::GradientMeasure measure(params_->size(), norm);
  {
    absl::MutexLock lock(&mutex_);
    for (size_t b = 0; b < reduced_.size(); ++b) {
      const SlicePlan::Bucket& bucket = plan_->buckets[b];
      for (size_t i = 0; i < bucket.layout.params.size() && reduced_[b]; ++i) {
        if (flags_[bucket.first_flag + i] != 0) measure.Add(bucket.layout.params[i], bucket.gradients[i]);
      }
    }
  }
  if (communicator().world_size() > 1) {
    EK_RETURN_IF_ERROR(channel_
                           ->AllReduce(absl::MakeSpan(measure.parts().data(), measure.parts().size()),
                                       norm == kInfinityNorm ? ReduceOp::kMax : ReduceOp::kSum, {.role = Role::kShard})
                           .Wait());
  }
  return measure.Result(grad_scale);
}

void SlicedOptimizer::UpdateBucket(int index, double grad_scale) {
  const SlicePlan::Bucket& bucket = plan_->buckets[index];
  is_torn_ = true;
  for (size_t i = 0; i < bucket.layout.params.size(); ++i) {
    if (flags_[bucket.first_flag + i] == 0) continue;  // No rank has a gradient.
    updater_.Update(bucket.layout.params[i], bucket.gradients[i], grad_scale);
  }
  if (gathers_.empty()) gathers_.assign(plan_->buckets.size(), Work());
  if (communicator().world_size() == 1) return;
  gathers_[index] = channel_->Issue(bucket.gather, TensorList(bucket.own_values.begin(), bucket.own_values.end()),
                                    TensorList(bucket.all_values.begin(), bucket.all_values.end()));
}

absl::Status SlicedOptimizer::WaitFor(int param) {
  Work gather;
  {
    absl::MutexLock lock(&mutex_);
    if (param < 0 || param >= params_->size()) {
      return absl::InvalidArgumentError(absl::StrCat(join_name(), ": there is no parameter ", param));
    }
    const int bucket = plan_ != nullptr ? plan_->bucket_of[param] : -1;
    if (bucket >= 0 && !gathers_.empty()) gather = gathers_[bucket];
    if (updater_.is_on_device()) return gather.OrderBefore(updater_.stream());
  }
  return gather.Wait();
}

absl::Status SlicedOptimizer::WaitForAll() {
  EK_RETURN_IF_ERROR(WaitForGathers());
  if (is_on_device()) return absl::OkStatus();
  std::vector<Work> flags;
  std::shared_ptr<StateMove> move;
  {
    absl::MutexLock lock(&mutex_);
    flags = flag_works_;
    move = move_;
  }
  EK_RETURN_IF_ERROR(WaitForEach(flags));
  return move != nullptr ? move->Wait() : absl::OkStatus();
}

absl::Status SlicedOptimizer::WaitForGathers() {
  std::vector<Work> gathers;
  {
    absl::MutexLock lock(&mutex_);
    gathers = gathers_;
    if (updater_.is_on_device()) {
      for (const Work& work : gathers) EK_RETURN_IF_ERROR(work.OrderBefore(updater_.stream()));
      settling_.insert(settling_.end(), gathers.begin(), gathers.end());
      gathers_.clear();
      return absl::OkStatus();
    }
  }
  if (gathers.empty()) return absl::OkStatus();
  EK_RETURN_IF_ERROR(WaitForEach(gathers));
  absl::MutexLock lock(&mutex_);
  gathers_.clear();
  move_.reset();  // Who sent its slices had its state.
  is_torn_ = false;
  return absl::OkStatus();
}

// Join ---------------------------------------------------------------------------------------------------------------

class SlicedOptimizer::Hook : public JoinHook {
 public:
  explicit Hook(SlicedOptimizer* owner) : owner_(owner) {}
  absl::Status OnDry() override { return owner_->WaitForAll(); }
  absl::Status OnAction(const StepAnswer& /*step*/, absl::string_view payload) override {
    return owner_->OnAction(payload);
  }
  absl::Status PostHook(bool is_last_joiner) override {
    return internal::AdoptFromLastJoiners(owner_->communicator(), owner_->join_name(), owner_->groups_, is_last_joiner);
  }

 private:
  SlicedOptimizer* const owner_;
};

absl::StatusOr<std::unique_ptr<JoinHook>> SlicedOptimizer::MakeJoinHook(const JoinOptions& /*options*/) {
  return std::make_unique<Hook>(this);
}

absl::Status SlicedOptimizer::OnAction(absl::string_view payload) {
  if (payload.empty()) return absl::InvalidArgumentError("an action without a word");
  const auto action = static_cast<Action>(payload.front());
  payload.remove_prefix(1);
  if (action == Action::kStep) return RepeatStep(payload);
  if (action == Action::kSave) return SaveHere(std::string(payload));
  internal::ByteReader reader(payload);
  const int to = reader.I32();
  if (action != Action::kConsolidate || !reader.Finish("a consolidation").ok()) {
    return absl::InvalidArgumentError("an action that this optimizer doesn't know");
  }
  return Gather(to).status();
}

absl::StatusOr<OptimizerState> SlicedOptimizer::Consolidate(int to) {
  if (to != kAllRanks && (to < 0 || to >= communicator().world_size())) {
    return absl::InvalidArgumentError(
        absl::StrCat(join_name(), ": Consolidate to rank ", to, " of ", communicator().world_size()));
  }
  EK_RETURN_IF_ERROR(AnnounceAfterStep(
      "Consolidate", internal::ByteWriter().U8(static_cast<uint8_t>(Action::kConsolidate)).I32(to).Take()));
  return Gather(to);
}

absl::Status SlicedOptimizer::Save(const std::string& folder) {
  EK_RETURN_IF_ERROR(AnnounceAfterStep("Save", absl::StrCat(std::string(1, static_cast<char>(Action::kSave)), folder)));
  return SaveHere(folder);
}

absl::Status SlicedOptimizer::AnnounceAfterStep(absl::string_view call, const std::string& payload) {
  if (!join_config().enable) return absl::OkStatus();
  if (last_step_ == nullptr || last_step_ != communicator().steps().current()) {
    return absl::FailedPreconditionError(
        absl::StrCat(join_name(), ": inside RunJoined() ", call, " comes after Step(), in the same step"));
  }
  return communicator().steps().Announce(join_name(), payload);
}

}  // namespace evenkeel
