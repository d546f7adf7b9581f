#include "evenkeel/zero_optim/loss_scaler.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "evenkeel/comm/agree.h"
#include "evenkeel/comm/base/fields.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/join/action_hook.h"

namespace evenkeel {
namespace {

absl::Status Check(const LossScalerOptions& options) {
  const auto refuse = [](absl::string_view what, auto value, absl::string_view rule) {
    return absl::InvalidArgumentError(
        absl::StrCat("a loss scaler's ", what, " is ", value, ", but must be ", rule));
  };
  const double most = options.largest_scale;
  if (!(options.least_scale > 0) || !std::isfinite(options.least_scale)) {
    return refuse("least scale", options.least_scale, "finite and above 0");
  }
  if (!(most >= options.least_scale) || !std::isfinite(most)) {
    return refuse("largest scale", most, "finite and not below the least");
  }
  if (!(options.initial_scale >= options.least_scale && options.initial_scale <= most)) {
    return refuse("initial scale", options.initial_scale, "between the least and the largest");
  }
  if (!(options.growth_factor >= 1) || !std::isfinite(options.growth_factor)) {
    return refuse("growth factor", options.growth_factor, "finite and at least 1");
  }
  if (!(options.backoff_factor > 0 && options.backoff_factor < 1)) {
    return refuse("backoff factor", options.backoff_factor, "above 0 and below 1");
  }
  if (options.growth_interval < 1)
    return refuse("growth interval", options.growth_interval, "at least 1");
  return absl::OkStatus();
}

constexpr absl::string_view kState = "a loss scaler's state";

absl::Status Check(const LossScalerState& state) {
  if (std::isfinite(state.scale) && state.scale > 0 && state.good_steps >= 0)
    return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(kState, ": value out of range"));
}

std::vector<Fact> FactsOf(const LossScalerOptions& options) {
  const auto text = [](double value) { return absl::StrFormat("%.17g", value); };
  return {{"initial_scale", text(options.initial_scale)},
          {"growth_factor", text(options.growth_factor)},
          {"backoff_factor", text(options.backoff_factor)},
          {"growth_interval", absl::StrCat(options.growth_interval)},
          {"least_scale", text(options.least_scale)},
          {"largest_scale", text(options.largest_scale)}};
}

// For the comparison of the ranks' steps.
std::string ScaleText(const LossScalerState& state) {
  return absl::StrFormat("scale=%.17g", state.scale);
}

}  // namespace

std::string LossScalerState::Serialize() const { return internal::ToBytes(*this); }

absl::StatusOr<LossScalerState> LossScalerState::Parse(absl::string_view bytes) {
  EK_ASSIGN_OR_RETURN(LossScalerState state, internal::FromBytes<LossScalerState>(bytes, kState));
  EK_RETURN_IF_ERROR(Check(state));
  return state;
}

LossScalerState NextScale(const LossScalerOptions& options, LossScalerState state,
                          bool found_nonfinite) {
  if (found_nonfinite) {
    return {.scale = std::max(state.scale * options.backoff_factor,
                              std::min(state.scale, options.least_scale))};
  }
  if (++state.good_steps < options.growth_interval) return state;
  return {.scale = std::min(state.scale * options.growth_factor,
                            std::max(state.scale, options.largest_scale))};
}

absl::StatusOr<std::unique_ptr<LossScaler>> LossScaler::Create(Communicator* comm,
                                                               LossScalerOptions options) {
  std::unique_ptr<LossScaler> scaler(new LossScaler(comm, options));
  EK_RETURN_IF_ERROR(Annotate(VerifySame(*comm, absl::StrCat("options/", scaler->join_name()),
                                         Check(options), FactsOf(options)),
                              scaler->join_name()));
  return scaler;
}

absl::Status LossScaler::Update(bool found_nonfinite, std::optional<double> new_scale) {
  if (new_scale.has_value() && (!std::isfinite(*new_scale) || *new_scale <= 0))
    return absl::InvalidArgumentError(absl::StrCat(join_name(), ": the new scale is ", *new_scale,
                                                   ", but must be finite and above 0"));
  EK_RETURN_IF_ERROR(Notify().status());
  if (new_scale.has_value()) {
    state_.scale = *new_scale;
  } else {
    state_ = NextScale(options_, state_, found_nonfinite);
  }
  EK_RETURN_IF_ERROR(ActionHook<LossScalerState>::Announce(*this, state_));
  CountStep(ScaleText(state_));
  return absl::OkStatus();
}

absl::Status LossScaler::LoadState(const LossScalerState& state) {
  if (join_config().enable) return InsideJoinError(join_name(), "LoadState");
  EK_RETURN_IF_ERROR(Check(state));
  state_ = state;
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<JoinHook>> LossScaler::MakeJoinHook(const JoinOptions& /*options*/) {
  return std::make_unique<ActionHook<LossScalerState>>(
      [this](const StepAnswer& /*step*/, const LossScalerState& state) -> absl::Status {
        EK_RETURN_IF_ERROR(Check(state));
        state_ = state;
        CountStep(ScaleText(state_));
        return absl::OkStatus();
      });
}

absl::StatusOr<Restore> LossScaler::KeepState(std::set<const void*>& /*kept*/) {
  return [this, own = state_] {
    state_ = own;
    return absl::OkStatus();
  };
}

absl::Status LossScaler::TakeOver(StateTransfer& transfer) {
  EK_ASSIGN_OR_RETURN(const ControlChannel::Parts parts, Exchange("state_of", state_.Serialize()));
  EK_ASSIGN_OR_RETURN(state_, LossScalerState::Parse(parts[transfer.source]));
  return absl::OkStatus();
}

}  // namespace evenkeel
