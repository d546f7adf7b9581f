#include "evenkeel/zero_optim/optimizer.h"

#include <algorithm>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "evenkeel/join/joinable.h"
#include "evenkeel/join/phase.h"
#include "evenkeel/libtorch/internal.h"
#include "evenkeel/zero_optim/update_rule.h"

namespace evenkeel::libtorch {
namespace {

using Replica = DataParallelBase::Replica;

template <class Rule, class Options>
Rule AdamRule(const Options& options, const char* name) {
  if (options.amsgrad()) Refuse(absl::StrCat(name, " with amsgrad is not supported; use Joined"));
  const auto [beta1, beta2] = options.betas();
  return {.learning_rate = options.lr(),
          .beta1 = beta1,
          .beta2 = beta2,
          .epsilon = options.eps(),
          .weight_decay = options.weight_decay()};
}

UpdateRule RuleOf(const torch::optim::OptimizerOptions& options) {
  if (const auto* sgd = dynamic_cast<const torch::optim::SGDOptions*>(&options)) {
    if (sgd->dampening() != 0) Refuse("SGD with dampening is not supported; use Joined");
    return Sgd{.learning_rate = sgd->lr(),
               .momentum = sgd->momentum(),
               .weight_decay = sgd->weight_decay(),
               .nesterov = sgd->nesterov()};
  }
  if (const auto* adam = dynamic_cast<const torch::optim::AdamOptions*>(&options))
    return AdamRule<Adam>(*adam, "Adam");
  if (const auto* adamw = dynamic_cast<const torch::optim::AdamWOptions*>(&options))
    return AdamRule<AdamW>(*adamw, "AdamW");
  Refuse(
      "Optimizer takes SGDOptions, AdamOptions and AdamWOptions; use Joined for other optimizers");
}

evenkeel::Placement CorePlacement(const Placement& placement) {
  if (const auto* whole = std::get_if<WholeTensors>(&placement))
    return evenkeel::WholeTensors{.max_imbalance = whole->max_imbalance};
  if (std::holds_alternative<Slices>(placement)) return evenkeel::Slices{};
  return evenkeel::Replicated{};
}

// Returns the indices of those of the tensors that `replica` has.
std::vector<int> IndicesOf(const Replica& replica, const std::vector<torch::Tensor>& tensors) {
  std::vector<int> indices;
  for (const torch::Tensor& tensor : tensors) {
    const auto found = replica.index_of.find(tensor.unsafeGetTensorImpl());
    if (found != replica.index_of.end()) indices.push_back(found->second);
  }
  return indices;
}

std::vector<int> IndicesOf(const Replica& replica, const torch::optim::Optimizer& optimizer) {
  std::vector<torch::Tensor> tensors;
  for (const auto& group : optimizer.param_groups())
    tensors.insert(tensors.end(), group.params().begin(), group.params().end());
  return IndicesOf(replica, tensors);
}

void CheckUsable(const Replica& replica) {
  if (replica.is_detached) Refuse("the optimizer's DataParallel was destroyed");
}

// Returns the closure's loss; an undefined tensor without a closure.
torch::Tensor LossOf(const torch::optim::Optimizer::LossClosure& closure) {
  if (closure == nullptr) return {};
  const at::AutoGradMode enable_grad(true);
  return closure();
}

std::string GroupName(size_t index) { return absl::StrCat("group", index); }

}  // namespace

// ---- Optimizer ----

struct Optimizer::State {
  std::shared_ptr<Replica> replica;
  std::unique_ptr<evenkeel::Optimizer> core;
  StepOptions next;
};

Optimizer::Optimizer(DataParallelBase& ddp, std::vector<torch::optim::OptimizerParamGroup> groups,
                     std::unique_ptr<torch::optim::OptimizerOptions> defaults,
                     const OptimizerOptions& options)
    : torch::optim::Optimizer(std::move(groups), std::move(defaults)),
      state_(std::make_shared<State>()),
      exceptions_at_creation_(std::uncaught_exceptions()) {
  state_->replica = ddp.replica();
  std::vector<ParameterGroup> core_groups;
  for (const auto& group : param_groups()) {
    ParameterGroup& own = core_groups.emplace_back();
    own.name = GroupName(core_groups.size() - 1);
    own.rule = RuleOf(group.options());
    own.params = IndicesOf(*state_->replica, group.params());
    if (own.params.size() != group.params().size())
      Refuse("a parameter group has a tensor that is not a parameter of the DataParallel's module");
  }
  // Create() may move gradients to other buckets.
  const absl::Cleanup follow = [&] { state_->replica->FollowGradients(); };
  state_->core = Value(evenkeel::Optimizer::Create(
      *ddp.replica()->core, core_groups, {.placement = CorePlacement(options.placement)}));
  // Copies the rates of a loop's last step to ranks that were exhausted.
  const auto take_rates = [this] {
    for (size_t i = 0; i < param_groups().size(); ++i)
      param_groups()[i].options().set_lr(
          LearningRate(state_->core->groups()[static_cast<int>(i)].rule));
  };
  ddp.replica()->optimizers.push_back({state_->core.get(), take_rates});
}

Optimizer::~Optimizer() {
  if (state_->core != nullptr) state_->replica->Forget(state_->core.get());
  const auto group = state_->replica->group;
  Park(group, std::move(state_), exceptions_at_creation_);
}

torch::Tensor Optimizer::step(LossClosure closure) {
  const torch::Tensor loss = LossOf(closure);
  Replica& replica = *state_->replica;
  CheckUsable(replica);
  if (static_cast<int>(param_groups().size()) != state_->core->groups().size())
    Refuse("a parameter group was added; pass all groups at creation");
  replica.FinishUnreached();
  const std::vector<int> params = IndicesOf(replica, *this);
  replica.CheckGradients(params, /*may_clear=*/true);
  replica.TakeGradients();
  for (size_t i = 0; i < param_groups().size(); ++i) {
    UpdateRule rule = RuleOf(param_groups()[i].options());
    const UpdateRule& own = state_->core->groups()[static_cast<int>(i)].rule;
    if (rule == own) continue;
    const double rate = LearningRate(rule);
    SetLearningRate(rule, LearningRate(own));
    if (!(rule == own))
      Refuse(absl::StrCat("the settings of parameter group ", i, " have changed from ",
                          ToString(own), " to ", ToString(rule),
                          "; only the rate may change after creation"));
    Check(state_->core->SetLearningRate(GroupName(i), rate));
  }
  const StepOptions options = std::exchange(state_->next, {});
  Check(state_->core->Step(options));
  replica.MarkUsedUp(params, options.grad_scale);
  for (const auto& group : param_groups()) {
    for (const torch::Tensor& param : group.params())
      if (param.requires_grad()) torch::autograd::impl::bump_version(param);
  }
  return loss;
}

void Optimizer::clip_grad_norm(double max_norm, double norm_type) {
  state_->next.clip = ClipOptions{.max_norm = max_norm, .norm = norm_type};
}

void Optimizer::unscale(double scale) {
  state_->next.grad_scale = scale;
  state_->next.skip_nonfinite = true;
}

void Optimizer::take_scaled_gradients(double scale) {
  Replica& replica = *state_->replica;
  CheckUsable(replica);
  replica.FinishUnreached();
  const std::vector<int> params = IndicesOf(replica, *this);
  replica.CheckGradients(params, /*may_clear=*/true);
  replica.TakeGradients();
  replica.HideGradients(params);
  unscale(scale);
}

double Optimizer::last_norm() const {
  const auto& check = state_->core->last_check();
  if (!check.has_value()) Refuse("last_norm() needs a step with clip_grad_norm() or unscale()");
  return check->norm;
}

bool Optimizer::last_was_skipped() const {
  const auto& check = state_->core->last_check();
  return check.has_value() && check->is_skipped;
}

void Optimizer::save(torch::serialize::OutputArchive&) const {
  Refuse("the state may be split over the ranks: use save_sharded()");
}
void Optimizer::load(torch::serialize::InputArchive&) { Refuse("use load_sharded()"); }
void Optimizer::save_sharded(const std::string& folder) { Check(state_->core->Save(folder)); }
void Optimizer::load_sharded(const std::string& folder) { Check(state_->core->Load(folder)); }
int64_t Optimizer::state_bytes() const { return state_->core->state_bytes(); }

// ---- Joined ----

struct Joined::State : Joinable {
  State(std::shared_ptr<Replica> replica, torch::optim::Optimizer& optimizer)
      : Joinable(replica->group->comm.get(), "Joined"),
        replica(std::move(replica)),
        optimizer(optimizer) {
    this->replica->optimizers.push_back({.joinable = this});
  }
  ~State() override { ReportUnwinding(); }

  struct Hook : JoinHook {
    explicit Hook(State* owner) : owner(owner) {}
    absl::Status MainHook(const StepAnswer&) override {
      owner->replica->AdoptGradients();
      owner->optimizer.step();
      owner->optimizer.zero_grad();
      for (const int param : IndicesOf(*owner->replica, owner->optimizer))
        owner->replica->set.SetGradState(param, GradState::kNone);
      owner->CountStep(owner->Rates());
      return absl::OkStatus();
    }
    State* const owner;
  };
  absl::StatusOr<std::unique_ptr<JoinHook>> MakeJoinHook(const evenkeel::JoinOptions&) override {
    return std::make_unique<Hook>(this);
  }
  JoinPhase join_phase() const override { return JoinPhase::kOptimizer; }
  const void* trained_set() const override { return &replica->set; }

  torch::Tensor Step(const torch::optim::Optimizer::LossClosure& closure) {
    const torch::Tensor loss = LossOf(closure);
    CheckUsable(*replica);
    replica->FinishUnreached();
    replica->CheckGradients(IndicesOf(*replica, optimizer), /*may_clear=*/false);
    Check(Notify().status());
    {
      const PhaseScope phase(communicator(), StepPhase::kOptimizer);
      optimizer.step();
    }
    CountStep(Rates());
    return loss;
  }

  // Compared between the ranks, because exhausted ranks step, too.
  std::string Rates() const {
    std::string text = "rates";
    for (const auto& group : optimizer.param_groups())
      absl::StrAppend(&text, " ", group.options().get_lr());
    return text;
  }

  const std::shared_ptr<Replica> replica;
  torch::optim::Optimizer& optimizer;
};

Joined::Joined(DataParallelBase& ddp, torch::optim::Optimizer& optimizer)
    : state_(std::make_shared<State>(ddp.replica(), optimizer)),
      exceptions_at_creation_(std::uncaught_exceptions()) {}

Joined::~Joined() {
  state_->replica->Forget(state_.get());
  const auto group = state_->replica->group;
  Park(group, std::move(state_), exceptions_at_creation_);
}

torch::Tensor Joined::step(torch::optim::Optimizer::LossClosure closure) {
  return state_->Step(closure);
}
void Joined::zero_grad(bool set_to_none) { state_->optimizer.zero_grad(set_to_none); }

}  // namespace evenkeel::libtorch
