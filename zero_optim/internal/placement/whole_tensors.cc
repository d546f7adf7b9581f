// Construction, and the owners of parameters: the plan that its steps follow
// (whole_tensors_step.cc).

#include "evenkeel/zero_optim/internal/placement/whole_tensors.h"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "evenkeel/bucket/finite_check.h"
#include "evenkeel/bucket/parameter_facts.h"
#include "evenkeel/comm/base/bytes.h"
#include "evenkeel/comm/status.h"

namespace evenkeel::internal {
namespace {

std::vector<ParamSpec> SpecsOf(const ParameterSet& params) {
  std::vector<ParamSpec> specs;
  for (int i = 0; i < params.size(); ++i) {
    const TensorView& value = params[i].value;
    specs.push_back({.count = value.count, .dtype = value.dtype, .device = value.device});
  }
  return specs;
}

}  // namespace

// Creation ----------------------------------------------------------------------------------------

WholeTensorsOptimizer::WholeTensorsOptimizer(Communicator& comm, ParameterSet& params,
                                             ParameterGroups groups, OptimizerOptions options)
    : PlacedOptimizer(comm, params, std::move(groups), std::move(options)),
      max_imbalance_(std::get<WholeTensors>(placement()).max_imbalance),
      bucket_cap_(std::get<WholeTensors>(placement()).bucket_cap),
      specs_(SpecsOf(params)),
      all_params_(SelectParams(params, [](const Parameter&) { return true; })),
      was_updated_(params.size(), 0),
      held_rank_(comm.rank()) {}

std::vector<Fact> WholeTensorsOptimizer::OtherSettings() const {
  return {{"bucket_cap", absl::StrCat(bucket_cap_.value, " bytes")},
          {"max_imbalance", absl::StrCat(max_imbalance_)}};
}

absl::Status WholeTensorsOptimizer::Init() {
  EK_ASSIGN_OR_RETURN(checks_finite_, ChecksFinite(options().check_finite));
  EK_RETURN_IF_ERROR(SetPlan(NobodyOwns(), TrainableMask(params_->size(), false), 0));
  seen_mask_version_ = params_->mask_version();
  return AdoptMask(params_->mask());
}

absl::Status WholeTensorsOptimizer::OnChannel() {
  reduction_ = std::make_unique<GradientReduction>(&communicator(), channel(), params_, specs_,
                                                   bucket_cap_, &updater_);
  return absl::OkStatus();
}

OwnerTable WholeTensorsOptimizer::NobodyOwns() const {
  std::vector<int64_t> sizes;
  for (const ParamSpec& spec : specs_) sizes.push_back(spec.count);
  return OwnerTable(std::move(sizes), communicator().world_size());
}

WholeTensorsOptimizer::~WholeTensorsOptimizer() {
  if (Detach() == nullptr) return;
  (void)open_.Wait();  // At most until the operations' deadline: they use this object's memory.
}

// The plan ----------------------------------------------------------------------------------------

WholeTensorsOptimizer::PlanPtr WholeTensorsOptimizer::plan() const {
  absl::MutexLock lock(&mutex_);
  return plan_;
}

absl::Status WholeTensorsOptimizer::SetPlan(OwnerTable owners, const TrainableMask& mask,
                                            uint64_t generation) {
  EK_ASSIGN_OR_RETURN(ShardPlan plan,
                      PlanShards(specs_, std::move(owners), mask, generation, bucket_cap_));
  plan.note = FrozenNote(*params_, mask);
  if (plan.owners.Imbalance(mask) > max_imbalance_)
    plan.better = plan.owners.Rebalanced(mask, ParamsByGroup());
  absl::MutexLock lock(&mutex_);
  plan_ = std::make_shared<const ShardPlan>(std::move(plan));
  return absl::OkStatus();
}

absl::Status WholeTensorsOptimizer::AdoptMask(const TrainableMask& mask,
                                              const std::set<int>& also_owned) {
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

absl::Status WholeTensorsOptimizer::TakeGroups(ParameterGroups groups) {
  updater_.groups() = std::move(groups);
  seen_mask_version_ = params_->mask_version();
  return AdoptMask(params_->mask());
}

absl::StatusOr<ParticipantState> WholeTensorsOptimizer::PrepareStep() {
  if (seen_mask_version_ != params_->mask_version()) {
    if (params_->mask() != plan()->mask) EK_RETURN_IF_ERROR(AdoptMask(params_->mask()));
    seen_mask_version_ = params_->mask_version();
  }
  return CurrentState();
}

ParticipantState WholeTensorsOptimizer::CurrentState() const {
  const PlanPtr plan = this->plan();
  const bool has_own_mask =
      seen_mask_version_ != params_->mask_version();  // Changed since; only on an exhausted rank.
  return {.generation = plan->generation,
          .schedule_hash = plan->hash,
          .mask_hash = has_own_mask ? params_->mask().Hash() : plan->mask_hash,
          .samples = params_->has_local_gradients() ? left_samples_ : 0,
          .note = plan->note};
}

// Without a DataParallel no record says which backward passes a step reduces.
void WholeTensorsOptimizer::OnLoopBegin() {
  if (!params_->has_local_gradients()) left_samples_ = 0;
  seen_drops_ = params_->dropped_gradients();
}

absl::Status WholeTensorsOptimizer::OnExhausted() {
  if (!params_->has_local_gradients()) return absl::OkStatus();
  EK_RETURN_IF_ERROR(CheckSamples());
  left_samples_ += std::max<int64_t>(StepControl::Of(communicator()).TakeSamples(), 0);
  return absl::OkStatus();
}

absl::Status WholeTensorsOptimizer::CheckSamples() const {
  // A DataParallel counts them itself.
  if (join_config().divisor.by() != DivideBy::kSamples || !params_->CheckDetached().ok() ||
      params_->dropped_gradients() == seen_drops_)
    return absl::OkStatus();
  return Refusal(
      ": gradients that were accumulated, and not reduced, were cleared in the loop: without a "
      "DataParallel their samples would count; clear them before the loop, or use a DataParallel");
}

std::string WholeTensorsOptimizer::ExportState() const {
  const PlanPtr plan = this->plan();
  return ByteWriter()
      .U64(plan->generation)
      .Bytes(plan->mask.Serialize())
      .Bytes(plan->owners.Serialize())
      .Take();
}

absl::Status WholeTensorsOptimizer::ImportState(absl::string_view state) {
  ByteReader reader(state);
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

}  // namespace evenkeel::internal
