#include "evenkeel/bucket/data_parallel.h"

#include <algorithm>
#include <optional>
#include <variant>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/time.h"
#include "evenkeel/bucket/divergence.h"
#include "evenkeel/bucket/parameter_facts.h"
#include "evenkeel/bucket/replica_transfer.h"
#include "evenkeel/bucket/step_times.h"
#include "evenkeel/bucket/tensor_snapshot.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/join/action_hook.h"
#include "evenkeel/join/steps/step_control.h"
#include "evenkeel/join/steps/step_phase.h"

namespace evenkeel {
namespace {

constexpr absl::string_view kFusionNames[] = {"kFlat", "kCoalesced"};

// Returns when the buckets of the step were complete. Those that were before backward began had no
// gradient to wait for, and do not count.
BucketsReady ReadyIn(const StepTimes& step, absl::Time backward_began) {
  absl::Time first = absl::InfiniteFuture(), last = absl::InfinitePast();
  for (const BucketTimes& bucket : step.buckets) {
    if (bucket.ready < backward_began || bucket.ready == absl::InfiniteFuture()) continue;
    first = std::min(first, bucket.ready);
    last = std::max(last, bucket.ready);
  }
  if (last == absl::InfinitePast()) return {};
  return {.first_us = absl::ToInt64Microseconds(first - backward_began),
          .last_us = std::max<int64_t>(1, absl::ToInt64Microseconds(last - backward_began))};
}

absl::Status CheckBuffers(const Communicator& comm, const std::vector<TensorView>& buffers,
                          const BufferOptions& options) {
  if (options.every < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("buffers.every is ", options.every, ", not at least 0"));
  }
  for (size_t b = 0; b < buffers.size(); ++b) {
    const TensorView& buffer = buffers[b];
    if (buffer.count < 0 || (buffer.data == nullptr && buffer.count > 0)) {
      return absl::InvalidArgumentError(
          absl::StrCat("buffer ", b, " has no memory for ", ToString(buffer)));
    }
    if (buffer.device == comm.device()) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("buffer ", b, " lies on ", ToString(buffer.device),
                     ", the group's tensors on ", ToString(comm.device())));
  }
  return absl::OkStatus();
}

std::string StaleStateRefusal(absl::string_view name) {
  return absl::StrCat(name,
                      ": the inputs of the ranks ended at different steps of the previous loop, so "
                      "the state of its optimizer differs between them: put the optimizer into "
                      "RunJoined()'s list, or name its state with SetOptimizerState()");
}

// The cases of a std::visit(), which does not compile without one for each alternative.
template <typename... Cases>
struct Overloads : Cases... {
  using Cases::operator()...;
};
template <typename... Cases>
Overloads(Cases...) -> Overloads<Cases...>;

}  // namespace

// The actions that exhausted ranks repeat.
struct DataParallel::Action {
  struct BeginSync {
    std::string message;  // The reduction's.
    static void VisitFields(auto& self, auto& visit) { visit(self.message); }
  };
  struct BeginAccumulation {};
  struct Finish {};  // Waits for the buckets.
  struct MakeBuffersEqual {};
  std::variant<BeginSync, BeginAccumulation, Finish, MakeBuffersEqual> kind;

  static void VisitFields(auto& self, auto& visit) { visit(self.kind); }
};

// The buffers as they were before a step (from its first backward to the one that synchronises).
struct DataParallel::KeptBuffers {
  TensorSnapshot content;
  int64_t step = 0;         // As the group counted it.
  bool was_active = true;   // This rank had inputs in it.
  bool was_joined = false;  // It was inside RunJoined().
};

DataParallel::DataParallel(Communicator* comm, ParameterSet* params,
                           std::vector<TensorView> buffers, DataParallelOptions options)
    : Joinable(comm, "data_parallel"),
      params_(params),
      buffers_(std::move(buffers)),
      options_(options),
      trainability_(options.trainability, params, join_name()),
      kept_(std::make_unique<KeptBuffers>()),
      kept_before_(std::make_unique<KeptBuffers>()) {}

absl::StatusOr<std::unique_ptr<DataParallel>> DataParallel::Create(
    Communicator* comm, ParameterSet* params, std::vector<TensorView> buffers,
    DataParallelOptions options, std::unique_ptr<BucketReduction> reduction) {
  absl::Status own = Complete(options.check_replicas);
  std::unique_ptr<DataParallel> ddp(new DataParallel(comm, params, std::move(buffers), options));
  const std::string& name = ddp->join_name();
  ddp->runtime_ = comm->runtime();
  own.Update(Reducer::Check(*comm, *params, options.reducer));
  own.Update(CheckBuffers(*comm, ddp->buffers_, options.buffers));
  own.Update(params->Validate(ddp->buffers_));
  own.Update(TrainabilityWatch::Check(options.trainability));
  EK_RETURN_IF_ERROR(
      Annotate(VerifySame(*comm, absl::StrCat("options/", name), own, ddp->Facts()), name));
  EK_ASSIGN_OR_RETURN(ddp->state_channel_, comm->OpenChannel(absl::StrCat(name, ".state")));
  if (options.broadcast_initial_state) {
    std::vector<TensorView> state = ValuesOf(*params);
    if (options.buffers.every > 0)
      state.insert(state.end(), ddp->buffers_.begin(), ddp->buffers_.end());
    EK_RETURN_IF_ERROR(
        BroadcastState(*ddp->state_channel_, state, 0, Role::kState, params->stream()));
  }
  EK_ASSIGN_OR_RETURN(ddp->reducer_,
                      Reducer::Create(comm, params, name, options.reducer, std::move(reduction)));
  ddp->PublishPlan();
  StepControl::Of(*comm).Register(ddp.get());
  return ddp;
}

DataParallel::~DataParallel() {
  ReportUnwinding();
  if (Communicator* comm = living_group()) StepControl::Of(*comm).Unregister(this);
  reducer_.reset();  // On a device it waits for what uses the memory here.
}

std::vector<Fact> DataParallel::Facts() const {
  std::vector<Fact> facts = FactsOf(*params_, buffers_);
  facts.push_back(
      {"buffers.how", options_.buffers.how == BufferSync::kAverage ? "average" : "broadcast"});
  facts.push_back({"buffers.every", absl::StrCat(options_.buffers.every)});
  facts.push_back({"buffers.when",
                   options_.buffers.when == BufferTime::kStepEnd ? "the step's end" : "its start"});
  facts.push_back({"broadcast_initial_state", options_.broadcast_initial_state ? "true" : "false"});
  std::string caps;
  const ReducerOptions& reducer = options_.reducer;
  for (const Bytes& cap : reducer.caps)
    absl::StrAppend(&caps, caps.empty() ? "{" : ", ", cap.value);
  facts.push_back({"the bucket caps", caps + "} bytes"});
  facts.push_back({"cap_order", reducer.cap_order == CapOrder::kFromFirstReady ? "kFromFirstReady"
                                                                               : "kFromLastReady"});
  facts.push_back({"gradient_as_bucket_view", reducer.gradient_as_bucket_view ? "true" : "false"});
  facts.push_back({"fusion", std::string(kFusionNames[static_cast<int>(reducer.fusion)])});
  facts.push_back({"skip_unused_buckets", reducer.skip_unused_buckets ? "true" : "false"});
  const TrainabilityOptions& trainability = options_.trainability;
  facts.push_back({"the trainability policy",
                   absl::StrCat(ToString(trainability.policy), ", every ", trainability.every,
                                " steps, verified every ", trainability.verify_every, " steps")});
  facts.push_back({"check_replicas", ToString(options_.check_replicas)});
  facts.push_back({"find_unused", reducer.find_unused ? "true" : "false"});
  facts.push_back({"static_graph", reducer.static_graph ? "true" : "false"});
  facts.push_back({"the steps of tuning", absl::StrCat(reducer.tune ? reducer.tuning_steps : 0)});
  facts.push_back(
      {"the list of delayed parameters", absl::StrCat("{", absl::StrJoin(reducer.delayed, ", "),
                                                      "} until \"", reducer.delay_until, "\"")});
  return facts;
}

void DataParallel::PublishPlan() {
  const PlanState& plan = reducer_->plan_state();
  trainability_.Adopt(plan.mask);
  note_ = FrozenNote(*params_, plan.mask);
  mask_hash_ = plan.mask.Hash();
  if (options_.on_plan) options_.on_plan();  // It may put another plan in force: `plan` is gone.
  absl::MutexLock lock(&mutex_);
  exported_ = reducer_->plan_state().Serialize();
}

std::string DataParallel::OtherFlagsText() const {
  const std::string frozen = FrozenNote(*params_, params_->mask());
  return absl::StrCat("which it began because the trained parameters of ", join_name(),
                      " have changed (", frozen.empty() ? "nothing frozen" : frozen, ")");
}

absl::Status DataParallel::BeginStep(StepMode mode) {
  if (reducer_->in_step())
    return reducer_->BeginStep(nullptr, mode, StepDivisor());  // Returns the error.
  mode_ = mode;
  EK_RETURN_IF_ERROR(FollowMemory());
  StepControl& steps = StepControl::Of(communicator());
  // The record of a step that another object has begun lacks the samples of this one.
  if (join_config().divisor.by() == DivideBy::kSamples && steps.has_more_samples()) steps.EndStep();
  // A step that another object has begun has the parameters that were trained at that time.
  if (!steps.WillBegin(join_name(), static_cast<int>(join_phase()))) {
    EK_ASSIGN_OR_RETURN(const bool has_changed, trainability_.BeforeStep(steps.steps_begun()));
    if (has_changed) steps.EndStep(OtherFlagsText());
  }
  EK_ASSIGN_OR_RETURN(std::shared_ptr<StepTicket> ticket, Notify());
  CountSamples(mode);
  phases_ = &StepControl::Of(communicator()).phases();
  phases_->Enter(StepPhase::kForward);
  if (join_config().enable) {
    Action action{Action::BeginAccumulation()};
    if (mode == StepMode::kSync) action.kind = Action::BeginSync{reducer_->StepMessage()};
    EK_RETURN_IF_ERROR(ActionHook<Action>::Announce(*this, action));
    ticket->OnAnswer([saw_uneven = saw_uneven_](const absl::StatusOr<StepAnswer>& answer) {
      if (answer.ok() && !answer->everyone_active()) *saw_uneven = true;
    });
  }
  EK_RETURN_IF_ERROR(KeepBuffers(/*is_active=*/true));
  if (WillSyncBuffers() || WillCompareReplicas()) {
    EK_ASSIGN_OR_RETURN(const StepAnswer answer, ticket->Wait());
    EK_RETURN_IF_ERROR(PrepareTensors(answer));
  }
  NoteStepBegun(mode == StepMode::kSync);
  return reducer_->BeginStep(std::move(ticket), mode, join_config().divisor);
}

absl::Status DataParallel::FinishStep() {
  if (reducer_->in_step() && mode_ == StepMode::kSync && join_config().enable)
    EK_RETURN_IF_ERROR(ActionHook<Action>::Announce(*this, {Action::Finish()}));
  EK_RETURN_IF_ERROR(reducer_->FinishStep());
  if (mode_ == StepMode::kSync) {
    if (ends_with_sync_) {
      StepAnswer answer;  // It has arrived with the gradients.
      if (join_config().enable) {
        EK_ASSIGN_OR_RETURN(answer, StepControl::Of(communicator()).current()->Wait());
      }
      EK_RETURN_IF_ERROR(FollowMemory());  // Forward may have moved buffers.
      EK_RETURN_IF_ERROR(BeginBufferSync(answer));
    }
    phases_->EndReduction(ReadyIn(reducer_->last_step(), phases_->backward_began()));
    step_is_open_ = false;
    CountStep();
  } else {
    phases_->Enter(StepPhase::kOutside);
  }
  mode_ = StepMode::kSync;  // Until a step of it begins: in those of others it says nothing else.
  return absl::OkStatus();
}

absl::StatusOr<ParticipantState> DataParallel::PrepareStep() {
  if (reducer_->in_step()) return CurrentState();  // Another object begins a step in this one's.
  const uint64_t generation = reducer_->generation();
  EK_RETURN_IF_ERROR(reducer_->RebuildNow());
  if (options_.on_plan && reducer_->generation() != generation) options_.on_plan();
  EK_ASSIGN_OR_RETURN(const bool has_changed,
                      trainability_.BeforeStep(StepControl::Of(communicator()).steps_begun()));
  if (has_changed) EK_RETURN_IF_ERROR(reducer_->RefreshTrainable());
  if (reducer_->generation() != generation) PublishPlan();
  reducer_->PrepareStep();
  return CurrentState();
}

ParticipantState DataParallel::CurrentState() const {
  const PlanState& plan = reducer_->plan_state();
  return {.generation = plan.generation,
          .schedule_hash = StepSchedule().Hash(),
          .mask_hash = mask_hash_,
          .sync = mode_ == StepMode::kSync,
          .samples = SamplesBeforeStep(),
          .note = note_};
}

void DataParallel::CountSamples(StepMode mode) {
  const int64_t before = SamplesBeforeStep();
  const int64_t samples = StepControl::Of(communicator()).last_samples();
  const bool is_known = before != StepRecord::kNotSaid && samples != StepRecord::kNotSaid;
  accumulated_samples_ = mode == StepMode::kSync ? 0
                         : is_known              ? before + samples
                                                 : StepRecord::kNotSaid;
}

std::string DataParallel::ExportState() const {
  absl::MutexLock lock(&mutex_);
  return exported_;
}

absl::Status DataParallel::ImportState(absl::string_view bytes) { return ImportPlan(bytes); }

absl::Status DataParallel::ImportPlan(absl::string_view bytes) {
  EK_ASSIGN_OR_RETURN(const PlanState plan, PlanState::Parse(bytes, params_->size()));
  EK_RETURN_IF_ERROR(reducer_->ImportPlan(plan));
  PublishPlan();
  return absl::OkStatus();
}

absl::Status DataParallel::RefreshTrainable() {
  trainability_.Read();
  const uint64_t generation = reducer_->generation();
  EK_RETURN_IF_ERROR(reducer_->RefreshTrainable());
  if (reducer_->generation() != generation) PublishPlan();
  return absl::OkStatus();
}

absl::Status DataParallel::RebuildNow() {
  EK_RETURN_IF_ERROR(reducer_->RebuildNow());
  PublishPlan();
  return absl::OkStatus();
}

bool DataParallel::WillSyncBuffers() const {
  const int64_t every = options_.buffers.every;
  return options_.buffers.when == BufferTime::kStepStart && every > 0 && !buffers_.empty() &&
         last_step_synced_ && buffer_turn_ % every == 0;
}

bool DataParallel::WillEndWithSync() const {
  const int64_t every = options_.buffers.every;
  return options_.buffers.when == BufferTime::kStepEnd && every > 0 && !buffers_.empty() &&
         (buffer_turn_ + last_step_synced_) % every == 0;
}

bool DataParallel::HasEqualBuffers() const {
  return options_.buffers.when == BufferTime::kStepEnd && options_.buffers.every == 1 &&
         options_.broadcast_initial_state;
}

void DataParallel::NoteStepBegun(bool synchronises) {
  ends_with_sync_ = synchronises && WillEndWithSync();
  if (last_step_synced_) ++buffer_turn_;
  last_step_synced_ = synchronises;
}

StateSource DataParallel::BufferSource(const StepAnswer& answer) const {
  if (!join_config().enable) return {.root = 0, .contributors = communicator().world_size()};
  return {.root = answer.highest_active,
          .contributors = answer.active,
          .contributes = !answer.record(communicator().rank()).joined};
}

absl::Status DataParallel::BeginBufferSync(const StepAnswer& answer) {
  EK_ASSIGN_OR_RETURN(std::vector<Work> works,
                      BeginSyncState(*state_channel_, buffers_, options_.buffers.how,
                                     BufferSource(answer), Role::kBuffers, params_->stream()));
  reducer_->Confirm(std::move(works));
  return absl::OkStatus();
}

absl::Status DataParallel::PrepareTensors(const StepAnswer& answer) {
  const bool syncs_buffers = WillSyncBuffers();
  if (syncs_buffers) EK_RETURN_IF_ERROR(BeginBufferSync(answer));
  // An optimizer outside of RunJoined()'s list does not step on exhausted ranks.
  const bool has_stale_ranks = !answer.everyone_active() && !join_config().has_optimizer;
  if (!WillCompareReplicas() || has_stale_ranks) return absl::OkStatus();
  return CompareReplicas(syncs_buffers || HasEqualBuffers());
}

std::vector<NamedView> DataParallel::NamedBuffers() const {
  std::vector<NamedView> buffers;
  for (size_t b = 0; b < buffers_.size(); ++b)
    buffers.push_back({absl::StrCat("buffer ", b), buffers_[b]});
  return buffers;
}

bool DataParallel::WillCompareReplicas() const {
  return last_step_synced_ && IsCheckDue(options_.check_replicas, communicator(), buffer_turn_);
}

absl::Status DataParallel::CompareReplicas(bool has_equal_buffers) {
  EK_RETURN_IF_ERROR(reducer_->WaitForValues());
  std::vector<NamedView> tensors = NamedValuesOf(*params_);
  if (has_equal_buffers) {
    for (NamedView& buffer : NamedBuffers()) tensors.push_back(std::move(buffer));
  }
  return evenkeel::CompareReplicas(join_name(), tensors, communicator(), options_.check_replicas,
                                   buffer_turn_, params_->stream());
}

absl::Status DataParallel::SyncBuffers() {
  if (reducer_->in_step()) {
    return absl::FailedPreconditionError(
        absl::StrCat(join_name(), ": SyncBuffers() inside a step: call it after FinishStep()"));
  }
  EK_RETURN_IF_ERROR(FollowMemory());
  StepAnswer last;
  if (join_config().enable) {
    EK_RETURN_IF_ERROR(Annotate(ActionHook<Action>::Announce(*this, {Action::MakeBuffersEqual()}),
                                absl::StrCat(join_name(), ": SyncBuffers()")));
    EK_ASSIGN_OR_RETURN(last, StepControl::Of(communicator()).current()->Wait());
  }
  return BeginBufferSync(last);
}

absl::Status DataParallel::RebindBuffer(int buffer, TensorView to) {
  const int count = static_cast<int>(buffers_.size());
  if (buffer < 0 || buffer >= count) {
    return absl::InvalidArgumentError(absl::StrCat(
        join_name(), ": buffer ", buffer, " is out of range: the number of buffers is ", count));
  }
  EK_RETURN_IF_ERROR(
      Annotate(CheckMoved(absl::StrCat("buffer ", buffer), buffers_[buffer], to), join_name()));
  buffers_[buffer] = to;
  return absl::OkStatus();
}

absl::Status DataParallel::FollowMemory() {
  const auto& [value_of, gradient_of, buffer_of] = options_.memory;
  for (int i = 0; i < params_->size() && (value_of || gradient_of); ++i) {
    const TensorView& old = (*params_)[i].value;
    const TensorView value = value_of ? value_of(i) : old;
    const TensorView gradient = gradient_of ? gradient_of(i) : TensorView();
    if (value == old && (gradient.data == nullptr || gradient == params_->own_grad(i))) continue;
    EK_RETURN_IF_ERROR(Annotate(params_->Rebind(i, value, gradient), join_name()));
  }
  for (size_t b = 0; b < buffers_.size() && buffer_of; ++b) {
    EK_RETURN_IF_ERROR(RebindBuffer(static_cast<int>(b), buffer_of(static_cast<int>(b))));
  }
  if (params_->memory_version() == checked_memory_) return absl::OkStatus();
  EK_RETURN_IF_ERROR(Annotate(params_->Validate(buffers_), join_name()));
  checked_memory_ = params_->memory_version();
  return absl::OkStatus();
}

Schedule DataParallel::StepSchedule() const {
  Schedule schedule = reducer_->schedule();
  const bool ends_with_sync = WillEndWithSync();
  if (!WillSyncBuffers() && !ends_with_sync) return schedule;
  const std::vector<Collective> entries =
      PlanStateSync(buffers_, options_.buffers.how, Role::kBuffers);
  schedule.entries.insert(ends_with_sync ? schedule.entries.end() : schedule.entries.begin(),
                          entries.begin(), entries.end());
  return schedule;
}

void DataParallel::SetOptimizerState(std::vector<TensorView> state) {
  optimizer_state_ = std::move(state);
  has_optimizer_state_ = true;
}

// Join --------------------------------------------------------------------------------------------

absl::StatusOr<std::unique_ptr<JoinHook>> DataParallel::MakeJoinHook(const JoinOptions&) {
  if (!optimizer_state_.empty() && join_config().has_optimizer)
    return absl::FailedPreconditionError(absl::StrCat(
        join_name(),
        ": SetOptimizerState() names the state of an optimizer outside of RunJoined()'s list, but "
        "the list has an optimizer, whose steps exhausted ranks take; an optimizer of your own "
        "needs a list without one"));
  if (!refusal_.empty()) {
    if (!has_optimizer_state_ || stale_root_ < 0) return absl::FailedPreconditionError(refusal_);
    EK_RETURN_IF_ERROR(BroadcastState(*state_channel_, optimizer_state_, stale_root_, Role::kState,
                                      params_->stream()));
    refusal_.clear();
    has_stale_state_ = false;
  }
  saw_uneven_ = std::make_shared<std::atomic<bool>>(false);
  last_rank_ = -1;
  return std::make_unique<ActionHook<Action>>(
      [this](const StepAnswer& answer, const Action& action) { return Shadow(answer, action); },
      [this](bool is_last_joiner) { return EndJoin(is_last_joiner); },
      [this]() -> absl::Status {
        if (!reducer_->in_step()) return absl::OkStatus();
        return absl::FailedPreconditionError(
            "the loop ended inside a step: FinishStep() was not called");
      });
}

absl::Status DataParallel::Shadow(const StepAnswer& answer, const Action& action) {
  const auto begin = [&](bool synchronises) -> absl::Status {
    EK_RETURN_IF_ERROR(FollowMemory());
    *saw_uneven_ = true;
    EK_RETURN_IF_ERROR(KeepBuffers(/*is_active=*/false));
    EK_RETURN_IF_ERROR(PrepareTensors(answer));
    NoteStepBegun(synchronises);
    return absl::OkStatus();
  };
  const Overloads repeat{
      [&](const Action::BeginSync& sync) -> absl::Status {
        EK_RETURN_IF_ERROR(begin(true));
        accumulated_samples_ = 0;
        return reducer_->BeginShadow(answer, join_config().divisor, sync.message);
      },
      [&](const Action::BeginAccumulation&) { return begin(false); },
      [&](const Action::Finish&) -> absl::Status {
        EK_RETURN_IF_ERROR(reducer_->FinishShadow());
        if (ends_with_sync_) {
          EK_RETURN_IF_ERROR(FollowMemory());
          EK_RETURN_IF_ERROR(BeginBufferSync(answer));
        }
        step_is_open_ = false;
        CountStep();
        return absl::OkStatus();
      },
      [&](const Action::MakeBuffersEqual&) -> absl::Status {
        EK_RETURN_IF_ERROR(FollowMemory());
        return BeginBufferSync(answer);
      },
  };
  return std::visit(repeat, action.kind);
}

absl::Status DataParallel::EndJoin(bool is_last_joiner) {
  const bool syncs_buffers =
      options_.buffers.every > 0 && !buffers_.empty() && !(HasEqualBuffers() && last_step_synced_);
  EK_RETURN_IF_ERROR(FollowMemory());
  // The ranks that were active to the end have what the others lack; the highest of them stands for
  // all.
  const TrainabilityOptions& flags = options_.trainability;
  std::string mine = is_last_joiner ? "1" : "0";
  for (int i = 0; i < params_->size(); ++i) {
    mine += (flags.reader ? flags.reader(i) : params_->trainable(i)) ? '1' : '0';
    const GradState state = params_->grad_state(i);
    const bool has_slices = state == GradState::kNone && !params_->was_cleared(i);
    mine += state == GradState::kReduced || has_slices ? '1' : '0';
  }
  EK_ASSIGN_OR_RETURN(const ControlChannel::Parts parts, Exchange("join", mine));
  StateSource last{.root = -1, .contributors = 0, .contributes = is_last_joiner};
  for (size_t rank = 0; rank < parts.size(); ++rank) {
    if (parts[rank].size() != mine.size() || parts[rank][0] != '1') continue;
    last.root = static_cast<int>(rank);
    ++last.contributors;
  }
  if (last.root < 0) return absl::InternalError("no rank was active to the end of the loop");
  if (last.contributors < static_cast<int>(parts.size())) last_rank_ = last.root;
  // The flags that their loops set, and the gradients that they cleared, after the last step count,
  // too.
  for (int i = 0; !is_last_joiner && i < params_->size(); ++i) {
    const bool is_trained = parts[last.root][1 + 2 * i] == '1';
    const bool is_kept = parts[last.root][2 + 2 * i] == '1';
    if (!is_kept && params_->grad_state(i) != GradState::kLocal)
      params_->SetGradState(i, GradState::kNone);
    if (params_->is_ignored(i)) continue;
    if (flags.writer) {
      flags.writer(i, is_trained);
    } else if (!flags.reader) {
      params_->SetTrainable(i, is_trained);
    }
  }
  if (syncs_buffers) {
    // If a rank is lost meanwhile, Recover() restores this rank's own buffers.
    KeptBuffers last_step = *kept_;
    const bool step_is_open = step_is_open_;
    EK_RETURN_IF_ERROR(KeepBuffers(is_last_joiner));
    EK_RETURN_IF_ERROR(SyncState(*state_channel_, buffers_, options_.buffers.how, last,
                                 Role::kState, params_->stream()));
    step_is_open_ = step_is_open;
    *kept_ = std::move(last_step);
  }
  if (!*saw_uneven_) return absl::OkStatus();
  std::vector<TensorView> state;
  if (!join_config().has_optimizer) {
    // An optimizer outside the loop stepped: the exhausted ranks' weights are stale.
    state = ValuesOf(*params_);
    state.insert(state.end(), optimizer_state_.begin(), optimizer_state_.end());
    if (!has_optimizer_state_) {
      stale_root_ = last.root;
      has_stale_state_ = !is_last_joiner;
      refusal_ = StaleStateRefusal(join_name());
    }
  }
  EK_RETURN_IF_ERROR(
      BroadcastState(*state_channel_, state, last.root, Role::kState, params_->stream()));
  return join_config().has_optimizer ? CheckReplicas() : absl::OkStatus();
}

// Exhausted ranks took every step, so that a difference comes from the program's code.
absl::Status DataParallel::CheckReplicas() {
  EK_ASSIGN_OR_RETURN(const std::optional<Divergence> found,
                      FindDivergence(*params_, communicator()));
  if (!found.has_value()) return absl::OkStatus();
  return absl::InternalError(
      absl::StrCat("after the loop the replicas differ: ", ToString(*found),
                   ": exhausted ranks do not run code that changes parameters in the loop, unless "
                   "it is passed to Optimizer::AfterUpdate() (after_step() in libtorch/)"));
}

// Another group -----------------------------------------------------------------------------------

absl::Status DataParallel::KeepBuffers(bool is_active) {
  if (!last_step_synced_) return absl::OkStatus();  // Accumulates: the step has begun before.
  std::swap(kept_, kept_before_);                   // Whose memory is used again.
  EK_RETURN_IF_ERROR(kept_->content.Take(buffers_, runtime_, params_->stream()));
  kept_->step = StepControl::Of(communicator()).steps_begun();
  kept_->was_active = is_active;
  kept_->was_joined = join_config().enable;
  step_is_open_ = true;
  return absl::OkStatus();
}

absl::Status DataParallel::RestoreBuffers(const KeptBuffers& kept) {
  return kept.content.Restore(buffers_, runtime_, params_->stream());
}

void DataParallel::LeaveGroup(Communicator* old, const GroupChange& change) {
  if (old != nullptr) StepControl::Of(*old).Unregister(this);
  phases_ = nullptr;
  // A step is not finished either if its gradients are there, but no optimizer has used them.
  // With updates in backward the optimizer has finished a step whose buffers are still being sent.
  const bool is_updated = ends_with_sync_ && change.last_update >= kept_->step;
  const bool is_open = (step_is_open_ && !is_updated) ||
                       (change.last_update >= 0 && kept_->step > change.last_update);
  const int64_t steps_back = change.ahead + is_open;
  buffers_are_right_ = change.ahead >= 0 && steps_back <= 2;
  if (buffers_are_right_ && steps_back > 0) {
    const KeptBuffers& right = *(steps_back == 1 ? kept_ : kept_before_);
    buffers_are_right_ = right.content.size() == buffers_.size() && FollowMemory().ok() &&
                         RestoreBuffers(right).ok();
    kept_->was_active = right.was_active;
    kept_->was_joined = right.was_joined;
  }
  step_is_open_ = false;
  kept_->content.Forget();
  kept_->step = 0;
  kept_before_->content.Forget();
  mode_ = StepMode::kSync;
  last_step_synced_ = true;  // A repeated step begins with one rank's buffers.
  buffer_turn_ = 0;
  saw_uneven_ = std::make_shared<std::atomic<bool>>(false);
}

absl::Status DataParallel::EnterGroup(const GroupChange& change) {
  EK_RETURN_IF_ERROR(FollowMemory());
  runtime_ = communicator().runtime();
  EK_RETURN_IF_ERROR(Annotate(
      VerifySame(communicator(), absl::StrCat("options/", join_name()), absl::OkStatus(), Facts()),
      join_name()));
  EK_ASSIGN_OR_RETURN(state_channel_,
                      communicator().OpenChannel(absl::StrCat(join_name(), ".state")));
  trainability_.Read();
  EK_RETURN_IF_ERROR(
      reducer_->ReplaceGroup(&communicator(), change.source >= 0 ? change.source : kNewestPlan));
  PublishPlan();
  EK_RETURN_IF_ERROR(FindStaleRoot());
  StepControl::Of(communicator()).Register(this);
  return absl::OkStatus();
}

// Finds a rank of this group that can repair the state that an uneven loop left out of date.
absl::Status DataParallel::FindStaleRoot() {
  const std::string mine = refusal_.empty() ? "" : has_stale_state_ ? "stale" : "right";
  EK_ASSIGN_OR_RETURN(const ControlChannel::Parts parts, Exchange("stale", mine));
  bool somebody_is_stale = false;
  stale_root_ = -1;
  for (size_t rank = 0; rank < parts.size(); ++rank) {
    somebody_is_stale = somebody_is_stale || parts[rank] == "stale";
    if (parts[rank] == "right") stale_root_ = static_cast<int>(rank);
  }
  if (!somebody_is_stale) {
    refusal_.clear();
    has_stale_state_ = false;
    return absl::OkStatus();
  }
  has_stale_state_ = mine != "right";
  refusal_ =
      stale_root_ >= 0
          ? StaleStateRefusal(join_name())
          : absl::StrCat(join_name(),
                         ": the optimizer's state is out of date since an uneven loop, and no rank "
                         "that has the current state is in this group");
  return absl::OkStatus();
}

HeldState DataParallel::CheckState() const {
  if (const absl::Status finished = reducer_->CheckFinished(); !finished.ok()) {
    return {StateKind::kTorn,
            absl::StrCat(join_name(),
                         ": a step that FinishStep() had ended failed later on the device: ",
                         finished.message())};
  }
  if (!has_stale_state_) return {};
  return {StateKind::kTorn,
          absl::StrCat(join_name(), ": the optimizer's state is out of date since an uneven loop")};
}

absl::StatusOr<Restore> DataParallel::KeepState(std::set<const void*>& kept) {
  if (runtime_ != nullptr) return nullptr;
  struct Kept {
    TensorSnapshot content;
    KeptBuffers last, before_last;
    bool step_is_open, has_stale_state;
    std::string refusal;
  };
  const bool keeps_values = kept.insert(params_).second;
  const auto tensors = [this, keeps_values] {
    std::vector<TensorView> all = buffers_;
    all.insert(all.end(), optimizer_state_.begin(), optimizer_state_.end());
    if (!keeps_values) return all;
    const std::vector<TensorView> values = ValuesOf(*params_);
    all.insert(all.end(), values.begin(), values.end());
    return all;
  };
  const auto own = std::make_shared<Kept>(Kept{.last = *kept_,
                                               .before_last = *kept_before_,
                                               .step_is_open = step_is_open_,
                                               .has_stale_state = has_stale_state_,
                                               .refusal = refusal_});
  EK_RETURN_IF_ERROR(own->content.Take(tensors(), runtime_, params_->stream()));
  return [this, own, tensors] {
    *kept_ = own->last;
    *kept_before_ = own->before_last;
    step_is_open_ = own->step_is_open;
    has_stale_state_ = own->has_stale_state;
    refusal_ = own->refusal;
    return own->content.Restore(tensors(), runtime_, params_->stream());
  };
}

absl::Status DataParallel::TakeOver(StateTransfer& transfer) {
  std::vector<NamedView> state;
  if (transfer.done.insert(params_).second) state = NamedValuesOf(*params_);
  for (size_t t = 0; t < optimizer_state_.size(); ++t)
    state.push_back({absl::StrCat("optimizer state ", t), optimizer_state_[t]});
  EK_RETURN_IF_ERROR(Transfer(transfer, state));
  if (has_optimizer_state_) {
    refusal_.clear();
    has_stale_state_ = false;
  }
  return buffers_.empty() ? absl::OkStatus() : TakeOverBuffers(transfer);
}

absl::Status DataParallel::Transfer(StateTransfer& transfer, const std::vector<NamedView>& state) {
  if (state.empty()) return absl::OkStatus();
  std::vector<TensorView> views;
  for (const NamedView& tensor : state) views.push_back(tensor.view);
  return TransferReplicas(communicator(), transfer,
                          {.tensors = [&] { return state; },
                           .move =
                               [&](int source) {
                                 return BroadcastState(*state_channel_, views, source, Role::kState,
                                                       params_->stream());
                               },
                           .stream = params_->stream()});
}

// Outside of RunJoined() they follow the lowest rank, inside it the highest that has inputs.
absl::Status DataParallel::TakeOverBuffers(StateTransfer& transfer) {
  const std::string mine = absl::StrCat(
      buffers_are_right_ ? "r" : "-", kept_->was_joined ? "j" : "-", kept_->was_active ? "a" : "-");
  EK_ASSIGN_OR_RETURN(const ControlChannel::Parts parts, Exchange("buffers", mine));
  StateTransfer buffers{.steps = transfer.steps};
  int lowest = -1, highest_active = -1;
  for (int rank = 0; rank < static_cast<int>(parts.size()); ++rank) {
    if (parts[rank].size() != 3 || parts[rank][0] != 'r') continue;
    if (HasEqualBuffers()) buffers.holders.push_back(rank);
    if (lowest < 0) lowest = rank;
    if (parts[rank] == "rja") highest_active = rank;
  }
  buffers.source = highest_active >= 0 ? highest_active : lowest >= 0 ? lowest : transfer.source;
  // Until the others' are there, this rank's own are what a repetition needs.
  KeptBuffers own = *kept_;
  EK_RETURN_IF_ERROR(KeepBuffers(own.was_active));
  kept_->was_joined = own.was_joined;
  const absl::Status moved = Transfer(buffers, NamedBuffers());
  transfer.repaired.insert(transfer.repaired.end(), buffers.repaired.begin(),
                           buffers.repaired.end());
  transfer.is_torn = transfer.is_torn || buffers.is_torn;
  EK_RETURN_IF_ERROR(moved);
  // Buffers that may differ between ranks stay so, where they are those of the right step.
  const bool are_one_ranks =
      options_.buffers.how == BufferSync::kBroadcast && options_.buffers.every == 1;
  if (!are_one_ranks && buffers_are_right_) EK_RETURN_IF_ERROR(RestoreBuffers(*kept_));
  step_is_open_ = false;
  *kept_ = std::move(own);
  return absl::OkStatus();
}

}  // namespace evenkeel
