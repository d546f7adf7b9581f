#include "evenkeel/bucket/reducer/reducer.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "evenkeel/bucket/finite_check.h"
#include "evenkeel/bucket/reducer/announcer.h"
#include "evenkeel/bucket/reducer/completer.h"
#include "evenkeel/bucket/reducer/launcher.h"
#include "evenkeel/bucket/reducer/plan_in_force.h"
#include "evenkeel/bucket/reducer/reducer_core.h"
#include "evenkeel/bucket/state_sync.h"
#include "evenkeel/comm/agree.h"
#include "evenkeel/comm/status.h"

namespace evenkeel {
namespace {

absl::StatusOr<std::vector<int>> ParseOrder(absl::string_view bytes, int param_count) {
  std::vector<int> order(bytes.size() / sizeof(int));
  if (!order.empty()) std::memcpy(order.data(), bytes.data(), order.size() * sizeof(int));
  std::vector<bool> seen(param_count, false);
  for (int param : order) {
    if (param < 0 || param >= param_count || seen[param]) {
      return absl::InternalError(
          absl::StrCat("a recorded gradient order names parameter ", param, " wrongly"));
    }
    seen[param] = true;
  }
  return order;
}

// Takes the buckets of sparse parameters out of the plan, and returns these parameters.
std::vector<int> TakeSparse(const std::vector<ParamSpec>& specs, BucketPlan& plan) {
  std::vector<int> sparse;
  size_t kept = 0;
  for (size_t b = 0; b < plan.buckets.size(); ++b) {
    if (specs[plan.buckets[b][0]].sparse) {
      sparse.push_back(plan.buckets[b][0]);
      continue;
    }
    if (kept != b) plan.buckets[kept] = std::move(plan.buckets[b]);
    plan.limits[kept++] = plan.limits[b];
  }
  plan.buckets.resize(kept);
  plan.limits.resize(kept);
  return sparse;
}

}  // namespace

// A reducer's parts, and what lies between them: the step that runs, and the plan that is to come.
struct Reducer::Impl {
  explicit Impl(ReducerCore made)
      : core(std::move(made)),
        announcer(&core, &launcher),
        completer(&core, &launcher),
        launcher(&core) {}

  absl::Status Init();
  absl::Status CheckNoneAdded() const;
  absl::Status CheckFusion(bool has_own_reduction) const;
  // Puts the plan for `state` in force, and moves gradients over. If it cannot be made, that in
  // force stays, and the reduction has its buckets again.
  absl::Status Install(PlanState state);
  // Shows the reduction the buckets, if it has not seen them, and makes the plan on them.
  absl::StatusOr<std::shared_ptr<const PlanInForce>> MakePlan(PlanState state,
                                                              std::vector<int> sparse,
                                                              BucketStorage& buckets);
  // Puts the same plan with other collectives in force, if the reduction has come to need others;
  // the same plan again, if the reduction could not return to it.
  absl::Status Refresh();
  absl::Status PrepareDevice();
  void DropRecordedOrder();
  absl::Status ImportPlan(const PlanState& state);
  void LeaveGroup();
  // `own`: this rank's plan, if it is to be the one that counts.
  absl::Status AgreeOnPlan(int plan_from, const PlanState& own);

  void RecordFor(const StepAnswer& answer);
  // Waits for the step's buckets, completes and counts it; `announcer` null: it is shadowed.
  absl::Status End(double scale, const StepAnswer& answer, const Announcer* announcer);
  absl::Status EndWith(const absl::Status& error);
  void ForgetStep();

  ReducerCore core;
  std::unique_ptr<BucketStorage> storage;  // The buckets of the plan in force.
  bool reduction_has_plan = false;         // It has seen that plan, in this group.
  uint64_t seen_mask_version = 0;
  // Under which topic the order comes that is to be adopted: while state.order_final is false, a
  // synchronising step records it and the next step adopts it. Empty: none is to come.
  std::string recorded_topic;
  int recorder = -1;  // Whose order that will be.

  // The step that is running.
  std::shared_ptr<StepTicket> ticket;
  StepMode mode = StepMode::kSync;
  StepDivisor divisor;
  StepAnswer shadow_answer;  // The step that is being shadowed.
  double shadow_scale = 1.0;

  Announcer announcer;
  Completer completer;
  Launcher launcher;  // Last: its thread ends before what it uses.
};

Reducer::Reducer(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

absl::StatusOr<std::unique_ptr<Reducer>> Reducer::Create(
    Communicator* comm, ParameterSet* params, absl::string_view name, ReducerOptions options,
    std::unique_ptr<BucketReduction> reduction) {
  const bool has_own_reduction = reduction != nullptr;
  if (!has_own_reduction) reduction = std::make_unique<AllReduceBuckets>();
  std::unique_ptr<Reducer> reducer(
      new Reducer(std::make_unique<Impl>(ReducerCore{.comm = comm,
                                                     .group = StepControl::Of(*comm).lifetime(),
                                                     .params = params,
                                                     .name = std::string(name),
                                                     .options = std::move(options),
                                                     .has_own_reduction = has_own_reduction,
                                                     .reduction = std::move(reduction)})));
  const absl::Status own = reducer->impl_->Init();
  EK_RETURN_IF_ERROR(Annotate(AgreeOn(*comm, absl::StrCat("create/", name), own).status(), name));
  return reducer;
}

absl::Status Reducer::Impl::Init() {
  EK_RETURN_IF_ERROR(Reducer::Check(*core.comm, *core.params, core.options));
  EK_ASSIGN_OR_RETURN(core.checks_finite, internal::ChecksFinite(core.options.check_finite));
  if (!core.comm->device().is_cpu() && core.options.tune) {
    return absl::UnimplementedError(absl::StrCat(
        "`tune` measures the host's time, which is not that of ", ToString(core.comm->device())));
  }
  EK_ASSIGN_OR_RETURN(core.attached,
                      core.params->Attach(core.name, core.options.gradient_as_bucket_view));
  EK_ASSIGN_OR_RETURN(core.device, DeviceSide::Create(*core.comm, *core.params));
  EK_RETURN_IF_ERROR(CheckFusion(core.has_own_reduction));
  if (core.options.stats_every < 1 || core.options.tuning_steps < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("stats_every (", core.options.stats_every, ") and tuning_steps (",
                     core.options.tuning_steps, ") must be at least 1"));
  }
  EK_RETURN_IF_ERROR(launcher.Init());
  for (int i = 0; i < core.params->size(); ++i) {
    const Parameter& param = (*core.params)[i];
    core.specs.push_back({.count = param.value.count,
                          .dtype = param.value.dtype,
                          .device = param.value.device,
                          .sparse = core.params->row_size(i) > 0});
  }
  for (const std::string& name : core.options.delayed)
    core.specs[core.params->Find(name)].delayed = true;
  seen_mask_version = core.params->mask_version();
  core.reduction->OnGroup(*core.comm);
  return Install({.mask = core.params->mask()});
}

absl::Status Reducer::Impl::CheckFusion(bool has_own_reduction) const {
  if (core.options.fusion == Fusion::kFlat ||
      (!has_own_reduction && !core.options.gradient_as_bucket_view)) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrCat("coalesced buckets have no memory of their own, so there are no views into it",
                   has_own_reduction ? ", and only all-reduce works on them" : ""));
}

absl::Status Reducer::InstallReduction(std::unique_ptr<BucketReduction> reduction) {
  Impl& impl = *impl_;
  ReducerCore& core = impl.core;
  absl::Status own = impl.CheckFusion(/*has_own_reduction=*/true);
  if (in_step()) {
    own = absl::FailedPreconditionError("the reduction cannot change inside a step");
  } else if (core.has_own_reduction) {
    own = absl::FailedPreconditionError(
        "its gradients are already reduced by compression or by another optimizer; only one can do "
        "so");
  }
  const auto exchange = [&] {
    core.reduction.swap(reduction);
    core.has_own_reduction = !core.has_own_reduction;
    impl.launcher.MakeWorker();
    core.reduction->OnGroup(*core.comm);
    impl.reduction_has_plan = false;
    return impl.Install(core.plan->state);
  };
  const bool is_exchanged = own.ok();
  if (is_exchanged) own = exchange();
  const absl::Status status =
      AgreeOn(*core.comm, absl::StrCat("reduction/", core.name), own).status();
  if (!status.ok() && is_exchanged) (void)exchange();  // All-reduce goes on.
  return Annotate(status, core.name);
}

Reducer::~Reducer() {
  Impl& impl = *impl_;
  ReducerCore& core = impl.core;
  if (impl.launcher.has_begun() && core.HasLivingGroup()) {
    absl::Status why = impl.announcer.error();
    why.Update(absl::FailedPreconditionError(
        absl::StrCat(core.name,
                     " was destroyed inside a step: end the step first (FinishStep() in C++; "
                     "backward, or step() of the optimizer, in libtorch)")));
    core.comm->AbortProvisionally(why);
  }
  impl.ForgetStep();
  core.params->SetReduced(false);
  if (core.options.gradient_as_bucket_view && impl.storage != nullptr)
    (void)impl.storage->MoveGradients(*core.params, /*are_views=*/false, core.device.get());
  if (core.device != nullptr) (void)core.device->Drain();  // Pending work uses the buckets.
}

// Between steps -----------------------------------------------------------------------------------

absl::Status Reducer::Impl::Install(PlanState state) {
  EK_ASSIGN_OR_RETURN(BucketPlan buckets,
                      PlanFor(state, core.specs, core.options.caps, core.options.cap_order));
  std::vector<int> sparse = TakeSparse(core.specs, buckets);
  const BucketStorage::Layout layout{
      .fusion = core.options.fusion,
      .count_multiple = std::max<int64_t>(1, core.reduction->CountMultiple()),
      .separate_flags = core.reduction->used_flags() == UsedFlags::kSeparate};
  std::unique_ptr<BucketStorage> made;  // Null: the buckets remain the same.
  if (core.plan == nullptr || sparse != core.plan->sparse || !(buckets == storage->plan()) ||
      !(layout == storage->layout())) {
    EK_ASSIGN_OR_RETURN(
        made, BucketStorage::Create(std::move(buckets), *core.params, layout, *core.comm));
  }
  const bool is_other_mask = core.plan == nullptr || !(state.mask == core.plan->state.mask);
  const bool had_plan = reduction_has_plan;
  absl::StatusOr<std::shared_ptr<const PlanInForce>> next =
      MakePlan(std::move(state), std::move(sparse), made != nullptr ? *made : *storage);
  if (!next.ok()) {
    // It may have kept pointers into the buckets that are freed now.
    if (had_plan && !reduction_has_plan)
      reduction_has_plan = core.reduction->OnPlan(storage->buckets()).ok();
    return next.status();
  }
  core.plan = *std::move(next);
  reduction_has_plan = true;
  announcer.OnPlan(is_other_mask);
  completer.OnPlan();
  if (made != nullptr) {
    storage.swap(made);  // The old buckets live until their contents have moved.
    if (core.options.gradient_as_bucket_view) {
      const absl::Status moved =
          storage->MoveGradients(*core.params, /*are_views=*/true, core.device.get());
      if (core.device != nullptr) EK_RETURN_IF_ERROR(core.device->Drain());
      EK_RETURN_IF_ERROR(moved);
    }
  }
  return PrepareDevice();
}

absl::StatusOr<std::shared_ptr<const PlanInForce>> Reducer::Impl::MakePlan(PlanState state,
                                                                           std::vector<int> sparse,
                                                                           BucketStorage& buckets) {
  if (&buckets != storage.get() || !reduction_has_plan) {
    if (core.device != nullptr) EK_RETURN_IF_ERROR(core.device->Drain());
    reduction_has_plan = false;
    EK_RETURN_IF_ERROR(core.reduction->OnPlan(buckets.buckets()));
  }
  return MakePlanInForce(core, std::move(state), std::move(sparse), buckets, launcher.unused());
}

absl::Status Reducer::Impl::Refresh() {
  if (reduction_has_plan && core.reduction->CollectivesVersion() == core.plan->collectives_version)
    return absl::OkStatus();
  // The counts of steps stay: the other ranks may have the plan already.
  EK_ASSIGN_OR_RETURN(core.plan, MakePlan(core.plan->state, core.plan->sparse, *storage));
  reduction_has_plan = true;
  return PrepareDevice();
}

absl::Status Reducer::Impl::PrepareDevice() {
  return core.device == nullptr ? absl::OkStatus()
                                : storage->Prepare(*core.params, core.device->stream());
}

absl::Status Reducer::RebuildNow() {
  Impl& impl = *impl_;
  ReducerCore& core = impl.core;
  std::optional<PlanState> next = impl.completer.MeasuredPlan();
  if (impl.recorded_topic.empty() && !next.has_value()) return absl::OkStatus();
  if (in_step())
    return absl::FailedPreconditionError(absl::StrCat(core.name, ": cannot rebuild inside a step"));
  ++impl.completer.counted().rebuilds;
  if (next.has_value()) return Annotate(impl.Install(*std::move(next)), core.name);
  const ControlChannel::From from{.rank = impl.recorder,
                                  .text = absl::StrCat("the gradient order of ", core.name)};
  EK_ASSIGN_OR_RETURN(std::string bytes, core.comm->control().Receive(impl.recorded_topic,
                                                                      core.comm->timeout(), from));
  EK_ASSIGN_OR_RETURN(std::vector<int> order, ParseOrder(bytes, core.params->size()));
  next = core.plan->state;
  AdoptOrder(*next, order);
  EK_RETURN_IF_ERROR(Annotate(impl.Install(*std::move(next)), core.name));
  impl.recorded_topic.clear();
  return absl::OkStatus();
}

absl::Status Reducer::Impl::CheckNoneAdded() const {
  if (core.params->size() == static_cast<int>(core.specs.size())) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat(core.name, " was made for ", core.specs.size(), " parameters, now there are ",
                   core.params->size(), ": add all before it is made"));
}

absl::Status Reducer::RefreshTrainable() {
  Impl& impl = *impl_;
  ReducerCore& core = impl.core;
  if (core.params->mask_version() == impl.seen_mask_version) return absl::OkStatus();
  if (in_step()) {
    return absl::FailedPreconditionError(absl::StrCat(
        core.name,
        ": the set of trained parameters cannot change inside a step; call FinishStep() first"));
  }
  EK_RETURN_IF_ERROR(impl.CheckNoneAdded());
  if (core.params->mask() == core.plan->state.mask) {
    impl.seen_mask_version = core.params->mask_version();
    return absl::OkStatus();
  }
  for (int i = 0; i < core.params->size(); ++i) {
    if (core.plan->state.mask[i] && !core.params->trainable(i) &&
        core.params->grad_state(i) == GradState::kLocal) {
      return absl::FailedPreconditionError(
          absl::StrCat(core.name, ": parameter \"", (*core.params)[i].name, "\" (", i,
                       ") was frozen while it holds a gradient that was accumulated and not "
                       "reduced; it would be lost: synchronise first, or clear it"));
    }
  }
  PlanState next = core.plan->state;
  AdoptMask(next, core.params->mask());
  EK_RETURN_IF_ERROR(Annotate(impl.Install(std::move(next)), core.name));
  impl.seen_mask_version = core.params->mask_version();
  impl.DropRecordedOrder();
  ++impl.completer.counted().refreshes;
  return absl::OkStatus();
}

void Reducer::Impl::DropRecordedOrder() {
  if (!recorded_topic.empty()) core.comm->control().Discard(recorded_topic);
  recorded_topic.clear();
}

absl::Status Reducer::ImportPlan(const PlanState& state) { return impl_->ImportPlan(state); }

absl::Status Reducer::Impl::ImportPlan(const PlanState& state) {
  if (ticket != nullptr)
    return absl::FailedPreconditionError(
        absl::StrCat(core.name, ": a plan cannot be imported inside a step"));
  for (int i = 0; i < core.params->size(); ++i) {
    // Frozen by the others: what this rank had accumulated for it is not asked for any more.
    if (core.plan->state.mask[i] && !state.mask[i]) core.params->SetGradState(i, GradState::kNone);
  }
  EK_RETURN_IF_ERROR(core.params->SetTrainable(state.mask));
  EK_RETURN_IF_ERROR(Install(state));
  seen_mask_version = core.params->mask_version();
  DropRecordedOrder();
  ++completer.counted().imports;
  return absl::OkStatus();
}

absl::Status Reducer::ReplaceGroup(Communicator* comm, int plan_from) {
  Impl& impl = *impl_;
  ReducerCore& core = impl.core;
  impl.LeaveGroup();
  core.comm = comm;
  core.group = StepControl::Of(*comm).lifetime();
  impl.reduction_has_plan = false;
  if (core.device != nullptr) core.device->ReplaceGroup(*comm);
  impl.completer.OnOtherGroup();
  core.reduction->OnGroup(*comm);
  // Parameters frozen for a step that failed before it began are frozen in its repetition.
  PlanState own = core.plan->state;
  if (!(own.mask == core.params->mask())) AdoptMask(own, core.params->mask());
  absl::Status status = impl.AgreeOnPlan(plan_from, own);
  if (!status.ok()) comm->Abort(status);
  return status;
}

void Reducer::Impl::LeaveGroup() {
  if (core.HasLivingGroup()) {
    // Buckets may be in flight, also in a group that is just ending: afterwards nothing there uses
    // them any more.
    if (launcher.has_begun())
      core.comm->Abort(
          absl::CancelledError(absl::StrCat(core.name, " left the group inside a step")));
    DropRecordedOrder();
  }
  ForgetStep();
  recorded_topic.clear();
  core.params->ClearGradients();
  core.params->SetReduced(false);
}

absl::Status Reducer::Impl::AgreeOnPlan(int plan_from, const PlanState& own) {
  EK_RETURN_IF_ERROR(launcher.ReplaceGroup());
  uint64_t specs = 0;
  for (int i = 0; i < core.params->size(); ++i) {
    if (!core.params->is_ignored(i))
      specs = StableHash(specs + 2 * core.specs[i].count + core.specs[i].delayed,
                         ToString(core.specs[i].dtype));
  }
  const std::string mine = absl::StrCat(absl::Hex(specs, absl::kZeroPad16), own.Serialize());
  EK_ASSIGN_OR_RETURN(
      const ControlChannel::Parts parts,
      core.comm->control().Exchange(absl::StrCat("plan/", core.name), mine, core.comm->timeout()));
  std::vector<PlanState> plans;
  for (size_t rank = 0; rank < parts.size(); ++rank) {
    const absl::string_view part = parts[rank];
    if (part.substr(0, 16) != absl::string_view(parts[0]).substr(0, 16)) {
      return absl::InvalidArgumentError(
          absl::StrCat("the parameters of ranks 0 and ", rank, " differ"));
    }
    EK_ASSIGN_OR_RETURN(
        PlanState plan,
        PlanState::Parse(part.substr(std::min<size_t>(16, part.size())), core.params->size()));
    plans.push_back(std::move(plan));
  }
  size_t chosen = plan_from == kNewestPlan ? 0 : static_cast<size_t>(plan_from);
  for (size_t rank = 0; rank < plans.size() && plan_from == kNewestPlan; ++rank) {
    if (plans[rank].generation > plans[chosen].generation) chosen = rank;
  }
  if (chosen >= plans.size())
    return absl::InternalError(
        absl::StrCat("rank ", plan_from, " cannot give the plan: it does not exist"));
  return plans[chosen] == core.plan->state ? Install(core.plan->state) : ImportPlan(plans[chosen]);
}

// A step ------------------------------------------------------------------------------------------

absl::Status Reducer::BeginStep(std::shared_ptr<StepTicket> ticket, StepMode mode,
                                StepDivisor divisor) {
  Impl& impl = *impl_;
  if (in_step()) {
    return impl.EndWith(absl::FailedPreconditionError(absl::StrCat(
        impl.core.name, ": a step began before FinishStep() ended the one before it")));
  }
  EK_RETURN_IF_ERROR(impl.CheckNoneAdded());
  if (impl.core.device != nullptr) {
    if (absl::Status status = impl.core.device->Confirm(); !status.ok())
      return impl.EndWith(Annotate(status, "an earlier step"));
  }
  impl.core.params->SetReduced(false);
  impl.ticket = std::move(ticket);
  impl.mode = mode;
  impl.divisor = divisor;
  if (mode == StepMode::kAccumulate) return impl.announcer.Begin(mode);
  if (absl::Status status = impl.Refresh(); !status.ok()) return impl.EndWith(status);
  if (absl::Status status = impl.core.reduction->OnStepBegin(); !status.ok())
    return impl.EndWith(Annotate(status, impl.core.name));
  impl.launcher.Begin(/*measures_ends=*/impl.completer.BeginStep());
  // Runs on the control thread; the pipeline is shared, so it may come after this step, and this
  // object, have ended.
  impl.ticket->OnAnswer([pipeline = impl.launcher.pipeline(), divisor,
                         name = impl.core.name](const absl::StatusOr<StepAnswer>& answer) {
    if (answer.ok()) pipeline->Open(divisor.ScaleOf(*answer, name));
  });
  return impl.announcer.Begin(mode);
}

absl::Status Reducer::GradientReady(int param) { return impl_->announcer.GradientReady(param); }
absl::Status Reducer::NoGradient(int param) { return impl_->announcer.NoGradient(param); }
absl::Status Reducer::MarkUnused(absl::Span<const int> params) {
  return impl_->announcer.MarkUnused(params);
}
absl::Status Reducer::CheckComplete() const { return impl_->announcer.CheckComplete(); }

absl::Status Reducer::FinishStep() {
  Impl& impl = *impl_;
  if (!in_step()) {
    return absl::FailedPreconditionError(
        absl::StrCat(impl.core.name, ": FinishStep() without BeginStep()"));
  }
  if (impl.mode == StepMode::kAccumulate) {
    impl.ForgetStep();
    return absl::OkStatus();
  }
  absl::Status own = impl.announcer.AnnounceTheRest();
  own.Update(impl.announcer.CheckComplete());
  if (!own.ok()) return impl.EndWith(own);
  absl::StatusOr<StepAnswer> answer = impl.ticket->Wait();
  if (!answer.ok()) return impl.EndWith(answer.status());
  const double scale = impl.divisor.ScaleOf(*answer, impl.core.name);
  impl.launcher.pipeline()->Open(scale);  // The ticket's callback may not have come to it yet.
  own = impl.announcer.MarkUnused({});
  if (own.ok()) own = impl.End(scale, *answer, &impl.announcer);
  return own.ok() ? own : impl.EndWith(own);
}

absl::Status Reducer::BeginShadow(const StepAnswer& answer, const StepDivisor& divisor,
                                  absl::string_view message) {
  Impl& impl = *impl_;
  if (impl.launcher.has_begun()) {
    return absl::InternalError(absl::StrCat(impl.core.name, ": a step is being shadowed already"));
  }
  EK_RETURN_IF_ERROR(Annotate(impl.core.reduction->OnShadow(message), impl.core.name));
  EK_RETURN_IF_ERROR(impl.Refresh());
  EK_RETURN_IF_ERROR(Annotate(impl.core.reduction->OnStepBegin(), impl.core.name));
  EK_RETURN_IF_ERROR(impl.launcher.BeginShadow());
  impl.shadow_scale = divisor.ScaleOf(answer, impl.core.name);
  impl.launcher.pipeline()->Open(impl.shadow_scale);
  impl.shadow_answer = answer;
  return absl::OkStatus();
}

absl::Status Reducer::FinishShadow() {
  Impl& impl = *impl_;
  if (!impl.launcher.has_begun())
    return absl::InternalError(absl::StrCat(impl.core.name, ": no step is being shadowed"));
  const absl::Status ended = impl.End(impl.shadow_scale, impl.shadow_answer, nullptr);
  return ended.ok() ? ended : impl.EndWith(ended);
}

absl::Status Reducer::Impl::End(double scale, const StepAnswer& answer,
                                const Announcer* announcer) {
  EK_RETURN_IF_ERROR(launcher.WaitForUnused());
  EK_RETURN_IF_ERROR(completer.Complete(scale));
  core.params->SetReduced(true);
  RecordFor(answer);
  EK_RETURN_IF_ERROR(completer.Account(announcer));
  ForgetStep();
  return Refresh();  // The record of the next step has the hash of its collectives.
}

// All ranks take the order of the lowest rank that was active in the recorded step: a rank without
// inputs has none.
void Reducer::Impl::RecordFor(const StepAnswer& answer) {
  if (core.plan->state.order_final || !recorded_topic.empty()) return;
  recorded_topic = absl::StrCat("order/", core.name, "/", core.plan->state.generation);
  recorder = answer.lowest_active;
  if (answer.lowest_active != core.comm->rank()) return;
  const std::vector<int>& order = announcer.order();
  const std::string bytes(reinterpret_cast<const char*>(order.data()), order.size() * sizeof(int));
  for (int rank = 0; rank < core.comm->world_size(); ++rank)
    core.comm->control().Send(rank, recorded_topic, bytes);
}

absl::Status Reducer::Impl::EndWith(const absl::Status& error) {
  completer.counted().last_error = std::string(error.message());
  core.comm->Abort(error);  // The other ranks wait for buckets that will not come. Afterwards
                            // nothing uses ours any more.
  ForgetStep();
  return error;
}

void Reducer::Impl::ForgetStep() {
  ticket.reset();
  announcer.End();
  launcher.Forget();
}

// Reduction and plan ------------------------------------------------------------------------------

void Reducer::PrepareStep() { impl_->core.reduction->PrepareStep(); }
absl::Status Reducer::WaitForValues() { return impl_->core.reduction->WaitForValues(); }
std::string Reducer::StepMessage() { return impl_->core.reduction->StepMessage(); }
void Reducer::Confirm(std::vector<Work> works) {
  if (impl_->core.device != nullptr) impl_->core.device->Keep(std::move(works));
}
absl::Status Reducer::CheckFinished() const {
  return impl_->core.device == nullptr ? absl::OkStatus() : impl_->core.device->CheckEnded();
}
bool Reducer::in_step() const { return impl_->ticket != nullptr; }
const BucketPlan& Reducer::plan() const { return impl_->storage->plan(); }
const std::vector<BucketInfo>& Reducer::buckets() const { return impl_->storage->buckets(); }
uint64_t Reducer::generation() const { return impl_->core.plan->state.generation; }
const Schedule& Reducer::schedule() const { return impl_->core.plan->schedule; }
const PlanState& Reducer::plan_state() const { return impl_->core.plan->state; }
const StepTimes& Reducer::last_step() const { return impl_->completer.times(); }
ReducerStats Reducer::stats() const { return impl_->completer.stats(); }
int64_t Reducer::reductions() const { return impl_->completer.reductions(); }

}  // namespace evenkeel
