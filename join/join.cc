// The loop runs; then this rank is exhausted and takes part in the others' steps until no rank is
// active:
//
//   record {joined} -> answer -> catch up with the plan -> the entries of the lowest active rank,
//   in their order, up to the end of the step -> next record
//
// The entries (steps/step_log.h) are the Joinables that take part in a step and their actions (an
// optimizer's step, with its learning rate), so an exhausted rank guesses nothing.

#include "evenkeel/join/join.h"

#include <cxxabi.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <iostream>
#include <memory>
#include <optional>
#include <string>
#include <typeinfo>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "evenkeel/comm/collective.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/join/internal/join_list.h"
#include "evenkeel/join/steps/step_control.h"
#include "evenkeel/join/steps/step_log.h"

namespace evenkeel {
namespace {

// "std::runtime_error: sample 17 is broken".
std::string TextOf(const std::exception* exception) {
  if (exception == nullptr) return "an exception that is not a std::exception";
  const absl::string_view what = exception->what();
  const char* const mangled = typeid(*exception).name();
  const std::unique_ptr<char, decltype(&std::free)> name(
      abi::__cxa_demangle(mangled, nullptr, nullptr, nullptr), &std::free);
  const absl::string_view type = name == nullptr ? mangled : name.get();
  return type == what ? std::string(what) : absl::StrCat(type, ": ", what);
}

absl::Status CheckOptions(const JoinOptions& options, const Communicator& comm) {
  if (options.min_active_ranks < 1 || options.min_active_ranks > comm.world_size()) {
    return absl::InvalidArgumentError(absl::StrCat("RunJoined: min_active_ranks is ",
                                                   options.min_active_ranks, " in a group of ",
                                                   comm.world_size()));
  }
  if (!options.enable && options.divide_by == DivideBy::kSamples) {
    return absl::InvalidArgumentError(
        "RunJoined: without `enable` the ranks do not exchange their numbers of samples");
  }
  return absl::OkStatus();
}

}  // namespace

// One call of RunJoined(). Its lifetime is the scope: construction configures the Joinables,
// destruction resets them.
class JoinRun {
 public:
  JoinRun(std::vector<Joinable*> joinables, const JoinOptions& options)
      : joinables_(std::move(joinables)),
        options_(options),
        comm_(joinables_[0]->communicator()),
        scope_(&comm_, options.enable) {
    JoinConfig config{
        .enable = options.enable,
        .min_active_ranks = MinActiveRanks(),
        .divisor = StepDivisor(options.enable ? options.divide_by : DivideBy::kInitialWorldSize),
        .is_first = true,
        .in_loop = true,
        .stopped_at = &stopped_at_};
    std::vector<std::string> names;
    for (const Joinable* joinable : joinables_) {
      config.has_optimizer =
          config.has_optimizer || joinable->join_phase() == JoinPhase::kOptimizer;
      names.push_back(joinable->join_name());
    }
    std::sort(names.begin(), names.end());
    const std::string what =
        absl::StrJoin({absl::StrJoin(names, ","), absl::StrCat(config.min_active_ranks),
                       absl::StrCat(static_cast<int>(options.divide_by))},
                      "\n");
    for (Joinable* joinable : joinables_) {
      joinable->config_ = config;
      config.is_first = false;
    }
    for (const Joinable* joinable : joinables_) counted_before_.push_back(joinable->counted_);
    steps().SetLoop(StableHash(1, what));
    steps().SetAgreement(options.enable);
    steps().RequireSamples(options.divide_by == DivideBy::kSamples);
    first_record_ = steps().records_sent();
    first_step_ = steps().steps_begun();
  }

  ~JoinRun() {
    for (Joinable* joinable : joinables_) joinable->config_ = JoinConfig();
    steps().SetLoop(std::nullopt);
    steps().SetAgreement(true);
    steps().RequireSamples(false);
  }

  absl::Status MakeHooks() {
    for (Joinable* joinable : joinables_) {
      EK_ASSIGN_OR_RETURN(std::unique_ptr<JoinHook> hook, joinable->MakeJoinHook(options_));
      if (hook == nullptr) {
        return absl::InternalError(
            absl::StrCat("RunJoined: ", joinable->join_name(), " made no hook"));
      }
      hooks_.push_back(std::move(hook));
    }
    return absl::OkStatus();
  }

  // An exception passes; the other ranks learn of it first.
  absl::Status Run(absl::FunctionRef<absl::Status(JoinScope&)> loop) {
    try {
      return RunToEnd(loop);
    } catch (const std::exception& exception) {
      Report(&exception);
      throw;
    } catch (...) {
      Report(nullptr);
      throw;
    }
  }

 private:
  absl::Status RunToEnd(absl::FunctionRef<absl::Status(JoinScope&)> loop) {
    absl::Status status = loop(scope_);
    if (!options_.enable) {
      steps().AbandonStep();
      if (status.ok()) status = CheckThatOptimizersStepped();
      if (status.ok()) status = scope_.Drain();
    } else if (status.ok() && stopped_at_.has_value()) {
      status = StoppedError();
    } else if (status.ok()) {
      status = Shadow();
    }
    if (stopped_at_.has_value() && absl::IsOutOfRange(status)) {
      steps().AbandonStep();
      const absl::Status ended = EndAfterStop();
      if (ended.ok()) return status;
      status = ended;
    }
    if (!status.ok()) comm_.Abort(status, Where());
    return status;
  }

  void Report(const std::exception* exception) {
    try {
      comm_.Abort(absl::UnknownError(TextOf(exception)), Where());
    } catch (...) {  // No memory for the report: the others see that the connection breaks.
    }
  }

  StepControl& steps() { return StepControl::Of(comm_); }
  int rank() const { return comm_.rank(); }
  int world_size() const { return comm_.world_size(); }

  int MinActiveRanks() const {
    return options_.throw_on_early_termination ? world_size() : options_.min_active_ranks;
  }

  absl::Status StoppedError() const {
    return absl::OutOfRangeError(absl::StrCat("rank ", rank(), ": all ranks have stopped early"));
  }

  // Ranks may have been exhausted before the stop, and have followed others for a while: all end
  // as after a whole loop.
  absl::Status EndAfterStop() {
    EK_RETURN_IF_ERROR(scope_.Drain());
    return RunPostHooks(/*is_last_joiner=*/!stopped_at_->record(rank()).joined);
  }

  // Returns `status` with the object's name before it, unless it begins with an object's name
  // already: that of this one, or of the one whose error has ended the group.
  absl::Status OfObject(const absl::Status& status, const std::string& name) const {
    const bool has_name = std::ranges::any_of(joinables_, [&](const Joinable* joinable) {
      return absl::StartsWith(status.message(), joinable->join_name() + ": ");
    });
    return has_name ? status : Annotate(status, name);
  }

  absl::Status RunPostHooks(bool is_last_joiner) {
    for (size_t i = 0; i < joinables_.size(); ++i) {
      EK_RETURN_IF_ERROR(OfObject(hooks_[i]->PostHook(is_last_joiner), joinables_[i]->join_name()));
    }
    return absl::OkStatus();
  }

  // For the other ranks, when the loop has ended with an error.
  std::string Where() {
    if (is_following_) {
      return absl::StrCat("failed while it shadowed the other ranks, after the ", steps_done_,
                          " steps of its own loop");
    }
    const int64_t begun = steps().steps_begun() - first_step_;
    return begun == 0 ? "failed before the first step of its loop"
                      : absl::StrCat("failed in step ", begun, " of its loop");
  }

  // Nothing would make the ranks' weights equal for an optimizer that has left them as they are.
  absl::Status CheckThatOptimizersStepped() const {
    const auto counted = [this](size_t i) { return joinables_[i]->counted_ - counted_before_[i]; };
    for (size_t i = 0; i < joinables_.size(); ++i) {
      const void* const set = joinables_[i]->trained_set();
      int64_t reductions = 0;
      for (size_t of = 0; of < joinables_.size(); ++of) {
        if (joinables_[of]->join_phase() == JoinPhase::kGradients &&
            joinables_[of]->trained_set() == set)
          reductions += counted(of);
      }
      if (set == nullptr || reductions == 0 || counted(i) > 0) continue;
      return absl::FailedPreconditionError(
          absl::StrCat("rank ", rank(), ": gradients were reduced ", reductions,
                       " times in the loop, but ", joinables_[i]->join_name(),
                       " never stepped: call its own step(), not that of an optimizer that it "
                       "wraps, or leave it out of the join"));
    }
    return absl::OkStatus();
  }

  absl::Status Shadow() {
    for (size_t i = 0; i < joinables_.size(); ++i) {
      EK_RETURN_IF_ERROR(OfObject(hooks_[i]->OnExhausted(), joinables_[i]->join_name()));
    }
    steps().EndStep();
    steps().BecomeExhausted();
    steps_done_ = steps().records_sent() - first_record_;
    is_following_ = true;
    bool is_last_joiner = true;
    for (int64_t shadowed = 0;;) {
      EK_ASSIGN_OR_RETURN(std::shared_ptr<StepTicket> ticket, steps().EnterJoined());
      EK_RETURN_IF_ERROR(FollowCalls(ticket));
      EK_ASSIGN_OR_RETURN(const StepAnswer answer, ticket->Wait());
      if (answer.active == 0) {
        EK_RETURN_IF_ERROR(CheckThatOptimizersStepped());
        break;
      }
      is_last_joiner = false;
      if (answer.active < MinActiveRanks()) {
        stopped_at_ = answer;
        EK_RETURN_IF_ERROR(
            steps().CatchUp(answer));  // The next loop begins with the same plan everywhere.
        return absl::OutOfRangeError(absl::StrCat(
            "rank ", rank(), " has exhausted all inputs after ", steps_done_, " steps",
            MinActiveRanks() == world_size() ? ""
                                             : absl::StrCat(", and only ", answer.active, " of ",
                                                            answer.world_size, " ranks have any"),
            "; all ranks stop before step ", answer.step));
      }
      if (shadowed == 0 && options_.on_exhausted) options_.on_exhausted(steps_done_);
      if (shadowed == options_.skew_warning_steps) Warn();
      EK_RETURN_IF_ERROR(ShadowStep(answer));
      ++shadowed;
    }
    EK_RETURN_IF_ERROR(scope_.Drain());
    return RunPostHooks(is_last_joiner);
  }

  // Follows the calls that the other ranks' loops issue before that step.
  absl::Status FollowCalls(const std::shared_ptr<StepTicket>& ticket) {
    while (true) {
      EK_ASSIGN_OR_RETURN(const std::optional<std::string> call, steps().NextCall(ticket));
      if (!call.has_value()) return absl::OkStatus();
      EK_RETURN_IF_ERROR(scope_.Follow(*call));
    }
  }

  absl::Status ShadowStep(const StepAnswer& answer) {
    EK_RETURN_IF_ERROR(steps().CatchUp(answer));
    while (true) {
      EK_ASSIGN_OR_RETURN(const StepEntry entry, steps().NextEntry(answer));
      if (entry.kind == StepEntry::Kind::kEnd) return absl::OkStatus();
      if (entry.kind == StepEntry::Kind::kCall) {
        EK_RETURN_IF_ERROR(scope_.Follow(entry.payload));
        continue;
      }
      size_t i = 0;
      while (i < joinables_.size() && joinables_[i]->join_name() != entry.participant) ++i;
      if (i == joinables_.size()) {
        return absl::FailedPreconditionError(absl::StrCat(
            "rank ", rank(), ": ", entry.participant, " takes part on rank ", answer.lowest_active,
            " but not on this rank: the same objects must join on all ranks"));
      }
      EK_RETURN_IF_ERROR(OfObject(entry.kind == StepEntry::Kind::kEntered
                                      ? hooks_[i]->MainHook(answer)
                                      : hooks_[i]->OnAction(answer, entry.payload),
                                  entry.participant));
    }
  }

  void Warn() {
    const std::string text =
        absl::StrCat("rank ", rank(), " had inputs for ", steps_done_,
                     " steps and has shadowed the other ranks for ", options_.skew_warning_steps,
                     " steps since then: distribute the inputs more evenly for faster training");
    if (options_.warn) return options_.warn(text);
    std::cerr << absl::StrCat(text, "\n");
  }

  std::vector<Joinable*> joinables_;  // By phase.
  std::vector<std::unique_ptr<JoinHook>> hooks_;
  const JoinOptions& options_;
  Communicator& comm_;
  JoinScope scope_;
  std::vector<int64_t> counted_before_;  // By Joinable, when the loop began.
  bool is_following_ = false;            // Its loop has ended.
  int64_t first_record_ = 0;
  int64_t first_step_ = 0;
  int64_t steps_done_ = 0;  // By this rank's loop.
  std::optional<StepAnswer> stopped_at_;
};

absl::Status RunJoined(absl::Span<Joinable* const> joinables, const JoinOptions& options,
                       absl::FunctionRef<absl::Status(JoinScope&)> loop) {
  // Hooks that communicate run in the same order on all ranks, whatever the order of the lists.
  EK_ASSIGN_OR_RETURN(std::vector<Joinable*> ordered, InOrder("RunJoined", joinables));
  Communicator& comm = joinables[0]->communicator();
  for (const Joinable* joinable : joinables) {
    if (&joinable->communicator() == &comm) continue;
    return absl::InvalidArgumentError(absl::StrCat("RunJoined: ", joinable->join_name(), " and ",
                                                   joinables[0]->join_name(),
                                                   " use different communicators"));
  }
  EK_RETURN_IF_ERROR(comm.status());
  if (StepControl::Of(comm).in_loop()) {
    return absl::FailedPreconditionError(absl::StrCat("a join is already running on rank ",
                                                      comm.rank(), ": a group runs one at a time"));
  }
  EK_RETURN_IF_ERROR(CheckOptions(options, comm));
  JoinRun run(std::move(ordered), options);
  EK_RETURN_IF_ERROR(run.MakeHooks());
  return run.Run(loop);
}

}  // namespace evenkeel
