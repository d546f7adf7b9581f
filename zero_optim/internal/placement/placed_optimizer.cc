#include "evenkeel/zero_optim/internal/placement/placed_optimizer.h"

#include <algorithm>
#include <utility>
#include <variant>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "evenkeel/bucket/divergence.h"
#include "evenkeel/comm/collective.h"
#include "evenkeel/comm/failure_info.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/work.h"
#include "evenkeel/join/action_hook.h"
#include "evenkeel/join/steps/step_control.h"
#include "evenkeel/zero_optim/internal/gradients.h"

namespace evenkeel::internal {
namespace {

constexpr absl::string_view kAfter = "AfterUpdate() (after_step() in libtorch/)";

}  // namespace

PlacedOptimizer::PlacedOptimizer(Communicator& comm, ParameterSet& params, ParameterGroups groups,
                                 OptimizerOptions options)
    : Optimizer(&comm, "optimizer"),
      params_(&params),
      updater_(&params, std::move(groups), comm.runtime()),
      options_(std::move(options)) {}

absl::Status PlacedOptimizer::Start(absl::Status own) {
  if (own.ok()) own = Complete(options_.check_replicas);
  if (own.ok()) own = updater_.Check();
  if (own.ok() && is_split()) own = updater_.CheckDense();
  if (own.ok() && is_split()) own = TakeChannel();
  if (own.ok()) own = Init();
  EK_RETURN_IF_ERROR(CheckSame(own, OtherSettings(), SameIn::kEverything));
  if (is_split()) Register();
  return absl::OkStatus();
}

absl::Status PlacedOptimizer::TakeChannel() {
  EK_ASSIGN_OR_RETURN(channel_, communicator().OpenChannel(join_name()));
  return OnChannel();
}

void PlacedOptimizer::Register() {
  StepControl::Of(communicator()).Register(this);
  is_registered_ = true;
}

void PlacedOptimizer::Unregister(Communicator* comm) {
  if (std::exchange(is_registered_, false) && comm != nullptr)
    StepControl::Of(*comm).Unregister(this);
}

Communicator* PlacedOptimizer::Detach() {
  ReportUnwinding();
  Unregister(living_group());
  return living_group();
}

// Another group -----------------------------------------------------------------------------------

void PlacedOptimizer::LeaveGroup(Communicator* old, const GroupChange& /*change*/) {
  // It uses the old group, which has ended, so that only this rank's files are waited for.
  if (old != nullptr) FinishSave(absl::InfiniteDuration());
  Unregister(old);
  last_step_.reset();
  has_begun_ = false;  // Some rank of the next group may not have begun.
  missing_ = 0;
  device_flags_.Forget();
  OnLeave(old);
}

absl::Status PlacedOptimizer::EnterGroup(const GroupChange& change) {
  if (is_split() && change.has_newcomers) {
    return absl::FailedPreconditionError(
        absl::StrCat(join_name(),
                     ": a lost rank is not replaced where the optimizer's state is split over the "
                     "ranks: use the placement Replicated, or go on without the rank"));
  }
  if (is_split()) EK_RETURN_IF_ERROR(TakeChannel());
  EK_RETURN_IF_ERROR(OnEnter(change));
  if (is_split()) Register();
  return absl::OkStatus();
}

// The program's code before and after a step ------------------------------------------------------

absl::Status PlacedOptimizer::BeforeUpdate(
    std::function<absl::Status(absl::Span<const GradientPiece>)> function) {
  if (updates_in_backward()) return Lacks("BeforeUpdate() with update_in_backward");
  before_update_.push_back(std::move(function));
  return absl::OkStatus();
}

absl::Status PlacedOptimizer::AfterUpdate(std::function<absl::Status()> function) {
  if (updates_in_backward() && !is_split()) return Lacks("AfterUpdate() with update_in_backward");
  after_update_.push_back(std::move(function));
  return absl::OkStatus();
}

bool PlacedOptimizer::ComparesFirstValues() const {
  return !has_begun_ && communicator().world_size() > 1 && params_->CheckDetached().ok();
}

absl::Status PlacedOptimizer::CheckFirstValues() {
  if (ComparesFirstValues()) {
    EK_ASSIGN_OR_RETURN(const std::optional<Divergence> found, CompareValues());
    if (found.has_value()) {
      return Refusal(
          ": before its first step the parameters are not equal on all ranks: ", ToString(*found),
          ": broadcast the values of one rank, or use a DataParallel, which does so");
    }
  }
  has_begun_ = true;
  return absl::OkStatus();
}

std::vector<int> PlacedOptimizer::ExhaustedRanks() const {
  std::vector<int> ranks;
  const std::vector<int> active = StepControl::Of(communicator()).active_ranks();
  for (int rank = 0; rank < communicator().world_size(); ++rank) {
    if (!std::ranges::binary_search(active, rank)) ranks.push_back(rank);
  }
  return ranks;
}

std::vector<uint64_t> PlacedOptimizer::HashTensors(absl::Span<const GradientSource> sources) const {
  std::vector<uint64_t> hashes;
  if (updater_.is_on_device()) return hashes;
  for (int i = 0; i < params_->size(); ++i) {
    const bool is_own = groups().contains(i) && !params_->is_ignored(i);
    const bool has_gradient = is_own && sources[i] == GradientSource::kHere &&
                              params_->grad_state(i) == GradState::kReduced;
    hashes.push_back(is_own ? HashOf((*params_)[i].value) : 0);
    hashes.push_back(has_gradient ? HashOf(ElementsOf(*params_, i)) : 0);
  }
  return hashes;
}

absl::Status PlacedOptimizer::CheckUnchanged(const StepMessage& step) const {
  const std::vector<uint64_t> own = HashTensors(step.sources);
  for (size_t i = 0; i < std::min(own.size(), step.hashes.size()); ++i) {
    const bool is_value = i % 2 == 0;
    // CheckFirstValues() follows, and has another cause to name.
    if (own[i] == step.hashes[i] || (is_value && ComparesFirstValues())) continue;
    const std::string& name = (*params_)[static_cast<int>(i / 2)].name;
    return is_value
               ? ChangedError(absl::StrCat("\"", name, "\""), kAfter)
               : ChangedError(absl::StrCat("the gradient of \"", name, "\""), "BeforeUpdate()");
  }
  return absl::OkStatus();
}

absl::StatusOr<std::optional<Divergence>> PlacedOptimizer::CompareValues() const {
  std::vector<NamedView> values = NamedValuesOf(*params_);
  for (int i = 0; i < params_->size(); ++i)
    if (!groups().contains(i)) values[i].view = TensorView();
  return FindDivergence(
      values, communicator(),
      {.stream = updater_.stream(), .topic = absl::StrCat("values/", join_name())});
}

absl::Status PlacedOptimizer::CheckValuesUnchanged() const {
  if (updater_.is_on_device() || ExhaustedRanks().empty()) return absl::OkStatus();
  EK_ASSIGN_OR_RETURN(const std::optional<Divergence> found, CompareValues());
  return found.has_value() ? ChangedError(absl::StrCat("\"", found->tensor, "\""), kAfter)
                           : absl::OkStatus();
}

absl::Status PlacedOptimizer::ChangedError(absl::string_view tensor,
                                           absl::string_view function) const {
  const int64_t step = steps_finished() + 1;
  const std::vector<int> exhausted = ExhaustedRanks();
  return WithFailureInfo(
      absl::FailedPreconditionError(absl::StrCat(
          tensor, " is not equal on all ranks when step ", step, " of ", join_name(),
          " begins: ", RankList(exhausted), exhausted.size() == 1 ? " has" : " have",
          " no more input, and did not run the code of the loop that changed it; pass such code to "
          "the optimizer's ",
          function, ", which runs it on all ranks; if it is there, it must do the same on each")),
      {.kind = FailureKind::kDisagreement,
       .ranks = StepControl::Of(communicator()).active_ranks(),
       .step = step});
}

std::vector<GradientPiece> PlacedOptimizer::WholePieces(
    absl::Span<const GradientSource> sources) const {
  std::vector<GradientPiece> pieces;
  for (int i = 0; i < params_->size() && has_functions_before(); ++i) {
    if (sources[i] == GradientSource::kHere)
      pieces.push_back({.param = i, .gradient = ElementsOf(*params_, i)});
  }
  return pieces;
}

absl::StatusOr<std::vector<GradientSource>> PlacedOptimizer::Choose(const TrainableMask& mask,
                                                                    LocalGradients local) const {
  const bool is_alone = communicator().world_size() == 1 &&
                        join_config().divisor.by() != DivideBy::kSamples;  // Nothing to divide by.
  return ChooseSources(*params_, groups(), mask, is_alone ? LocalGradients::kComplete : local,
                       communicator().rank());
}

absl::StatusOr<GradientCheck> PlacedOptimizer::Total(GradientMeasure measure, double norm,
                                                     double grad_scale) {
  if (communicator().world_size() > 1) {
    EK_RETURN_IF_ERROR(
        channel_
            ->AllReduce(absl::MakeSpan(measure.parts().data(), measure.parts().size()),
                        norm == kInfinityNorm ? ReduceOp::kMax : ReduceOp::kSum,
                        {.role = Role::kShard})
            .Wait());
  }
  return measure.Result(grad_scale);
}

absl::Status PlacedOptimizer::MeasureStepThere(const StepOptions& options) {
  if (!NeedsCheck(options)) return absl::OkStatus();
  const double norm = NormOf(options);
  EK_RETURN_IF_ERROR(updater_.MeasureThere(kStepList, norm, updater_.stream()));
  return is_split() ? AddUpMeasure(updater_, norm, communicator(), *channel_) : absl::OkStatus();
}

absl::Status PlacedOptimizer::PrepareStepThere(const StepOptions& options, const TensorView& flags,
                                               bool may_be_unset) {
  const bool is_measured = NeedsCheck(options);
  EK_RETURN_IF_ERROR(updater_.PrepareThere(kStepList, options, is_measured, updater_.stream(),
                                           flags, may_be_unset));
  if (is_measured) checks_.SetThere(&updater_.device());
  return absl::OkStatus();
}

absl::Status PlacedOptimizer::RunBeforeUpdate(absl::Span<const GradientPiece> pieces) {
  for (size_t i = 0; i < before_update_.size(); ++i)  // A function may add another one.
    EK_RETURN_IF_ERROR(before_update_[i](pieces));
  return absl::OkStatus();
}

std::string PlacedOptimizer::MissingText(absl::Span<const GradientSource> sources) {
  constexpr int kNames = 2;
  int missing = 0;
  uint64_t hash = 0;
  std::string names;
  for (int i = 0; i < static_cast<int>(sources.size()); ++i) {
    if (sources[i] != GradientSource::kNone || !groups().contains(i) || params_->is_ignored(i) ||
        (*params_)[i].value.count == 0)
      continue;
    if (++missing <= kNames) absl::StrAppend(&names, "\"", (*params_)[i].name, "\" ");
    hash = StableHash(hash, static_cast<uint64_t>(i));
  }
  if (std::exchange(missing_, hash) == hash) return "";
  if (missing == 0) return "missing gradients=0";
  return absl::StrCat("missing gradients=", missing, " (", names, missing > kNames ? "... " : "",
                      absl::Hex(hash), ")");
}

absl::Status PlacedOptimizer::EndUpdate(const StepMessage& step) {
  std::vector<std::string> settings;
  const auto add = [&](std::string text) {
    if (!text.empty()) settings.push_back(std::move(text));
  };
  add(SettingsText(groups(), step.rules, step.options));
  add(MissingText(step.sources));
  uint64_t hash = 0;
  for (const uint64_t one : step.hashes) hash = StableHash(hash, one);
  if (hash != 0) add(absl::StrCat("hash of values and gradients=", absl::Hex(hash)));
  const auto add_count = [&](absl::string_view what, size_t count) {
    if (count > 0) add(absl::StrCat(what, "=", count));
  };
  add_count("functions before the step", before_update_.size());
  add_count("functions after the step", after_update_.size());
  CountStep(absl::StrJoin(settings, ", "));
  for (size_t i = 0; i < after_update_.size(); ++i)  // A function may add another one.
    EK_RETURN_IF_ERROR(after_update_[i]());
  return absl::OkStatus();
}

// Not supported by a placement --------------------------------------------------------------------

absl::string_view PlacedOptimizer::placement_name() const {
  constexpr absl::string_view kNames[] = {"Replicated", "WholeTensors", "Slices"};
  return kNames[placement().index()];
}

absl::Status PlacedOptimizer::Lacks(absl::string_view what) const {
  return absl::UnimplementedError(
      absl::StrCat(join_name(), ": the placement ", placement_name(), " has no ", what));
}

absl::Status PlacedOptimizer::CheckParam(int param) const {
  if (param >= 0 && param < params_->size()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(join_name(), ": there is no parameter ", param));
}

// Exhausted ranks ---------------------------------------------------------------------------------

absl::StatusOr<std::unique_ptr<JoinHook>> PlacedOptimizer::MakeJoinHook(
    const JoinOptions& /*options*/) {
  OnLoopBegin();
  return std::make_unique<ActionHook<OptimizerAction>>(
      [this](const StepAnswer& answer, const OptimizerAction& action) {
        return std::visit([&](const auto& kind) { return Repeat(answer, kind); }, action);
      },
      [this](bool is_last_joiner) { return EndLoop(is_last_joiner); },
      [this] { return OnExhausted(); });
}

absl::Status PlacedOptimizer::Announce(const OptimizerAction& action) {
  return ActionHook<OptimizerAction>::Announce(*this, action);
}

absl::Status PlacedOptimizer::AnnounceAfterStep(absl::string_view call,
                                                const OptimizerAction& action) {
  if (!join_config().enable) return absl::OkStatus();
  if (last_step_ == nullptr || last_step_ != StepControl::Of(communicator()).current()) {
    return Refusal(": inside a join, ", call,
                   " must follow the optimizer's step, before the next step begins");
  }
  return Announce(action);
}

absl::Status PlacedOptimizer::UnknownAction() const {
  return absl::InvalidArgumentError("an action that this optimizer does not support");
}

absl::Status PlacedOptimizer::Repeat(const StepAnswer& answer, const StepMessage& step) {
  EK_RETURN_IF_ERROR(step.CheckFor(params_->size()));
  return RepeatStep(answer, step);
}

absl::Status PlacedOptimizer::Repeat(const StepAnswer& answer, const CheckAction& check) {
  EK_RETURN_IF_ERROR(check.step.CheckFor(params_->size()));
  return RepeatCheck(answer, check.step);
}

absl::Status PlacedOptimizer::Repeat(const StepAnswer& /*answer*/,
                                     const RebalanceAction& /*rebalance*/) {
  return RebalanceNow();
}

absl::Status PlacedOptimizer::Repeat(const StepAnswer& /*answer*/, const SaveAction& save) {
  if (!save.is_async) return SaveNow(save.folder);
  StartSave(save.folder);  // The active ranks get its result.
  return absl::OkStatus();
}

// An exhausted rank has no use for the chunks that it receives.
absl::Status PlacedOptimizer::Repeat(const StepAnswer& /*answer*/, const VisitAction& visit) {
  EK_RETURN_IF_ERROR(CheckReceiver("VisitState", visit.to));
  return Stream(
      visit.to, [](const StateChunk&) { return absl::OkStatus(); }, Bytes{visit.chunk_bytes});
}

}  // namespace evenkeel::internal
