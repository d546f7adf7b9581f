#include "evenkeel/bucket/reducer.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "evenkeel/bucket/internal/reducer_checks.h"
#include "evenkeel/bucket/state_sync.h"
#include "evenkeel/comm/status.h"

namespace evenkeel {
namespace {

absl::StatusOr<std::vector<int>> ParseOrder(absl::string_view bytes, int param_count) {
  std::vector<int> order(bytes.size() / sizeof(int));
  if (!order.empty()) std::memcpy(order.data(), bytes.data(), order.size() * sizeof(int));
  std::vector<bool> seen(param_count, false);
  for (int param : order) {
    if (param < 0 || param >= param_count || seen[param]) {
      return absl::InternalError(absl::StrCat("a recorded gradient order names parameter ", param, " wrongly"));
    }
    seen[param] = true;
  }
  return order;
}

// Takes the buckets of sparse parameters out of the plan, and answers whose they are.
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

Reducer::Reducer(Communicator* comm, ParameterSet* params, absl::string_view name, ReducerOptions options,
                 std::unique_ptr<BucketReduction> reduction)
    : comm_(comm),
      group_(comm->steps().lifetime()),
      params_(params),
      name_(name),
      options_(std::move(options)),
      has_own_reduction_(reduction != nullptr),
      reduction_(reduction != nullptr ? std::move(reduction) : std::make_unique<AllReduceBuckets>()),
      averages_(std::max<int64_t>(1, options_.stats_every)) {}

absl::StatusOr<std::unique_ptr<Reducer>> Reducer::Create(Communicator* comm, ParameterSet* params,
                                                         absl::string_view name, ReducerOptions options,
                                                         std::unique_ptr<BucketReduction> reduction) {
  std::unique_ptr<Reducer> reducer(new Reducer(comm, params, name, std::move(options), std::move(reduction)));
  const absl::Status own = reducer->Init();
  EK_RETURN_IF_ERROR(
      Annotate(AgreeThatAllCan(absl::StrCat("create/", name), own, comm->control(), comm->timeout()), name));
  return reducer;
}

absl::Status Reducer::Check(const Communicator& comm, const ParameterSet& params, const ReducerOptions& options) {
  EK_RETURN_IF_ERROR(CheckParameters(params, comm.device(), options.gradient_as_bucket_view));
  EK_RETURN_IF_ERROR(CheckDelayed(params, options.delayed, options.delay_until));
  return CheckCaps(options.caps);
}

absl::Status Reducer::Init() {
  EK_RETURN_IF_ERROR(Check(*comm_, *params_, options_));
  if (!comm_->device().is_cpu() && (options_.tune || options_.fusion == Fusion::kMeasured)) {
    return absl::UnimplementedError(absl::StrCat(
        name_, ": `tune` and Fusion::kMeasured take the host's time, which is not ", ToString(comm_->device()), "'s"));
  }
  EK_ASSIGN_OR_RETURN(attached_, params_->Attach(name_, options_.gradient_as_bucket_view));
  EK_ASSIGN_OR_RETURN(device_, DeviceSide::Create(*comm_, *params_));
  if (options_.fusion != Fusion::kFlat && (has_own_reduction_ || options_.gradient_as_bucket_view)) {
    return absl::InvalidArgumentError(
        absl::StrCat(name_, ": coalesced buckets have no memory of their own, so there are no views into it",
                     has_own_reduction_ ? ", and only all-reduce works on them" : ""));
  }
  if (options_.stats_every < 1 || options_.tuning_steps < 1) {
    return absl::InvalidArgumentError(absl::StrCat(name_, ": stats_every is ", options_.stats_every, ", tuning_steps ",
                                                   options_.tuning_steps, ", not at least 1"));
  }
  if (options_.fusion == Fusion::kMeasured) {
    fusion_trial_ = std::make_unique<FusionTrial>(name_, options_.tuning_steps, /*waits_for_caps=*/options_.tune);
  }
  if (options_.tune) {
    tuner_ = std::make_unique<PlanTuner>(name_, PlanOptions{.caps = options_.caps, .cap_order = options_.cap_order},
                                         options_.tuning_steps);
  }
  if (options_.static_graph) counts_.emplace(params_);
  if (options_.skip_unused_buckets) {
    EK_ASSIGN_OR_RETURN(unused_, UnusedAgreement::Create(comm_, name_, params_->size()));
  }
  if (reduction_->HasThread() && device_ == nullptr) worker_ = std::make_unique<WorkerThread>();
  for (int i = 0; i < params_->size(); ++i) {
    const Parameter& param = (*params_)[i];
    specs_.push_back({.count = param.value.count,
                      .dtype = param.value.dtype,
                      .device = param.value.device,
                      .sparse = params_->row_size(i) > 0});
  }
  for (const std::string& name : options_.delayed) specs_[params_->Find(name)].delayed = true;
  if (!options_.delayed.empty()) delay_until_ = params_->Find(options_.delay_until);
  seen_mask_version_ = params_->mask_version();
  reduction_->OnGroup(*comm_);
  return Install({.mask = params_->mask()});
}

Reducer::~Reducer() {
  if (pipeline_ != nullptr && HasLivingGroup()) {
    (void)EndWith(absl::FailedPreconditionError(absl::StrCat(name_, " was destroyed inside a step")));
  }
  ForgetStep();
  if (options_.gradient_as_bucket_view) {
    for (int i = 0; i < params_->size(); ++i) {
      if (storage_ != nullptr && storage_->SlotOf(i).data != nullptr) (void)MoveGradient(i, params_->own_grad(i));
    }
  }
  if (device_ != nullptr) (void)device_->Drain();  // What is there uses the buckets.
}

absl::Status Reducer::Install(PlanState state) {
  EK_ASSIGN_OR_RETURN(BucketPlan plan, PlanFor(state, specs_, options_.caps, options_.cap_order));
  const std::vector<int> sparse = TakeSparse(specs_, plan);
  const BucketStorage::Layout layout{.fusion = FusionOf(state),
                                     .count_multiple = std::max<int64_t>(1, reduction_->CountMultiple())};
  if (storage_ == nullptr || sparse != sparse_.sparse() || !(plan == storage_->plan()) ||
      !(layout == storage_->layout())) {
    EK_ASSIGN_OR_RETURN(std::unique_ptr<BucketStorage> storage,
                        BucketStorage::Create(std::move(plan), *params_, layout, *comm_));
    if (device_ != nullptr) EK_RETURN_IF_ERROR(device_->Drain());
    EK_RETURN_IF_ERROR(Annotate(reduction_->OnPlan(storage->buckets()), name_));
    storage.swap(storage_);
    if (options_.gradient_as_bucket_view) {  // Moves contents out of the old buckets, which go here.
      const absl::Status moved = AttachViews();
      if (device_ != nullptr) EK_RETURN_IF_ERROR(device_->Drain());
      EK_RETURN_IF_ERROR(moved);
    }
    BucketPlan tracked = storage_->plan();
    for (int param : sparse) tracked.buckets.push_back({param});  // Behind those that are launched.
    tracker_ = ReadyTracker(tracked, params_);
    sparse_ = SparseReduction(sparse);
  } else if (group_is_new_) {
    if (device_ != nullptr) EK_RETURN_IF_ERROR(device_->Drain());
    EK_RETURN_IF_ERROR(Annotate(reduction_->OnPlan(storage_->buckets()), name_));
  }
  group_is_new_ = false;
  if (counts_.has_value() && !(state.mask == state_.mask)) counts_->Forget();
  state_ = std::move(state);
  if (tuner_ != nullptr) tuner_->OnPlan(state_, storage_->plan(), specs_);
  if (fusion_trial_ != nullptr) fusion_trial_->OnPlan(state_);
  delayed_bucket_ = -1;
  if (delay_until_ >= 0 && state_.mask[delay_until_]) {
    const auto& buckets = storage_->plan().buckets;
    const auto is_delayed = [this](const std::vector<int>& bucket) { return specs_[bucket[0]].delayed; };
    const auto first = std::ranges::find_if(buckets, is_delayed);
    if (first != buckets.end()) delayed_bucket_ = static_cast<int>(first - buckets.begin());
  }
  return PlanCollectives();
}

Fusion Reducer::FusionOf(const PlanState& state) const {
  if (options_.fusion != Fusion::kMeasured) return options_.fusion;
  const bool is_coalesced = state.fusion == MeasuredFusion::kTrying || state.fusion == MeasuredFusion::kCoalesced;
  return is_coalesced ? Fusion::kCoalesced : Fusion::kFlat;
}

absl::Status Reducer::PlanCollectives() {
  auto plan = std::make_shared<BucketPipeline::Plan>();
  plan->reduction = reduction_.get();
  plan->worker = worker_.get();
  if (worker_ != nullptr) plan->waits = comm_->control().waits();
  schedule_ = {.generation = state_.generation};
  if (unused_ != nullptr && unused_->what().has_value()) schedule_.entries.push_back(*unused_->what());
  size_t rounds = 1;
  for (const BucketInfo& bucket : storage_->buckets()) {
    std::vector<Collective> collectives = reduction_->CollectivesFor(bucket);
    if (bucket.index == 0) rounds = collectives.size();
    if (collectives.empty() || collectives.size() != rounds || (rounds > 1 && !reduction_->HasThread())) {
      return absl::InvalidArgumentError(absl::StrCat(name_, ": the reduction gives bucket ", bucket.index, " ",
                                                     collectives.size(), " collectives, bucket 0 ", rounds,
                                                     ": there must be as many for each, at least one, and more "
                                                     "than one only with a thread"));
    }
    for (Collective& what : collectives) {
      what.role = Role::kBucket;
      what.index = bucket.index;
      what.index_count = bucket.bucket_count;
      what.joined = Contribution::kIdentity;
      schedule_.entries.push_back(what);
    }
    plan->buckets.push_back({bucket, std::move(collectives)});
  }
  if (reduction_->used_flags() == UsedFlags::kSeparate && !plan->buckets.empty()) {
    const int64_t count = params_->size();
    if (used_.data == nullptr) {
      EK_ASSIGN_OR_RETURN(used_, comm_->Allocate(count * SizeOf(DType::kFloat32)));
    }
    plan->used_data = TensorView(used_.data.get(), count, DType::kFloat32, comm_->device());
    plan->used = {.kind = CollectiveKind::kAllReduce, .count = count, .role = Role::kState};
    schedule_.entries.push_back(plan->used);
  }
  if (device_ != nullptr) {
    plan->runtime = &device_->runtime();
    if (has_own_reduction_) {
      EK_ASSIGN_OR_RETURN(plan->streams, device_->SideStreams(static_cast<int>(rounds) + 1));
    }
    EK_RETURN_IF_ERROR(storage_->Prepare(*params_, separate_flags(), device_->stream()));
  }
  for (const Collective& what : sparse_.Collectives(*params_)) schedule_.entries.push_back(what);
  for (size_t round = 0; round < rounds; ++round) {
    EK_ASSIGN_OR_RETURN(Channel* const channel,
                        comm_->OpenChannel(round == 0 ? name_ : absl::StrCat(name_, ".round", round)));
    plan->channels.push_back(channel);
  }
  pipeline_plan_ = std::move(plan);
  collectives_version_ = reduction_->CollectivesVersion();
  return absl::OkStatus();
}

absl::Status Reducer::RefreshCollectives() {
  return reduction_->CollectivesVersion() == collectives_version_ ? absl::OkStatus() : PlanCollectives();
}

absl::Status Reducer::AttachViews() {
  absl::Status first;
  for (int i = 0; i < params_->size(); ++i) {
    const TensorView slot = storage_->SlotOf(i);
    first.Update(MoveGradient(i, slot.data != nullptr ? slot : params_->own_grad(i)));
  }
  return first;
}

absl::Status Reducer::MoveGradient(int param, TensorView to) {
  const TensorView from = (*params_)[param].grad;
  if (from.data == to.data || from.count == 0) return absl::OkStatus();
  absl::Status moved;
  if (params_->grad_state(param) != GradState::kNone) {
    if (to.data == nullptr) {
      params_->SetGradState(param, GradState::kNone);  // Nowhere to keep it: it was made without memory of its own.
    } else if (device_ != nullptr) {
      moved = device_->runtime().Copy(to.data, from.data, from.bytes(), device_->stream());
    } else {
      std::memcpy(to.data, from.data, from.bytes());
    }
  }
  params_->SetGradMemory(param, to);
  return moved;
}

TensorView Reducer::separate_flags() const {
  return used_.data == nullptr ? TensorView()
                               : TensorView(used_.data.get(), params_->size(), DType::kFloat32, comm_->device());
}

absl::Status Reducer::RebuildNow() {
  const bool has_caps = tuner_ != nullptr && tuner_->choice().has_value();
  const bool has_fusion = fusion_trial_ != nullptr && fusion_trial_->next().has_value();
  if (recorded_topic_.empty() && !has_caps && !has_fusion) return absl::OkStatus();
  if (in_step()) return absl::FailedPreconditionError(absl::StrCat(name_, ": can't rebuild inside a step"));
  ++counted_.rebuilds;
  if (has_caps) {  // Of a plan that has its order.
    PlanState next = state_;
    AdoptCaps(next, tuner_->choice()->caps, tuner_->choice()->cap_order);
    return Install(std::move(next));
  }
  if (has_fusion) {  // Of one that has its caps, too.
    PlanState next = state_;
    AdoptFusion(next, *fusion_trial_->next());
    return Install(std::move(next));
  }
  const ControlChannel::From from{.rank = recorder_, .text = absl::StrCat("the gradient order of ", name_)};
  EK_ASSIGN_OR_RETURN(std::string bytes, comm_->control().Receive(recorded_topic_, comm_->timeout(), from));
  EK_ASSIGN_OR_RETURN(std::vector<int> order, ParseOrder(bytes, params_->size()));
  PlanState next = state_;
  AdoptOrder(next, order);
  EK_RETURN_IF_ERROR(Install(std::move(next)));
  recorded_topic_.clear();
  return absl::OkStatus();
}

absl::Status Reducer::CheckNoneAdded() const {
  if (params_->size() == static_cast<int>(specs_.size())) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(name_, " was made for ", specs_.size(),
                                                    " parameters, now there are ", params_->size(),
                                                    ": add all before it is made"));
}

absl::Status Reducer::RefreshTrainable() {
  if (params_->mask_version() == seen_mask_version_) return absl::OkStatus();
  if (in_step()) {
    return absl::FailedPreconditionError(
        absl::StrCat(name_, ": what is trained can't change inside a step; call FinishStep() first"));
  }
  EK_RETURN_IF_ERROR(CheckNoneAdded());
  if (params_->mask() == state_.mask) {
    seen_mask_version_ = params_->mask_version();
    return absl::OkStatus();
  }
  for (int i = 0; i < params_->size(); ++i) {
    if (state_.mask[i] && !params_->trainable(i) && params_->grad_state(i) == GradState::kLocal) {
      return absl::FailedPreconditionError(
          absl::StrCat(name_, ": parameter \"", (*params_)[i].name, "\" (", i,
                       ") was frozen while it holds a gradient that was accumulated and not reduced; it would be lost: "
                       "synchronise first, or clear it"));
    }
  }
  PlanState next = state_;
  AdoptMask(next, params_->mask());
  EK_RETURN_IF_ERROR(Install(std::move(next)));
  seen_mask_version_ = params_->mask_version();
  DropRecordedOrder();
  ++counted_.refreshes;
  return absl::OkStatus();
}

void Reducer::DropRecordedOrder() {
  if (!recorded_topic_.empty()) comm_->control().Discard(recorded_topic_);
  recorded_topic_.clear();
}

void Reducer::ForgetReduced() {
  for (int i = 0; i < params_->size(); ++i) {
    if (params_->grad_state(i) == GradState::kReduced) params_->SetGradState(i, GradState::kNone);
  }
}

absl::Status Reducer::ImportPlan(const PlanState& state) {
  if (in_step()) return absl::FailedPreconditionError(absl::StrCat(name_, ": can't take over a plan inside a step"));
  for (int i = 0; i < params_->size(); ++i) {
    // Frozen by the others: what this rank had accumulated for it is not asked for any more.
    if (state_.mask[i] && !state.mask[i]) params_->SetGradState(i, GradState::kNone);
  }
  EK_RETURN_IF_ERROR(params_->SetTrainable(state.mask));
  EK_RETURN_IF_ERROR(Install(state));
  seen_mask_version_ = params_->mask_version();
  DropRecordedOrder();
  ++counted_.imports;
  return absl::OkStatus();
}

absl::Status Reducer::CheckGroup(const Communicator& comm) const {
  EK_RETURN_IF_ERROR(CheckDevice(*params_, comm.device(), "the new group"));
  return CheckStream(*params_, comm.device(), "the new group");
}

bool Reducer::can_leave() const { return dynamic_cast<const AllReduceBuckets*>(reduction_.get()) != nullptr; }

absl::Status Reducer::ReplaceGroup(Communicator* comm, int plan_from, bool keeps_gradients) {
  LeaveGroup(keeps_gradients);
  comm_ = comm;
  group_ = comm->steps().lifetime();
  group_is_new_ = true;
  if (device_ != nullptr) device_->ReplaceGroup(*comm);
  ++reductions_;
  reduction_->OnGroup(*comm);
  absl::Status status = AgreeOnPlan(plan_from);
  if (!status.ok()) comm->Abort(status);
  return status;
}

void Reducer::LeaveGroup(bool keeps_gradients) {
  if (HasLivingGroup()) {
    // Buckets may be in flight, also in a group that is just ending: afterwards nothing there uses them any more.
    if (pipeline_ != nullptr) comm_->Abort(absl::CancelledError(absl::StrCat(name_, " left the group inside a step")));
    DropRecordedOrder();
  }
  ForgetStep();
  recorded_topic_.clear();
  step_error_ = absl::OkStatus();
  tracker_.Reset();
  if (!keeps_gradients) params_->ClearGradients();
}

absl::Status Reducer::AgreeOnPlan(int plan_from) {
  if (unused_ != nullptr) EK_RETURN_IF_ERROR(unused_->ReplaceGroup(comm_));
  uint64_t specs = 0;
  for (int i = 0; i < params_->size(); ++i) {
    if (!params_->is_ignored(i))
      specs = StableHash(specs + 2 * specs_[i].count + specs_[i].delayed, ToString(specs_[i].dtype));
  }
  const std::string mine = absl::StrCat(absl::Hex(specs, absl::kZeroPad16), state_.Serialize());
  EK_ASSIGN_OR_RETURN(const ControlChannel::Parts parts,
                      comm_->control().Exchange(absl::StrCat("plan/", name_), mine, comm_->timeout()));
  std::vector<PlanState> plans;
  for (size_t rank = 0; rank < parts.size(); ++rank) {
    const absl::string_view part = parts[rank];
    if (part.substr(0, 16) != absl::string_view(parts[0]).substr(0, 16)) {
      return absl::InvalidArgumentError(absl::StrCat("the parameters of ranks 0 and ", rank, " differ"));
    }
    EK_ASSIGN_OR_RETURN(PlanState plan,
                        PlanState::Parse(part.substr(std::min<size_t>(16, part.size())), params_->size()));
    plans.push_back(std::move(plan));
  }
  size_t chosen = plan_from == kNewestPlan ? 0 : static_cast<size_t>(plan_from);
  for (size_t rank = 0; rank < plans.size() && plan_from == kNewestPlan; ++rank) {
    if (plans[rank].generation > plans[chosen].generation) chosen = rank;
  }
  if (chosen >= plans.size()) return absl::InternalError(absl::StrCat("there is no rank ", plan_from, " to plan"));
  return plans[chosen] == state_ ? Install(state_) : ImportPlan(plans[chosen]);
}

}  // namespace evenkeel
