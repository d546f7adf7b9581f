// The loop runs; then this rank is dry and takes part in the others' steps until nobody is active:
//
//   record {joined} -> answer -> catch up with the plan -> what the lowest active rank does, in its order, until it
//   says that the step is over -> next record
//
// Which Joinables take part in a step, and what they do there (an optimizer's step, with its learning rate), is told by
// the lowest active rank over the control plane, so a dry rank guesses nothing.

#include "evenkeel/join/join.h"

#include <algorithm>
#include <cstdint>
#include <iostream>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "evenkeel/comm/collective.h"
#include "evenkeel/comm/status.h"

namespace evenkeel {
namespace {

absl::Status CheckList(absl::Span<Joinable* const> joinables) {
  if (joinables.empty()) return absl::InvalidArgumentError("RunJoined needs at least one Joinable");
  for (size_t i = 0; i < joinables.size(); ++i) {
    if (joinables[i] == nullptr) return absl::InvalidArgumentError(absl::StrCat("RunJoined: entry ", i, " is null"));
    if (&joinables[i]->communicator() != &joinables[0]->communicator()) {
      return absl::InvalidArgumentError(absl::StrCat("RunJoined: ", joinables[i]->join_name(), " and ",
                                                     joinables[0]->join_name(), " use different communicators"));
    }
    if (std::count(joinables.begin(), joinables.end(), joinables[i]) > 1) {
      return absl::InvalidArgumentError(
          absl::StrCat("RunJoined: ", joinables[i]->join_name(), " is in the list more than once"));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckOptions(const JoinOptions& options, const Communicator& comm) {
  if (options.min_active_ranks < 1 || options.min_active_ranks > comm.world_size()) {
    return absl::InvalidArgumentError(absl::StrCat("RunJoined: min_active_ranks is ", options.min_active_ranks,
                                                   " in a group of ", comm.world_size()));
  }
  if (!options.enable && options.divide_by == DivideBy::kSamples) {
    return absl::InvalidArgumentError("RunJoined: without enable, ranks do not tell each other their samples");
  }
  return absl::OkStatus();
}

}  // namespace

// One call of RunJoined(). Its lifetime is the scope: construction configures the Joinables, destruction resets them.
class JoinRun {
 public:
  JoinRun(absl::Span<Joinable* const> joinables, const JoinOptions& options)
      : joinables_(joinables.begin(), joinables.end()), options_(options), comm_(joinables[0]->communicator()) {
    JoinConfig config{.enable = options.enable,
                      .min_active_ranks = MinActiveRanks(),
                      .is_first = true,
                      .scope = this,
                      .stopped_at = &stopped_at_};
    std::vector<std::string> names;
    for (const Joinable* joinable : joinables_) {
      config.has_optimizer = config.has_optimizer || joinable->join_phase() == JoinPhase::kOptimizer;
      names.push_back(joinable->join_name());
    }
    std::sort(names.begin(), names.end());
    const std::string what = absl::StrJoin({absl::StrJoin(names, ","), absl::StrCat(config.min_active_ranks),
                                            absl::StrCat(static_cast<int>(options.divide_by))},
                                           "\n");
    for (Joinable* joinable : joinables_) {
      config.divisor = std::make_shared<StepDivisor>(options.enable ? options.divide_by : DivideBy::kInitialWorldSize);
      joinable->config_ = config;
      config.is_first = false;
    }
    std::stable_sort(joinables_.begin(), joinables_.end(),
                     [](const Joinable* a, const Joinable* b) { return a->join_phase() < b->join_phase(); });
    steps().SetScope(this, StableHash(1, what));
    steps().SetAgreement(options.enable);
    steps().RequireSamples(options.divide_by == DivideBy::kSamples);
    first_record_ = steps().records_sent();
    first_step_ = steps().steps_begun();
  }

  ~JoinRun() {
    for (Joinable* joinable : joinables_) joinable->config_ = JoinConfig();
    steps().SetScope(nullptr, 0);
    steps().SetAgreement(true);
    steps().RequireSamples(false);
  }

  absl::Status MakeHooks() {
    for (Joinable* joinable : joinables_) {
      EK_ASSIGN_OR_RETURN(std::unique_ptr<JoinHook> hook, joinable->MakeJoinHook(options_));
      if (hook == nullptr) {
        return absl::InternalError(absl::StrCat("RunJoined: ", joinable->join_name(), " made no hook"));
      }
      hooks_.push_back(std::move(hook));
    }
    return absl::OkStatus();
  }

  absl::Status Run(absl::FunctionRef<absl::Status(JoinScope&)> loop) {
    JoinScope scope(&comm_);
    absl::Status status = loop(scope);
    std::string where = Where();
    if (!options_.enable) {
      steps().AbandonStep();
    } else if (status.ok() && stopped_at_.has_value()) {
      status = absl::OutOfRangeError(absl::StrCat("rank ", comm_.rank(), ": all ranks have stopped early"));
    } else if (status.ok()) {
      status = Shadow();
      where = absl::StrCat("failed after its loop's ", steps_done_, " steps, while it followed the other ranks");
    }
    if (stopped_at_.has_value() && absl::IsOutOfRange(status)) {
      steps().AbandonStep();
      const absl::Status ended = EndAfterStop();
      if (ended.ok()) return status;
      status = ended;
    }
    if (!status.ok()) comm_.Abort(status, where);
    return status;
  }

 private:
  StepControl& steps() { return comm_.steps(); }

  int MinActiveRanks() const {
    return options_.throw_on_early_termination ? comm_.world_size() : options_.min_active_ranks;
  }

  // If ranks had run dry before the stop, they have followed others for a while: they end as after a whole loop.
  absl::Status EndAfterStop() {
    if (MinActiveRanks() >= comm_.world_size()) return absl::OkStatus();
    return RunPostHooks(/*is_last_joiner=*/!stopped_at_->records[comm_.rank()].joined);
  }

  absl::Status RunPostHooks(bool is_last_joiner) {
    for (size_t i = 0; i < joinables_.size(); ++i) {
      EK_RETURN_IF_ERROR(Annotate(hooks_[i]->PostHook(is_last_joiner), joinables_[i]->join_name()));
    }
    return absl::OkStatus();
  }

  // For the other ranks, when the loop has ended with an error.
  std::string Where() {
    const int64_t begun = steps().steps_begun() - first_step_;
    return begun == 0 ? "failed before the first step of its loop"
                      : absl::StrCat("failed in step ", begun, " of its loop");
  }

  absl::Status Shadow() {
    for (size_t i = 0; i < joinables_.size(); ++i) {
      EK_RETURN_IF_ERROR(Annotate(hooks_[i]->OnDry(), joinables_[i]->join_name()));
    }
    steps().EndStep();
    steps_done_ = steps().records_sent() - first_record_;
    bool is_last_joiner = true;
    for (int64_t shadowed = 0;; ++shadowed) {
      EK_ASSIGN_OR_RETURN(std::shared_ptr<StepTicket> ticket, steps().EnterJoined());
      EK_ASSIGN_OR_RETURN(const StepAnswer answer, ticket->Wait());
      if (answer.active == 0) break;
      is_last_joiner = false;
      if (answer.active < MinActiveRanks()) {
        stopped_at_ = answer;
        EK_RETURN_IF_ERROR(steps().CatchUp(answer));  // The next loop begins with the same plan everywhere.
        return absl::OutOfRangeError(
            absl::StrCat("rank ", comm_.rank(), " has exhausted all inputs after ", steps_done_, " steps",
                         MinActiveRanks() == comm_.world_size()
                             ? ""
                             : absl::StrCat(", and only ", answer.active, " of ", answer.world_size, " ranks have any"),
                         "; all ranks stop at step ", answer.step));
      }
      if (shadowed == 0 && options_.on_dry) options_.on_dry(steps_done_);
      if (shadowed == options_.skew_warning_steps) Warn();
      EK_RETURN_IF_ERROR(ShadowStep(answer));
    }
    return RunPostHooks(is_last_joiner);
  }

  absl::Status ShadowStep(const StepAnswer& answer) {
    EK_RETURN_IF_ERROR(steps().CatchUp(answer));
    while (true) {
      EK_ASSIGN_OR_RETURN(const StepAction action, steps().NextAction(answer));
      if (action.kind == StepAction::Kind::kEnd) return absl::OkStatus();
      size_t i = 0;
      while (i < joinables_.size() && joinables_[i]->join_name() != action.actor) ++i;
      if (i == joinables_.size()) {
        return absl::FailedPreconditionError(absl::StrCat("rank ", comm_.rank(), ": ", action.actor, " acts on rank ",
                                                          answer.lowest_active,
                                                          " but is not in the list of this rank"));
      }
      EK_RETURN_IF_ERROR(Annotate(action.kind == StepAction::Kind::kEntered
                                      ? hooks_[i]->MainHook(answer)
                                      : hooks_[i]->OnAction(answer, action.payload),
                                  action.actor));
    }
  }

  void Warn() {
    const std::string text =
        absl::StrCat("rank ", comm_.rank(), " had inputs for ", steps_done_, " steps and has shadowed ",
                     options_.skew_warning_steps, " since: with inputs so uneven training is slower than it need be");
    if (options_.warn) return options_.warn(text);
    std::cerr << text << std::endl;
  }

  std::vector<Joinable*> joinables_;  // By phase.
  std::vector<std::unique_ptr<JoinHook>> hooks_;
  const JoinOptions& options_;
  Communicator& comm_;
  int64_t first_record_ = 0;
  int64_t first_step_ = 0;
  int64_t steps_done_ = 0;  // By this rank's loop.
  std::optional<StepAnswer> stopped_at_;
};

absl::Status JoinScope::AddSamples(int64_t samples) {
  if (samples < 0) return absl::InvalidArgumentError(absl::StrCat("AddSamples: ", samples, " samples"));
  comm_->steps().AddSamples(samples);
  return absl::OkStatus();
}

std::vector<int> JoinScope::active_ranks() const { return comm_->steps().active_ranks(); }

absl::Status RunJoined(absl::Span<Joinable* const> joinables, const JoinOptions& options,
                       absl::FunctionRef<absl::Status(JoinScope&)> loop) {
  EK_RETURN_IF_ERROR(CheckList(joinables));
  Communicator& comm = joinables[0]->communicator();
  EK_RETURN_IF_ERROR(comm.status());
  if (comm.steps().scope() != nullptr) {
    return absl::FailedPreconditionError(
        absl::StrCat("RunJoined is already running on rank ", comm.rank(), " of this communicator"));
  }
  EK_RETURN_IF_ERROR(CheckOptions(options, comm));
  JoinRun run(joinables, options);
  EK_RETURN_IF_ERROR(run.MakeHooks());
  return run.Run(loop);
}

}  // namespace evenkeel
