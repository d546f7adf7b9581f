// One step, bucket by bucket and in bucket order on every rank:
//
//   BeginReduction()   in backward, on the reducer's thread: if the plan is new, state begins to
//                      move to its new places; which gradients exist goes out, beside the reducer's
//                      reduce-scatter
//   OnReduced()        the slice is here; updated at once, or noted for Step()
//   UpdateBucket()     what every rank counts (steps), and what this rank's slice holds
//   all-gather         on this optimizer's own channel, which is why it need not end when the
//                      reducer's step does
//
// Three channels: the reducer's, the flags', the optimizer's. Within each the order is that of the
// buckets; between them it depends on the rank. The first two of these lines are in
// slices_reduction.cc.

#include "evenkeel/zero_optim/internal/placement/slices.h"

#include <algorithm>
#include <cassert>
#include <utility>

#include "absl/strings/str_cat.h"
#include "evenkeel/bucket/divergence.h"
#include "evenkeel/comm/device/runtime.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/join/phase.h"
#include "evenkeel/zero_optim/internal/gradient_measure.h"
#include "evenkeel/zero_optim/internal/open_works.h"

namespace evenkeel::internal {

// Creation ----------------------------------------------------------------------------------------

SlicesOptimizer::SlicesOptimizer(Communicator& comm, ParameterSet& params, ParameterGroups groups,
                                 OptimizerOptions options)
    : PlacedOptimizer(comm, params, groups, std::move(options)),
      how_(std::get<Slices>(placement())),
      groups_(std::move(groups)),
      held_rank_(comm.rank()),
      held_world_size_(comm.world_size()),
      holders_(params.size()) {
  for (int i = 0; i < params.size(); ++i) (void)updater_.SetPart(i, 0, 0);
}

std::vector<Fact> SlicesOptimizer::OtherSettings() const {
  return {{"update_in_backward", updates_in_backward() ? "true" : "false"},
          {"overlap_forward", how_.overlap_forward ? "true" : "false"}};
}

absl::Status SlicesOptimizer::OnChannel() {
  EK_ASSIGN_OR_RETURN(flag_channel_,
                      communicator().OpenChannel(absl::StrCat(join_name(), ".used")));
  return absl::OkStatus();
}

SlicesOptimizer::~SlicesOptimizer() {
  Communicator* const comm = Detach();
  link_->Cut();
  if (comm == nullptr) return;
  (void)WaitForAll();  // At most until the operations' deadline: they use the padding's memory.
  (void)WaitUntilSettled();
}

// A step ------------------------------------------------------------------------------------------

void SlicesOptimizer::MoveTo(Phase next) {
  switch (next) {
    case Phase::kReduced:  // OnLeave() comes from any phase.
      break;
    case Phase::kBegun:
      assert(!awaits_step());
      break;
    case Phase::kReducing:
      assert(phase_ == Phase::kBegun);
      break;
    case Phase::kUpdating:
      assert(is_reducing());
      break;
    case Phase::kUpdated:
      assert(awaits_step());
      break;
    case Phase::kStepped:
      assert(!is_open());
      break;
  }
  phase_ = next;
}

absl::StatusOr<ParticipantState> SlicesOptimizer::PrepareStep() {
  absl::MutexLock lock(&mutex_);
  EK_RETURN_IF_ERROR(CheckStepped());
  EK_RETURN_IF_ERROR(updater_.groups().Adopt(groups_.rules()));
  if (updates_in_backward()) DeclareSettings(SettingsText(groups_, groups_.rules()));
  return CurrentState();
}

ParticipantState SlicesOptimizer::CurrentState() const {
  return {.schedule_hash =
              StableHash(uint64_t{updates_in_backward()}, uint64_t{how_.overlap_forward})};
}

absl::Status SlicesOptimizer::CheckStepped() const {
  if (!awaits_step()) return absl::OkStatus();
  return Refusal(
      ": a step begins, but Step() was not called after the one before, which updated parameters "
      "in backward");
}

// The slices of the last reduction are overwritten from the step's first bucket on.
absl::Status SlicesOptimizer::CheckNotOpen() const {
  if (!is_open()) return absl::OkStatus();
  EK_RETURN_IF_ERROR(communicator().status());  // A reduction that failed has ended the group.
  return Refusal(
      ": Step() was called while the gradients are being reduced: call it after FinishStep()");
}

// A gradient that is not a slice was not reduced, or not by this optimizer's reduction.
absl::Status SlicesOptimizer::CheckSliced() const {
  for (int i = 0; i < params_->size(); ++i) {
    const GradState state = params_->grad_state(i);
    if (state == GradState::kNone || !params_->trainable(i) || !groups_.contains(i)) continue;
    return Refusal(": rank ", communicator().rank(), ", parameter \"", (*params_)[i].name,
                   "\" has a gradient that ",
                   state == GradState::kLocal
                       ? "was not reduced: the last backward before the optimizer's step must "
                         "reduce, not accumulate (kAccumulate, no_sync())"
                       : "is not a slice: its DataParallel was made without TakeReduction()");
  }
  return absl::OkStatus();
}

absl::Status SlicesOptimizer::CheckMemory() {
  for (const Note& note : std::exchange(notes_, {})) {
    const Parameter& param = (*params_)[note.param];
    if (param.grad.data != note.data || HashOf(param.grad) == note.hash) continue;
    return Refusal(
        ": rank ", communicator().rank(), " changed the memory of the gradient of \"", param.name,
        "\" between FinishStep() and Step(); with Slices that has no effect, because each rank has "
        "a slice of the gradient elsewhere: pass such code to the optimizer's BeforeUpdate()");
  }
  return absl::OkStatus();
}

absl::Status SlicesOptimizer::Step(const StepOptions& options) {
  const PhaseScope phase(communicator(), StepPhase::kOptimizer);
  EK_RETURN_IF_ERROR(CheckOptions(options));
  if (updates_in_backward() && !(options == StepOptions())) {
    return absl::InvalidArgumentError(
        absl::StrCat(join_name(), ": Step() has options, but the update was made in backward"));
  }
  {
    absl::MutexLock lock(&mutex_);
    EK_RETURN_IF_ERROR(CheckNotOpen());  // Before it takes part in the group's step.
  }
  EK_RETURN_IF_ERROR(CheckMemory());
  EK_ASSIGN_OR_RETURN(std::shared_ptr<StepTicket> ticket, Notify());
  EK_ASSIGN_OR_RETURN(const StepAnswer answer, ticket->Wait());
  EK_RETURN_IF_ERROR(CheckSliced());
  StepMessage step{.rules = groups_.rules(), .options = options};
  EK_ASSIGN_OR_RETURN(step.sources, ChooseSlices());
  if (!updates_in_backward())
    EK_RETURN_IF_ERROR(WaitForGathers());  // Of a step before without a reduction in between.
  NoteStep(std::move(ticket));
  if (!answer.everyone_active()) {
    if (!updates_in_backward()) step.hashes = HashTensors(step.sources);
    EK_RETURN_IF_ERROR(Announce(step));
  }
  return Run(step, /*has_inputs=*/true);
}

absl::StatusOr<std::vector<GradientSource>> SlicesOptimizer::ChooseSlices() const {
  absl::MutexLock lock(&mutex_);
  std::vector<GradientSource> sources(params_->size(), GradientSource::kNone);
  for (int i = 0; i < params_->size(); ++i) {
    if (!groups_.contains(i) || params_->is_ignored(i)) continue;
    const bool is_dropped = params_->was_cleared(i) || !params_->trainable(i);
    if (!is_dropped) sources[i] = GradientSource::kHere;
    if (is_dropped && awaits_step() && WasUpdated(i)) {
      return Refusal(": the gradient of \"", (*params_)[i].name,
                     "\" was cleared, or the parameter frozen, before Step(), but it was updated "
                     "in backward already: do this after Step()");
    }
  }
  if (updates_in_backward() && phase_ == Phase::kStepped) {
    return Refusal(
        ": a second Step() after one backward has nothing left to update: the gradients were used "
        "up in backward");
  }
  return sources;
}

absl::Status SlicesOptimizer::RepeatStep(const StepAnswer& /*answer*/, const StepMessage& step) {
  {
    absl::MutexLock lock(&mutex_);
    EK_RETURN_IF_ERROR(CheckNotOpen());
  }
  EK_RETURN_IF_ERROR(groups_.Adopt(step.rules));
  EK_RETURN_IF_ERROR(WaitForGathers());
  if (!step.hashes.empty()) EK_RETURN_IF_ERROR(CheckUnchanged(step));
  return Run(step, /*has_inputs=*/false);
}

absl::Status SlicesOptimizer::Run(const StepMessage& step, bool has_inputs) {
  {
    absl::MutexLock lock(&mutex_);
    EK_RETURN_IF_ERROR(CheckNotOpen());
    if (updates_in_backward() && !(updater_.groups().rules() == step.rules)) {
      return Refusal(
          ": settings were changed after the step began, which has updated by the old ones: change "
          "them before BeginStep()");
    }
    EK_RETURN_IF_ERROR(updater_.groups().Adopt(step.rules));
    sources_ = step.sources;
  }
  if (!updates_in_backward()) EK_RETURN_IF_ERROR(UpdateAll(step.options));
  // A rank without inputs has no forward to overlap with.
  if (!how_.overlap_forward || !has_inputs || has_functions_after())
    EK_RETURN_IF_ERROR(WaitForGathers());
  {
    absl::MutexLock lock(&mutex_);
    EK_RETURN_IF_ERROR(CheckNotOpen());  // Another thread may have begun a step meanwhile.
    MoveTo(Phase::kStepped);
    EndTornUpdate();  // If its slices have arrived before.
  }
  return EndUpdate(step);
}

// On a device the host doesn't know whether any rank has a gradient.
bool SlicesOptimizer::IsUsed(const SlicePlan::Bucket& bucket, size_t position) const {
  const int param = bucket.layout.params[position];
  if (!sources_.empty() && sources_[param] == GradientSource::kNone) return false;
  return updater_.is_on_device() || flags_[bucket.first_flag + position] != 0;
}

bool SlicesOptimizer::WasUpdated(int param) const {
  const int index = plan_->bucket_of[param];
  if (index < 0 || !reduced_[index]) return false;
  const SlicePlan::Bucket& bucket = plan_->buckets[index];
  return IsUsed(bucket,
                std::ranges::find(bucket.layout.params, param) - bucket.layout.params.begin());
}

absl::Status SlicesOptimizer::RunBefore() {
  std::vector<GradientPiece> pieces;
  {
    absl::MutexLock lock(&mutex_);
    for (size_t b = 0; b < reduced_.size() && has_functions_before(); ++b) {
      const SlicePlan::Bucket& bucket = plan_->buckets[b];
      size_t position = 0;
      for (const Segment& own : bucket.own) {
        while (bucket.layout.params[position] != own.param) ++position;
        if (reduced_[b] && IsUsed(bucket, position))
          pieces.push_back({own.param, own.begin, bucket.gradients[position]});
      }
    }
  }
  return RunBeforeUpdate(pieces);
}

absl::Status SlicesOptimizer::UpdateAll(const StepOptions& options) {
  if (!updater_.is_on_device()) EK_RETURN_IF_ERROR(WaitForFlagsAndState());
  EK_RETURN_IF_ERROR(RunBefore());
  checks_.Begin();
  if (updater_.is_on_device()) {
    absl::MutexLock lock(&mutex_);
    return UpdateAllThere(options);
  }
  StepOptions decided = options;
  if (NeedsCheck(options)) {
    EK_ASSIGN_OR_RETURN(const GradientCheck check, Measure(NormOf(options), options.grad_scale));
    decided = checks_.Decide(options, check);
  }
  if (decided.skip) return absl::OkStatus();
  absl::MutexLock lock(&mutex_);
  for (size_t b = 0; b < reduced_.size(); ++b) {
    if (reduced_[b]) UpdateBucket(static_cast<int>(b), decided.grad_scale);
  }
  return absl::OkStatus();
}

// Nothing here waits for the device: neither which gradients exist, nor whether the step is
// skipped, is known on the host. So slices go round after a step that changed nothing, too.
absl::Status SlicesOptimizer::UpdateAllThere(const StepOptions& options) {
  if (plan_ == nullptr || options.skip) return absl::OkStatus();
  const StreamRef stream = updater_.stream();
  if (move_ != nullptr) EK_RETURN_IF_ERROR(move_->OrderBefore(stream));
  std::vector<ParameterUpdater::Gradient> all;
  for (size_t b = 0; b < reduced_.size(); ++b) {
    if (!reduced_[b]) continue;
    const std::vector<ParameterUpdater::Gradient> some = GradientsOf(static_cast<int>(b));
    all.insert(all.end(), some.begin(), some.end());
  }
  EK_RETURN_IF_ERROR(
      device_flags_.Reduce(flags_, updater_, communicator(), *flag_channel_, stream));
  EK_RETURN_IF_ERROR(updater_.SetGradients(kStepList, all, stream));
  EK_RETURN_IF_ERROR(MeasureStepThere(options));
  is_torn_ = true;
  EK_RETURN_IF_ERROR(PrepareStepThere(options, device_flags_.all(), MayBeUnset()));
  gathers_.assign(plan_->buckets.size(), Work());
  for (size_t b = 0; b < reduced_.size(); ++b) {
    if (reduced_[b]) EK_RETURN_IF_ERROR(ApplyThere(static_cast<int>(b), std::nullopt, stream));
  }
  return absl::OkStatus();
}

std::vector<ParameterUpdater::Gradient> SlicesOptimizer::GradientsOf(int index) const {
  const SlicePlan::Bucket& bucket = plan_->buckets[index];
  std::vector<ParameterUpdater::Gradient> gradients;
  for (size_t i = 0; i < bucket.layout.params.size(); ++i) {
    if (!IsUsed(bucket, i)) continue;
    gradients.push_back(
        {bucket.layout.params[i], bucket.gradients[i], bucket.first_flag + static_cast<int>(i)});
  }
  return gradients;
}

bool SlicesOptimizer::MayBeUnset() const {
  return std::find(flags_.begin(), flags_.end(), 0) != flags_.end();
}

absl::Status SlicesOptimizer::ApplyThere(int index, const std::optional<StepOptions>& to_prepare,
                                         StreamRef stream) {
  const int list = kFirstBucketList + index;
  is_torn_ = true;
  EK_RETURN_IF_ERROR(updater_.SetGradients(list, GradientsOf(index), stream));
  if (to_prepare.has_value()) {
    EK_RETURN_IF_ERROR(updater_.PrepareThere(list, *to_prepare, /*is_measured=*/false, stream,
                                             device_flags_.all(), MayBeUnset()));
  }
  EK_RETURN_IF_ERROR(updater_.ApplyThere(list, stream));
  SendOut(index, stream);
  return absl::OkStatus();
}

// All buckets have gone out when the first of a step comes here, so all flags go with it.
absl::Status SlicesOptimizer::UpdateInBackwardThere(int index, StreamRef stream) {
  if (phase_ == Phase::kReducing) {
    if (move_ != nullptr) {  // Its copies are on the parameters' stream.
      DeviceRuntime& runtime = *communicator().runtime();
      EK_ASSIGN_OR_RETURN(const Event copied, runtime.Record(updater_.stream()));
      EK_RETURN_IF_ERROR(runtime.Wait(stream, copied));
      EK_RETURN_IF_ERROR(move_->OrderBefore(stream));
    }
    EK_RETURN_IF_ERROR(
        device_flags_.Reduce(flags_, updater_, communicator(), *flag_channel_, stream));
  }
  MoveTo(Phase::kUpdating);
  return ApplyThere(index, StepOptions(), stream);
}

void SlicesOptimizer::Settle() {
  if (settling_.empty()) return;
  settling_.Forget();
  EndTornUpdate();
}

void SlicesOptimizer::EndTornUpdate() {
  if (!is_torn_ || awaits_step() || !gathers_.empty() || !settling_.empty()) return;
  move_.reset();  // A rank that has sent its slices had its state.
  is_torn_ = false;
}

absl::Status SlicesOptimizer::WaitUntilSettled() {
  if (!updater_.is_on_device()) return absl::OkStatus();
  OpenWorks works;
  std::shared_ptr<StateMove> move;
  {
    absl::MutexLock lock(&mutex_);
    works = settling_;
    move = move_;
  }
  EK_RETURN_IF_ERROR(works.Wait());
  if (move != nullptr) EK_RETURN_IF_ERROR(move->Wait());
  absl::MutexLock lock(&mutex_);
  Settle();
  return absl::OkStatus();
}

// Each rank measures its slices, ranks without inputs too; the sum is over this optimizer's own
// group.
absl::StatusOr<GradientCheck> SlicesOptimizer::Measure(double norm, double grad_scale) {
  GradientMeasure measure(params_->size(), norm);
  {
    absl::MutexLock lock(&mutex_);
    for (size_t b = 0; b < reduced_.size(); ++b) {
      const SlicePlan::Bucket& bucket = plan_->buckets[b];
      for (size_t i = 0; i < bucket.layout.params.size() && reduced_[b]; ++i) {
        if (IsUsed(bucket, i)) measure.Add(bucket.layout.params[i], bucket.gradients[i]);
      }
    }
  }
  return Total(std::move(measure), norm, grad_scale);
}

void SlicesOptimizer::UpdateBucket(int index, double grad_scale) {
  const SlicePlan::Bucket& bucket = plan_->buckets[index];
  is_torn_ = true;
  for (size_t i = 0; i < bucket.layout.params.size(); ++i) {
    if (!IsUsed(bucket, i)) continue;
    updater_.Update(bucket.layout.params[i], bucket.gradients[i], grad_scale);
  }
  SendOut(index, {});
}

void SlicesOptimizer::SendOut(int index, StreamRef after) {
  const SlicePlan::Bucket& bucket = plan_->buckets[index];
  if (gathers_.empty()) gathers_.assign(plan_->buckets.size(), Work());
  if (communicator().world_size() == 1) return;
  gathers_[index] = channel()->Issue(bucket.gather, OwnValues(bucket, *params_),
                                     AllValues(bucket, *params_), {.after = after});
}

absl::Status SlicesOptimizer::WaitFor(int param) {
  Work gather;
  {
    EK_RETURN_IF_ERROR(CheckParam(param));
    absl::MutexLock lock(&mutex_);
    const int bucket = plan_ != nullptr ? plan_->bucket_of[param] : -1;
    if (bucket >= 0 && !gathers_.empty()) gather = gathers_[bucket];
    if (updater_.is_on_device()) return gather.OrderBefore(updater_.stream());
  }
  return gather.Wait();
}

absl::Status SlicesOptimizer::WaitForAll() {
  EK_RETURN_IF_ERROR(WaitForGathers());
  return updater_.is_on_device() ? absl::OkStatus() : WaitForFlagsAndState();
}

absl::Status SlicesOptimizer::WaitForFlagsAndState() {
  std::vector<Work> flags;
  std::shared_ptr<StateMove> move;
  {
    absl::MutexLock lock(&mutex_);
    flags = flag_works_;
    move = move_;
  }
  if (move != nullptr) EK_RETURN_IF_ERROR(move->Wait());
  return internal::WaitForAll(flags);
}

absl::Status SlicesOptimizer::WaitForGathers() {
  std::vector<Work> gathers;
  {
    absl::MutexLock lock(&mutex_);
    gathers = gathers_;
    if (updater_.is_on_device()) {
      EK_RETURN_IF_ERROR(OrderAllBefore(gathers, updater_.stream()));
      settling_.Add(std::move(gathers));
      gathers_.clear();
      return absl::OkStatus();
    }
  }
  if (gathers.empty()) return absl::OkStatus();
  EK_RETURN_IF_ERROR(internal::WaitForAll(gathers));
  absl::MutexLock lock(&mutex_);
  gathers_.clear();
  EndTornUpdate();
  return absl::OkStatus();
}

}  // namespace evenkeel::internal
