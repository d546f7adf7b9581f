// What happens in a step; reducer.cc has what happens between steps.

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "evenkeel/bucket/internal/reducer_checks.h"
#include "evenkeel/bucket/reducer.h"
#include "evenkeel/comm/status.h"

namespace evenkeel {
namespace {

std::string SerializeOrder(const std::vector<int>& order) {
  return std::string(reinterpret_cast<const char*>(order.data()), order.size() * sizeof(int));
}

}  // namespace

void Reducer::ForgetStep() {
  ticket_.reset();
  if (pipeline_ != nullptr) pipeline_->Close();
  // A step that was not completed: what its reduction does on other streams is in front of what comes.
  if (pipeline_ != nullptr && device_ != nullptr) (void)device_->Join();
  pipeline_.reset();
  if (unused_ != nullptr) unused_->Forget();
}

absl::Status Reducer::BeginStep(std::shared_ptr<StepTicket> ticket, StepMode mode,
                                std::shared_ptr<StepDivisor> divisor) {
  if (in_step()) {
    return EndWith(absl::FailedPreconditionError(
        absl::StrCat(name_, ": a step began before FinishStep() ended the one before it")));
  }
  EK_RETURN_IF_ERROR(CheckNoneAdded());
  if (device_ != nullptr) {
    if (absl::Status status = device_->Confirm(); !status.ok()) return EndWith(Annotate(status, "an earlier step"));
  }
  ticket_ = std::move(ticket);
  mode_ = mode;
  divisor_ = std::move(divisor);
  step_error_ = absl::OkStatus();
  if (mode == StepMode::kAccumulate) {
    ticket_->OnAnswer([divisor = divisor_](const absl::StatusOr<StepAnswer>& answer) {
      if (answer.ok()) divisor->ScaleOf(*answer, /*reduces=*/false);
    });
    return absl::OkStatus();
  }
  if (absl::Status status = RefreshCollectives(); !status.ok()) return EndWith(status);
  tracker_.Reset();
  unused_hash_ = 0;
  packed_.assign(storage_->size(), {});
  times_ = {.begin = absl::Now(), .is_measured = IsMeasured()};
  pipeline_ = std::make_shared<BucketPipeline>(pipeline_plan_, std::vector<bool>(storage_->size(), true),
                                               /*waits_for_skips=*/unused_ != nullptr);
  if (times_.is_measured) pipeline_->MeasureEnds();
  // Runs on the control thread; the pipeline is shared, so it may come after this step, and this object, have ended.
  ticket_->OnAnswer([pipeline = pipeline_, divisor = divisor_](const absl::StatusOr<StepAnswer>& answer) {
    if (answer.ok()) pipeline->Open(divisor->ScaleOf(*answer, /*reduces=*/true));
  });
  return counts_.has_value() ? BeginCounting() : absl::OkStatus();
}

absl::Status Reducer::BeginCounting() {
  counts_->BeginStep();
  if (!counts_->is_recorded()) return absl::OkStatus();
  for (int param = 0; param < params_->size(); ++param) {
    if (tracker_.is_planned(param) && counts_->expected(param) == 0) EK_RETURN_IF_ERROR(Announce(param));
  }
  return absl::OkStatus();
}

absl::Status Reducer::CheckCall(int param) const {
  if (!in_step()) {
    return absl::FailedPreconditionError(
        absl::StrCat(name_, ": the gradient of parameter ", param, " came outside of a step; call BeginStep() first"));
  }
  if (param < 0 || param >= params_->size()) {
    return absl::InvalidArgumentError(
        absl::StrCat(name_, ": gradient of parameter ", param, " announced; there are ", params_->size()));
  }
  return absl::OkStatus();
}

absl::Status Reducer::GradientReady(int param) {
  EK_RETURN_IF_ERROR(CheckCall(param));
  if (params_->grad_state(param) == GradState::kNone) {
    step_error_.Update(absl::FailedPreconditionError(
        absl::StrCat(name_, ": parameter \"", (*params_)[param].name, "\" (", param,
                     ") was announced without a gradient: backward sets its state to kLocal when it has written it, or "
                     "calls NoGradient()")));
    return step_error_;
  }
  const absl::Status status = params_->row_size(param) > 0 ? absl::OkStatus() : CheckGradient((*params_)[param]);
  if (!status.ok()) {
    step_error_.Update(Annotate(status, name_));
    return step_error_;
  }
  if (mode_ == StepMode::kAccumulate) return absl::OkStatus();
  if (counts_.has_value() && tracker_.is_planned(param)) {
    const absl::StatusOr<FiringCounts::Verdict> verdict = counts_->Count(param);
    step_error_.Update(Annotate(verdict.status(), name_));
    EK_RETURN_IF_ERROR(step_error_);
    times_.last_gradient = absl::Now();
    if (*verdict != FiringCounts::Verdict::kLast) return absl::OkStatus();
  }
  return Announce(param);
}

absl::Status Reducer::NoGradient(int param) {
  EK_RETURN_IF_ERROR(CheckCall(param));
  if (params_->grad_state(param) != GradState::kNone) {
    return absl::FailedPreconditionError(absl::StrCat(name_, ": parameter \"", (*params_)[param].name, "\" (", param,
                                                      ") has a gradient; announce it with GradientReady()"));
  }
  // With a static graph, what is not announced has none.
  return mode_ == StepMode::kAccumulate || counts_.has_value() ? absl::OkStatus() : Announce(param);
}

absl::Status Reducer::MarkUnused(absl::Span<const int> params) {
  for (const int param : params) {
    EK_RETURN_IF_ERROR(CheckCall(param));
    const bool counts = mode_ == StepMode::kSync && tracker_.is_planned(param) && !counts_.has_value();
    if (counts) EK_RETURN_IF_ERROR(Announce(param));
  }
  if (unused_ != nullptr && mode_ == StepMode::kSync && !unused_->has_begun()) AgreeOnUnused();
  return absl::OkStatus();
}

absl::Status Reducer::Announce(int param) {
  absl::StatusOr<int> complete = tracker_.Announce(param);
  if (!complete.ok()) {
    step_error_.Update(Annotate(complete.status(), name_));
    return step_error_;
  }
  if (device_ == nullptr && params_->row_size(param) == 0) {
    PutIn(param);
    if (options_.gradient_as_bucket_view) params_->SetGradMemory(param, storage_->SlotOf(param));
  }
  if (params_->grad_state(param) == GradState::kNone) unused_hash_ += StableHash(1, static_cast<uint64_t>(param));
  pipeline_->CountGradient();
  times_.last_gradient = absl::Now();
  if (tracker_.order().size() == 1) times_.first_gradient = times_.last_gradient;
  const bool is_recording = tuner_ != nullptr && tuner_->is_recording();
  if (is_recording) tuner_->Gradient(param, times_.last_gradient - times_.begin);
  if (*complete >= 0 && *complete < storage_->size()) {
    if (absl::Status status = PutOnItsWay(*complete); !status.ok()) return EndWith(Annotate(status, name_));
  }
  Release(param, *complete);
  if (is_recording && *complete >= 0) tuner_->Launch(absl::Now() - times_.last_gradient);
  return absl::OkStatus();
}

absl::Status Reducer::PutOnItsWay(int bucket) {
  const auto& planned = storage_->plan().buckets[bucket];
  packed_[bucket].has_all =
      std::ranges::all_of(planned, [this](int param) { return params_->grad_state(param) != GradState::kNone; });
  if (device_ == nullptr) return absl::OkStatus();
  EK_RETURN_IF_ERROR(Pack(bucket));
  EK_ASSIGN_OR_RETURN(packed_[bucket].packed, device_->runtime().Record(device_->stream()));
  return absl::OkStatus();
}

absl::Status Reducer::Pack(int bucket) {
  EK_RETURN_IF_ERROR(storage_->Pack(*params_, bucket, separate_flags(), device_->stream()));
  if (!options_.gradient_as_bucket_view) return absl::OkStatus();
  for (const int param : storage_->bucket(bucket).params) params_->SetGradMemory(param, storage_->SlotOf(param));
  return absl::OkStatus();
}

// Buckets leave in their order, so it is enough to hold the first of those that are delayed.
void Reducer::Release(int param, int complete) {
  const bool is_held = complete >= 0 && complete == delayed_bucket_ && !tracker_.is_announced(delay_until_);
  const bool is_sparse = complete >= storage_->size();  // Gathered when the step is finished.
  if (complete >= 0 && !is_held && !is_sparse) pipeline_->BucketReady(complete, packed_[complete]);
  const bool ends_delay = param == delay_until_ && delayed_bucket_ >= 0 && complete != delayed_bucket_;
  if (ends_delay && tracker_.is_complete(delayed_bucket_))
    pipeline_->BucketReady(delayed_bucket_, packed_[delayed_bucket_]);
}

// The gradients of what this rank has not announced are none.
absl::Status Reducer::AnnounceTheRest() {
  const auto announce = [this](int param) {
    return tracker_.is_planned(param) && !tracker_.is_announced(param) ? Announce(param) : absl::OkStatus();
  };
  if (IsCounting()) {  // Nothing has been announced yet: this is the order that is recorded.
    for (const int param : counts_->CompletionOrder()) EK_RETURN_IF_ERROR(announce(param));
    counts_->EndRecording();
  } else if (options_.find_unused) {
    for (int param = 0; param < params_->size(); ++param) EK_RETURN_IF_ERROR(announce(param));
  }
  return absl::OkStatus();
}

// Which parameters this rank uses: all that it has not announced without a gradient.
void Reducer::AgreeOnUnused() {
  std::vector<uint8_t> uses(params_->size(), 0);
  for (int param = 0; param < params_->size(); ++param) {
    uses[param] =
        tracker_.is_planned(param) && (!tracker_.is_announced(param) || params_->grad_state(param) != GradState::kNone);
  }
  AgreeOnUnused(uses, /*contributes=*/true);
}

void Reducer::AgreeOnUnused(absl::Span<const uint8_t> uses, bool contributes) {
  // May come after this step: it keeps what it uses, and the pipeline is closed then.
  unused_->Begin(uses, contributes, [pipeline = pipeline_, plan = storage_->plan()](absl::Span<const uint8_t> used) {
    std::vector<bool> skipped;
    for (const std::vector<int>& bucket : plan.buckets) {
      skipped.push_back(std::none_of(bucket.begin(), bucket.end(), [&](int param) { return used[param] != 0; }));
    }
    pipeline->Skip(std::move(skipped));
  });
}

absl::Status Reducer::WaitForUnused() {
  if (unused_ == nullptr) return absl::OkStatus();
  if (!unused_->has_begun()) AgreeOnUnused();
  EK_RETURN_IF_ERROR(unused_->Wait());
  pipeline_->WaitForSkips();
  return absl::OkStatus();
}

void Reducer::PutIn(int param) {
  storage_->CopyIn(*params_, param);
  if (used_.data != nullptr) used_flags()[param] = params_->grad_state(param) != GradState::kNone;
}

absl::Status Reducer::CheckComplete() const {
  if (!in_step()) return absl::FailedPreconditionError(absl::StrCat(name_, ": no step is running"));
  if (mode_ == StepMode::kAccumulate) return absl::OkStatus();
  EK_RETURN_IF_ERROR(step_error_);
  if (counts_.has_value()) EK_RETURN_IF_ERROR(Annotate(counts_->CheckComplete(), name_));
  if (options_.find_unused || IsCounting()) return absl::OkStatus();  // FinishStep() announces the rest.
  return Annotate(tracker_.CheckComplete(), name_);
}

absl::Status Reducer::FinishStep() {
  if (!in_step()) return absl::FailedPreconditionError(absl::StrCat(name_, ": FinishStep() without BeginStep()"));
  if (mode_ == StepMode::kAccumulate) {
    ticket_.reset();
    return absl::OkStatus();
  }
  // After an error nothing more is launched: what others wait for must not come as if there were no gradient.
  if (step_error_.ok()) step_error_.Update(AnnounceTheRest());
  step_error_.Update(CheckComplete());
  if (!step_error_.ok()) return EndWith(step_error_);
  absl::StatusOr<StepAnswer> answer = ticket_->Wait();
  if (!answer.ok()) return EndWith(answer.status());
  const double scale = divisor_->ScaleOf(*answer, /*reduces=*/true);
  pipeline_->Open(scale);  // The ticket's callback may not have come to it yet.
  if (absl::Status status = WaitForUnused(); !status.ok()) return EndWith(status);
  if (absl::Status status = Complete(scale); !status.ok()) return EndWith(status);
  same_unused_steps_ = unused_hash_ == last_unused_hash_ ? same_unused_steps_ + 1 : 1;
  last_unused_hash_ = unused_hash_;
  times_.end = absl::Now();
  times_.gradients = static_cast<int>(tracker_.order().size());
  times_.buckets = pipeline_->times();
  RecordFor(*answer);
  ForgetStep();
  return Account(&times_);
}

absl::Status Reducer::Complete(double scale) {
  EK_RETURN_IF_ERROR(pipeline_->Wait());
  EK_RETURN_IF_ERROR(reduction_->OnStepEnd());
  ++reductions_;
  if (device_ == nullptr) {
    CompleteHere();
  } else {
    EK_RETURN_IF_ERROR(CompleteOnDevice());
  }
  EK_RETURN_IF_ERROR(sparse_.Run(*params_, *pipeline_plan_->channels[0], comm_->world_size(), scale));
  return RefreshCollectives();
}

void Reducer::CompleteHere() {
  for (const BucketInfo& bucket : storage_->buckets()) {
    const GradFate fate = pipeline_->fate(bucket.index);
    for (int param : bucket.params) {
      const bool is_used = used_.data != nullptr ? used_flags()[param] != 0 : storage_->IsUsed(param);
      if (fate == GradFate::kNone || !is_used) {
        params_->SetGradState(param, GradState::kNone);
        continue;
      }
      storage_->CopyOut(*params_, param);
      params_->SetGradState(param, GradState::kReduced);
    }
  }
}

absl::Status Reducer::CompleteOnDevice() {
  std::vector<int> unclear;  // Buckets of which this rank does not know who has gradients.
  for (const BucketInfo& bucket : storage_->buckets()) {
    EK_RETURN_IF_ERROR(pipeline_->FollowBucket(bucket.index, device_->stream()));
    const bool is_reduced = pipeline_->fate(bucket.index) == GradFate::kReduced;
    for (int param : bucket.params) params_->SetGradState(param, is_reduced ? GradState::kReduced : GradState::kNone);
    if (is_reduced && !pipeline_->has_all(bucket.index)) {
      unclear.push_back(bucket.index);
    } else if (is_reduced) {
      EK_RETURN_IF_ERROR(storage_->Unpack(*params_, bucket.index, device_->stream()));
    }
  }
  EK_RETURN_IF_ERROR(pipeline_->FollowUsed(device_->stream()));
  if (!unclear.empty()) EK_RETURN_IF_ERROR(SetUsed(unclear));
  for (const int bucket : unclear) EK_RETURN_IF_ERROR(storage_->Unpack(*params_, bucket, device_->stream()));
  device_->Keep(pipeline_->works());
  device_->EndStep();
  return absl::OkStatus();
}

// By the bits of their flags, which are those of +0 where no rank has set one.
absl::Status Reducer::SetUsed(absl::Span<const int> buckets) {
  std::vector<TensorView> flags;
  for (const int bucket : buckets) {
    const BucketInfo& info = storage_->bucket(bucket);
    for (size_t i = 0; i < info.params.size(); ++i) {
      const bool is_separate = used_.data != nullptr;
      flags.push_back(is_separate ? separate_flags().Slice(info.params[i], 1) : info.used.Slice(i, 1));
    }
  }
  EK_ASSIGN_OR_RETURN(absl::Span<const std::byte> bytes, device_->Read(flags));
  for (const int bucket : buckets) {
    for (const int param : storage_->bucket(bucket).params) {
      const auto size = static_cast<size_t>(SizeOf(used_.data != nullptr ? DType::kFloat32 : specs_[param].dtype));
      const absl::Span<const std::byte> flag = bytes.subspan(0, size);
      bytes.remove_prefix(size);
      const bool is_used = std::ranges::any_of(flag, [](std::byte byte) { return byte != std::byte{0}; });
      if (!is_used) params_->SetGradState(param, GradState::kNone);
    }
  }
  return absl::OkStatus();
}

// The order of the lowest rank active in the recorded step becomes everybody's: a rank without inputs has none to give.
void Reducer::RecordFor(const StepAnswer& answer) {
  if (state_.order_final || !recorded_topic_.empty()) return;
  recorded_topic_ = absl::StrCat("order/", name_, "/", state_.generation);
  recorder_ = answer.lowest_active;
  if (answer.lowest_active != comm_->rank()) return;
  const std::string order = SerializeOrder(tracker_.order());
  for (int rank = 0; rank < comm_->world_size(); ++rank) comm_->control().Send(rank, recorded_topic_, order);
}

absl::Status Reducer::EndWith(const absl::Status& error) {
  counted_.last_error = std::string(error.message());
  comm_->Abort(error);  // The other ranks wait for buckets that will not come. Afterwards nothing uses ours any more.
  ForgetStep();
  return error;
}

absl::Status Reducer::BeginShadow(const StepAnswer& answer, StepDivisor& divisor, absl::string_view message) {
  if (pipeline_ != nullptr) return absl::InternalError(absl::StrCat(name_, ": a step is being shadowed already"));
  EK_RETURN_IF_ERROR(Annotate(reduction_->OnShadow(message), name_));
  EK_RETURN_IF_ERROR(RefreshCollectives());
  if (used_.data != nullptr && device_ == nullptr) {
    std::memset(used_.data.get(), 0, params_->size() * sizeof(float));
  } else if (used_.data != nullptr) {
    EK_RETURN_IF_ERROR(device_->runtime().Zero(used_.data.get(), params_->size() * sizeof(float), device_->stream()));
  }
  packed_.assign(storage_->size(), {});
  std::vector<bool> contributes(storage_->size(), false);
  for (int b = 0; b < storage_->size(); ++b) {
    for (int param : storage_->bucket(b).params) {
      if (params_->grad_state(param) == GradState::kLocal) contributes[b] = true;
      storage_->Locate(*params_, param);  // What it contributes nothing to, it receives all the same.
    }
    if (!contributes[b]) continue;
    for (int param : storage_->bucket(b).params) {
      // What an earlier step left reduced is the group's already; only what this rank accumulated counts.
      if (params_->grad_state(param) == GradState::kReduced) params_->SetGradState(param, GradState::kNone);
      if (device_ == nullptr) PutIn(param);
    }
    EK_RETURN_IF_ERROR(PutOnItsWay(b));
  }
  for (int b = 0; b < storage_->size() && device_ != nullptr; ++b) {
    EK_ASSIGN_OR_RETURN(packed_[b].packed, device_->runtime().Record(device_->stream()));
  }
  const bool contributes_any = std::find(contributes.begin(), contributes.end(), true) != contributes.end();
  pipeline_ = std::make_shared<BucketPipeline>(pipeline_plan_, std::move(contributes),
                                               /*waits_for_skips=*/unused_ != nullptr);
  if (unused_ != nullptr) {
    std::vector<uint8_t> uses(params_->size(), 0);
    for (int param = 0; param < params_->size(); ++param) uses[param] = params_->grad_state(param) == GradState::kLocal;
    AgreeOnUnused(uses, contributes_any);
  }
  for (int b = 0; b < storage_->size(); ++b) pipeline_->BucketReady(b, packed_[b]);
  shadow_scale_ = divisor.ScaleOf(answer, /*reduces=*/true);
  pipeline_->Open(shadow_scale_);
  for (int param : sparse_.sparse()) {
    if (params_->grad_state(param) == GradState::kReduced) params_->SetGradState(param, GradState::kNone);
  }
  shadow_answer_ = answer;
  return absl::OkStatus();
}

absl::Status Reducer::FinishShadow() {
  if (pipeline_ == nullptr) return absl::InternalError(absl::StrCat(name_, ": no step is being shadowed"));
  if (absl::Status status = WaitForUnused(); !status.ok()) return EndWith(status);
  if (absl::Status status = Complete(shadow_scale_); !status.ok()) return EndWith(status);
  ForgetStep();
  tracker_.Reset();
  RecordFor(shadow_answer_);
  return Account(/*times=*/nullptr);
}

}  // namespace evenkeel
