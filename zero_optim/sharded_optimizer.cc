// A step, on every rank:
//
//   reduce this rank's own gradients towards their owners     (only those that nobody has reduced)
//   for each bucket of the schedule: its owner updates it, then all issue its broadcast
//   wait for the broadcasts
//
// A rank issues the broadcasts of owners before it, then updates its own buckets while those arrive. Before it begins,
// the lowest active rank tells dry ranks what the step is (StepMessage), and they run the same code.

#include "evenkeel/zero_optim/sharded_optimizer.h"

#include <cstring>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "evenkeel/comm/internal/bytes.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/work.h"
#include "evenkeel/zero_optim/internal/action_hook.h"
#include "evenkeel/zero_optim/internal/agree.h"
#include "evenkeel/zero_optim/internal/gradients.h"
#include "evenkeel/zero_optim/internal/state_sync.h"

namespace evenkeel {
namespace {

using internal::GradientSource;
using internal::LocalGradients;
using internal::ShardBucket;
using internal::ShardPlan;
using internal::StepMessage;

// First byte of what the lowest active rank announces.
enum class Action : char { kStep = 's', kConsolidate = 'c' };

constexpr int kNamesInNote = 3;

std::vector<ParamSpec> SpecsOf(const ParameterSet& params) {
  std::vector<ParamSpec> specs;
  for (int i = 0; i < params.size(); ++i) {
    const TensorView& value = params[i].value;
    specs.push_back({.count = value.count, .dtype = value.dtype, .device = value.device});
  }
  return specs;
}

// "frozen: fc1.weight, fc1.bias"; empty if nothing is.
std::string FrozenNote(const ParameterSet& params, const TrainableMask& mask) {
  std::string note;
  int frozen = 0;
  for (int i = 0; i < mask.size(); ++i) {
    if (mask[i] || ++frozen > kNamesInNote) continue;
    absl::StrAppend(&note, frozen == 1 ? "frozen: " : ", ", params[i].name);
  }
  if (frozen > kNamesInNote) absl::StrAppend(&note, " and ", frozen - kNamesInNote, " more");
  return note;
}

absl::Status WaitForAll(const std::vector<Work>& works) {
  absl::Status status;
  for (const Work& work : works) status.Update(work.Wait());
  return status;
}

}  // namespace

// Creation -----------------------------------------------------------------------------------------------------------

ShardedOptimizer::ShardedOptimizer(Communicator* comm, ParameterSet* params, ParameterGroups groups,
                                   ShardedOptimizerOptions options)
    : Joinable(comm, "sharded_optimizer"),
      params_(params),
      options_(std::move(options)),
      specs_(SpecsOf(*params)),
      updater_(params, std::move(groups)),
      was_updated_(params->size(), 0) {}

absl::StatusOr<std::unique_ptr<ShardedOptimizer>> ShardedOptimizer::Create(Communicator* comm, ParameterSet* params,
                                                                           const UpdateRule& rule,
                                                                           ShardedOptimizerOptions options) {
  return Create(comm, params, AllInOneGroup(*params, rule), std::move(options));
}

absl::StatusOr<std::unique_ptr<ShardedOptimizer>> ShardedOptimizer::Create(Communicator* comm, ParameterSet* params,
                                                                           const std::vector<ParameterGroup>& groups,
                                                                           ShardedOptimizerOptions options) {
  auto made = ParameterGroups::Create(params->size(), groups);
  absl::Status own = made.status();
  std::unique_ptr<ShardedOptimizer> optimizer(new ShardedOptimizer(
      comm, params, own.ok() ? *std::move(made) : ParameterGroups(params->size()), std::move(options)));
  own.Update(optimizer->updater_.Check());
  if (own.ok()) own = optimizer->Init();
  EK_RETURN_IF_ERROR(internal::CheckSameOnAllRanks(*comm, optimizer->join_name(), own, *params, optimizer->groups()));
  comm->steps().Register(optimizer.get());
  optimizer->is_registered_ = true;
  return optimizer;
}

absl::Status ShardedOptimizer::Init() {
  EK_RETURN_IF_ERROR(TakeChannel());
  EK_RETURN_IF_ERROR(SetPlan(NobodyOwns(), TrainableMask(params_->size(), false), 0));
  seen_mask_version_ = params_->mask_version();
  return AdoptMask(params_->mask());
}

absl::Status ShardedOptimizer::TakeChannel() {
  EK_ASSIGN_OR_RETURN(channel_, communicator().OpenChannel(join_name()));
  reduction_ =
      std::make_unique<internal::GradientReduction>(&communicator(), channel_, params_, specs_, options_.bucket_cap);
  return absl::OkStatus();
}

OwnerTable ShardedOptimizer::NobodyOwns() const {
  std::vector<int64_t> sizes;
  for (const ParamSpec& spec : specs_) sizes.push_back(spec.count);
  return OwnerTable(std::move(sizes), communicator().world_size());
}

ShardedOptimizer::~ShardedOptimizer() {
  Communicator* const comm = living_group();
  if (is_registered_ && comm != nullptr) comm->steps().Unregister(this);
}

// The plan -----------------------------------------------------------------------------------------------------------

ShardedOptimizer::PlanPtr ShardedOptimizer::plan() const {
  absl::MutexLock lock(&mutex_);
  return plan_;
}

absl::Status ShardedOptimizer::SetPlan(OwnerTable owners, const TrainableMask& mask, uint64_t generation) {
  EK_ASSIGN_OR_RETURN(ShardPlan plan,
                      internal::PlanShards(specs_, std::move(owners), mask, generation, options_.bucket_cap));
  plan.note = FrozenNote(*params_, mask);
  absl::MutexLock lock(&mutex_);
  plan_ = std::make_shared<const ShardPlan>(std::move(plan));
  return absl::OkStatus();
}

absl::Status ShardedOptimizer::AdoptMask(const TrainableMask& mask, const std::set<int>& also_owned) {
  const PlanPtr old = plan();
  OwnerTable owners = old->owners;
  for (const ParameterGroup& group : groups().groups()) {
    std::vector<int> to_own;
    for (int param : group.params) {
      const bool is_owned = mask[param] || also_owned.contains(param);
      if (is_owned && owners.owner(param) == kNoOwner) to_own.push_back(param);
    }
    EK_RETURN_IF_ERROR(owners.Assign(to_own));
  }
  return SetPlan(std::move(owners), mask, old->generation + 1);
}

absl::Status ShardedOptimizer::AddGroup(ParameterGroup group) {
  if (join_config().enable) return internal::InsideJoinError(join_name(), "AddGroup");
  EK_RETURN_IF_ERROR(internal::AddGroupOnAllRanks(communicator(), join_name(), *params_, std::move(group), updater_));
  seen_mask_version_ = params_->mask_version();
  return AdoptMask(params_->mask());
}

absl::StatusOr<ParticipantState> ShardedOptimizer::PrepareStep() {
  if (seen_mask_version_ != params_->mask_version()) {
    if (params_->mask() != plan()->mask) EK_RETURN_IF_ERROR(AdoptMask(params_->mask()));
    seen_mask_version_ = params_->mask_version();
  }
  return CurrentState();
}

ParticipantState ShardedOptimizer::CurrentState() const {
  const PlanPtr plan = this->plan();
  const bool has_own_mask = seen_mask_version_ != params_->mask_version();  // Changed since; only on a dry rank.
  return {.generation = plan->generation,
          .schedule_hash = plan->hash,
          .mask_hash = has_own_mask ? params_->mask().Hash() : plan->mask_hash,
          .note = plan->note};
}

std::string ShardedOptimizer::ExportState() const {
  const PlanPtr plan = this->plan();
  return internal::ByteWriter()
      .U64(plan->generation)
      .Bytes(plan->mask.Serialize())
      .Bytes(plan->owners.Serialize())
      .Take();
}

absl::Status ShardedOptimizer::ImportState(absl::string_view state) {
  internal::ByteReader reader(state);
  const uint64_t generation = reader.U64();
  const absl::string_view mask_bytes = reader.Bytes(), owner_bytes = reader.Bytes();
  EK_RETURN_IF_ERROR(reader.Finish("a sharded optimizer's state"));
  EK_ASSIGN_OR_RETURN(const TrainableMask mask, TrainableMask::Parse(mask_bytes));
  OwnerTable owners = plan()->owners;
  EK_RETURN_IF_ERROR(owners.Restore(owner_bytes));
  EK_RETURN_IF_ERROR(params_->SetTrainable(mask));
  seen_mask_version_ = params_->mask_version();
  return SetPlan(std::move(owners), mask, generation);
}

// A step -------------------------------------------------------------------------------------------------------------

absl::Status ShardedOptimizer::Step(const StepOptions& options) {
  EK_ASSIGN_OR_RETURN(std::shared_ptr<StepTicket> ticket, Notify());
  EK_ASSIGN_OR_RETURN(const StepAnswer answer, ticket->Wait());
  EK_RETURN_IF_ERROR(internal::CheckOptions(options));
  const bool is_complete =
      communicator().world_size() == 1 && join_config().divisor->by() != DivideBy::kSamples;  // Nothing to divide by.
  const LocalGradients local = is_complete ? LocalGradients::kComplete : LocalGradients::kReduced;
  StepMessage step{.rules = groups().rules(), .options = options};
  EK_ASSIGN_OR_RETURN(step.sources, ChooseSources(*params_, groups(), plan()->mask, local, communicator().rank()));
  last_step_ = std::move(ticket);
  if (!answer.everyone_active()) {
    const std::string payload = absl::StrCat(std::string(1, static_cast<char>(Action::kStep)), step.Serialize());
    EK_RETURN_IF_ERROR(communicator().steps().Announce(join_name(), payload));
  }
  EK_RETURN_IF_ERROR(Run(step, answer, /*has_inputs=*/true));
  if (!options.skip) NoteUpdated(step.sources);
  return absl::OkStatus();
}

void ShardedOptimizer::NoteUpdated(const std::vector<GradientSource>& sources) {
  for (size_t i = 0; i < sources.size(); ++i) {
    if (sources[i] != GradientSource::kNone) was_updated_[i] = 1;
  }
}

absl::Status ShardedOptimizer::RepeatStep(const StepAnswer& answer, absl::string_view message) {
  EK_ASSIGN_OR_RETURN(StepMessage step, StepMessage::Parse(message, params_->size()));
  EK_RETURN_IF_ERROR(updater_.groups().Adopt(step.rules));
  const std::vector<GradientSource> sources = step.sources;
  const PlanPtr plan = this->plan();
  for (int i = 0; i < params_->size(); ++i) {
    const bool is_owner = plan->owners.owner(i) == communicator().rank();
    if (!is_owner && step.sources[i] == GradientSource::kHere) step.sources[i] = GradientSource::kNone;
  }
  if (!step.options.skip) EK_RETURN_IF_ERROR(CheckArrived(*params_, step.sources, communicator().rank()));
  EK_RETURN_IF_ERROR(Run(step, answer, /*has_inputs=*/false));
  if (!step.options.skip) NoteUpdated(sources);
  return absl::OkStatus();
}

absl::Status ShardedOptimizer::Run(const StepMessage& step, const StepAnswer& answer, bool has_inputs) {
  std::vector<int> to_reduce;
  for (int i = 0; i < params_->size(); ++i) {
    if (step.sources[i] == GradientSource::kToReduce) to_reduce.push_back(i);
  }
  const double scale =
      join_config().divisor->ScaleOf(answer, /*reduces=*/true);  // Of a skipped step too: it is used up.
  if (!step.options.skip) EK_RETURN_IF_ERROR(ReduceAndUpdate(step, answer, to_reduce, {scale, has_inputs}));
  for (int param : to_reduce) params_->SetGradState(param, GradState::kNone);
  CountStep();
  return absl::OkStatus();
}

absl::Status ShardedOptimizer::ReduceAndUpdate(const StepMessage& step, const StepAnswer& answer,
                                               const std::vector<int>& to_reduce,
                                               const internal::GradientReduction::StartOptions& how) {
  const PlanPtr plan = this->plan();
  EK_RETURN_IF_ERROR(reduction_->Start(plan->owners, to_reduce, how));

  // Nobody's parameters or state change before every rank is known to have come here: until then a failed step can be
  // repeated. The broadcasts would queue behind the reductions anyway.
  absl::Status status = WaitForReductions(*plan, to_reduce);
  std::vector<Work> broadcasts;
  if (status.ok()) is_torn_ = true;
  for (size_t b = 0; b < plan->buckets.size() && status.ok(); ++b) {
    const ShardBucket& bucket = plan->buckets[b];
    if (bucket.owner == communicator().rank()) status = UpdateBucket(bucket, step);
    if (!status.ok() || answer.world_size == 1) continue;
    TensorList values;
    for (int param : bucket.params) values.push_back((*params_)[param].value);
    broadcasts.push_back(channel_->Issue(plan->schedule.entries[b], values, values));
  }
  status.Update(WaitForAll(broadcasts));
  status.Update(reduction_->WaitAll());
  if (!status.ok()) return status;
  is_torn_ = false;
  return absl::OkStatus();
}

// Those to this rank; all of them if it owns none.
absl::Status ShardedOptimizer::WaitForReductions(const ShardPlan& plan, const std::vector<int>& to_reduce) {
  absl::Status status;
  bool owns_any = false;
  for (int param : to_reduce) {
    if (plan.owners.owner(param) != communicator().rank()) continue;
    owns_any = true;
    status.Update(reduction_->Wait(param).status());
  }
  if (!owns_any) status.Update(reduction_->WaitAll());
  return status;
}

absl::Status ShardedOptimizer::UpdateBucket(const ShardBucket& bucket, const StepMessage& step) {
  for (int param : bucket.params) {
    TensorView gradient;
    switch (step.sources[param]) {
      case GradientSource::kNone:
        continue;
      case GradientSource::kHere:
        gradient = (*params_)[param].grad;
        break;
      case GradientSource::kToReduce:
        EK_ASSIGN_OR_RETURN(gradient, reduction_->Wait(param));
        if (gradient.data == nullptr) continue;  // No rank had one.
        break;
    }
    updater_.Update(param, gradient, step.options.grad_scale);
  }
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<JoinHook>> ShardedOptimizer::MakeJoinHook(const JoinOptions& /*options*/) {
  return std::make_unique<internal::ActionHook>(
      [this](const StepAnswer& step, absl::string_view payload) { return OnAction(step, payload); },
      [this](bool is_last_joiner) {
        return internal::AdoptFromLastJoiners(communicator(), join_name(), updater_.groups(), is_last_joiner);
      });
}

absl::Status ShardedOptimizer::OnAction(const StepAnswer& answer, absl::string_view payload) {
  if (payload.empty()) return absl::InvalidArgumentError("an action without a word");
  const auto action = static_cast<Action>(payload.front());
  payload.remove_prefix(1);
  if (action == Action::kStep) return RepeatStep(answer, payload);
  internal::ByteReader reader(payload);
  const int to = reader.I32();
  if (action != Action::kConsolidate || !reader.Finish("a consolidation").ok()) {
    return absl::InvalidArgumentError("an action that this optimizer doesn't know");
  }
  return Gather(to).status();
}

// State --------------------------------------------------------------------------------------------------------------

absl::StatusOr<OptimizerState> ShardedOptimizer::Consolidate(int to) {
  if (to != kAllRanks && (to < 0 || to >= communicator().world_size())) {
    return absl::InvalidArgumentError(
        absl::StrCat(join_name(), ": Consolidate to rank ", to, " of ", communicator().world_size()));
  }
  if (join_config().enable) {
    if (last_step_ == nullptr || last_step_ != communicator().steps().current()) {
      return absl::FailedPreconditionError(
          absl::StrCat(join_name(), ": inside RunJoined() Consolidate comes after Step(), in the same step"));
    }
    const std::string payload = internal::ByteWriter().U8(static_cast<uint8_t>(Action::kConsolidate)).I32(to).Take();
    EK_RETURN_IF_ERROR(communicator().steps().Announce(join_name(), payload));
  }
  return Gather(to);
}

// How often each parameter was updated, which only its owner knows.
absl::StatusOr<std::vector<int64_t>> ShardedOptimizer::GatherSteps() {
  std::vector<int64_t> steps;
  for (int i = 0; i < params_->size(); ++i) steps.push_back(updater_.step(i));
  EK_RETURN_IF_ERROR(channel_->AllReduce(absl::MakeSpan(steps), ReduceOp::kSum, {.role = Role::kState}).Wait());
  return steps;
}

absl::StatusOr<OptimizerState> ShardedOptimizer::Gather(int to) {
  const int rank = communicator().rank();
  const bool receives = to == kAllRanks || to == rank;
  EK_ASSIGN_OR_RETURN(const std::vector<int64_t> steps, GatherSteps());
  OptimizerState state;
  std::vector<int> updated;
  for (int i = 0; i < params_->size(); ++i) {
    if (steps[i] == 0) continue;
    updated.push_back(i);
    if (receives) state.params[i].step = steps[i];
  }
  EK_ASSIGN_OR_RETURN(const std::vector<ShardBucket> buckets,
                      internal::BucketsByOwner(specs_, plan()->owners, updated, options_.bucket_cap));

  // Straight from the owner's memory into that of the result.
  std::vector<Work> works;
  for (const ShardBucket& bucket : buckets) {
    for (size_t t = 0; t < kMaxStateTensors; ++t) {
      TensorList parts;
      for (int param : bucket.params) {
        const auto names = StateTensorNames(groups().rule_of(param));
        if (t >= names.size()) continue;
        StateTensor* const own = bucket.owner == rank ? &updater_.tensors(param)[t] : nullptr;
        if (receives) {
          StateTensor& result = state.params[param].tensors[std::string(names[t])];
          result = own != nullptr ? *own : StateTensor(bucket.dtype, specs_[param].count);
          parts.push_back(result.view());
        } else if (own != nullptr) {
          parts.push_back(own->view());
        }
      }
      if (to == kAllRanks && !parts.empty()) {
        works.push_back(channel_->Broadcast(absl::MakeConstSpan(parts), bucket.owner, {.role = Role::kState}));
      } else if (to != kAllRanks && to != bucket.owner) {
        for (const TensorView& part : parts) {
          works.push_back(rank == to ? channel_->Recv(part, bucket.owner, {.role = Role::kState})
                                     : channel_->Send(part, to, {.role = Role::kState}));
        }
      }
    }
  }
  EK_RETURN_IF_ERROR(WaitForAll(works));
  return state;
}

absl::Status ShardedOptimizer::LoadState(const OptimizerState& state) {
  if (join_config().enable) return internal::InsideJoinError(join_name(), "LoadState");
  EK_RETURN_IF_ERROR(Annotate(updater_.CheckState(state), join_name()));
  const PlanPtr old = plan();
  std::set<int> to_own;  // Trained in the past, but not since this optimizer was made.
  for (const auto& [param, entry] : state.params) {
    if (old->owners.owner(param) == kNoOwner) to_own.insert(param);
  }
  if (!to_own.empty()) EK_RETURN_IF_ERROR(AdoptMask(old->mask, to_own));
  const PlanPtr now = plan();
  was_updated_.assign(was_updated_.size(), 0);
  for (const auto& [param, entry] : state.params) was_updated_[param] = 1;
  is_torn_ = false;
  updater_.Import(state, [&](int param) { return now->owners.owner(param) == communicator().rank(); });
  return absl::OkStatus();
}

// Another group -------------------------------------------------------------------------------------------------------

void ShardedOptimizer::LeaveGroup(Communicator* old, const GroupChange& /*change*/) {
  if (is_registered_ && old != nullptr) old->steps().Unregister(this);
  is_registered_ = false;
  last_step_.reset();
  params_->ClearGradients();
}

internal::ShardFacts ShardedOptimizer::Facts() const {
  const PlanPtr plan = this->plan();
  internal::ShardFacts facts{.generation = plan->generation,
                             .mask = plan->mask,
                             .steps_finished = steps_finished(),
                             .is_torn = is_torn_,
                             .may_lose = options_.lost_shard == LostShard::kFresh,
                             .checkpoint_hint = options_.checkpoint_hint,
                             .owners = plan->owners.owners(),
                             .was_updated = was_updated_};
  for (int i = 0; i < params_->size(); ++i) facts.held_steps.push_back(updater_.step(i));
  return facts;
}

absl::Status ShardedOptimizer::EnterGroup(const GroupChange& change) {
  EK_RETURN_IF_ERROR(TakeChannel());
  EK_RETURN_IF_ERROR(internal::CheckSameOnAllRanks(communicator(), join_name(), absl::OkStatus(), *params_, groups(),
                                                   internal::SameIn::kShape));
  EK_ASSIGN_OR_RETURN(const ControlChannel::Parts parts,
                      communicator().control().Exchange(absl::StrCat("shards/", join_name()), Facts().Serialize(),
                                                        communicator().timeout()));
  std::vector<internal::ShardFacts> by_rank;
  for (const std::string& part : parts) {
    EK_ASSIGN_OR_RETURN(internal::ShardFacts facts, internal::ShardFacts::Parse(part, params_->size()));
    by_rank.push_back(std::move(facts));
  }
  EK_ASSIGN_OR_RETURN(const internal::ShardMove move, internal::PlanShardMove(by_rank, change.source));
  EK_RETURN_IF_ERROR(MoveState(move));
  communicator().steps().Register(this);
  is_registered_ = true;
  return absl::OkStatus();
}

absl::Status ShardedOptimizer::MoveState(const internal::ShardMove& move) {
  OwnerTable owners = NobodyOwns();
  EK_RETURN_IF_ERROR(owners.Assign(move.owned));
  const int rank = communicator().rank();
  std::vector<Work> works;
  for (int param = 0; param < params_->size(); ++param) {
    const int from = move.holder[param], to = owners.owner(param);
    was_updated_[param] = from >= 0;
    if (from < 0 || from == to || (rank != from && rank != to)) continue;
    if (rank == to) updater_.Prepare(param, move.steps[param]);
    for (StateTensor& tensor : updater_.tensors(param)) {
      works.push_back(rank == to ? channel_->Recv(tensor.view(), from, {.role = Role::kState})
                                 : channel_->Send(tensor.view(), to, {.role = Role::kState}));
    }
  }
  EK_RETURN_IF_ERROR(WaitForAll(works));
  for (int param = 0; param < params_->size(); ++param) {
    if (owners.owner(param) != rank || move.holder[param] < 0) updater_.Prepare(param, 0);
  }
  is_torn_ = false;
  EK_RETURN_IF_ERROR(params_->SetTrainable(move.mask));
  seen_mask_version_ = params_->mask_version();
  return SetPlan(std::move(owners), move.mask, move.generation);
}

absl::Status ShardedOptimizer::CheckWhole() const {
  if (!is_torn_) return absl::OkStatus();
  return absl::AbortedError(absl::StrCat(join_name(), " was in the middle of an update"));
}

absl::Status ShardedOptimizer::TakeOver(StateTransfer& transfer) {
  const internal::StateSync sync{.comm = communicator(), .channel = *channel_, .name = join_name()};
  if (transfer.done.insert(params_).second) EK_RETURN_IF_ERROR(sync.BroadcastValues(*params_, transfer.source));
  return sync.BroadcastSettings(updater_, transfer.source);
}

}  // namespace evenkeel
