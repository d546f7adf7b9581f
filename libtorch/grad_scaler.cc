#include <limits>
#include <memory>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "evenkeel/libtorch/internal.h"
#include "evenkeel/zero_optim/loss_scaler.h"

namespace evenkeel::libtorch {
namespace {

LossScalerOptions CoreOptions(const GradScalerOptions& options) {
  if (!options.enabled)  // The scale stays 1, and ranks that disagree about that are an error.
    return {.initial_scale = 1, .growth_factor = 1};
  return {.initial_scale = options.init_scale,
          .growth_factor = options.growth_factor,
          .backoff_factor = options.backoff_factor,
          .growth_interval = options.growth_interval,
          .least_scale = std::numeric_limits<float>::min(),
          .largest_scale = 0x1p127};
}

// Losses are multiplied by it as a float32, gradients by one over that.
void CheckScale(double scale) {
  const LossScalerOptions limits = CoreOptions({});
  if (scale >= limits.least_scale && scale <= limits.largest_scale) return;
  Refuse(absl::StrCat("the scale of GradScaler is ", scale, "; it must be from ",
                      limits.least_scale, " to ", limits.largest_scale));
}

}  // namespace

struct GradScaler::State {
  std::shared_ptr<Group::State> group;
  std::unique_ptr<LossScaler> core;
  bool is_enabled = true;
  // Since the last update().
  std::set<const void*> unscaled, stepped;  // Optimizers.
  bool found_nonfinite = false;
};

GradScaler::GradScaler(Group& group, const GradScalerOptions& options)
    : state_(std::make_shared<State>()), exceptions_at_creation_(std::uncaught_exceptions()) {
  state_->group = group.state();
  state_->is_enabled = options.enabled;
  state_->core = Value(LossScaler::Create(state_->group->comm.get(), CoreOptions(options)));
  state_->group->scalers.push_back(state_->core.get());
}

GradScaler::~GradScaler() {
  const auto group = state_->group;
  std::erase(group->scalers, state_->core.get());
  Park(group, std::move(state_), exceptions_at_creation_);
}

// A factor of float32 keeps the product of a loss of 16 bits from overflowing.
torch::Tensor GradScaler::scale(const torch::Tensor& loss) const {
  return state_->is_enabled ? loss * torch::tensor(get_scale(), torch::kFloat) : loss;
}

template <class Any>
void GradScaler::Unscale(Any& optimizer) {
  if (!state_->is_enabled) return;
  if (state_->unscaled.contains(&optimizer))
    Refuse(absl::StrCat("unscale_() was called ",
                        state_->stepped.contains(&optimizer) ? "after step()" : "twice",
                        "; call update() once after the step() of each optimizer"));
  optimizer.take_scaled_gradients(1 / static_cast<double>(static_cast<float>(get_scale())));
  state_->unscaled.insert(&optimizer);
}

template <class Any>
void GradScaler::Step(Any& optimizer) {
  if (!state_->is_enabled) {
    optimizer.step();
    return;
  }
  if (state_->stepped.contains(&optimizer))
    Refuse("step() of GradScaler was called twice: call update() after the step()");
  if (!state_->unscaled.contains(&optimizer)) Unscale(optimizer);
  state_->stepped.insert(&optimizer);
  optimizer.step();
  state_->found_nonfinite |= optimizer.last_was_skipped();
}

void GradScaler::unscale_(Optimizer& optimizer) { Unscale(optimizer); }
void GradScaler::unscale_(Joined& optimizer) { Unscale(optimizer); }
void GradScaler::step(Optimizer& optimizer) { Step(optimizer); }
void GradScaler::step(Joined& optimizer) { Step(optimizer); }

void GradScaler::update(std::optional<double> new_scale) {
  if (!state_->is_enabled) return;
  if (state_->stepped.empty() && !new_scale.has_value())
    Refuse("update() of GradScaler was called without a step() before");
  if (new_scale.has_value()) CheckScale(*new_scale);
  Check(state_->core->Update(std::exchange(state_->found_nonfinite, false), new_scale));
  state_->unscaled.clear();
  state_->stepped.clear();
}

double GradScaler::get_scale() const { return state_->core->scale(); }
bool GradScaler::is_enabled() const { return state_->is_enabled; }

GradScalerState GradScaler::state() const {
  const LossScalerState& core = state_->core->state();
  return {.scale = core.scale, .growth_tracker = core.good_steps};
}

void GradScaler::load_state(const GradScalerState& state) {
  CheckScale(state.scale);
  Check(state_->core->LoadState({.scale = state.scale, .good_steps = state.growth_tracker}));
}

}  // namespace evenkeel::libtorch
