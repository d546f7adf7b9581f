#include "evenkeel/zero_optim/optimizer.h"

#include <c10/util/Type.h>

#include <algorithm>
#include <sstream>
#include <typeinfo>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "evenkeel/bucket/divergence.h"
#include "evenkeel/comm/agree.h"
#include "evenkeel/comm/collective.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/join/action_hook.h"
#include "evenkeel/join/joinable.h"
#include "evenkeel/join/phase.h"
#include "evenkeel/join/steps/step_control.h"
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

// The parameters of each group of an optimizer, by their index.
using Groups = std::vector<std::vector<int>>;

// Returns the parameters of all groups.
std::vector<int> AllOf(const Groups& groups) {
  std::vector<int> all;
  for (const std::vector<int>& group : groups) all.insert(all.end(), group.begin(), group.end());
  return all;
}

// Returns an error for a parameter whose gradients are not reduced.
absl::StatusOr<Groups> GroupsOf(const Replica& replica, const torch::optim::Optimizer& optimizer) {
  Groups groups;
  for (const auto& group : optimizer.param_groups()) {
    const std::string place = absl::StrCat(" of parameter group ", groups.size());
    std::vector<int>& indices = groups.emplace_back();
    for (const torch::Tensor& tensor : group.params()) {
      const auto found = replica.index_of.find(tensor.unsafeGetTensorImpl());
      if (found == replica.index_of.end()) {
        std::string name = absl::StrCat("tensor ", indices.size(), place, ", of sizes ",
                                        c10::str(tensor.sizes()), ",");
        for (const auto& item : replica.module->named_parameters())
          if (item.value().is_same(tensor))
            name = absl::StrCat("parameter \"", item.key(), "\"", place);
        return absl::InvalidArgumentError(absl::StrCat(
            name,
            " is not a parameter that the DataParallel of this optimizer has, so its gradient is "
            "not reduced: make the DataParallel of a module with all layers, and the optimizer of "
            "its parameters()"));
      }
      if (replica.set.is_ignored(found->second))
        return absl::InvalidArgumentError(
            absl::StrCat("parameter \"", replica.NameOf(found->second), "\"", place,
                         " is in DataParallelOptions::ignored, so its gradient is not reduced: "
                         "train it with an optimizer of torch of its own"));
      indices.push_back(found->second);
    }
  }
  return groups;
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

// Names and values, in a fixed order.
using Settings = std::vector<std::pair<std::string, std::string>>;

// Adds the settings if `options` has this type.
template <class Options>
bool AddSettings(const torch::optim::OptimizerOptions& options, Settings& settings) {
  const auto* known = dynamic_cast<const Options*>(&options);
  if (known == nullptr) return false;
  const auto add = [&](const char* name, double value) {
    settings.emplace_back(name, SettingText(value));
  };
  const auto add_flag = [&](const char* name, bool value) {
    settings.emplace_back(name, value ? "true" : "false");
  };
  if constexpr (requires { known->weight_decay(); }) add("weight_decay", known->weight_decay());
  if constexpr (requires { known->momentum(); }) add("momentum", known->momentum());
  if constexpr (requires { known->dampening(); }) add("dampening", known->dampening());
  if constexpr (requires { known->nesterov(); }) add_flag("nesterov", known->nesterov());
  if constexpr (requires { known->betas(); }) {
    add("betas[0]", std::get<0>(known->betas()));
    add("betas[1]", std::get<1>(known->betas()));
  }
  if constexpr (requires { known->eps(); }) add("eps", known->eps());
  if constexpr (requires { known->amsgrad(); }) add_flag("amsgrad", known->amsgrad());
  if constexpr (requires { known->alpha(); }) add("alpha", known->alpha());
  if constexpr (requires { known->centered(); }) add_flag("centered", known->centered());
  if constexpr (requires { known->lr_decay(); }) {
    add("lr_decay", known->lr_decay());
    add("initial_accumulator_value", known->initial_accumulator_value());
  }
  return true;
}

Settings SettingsOf(const torch::optim::OptimizerOptions& options) {
  using namespace torch::optim;
  Settings settings = {{"lr", SettingText(options.get_lr())}};
  if (AddSettings<SGDOptions>(options, settings) || AddSettings<AdamOptions>(options, settings) ||
      AddSettings<AdamWOptions>(options, settings) ||
      AddSettings<RMSpropOptions>(options, settings) ||
      AddSettings<AdagradOptions>(options, settings))
    return settings;
  try {  // Those of a type of the program's.
    torch::serialize::OutputArchive archive;
    options.serialize(archive);
    std::ostringstream bytes;
    archive.save_to(bytes);
    settings.emplace_back("hash of serialize()", absl::StrCat(StableHash(0, bytes.str())));
  } catch (const c10::Error&) {  // It has no serialize().
  }
  return settings;
}

std::vector<Settings> SettingsOf(const torch::optim::Optimizer& optimizer) {
  std::vector<Settings> settings;
  for (const auto& group : optimizer.param_groups())
    settings.push_back(SettingsOf(group.options()));
  return settings;
}

std::vector<Fact> FactsOf(const Replica& replica, const torch::optim::Optimizer& optimizer,
                          const Groups& groups, const std::vector<Settings>& settings) {
  std::vector<Fact> facts = {
      {"the class of the optimizer", c10::demangle(typeid(optimizer).name())},
      {"the number of parameter groups", absl::StrCat(groups.size())}};
  std::vector<std::string> group_of(replica.params.size(), "none");
  for (size_t i = 0; i < groups.size(); ++i) {
    for (const auto& [name, value] : settings[i])
      facts.push_back({absl::StrCat("parameter group ", i), absl::StrCat(name, "=", value)});
    for (const int param : groups[i]) group_of[param] = absl::StrCat(i);
  }
  for (size_t i = 0; i < group_of.size(); ++i)
    facts.push_back(
        {absl::StrCat("the parameter group of \"", replica.NameOf(static_cast<int>(i)), "\""),
         group_of[i]});
  return facts;
}

}  // namespace

// ---- Optimizer ----

struct Optimizer::State {
  // Throws if the groups are not those of the creation.
  void CheckGroups(const torch::optim::Optimizer& optimizer) const;
  // Copies torch's rates to the core. Throws if other settings have changed.
  void PassRates(const torch::optim::Optimizer& from) const;
  // Copies rates to torch: on ranks that were exhausted they are those of the others.
  void TakeRates(torch::optim::Optimizer& to) const;
  // By parameter, of those that each step rounds from a master copy.
  std::vector<std::pair<int, uint64_t>> HashesOfRounded() const;

  std::shared_ptr<Replica> replica;
  Groups groups;
  std::unique_ptr<evenkeel::Optimizer> core;
  StepOptions next;
};

void Optimizer::State::CheckGroups(const torch::optim::Optimizer& optimizer) const {
  if (optimizer.param_groups().size() != groups.size())
    Refuse("a parameter group was added; pass all groups at creation");
  const Groups now = Value(GroupsOf(*replica, optimizer));
  if (now == groups) return;
  for (size_t i = 0; i < now.size(); ++i) {
    const auto require_in = [&](const auto& params, const auto& others, const char* change) {
      for (const int param : params)
        if (std::count(others.begin(), others.end(), param) == 0)
          Refuse(absl::StrCat("parameter \"", replica->NameOf(param), "\" was ", change,
                              " parameter group ", i,
                              " after creation; pass all parameters at creation, and freeze those "
                              "to be trained later with requires_grad_(false)"));
    };
    require_in(now[i], groups[i], "added to");
    require_in(groups[i], now[i], "removed from");
  }
}

std::vector<std::pair<int, uint64_t>> Optimizer::State::HashesOfRounded() const {
  std::vector<std::pair<int, uint64_t>> hashes;
  for (const int i : AllOf(groups)) {
    const torch::Tensor& tensor = replica->params[i].tensor;
    if (tensor.element_size() == 2) hashes.emplace_back(i, HashOf(MemoryOf(tensor)));
  }
  return hashes;
}

void Optimizer::State::PassRates(const torch::optim::Optimizer& from) const {
  for (int i = 0; i < core->groups().size(); ++i) {
    UpdateRule rule = RuleOf(from.param_groups()[i].options());
    const UpdateRule& own = core->groups()[i].rule;
    if (rule == own) continue;
    const double rate = LearningRate(rule);
    SetLearningRate(rule, LearningRate(own));
    if (!(rule == own))
      Refuse(absl::StrCat("the settings of parameter group ", i, " have changed from ",
                          ToString(own), " to ", ToString(rule),
                          "; only the rate may change after creation"));
    Check(core->SetLearningRate(GroupName(i), rate));
  }
}

void Optimizer::State::TakeRates(torch::optim::Optimizer& to) const {
  for (int i = 0; i < core->groups().size(); ++i)
    to.param_groups()[i].options().set_lr(LearningRate(core->groups()[i].rule));
}

Optimizer::Optimizer(DataParallelBase& ddp, std::vector<torch::optim::OptimizerParamGroup> groups,
                     std::unique_ptr<torch::optim::OptimizerOptions> defaults,
                     const OptimizerOptions& options)
    : torch::optim::Optimizer(std::move(groups), std::move(defaults)),
      state_(std::make_shared<State>()),
      exceptions_at_creation_(std::uncaught_exceptions()) {
  state_->replica = ddp.replica();
  state_->groups = Value(GroupsOf(*state_->replica, *this));
  std::vector<ParameterGroup> core_groups;
  for (size_t i = 0; i < state_->groups.size(); ++i)
    core_groups.push_back({.name = GroupName(i),
                           .params = state_->groups[i],
                           .rule = RuleOf(param_groups()[i].options())});
  // Create() may move gradients to other buckets.
  const absl::Cleanup follow = [&] { state_->replica->FollowGradients(); };
  state_->core = Value(evenkeel::Optimizer::Create(
      *ddp.replica()->core, core_groups, {.placement = CorePlacement(options.placement)}));
  ddp.replica()->optimizers.push_back({.joinable = state_->core.get(),
                                       .after_loop = [this] { state_->PassRates(*this); },
                                       .after_join = [this] { state_->TakeRates(*this); }});
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
  state_->CheckGroups(*this);
  replica.FinishUnreached();
  const std::vector<int> params = AllOf(state_->groups);
  replica.CheckGradients(params, /*may_clear=*/true);
  replica.TakeGradients();
  state_->PassRates(*this);
  const StepOptions options = std::exchange(state_->next, {});
  {
    const int64_t before = state_->core->steps_finished();
    const absl::Cleanup mark = [&] {  // Also if a function after the step throws.
      if (state_->core->steps_finished() > before) replica.MarkUsedUp(params, options.grad_scale);
    };
    Check(state_->core->Step(options));
  }
  for (const auto& group : param_groups()) {
    for (const torch::Tensor& param : group.params())
      if (param.requires_grad()) torch::autograd::impl::bump_version(param);
  }
  return loss;
}

void Optimizer::after_step(std::function<void()> function) {
  Check(state_->core->AfterUpdate([this, function = std::move(function)] {
    const at::NoGradGuard no_grad;
    state_->TakeRates(*this);
    const auto before = state_->HashesOfRounded();
    function();
    const auto after = state_->HashesOfRounded();
    for (size_t i = 0; i < before.size(); ++i)
      if (before[i] != after[i])
        Refuse(absl::StrCat("a function of after_step() changed parameter \"",
                            state_->replica->NameOf(before[i].first),
                            "\" of 16 bits, but the next step rounds it from its float32 master "
                            "copy: keep it in float32, under autocast"));
    state_->PassRates(*this);
    return absl::OkStatus();
  }));
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
  const std::vector<int> params = AllOf(state_->groups);
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
  // Throws on all ranks unless they have the same optimizer, which can be used.
  static std::shared_ptr<State> Create(const std::shared_ptr<Replica>& replica,
                                       torch::optim::Optimizer& optimizer) {
    absl::StatusOr<Groups> groups = GroupsOf(*replica, optimizer);
    if (dynamic_cast<torch::optim::LBFGS*>(&optimizer) != nullptr)
      groups = absl::InvalidArgumentError(
          "LBFGS calls its closure several times in a step, which ranks without a batch cannot "
          "repeat: outside of join() call its own step(), with a closure that returns the mean of "
          "the ranks' losses (Group::all_reduce())");
    const std::vector<Settings> settings = SettingsOf(optimizer);
    Check(VerifySame(
        *replica->group->comm, "Joined", groups.status(),
        groups.ok() ? FactsOf(*replica, optimizer, *groups, settings) : std::vector<Fact>()));
    return std::make_shared<State>(replica, optimizer, *std::move(groups), settings);
  }
  State(std::shared_ptr<Replica> of, torch::optim::Optimizer& optimizer, Groups groups,
        std::vector<Settings> settings)
      : Joinable(of->group->comm.get(), "Joined"),
        replica(std::move(of)),
        optimizer(optimizer),
        groups_(std::move(groups)),
        settings_(std::move(settings)) {
    replica->optimizers.push_back({.joinable = this});
  }
  ~State() override { ReportUnwinding(); }

  // A step of a rank with a batch, for those without one.
  struct StepAction {
    std::optional<double> factor;  // Of the gradients.
    std::string rates;             // Rates().
    std::vector<uint64_t> hashes;  // Hashes().
    static void VisitFields(auto& self, auto& visit) {
      visit(self.factor, self.rates, self.hashes);
    }
  };
  absl::StatusOr<std::unique_ptr<JoinHook>> MakeJoinHook(const evenkeel::JoinOptions&) override {
    return std::make_unique<ActionHook<StepAction>>(
        [this](const StepAnswer&, const StepAction& action) { return Repeat(action); },
        [this](bool is_last_joiner) { return TakeLastRates(is_last_joiner); });
  }
  JoinPhase join_phase() const override { return JoinPhase::kOptimizer; }
  const void* trained_set() const override { return &replica->set; }

  torch::Tensor Step(const torch::optim::Optimizer::LossClosure& closure) {
    const torch::Tensor loss = LossOf(closure);
    const Groups groups = TakeGradients();
    const StepAnswer answer = Value(Value(Notify())->Wait());
    if (!answer.everyone_active()) {
      const StepAction action{.factor = factor_, .rates = Rates(), .hashes = Hashes(groups)};
      values_ = StableHash(0, absl::StrJoin(action.hashes, " "));
      Check(ActionHook<StepAction>::Announce(*this, action));
    }
    const PhaseScope phase(communicator(), StepPhase::kOptimizer);
    Update(groups);
    return loss;
  }

  std::string FactorText() const { return factor_.has_value() ? SettingText(*factor_) : ""; }
  // Returns hashes of the values: ranks without a batch compare them with their own.
  std::vector<uint64_t> Hashes(const Groups& groups) const {
    std::vector<uint64_t> hashes;
    for (const int i : AllOf(groups)) hashes.push_back(HashOf(MemoryOf(replica->params[i].tensor)));
    return hashes;
  }
  absl::Status Repeat(const StepAction& action) {
    EK_ASSIGN_OR_RETURN(const Groups groups, GroupsOf(*replica, optimizer));
    const std::vector<uint64_t>& theirs = action.hashes;
    const std::vector<uint64_t> mine = Hashes(groups);
    if (theirs.size() != mine.size())
      return absl::FailedPreconditionError(absl::StrCat(
          "the optimizer has ", theirs.size(), " parameters on the ranks with a batch, ",
          mine.size(), " on this one: change its groups outside of join()"));
    values_ = StableHash(0, absl::StrJoin(theirs, " "));
    for (size_t i = 0; i < mine.size(); ++i) {
      if (mine[i] == theirs[i]) continue;
      return absl::FailedPreconditionError(
          absl::StrCat("parameter \"", replica->NameOf(AllOf(groups)[i]),
                       "\" is not equal on all ranks: those with a batch have changed it after "
                       "step() inside join(), where ranks without a batch do not do the same; pass "
                       "such code to the optimizer's after_step(), which runs it on all ranks"));
    }
    replica->AdoptGradients(/*had_gradient=*/{});
    EK_RETURN_IF_ERROR(TakeRates(action.rates));
    if (action.factor.has_value()) ScaleGradients(groups, *action.factor);
    Update(groups);
    optimizer.zero_grad();
    return absl::OkStatus();
  }

  // Ends the reduction, and checks that the step may use what is there.
  Groups TakeGradients() {
    CheckUsable(*replica);
    replica->FinishUnreached();
    Groups groups = Value(GroupsOf(*replica, optimizer));
    for (const std::vector<int>& group : groups)
      replica->CheckGradients(group, /*may_clear=*/false);
    return groups;
  }

  // Before a step, which is skipped unless all gradients are finite: as they are equal on all
  // ranks, so is this.
  void ScaleGradients(const Groups& groups, double factor) {
    factor_ = factor;
    is_skipped = !replica->ScaleGradients(AllOf(groups), factor);
  }

  void Update(const Groups& groups) {
    is_skipped = is_skipped && factor_.has_value();  // Not that of the last step.
    if (!is_skipped) optimizer.step();
    CountStep(Changes(groups));
    factor_.reset();
    values_.reset();
    const at::NoGradGuard no_grad;
    for (size_t i = 0; i < after_step.size(); ++i) after_step[i]();  // One may add another.
  }

  // Returns the differences from what was compared at creation.
  std::string Changes(const Groups& groups) const {
    // Never empty: an empty text would not be compared.
    std::vector<std::string> changes = {
        absl::StrCat("functions after the step=", after_step.size())};
    if (factor_.has_value()) changes.push_back(absl::StrCat("scale of gradients=", FactorText()));
    if (values_.has_value())
      changes.push_back(absl::StrCat("hash of values=", absl::Hex(*values_)));
    const std::vector<Settings> now = SettingsOf(optimizer);
    for (size_t i = 0; i < now.size(); ++i) {
      for (size_t k = 0; k < now[i].size(); ++k) {
        if (i < settings_.size() && now[i][k] == settings_[i][k]) continue;
        changes.push_back(absl::StrCat(now[i][k].first, " of group ", i, "=", now[i][k].second));
      }
    }
    if (groups != groups_) {
      uint64_t hash = groups.size();
      for (const std::vector<int>& group : groups)
        hash = StableHash(hash, absl::StrJoin(group, " "));
      changes.push_back(absl::StrCat("hash of the parameter groups=", absl::Hex(hash)));
    }
    constexpr size_t kMost = 8;  // A part of the record that each step sends.
    if (changes.size() > kMost) {
      changes[kMost] = absl::StrCat("hash of all settings=",
                                    absl::Hex(StableHash(0, absl::StrJoin(changes, ", "))));
      changes.resize(kMost + 1);
    }
    return absl::StrCat(absl::StrJoin(changes, ", "), replica->MissingText(AllOf(groups)));
  }

  std::string Rates() const {
    std::vector<std::string> rates;
    for (const auto& group : optimizer.param_groups())
      rates.push_back(SettingText(group.options().get_lr()));
    return absl::StrJoin(rates, " ");
  }
  absl::Status TakeRates(absl::string_view text) {
    const std::vector<absl::string_view> rates = absl::StrSplit(text, ' ');
    auto& groups = optimizer.param_groups();
    if (rates.size() != groups.size())
      return absl::FailedPreconditionError(
          absl::StrCat("rank ", communicator().rank(), " has ", groups.size(),
                       " parameter groups, but the ranks with a batch have ", rates.size()));
    for (size_t i = 0; i < groups.size(); ++i) {
      double rate = 0;
      if (!absl::SimpleAtod(rates[i], &rate))
        return absl::InvalidArgumentError(absl::StrCat("\"", rates[i], "\" is not a rate"));
      groups[i].options().set_lr(rate);
    }
    return absl::OkStatus();
  }
  // Takes the rates with which the ranks that had batches to the end have ended the loop.
  absl::Status TakeLastRates(bool is_last_joiner) {
    EK_ASSIGN_OR_RETURN(const std::vector<std::string> rates,
                        AgreeOn(communicator(), absl::StrCat(join_name(), "/rates"),
                                absl::OkStatus(), is_last_joiner ? Rates() : ""));
    int source = -1;
    for (int rank = 0; rank < static_cast<int>(rates.size()); ++rank) {
      if (rates[rank].empty()) continue;
      if (source >= 0 && rates[rank] != rates[source])
        return absl::FailedPreconditionError(
            absl::StrCat("the ranks ended the loop with different rates: rank ", source, " has ",
                         rates[source], "; rank ", rank, " has ", rates[rank]));
      source = rank;
    }
    return source < 0 ? absl::OkStatus() : TakeRates(rates[source]);
  }

  const std::shared_ptr<Replica> replica;
  torch::optim::Optimizer& optimizer;
  std::vector<std::function<void()>> after_step;
  bool is_skipped = false;  // The last step, or the next one.

 private:
  std::optional<double> factor_;    // The gradients of the next step have been multiplied by it.
  std::optional<uint64_t> values_;  // Before a step that not all ranks make: of all values.
  const Groups groups_;             // At creation, as the settings.
  const std::vector<Settings> settings_;
};

Joined::Joined(DataParallelBase& ddp, torch::optim::Optimizer& optimizer)
    : state_(State::Create(ddp.replica(), optimizer)),
      exceptions_at_creation_(std::uncaught_exceptions()) {}

Joined::~Joined() {
  state_->replica->Forget(state_.get());
  const auto group = state_->replica->group;
  Park(group, std::move(state_), exceptions_at_creation_);
}

torch::Tensor Joined::step(torch::optim::Optimizer::LossClosure closure) {
  return state_->Step(closure);
}
void Joined::after_step(std::function<void()> function) {
  state_->after_step.push_back(std::move(function));
}
bool Joined::last_was_skipped() const { return state_->is_skipped; }
void Joined::take_scaled_gradients(double scale) {
  state_->ScaleGradients(state_->TakeGradients(), scale);
}
void Joined::zero_grad(bool set_to_none) { state_->optimizer.zero_grad(set_to_none); }

}  // namespace evenkeel::libtorch
