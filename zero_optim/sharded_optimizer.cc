// How a ShardedOptimizer is made, and who owns what: the plan that its steps follow (sharded_optimizer_step.cc).

#include "evenkeel/zero_optim/sharded_optimizer.h"

#include <cstdint>
#include <memory>
#include <numeric>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "evenkeel/comm/internal/bytes.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/zero_optim/internal/action_hook.h"
#include "evenkeel/zero_optim/internal/agree.h"

namespace evenkeel {
namespace {

using internal::ShardPlan;

constexpr int kNamesInNote = 3;

std::vector<ParamSpec> SpecsOf(const ParameterSet& params) {
  std::vector<ParamSpec> specs;
  for (int i = 0; i < params.size(); ++i) {
    const TensorView& value = params[i].value;
    specs.push_back({.count = value.count, .dtype = value.dtype, .device = value.device});
  }
  return specs;
}

std::vector<int> AllOf(const ParameterSet& params) {
  std::vector<int> all(params.size());
  std::iota(all.begin(), all.end(), 0);
  return all;
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

}  // namespace

// Creation -----------------------------------------------------------------------------------------------------------

ShardedOptimizer::ShardedOptimizer(Communicator* comm, ParameterSet* params, ParameterGroups groups,
                                   ShardedOptimizerOptions options)
    : Joinable(comm, "sharded_optimizer"),
      params_(params),
      options_(std::move(options)),
      specs_(SpecsOf(*params)),
      all_params_(AllOf(*params)),
      updater_(params, std::move(groups), comm->runtime()),
      was_updated_(params->size(), 0),
      held_rank_(comm->rank()) {}

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
  if (own.ok()) own = optimizer->updater_.Check();
  own.Update(optimizer->updater_.CheckDense());
  if (own.ok()) own = optimizer->Init();
  const std::vector<std::string> settings = {
      absl::StrCat("bucket_cap=", optimizer->options_.bucket_cap.value, " bytes"),
      absl::StrCat("max_imbalance=", optimizer->options_.max_imbalance)};
  EK_RETURN_IF_ERROR(internal::CheckSameOnAllRanks(*comm, optimizer->join_name(), own, *params, optimizer->groups(),
                                                   internal::SameIn::kEverything, settings));
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
  reduction_ = std::make_unique<internal::GradientReduction>(&communicator(), channel_, params_, specs_,
                                                             options_.bucket_cap, &updater_);
  return absl::OkStatus();
}

OwnerTable ShardedOptimizer::NobodyOwns() const {
  std::vector<int64_t> sizes;
  for (const ParamSpec& spec : specs_) sizes.push_back(spec.count);
  return OwnerTable(std::move(sizes), communicator().world_size());
}

ShardedOptimizer::~ShardedOptimizer() {
  ReportUnwinding();
  Communicator* const comm = living_group();
  if (comm == nullptr) return;
  if (is_registered_) comm->steps().Unregister(this);
  (void)open_.Wait();  // At most until the operations' deadline: they use this object's memory.
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
  if (plan.owners.Imbalance(mask) > options_.max_imbalance) plan.better = plan.owners.Rebalanced(mask, ParamsByGroup());
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
    EK_RETURN_IF_ERROR(owners.Assign(to_own, &mask));
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

}  // namespace evenkeel
