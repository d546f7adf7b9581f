// The survivors' new group, then: what each has -> one plan -> every Joinable into the group -> the
// source's state.

#include "evenkeel/join/recovery.h"

#include <algorithm>
#include <set>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "evenkeel/comm/base/clock.h"
#include "evenkeel/comm/base/fields.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/join/held_state.h"
#include "evenkeel/join/internal/join_list.h"
#include "evenkeel/join/internal/recovery_plan.h"

namespace evenkeel {

using internal::RecoveryFacts;
using internal::RecoveryPlan;

// One call of Recover(); more than one new group if another rank is lost meanwhile.
class RecoveryRun {
 public:
  RecoveryRun(std::vector<Joinable*> joinables, const RecoveryOptions& options, absl::Time deadline,
              bool is_newcomer)
      : joinables_(std::move(joinables)),
        options_(options),
        deadline_(deadline),
        is_newcomer_(is_newcomer) {
    for (Joinable* joinable : joinables_) {
      if (joinable->steps_finished() >= 0) optimizers_.push_back(joinable);
    }
  }

  absl::StatusOr<Recovered> In(std::unique_ptr<Communicator> next) {
    absl::StatusOr<RecoveryPlan> plan = Agree(*next);
    absl::Status status = plan.status();
    StateTransfer transfer;
    if (status.ok()) status = Move(*plan, *next, transfer);
    if (!status.ok()) {
      next->Abort(status);
      EK_RETURN_IF_ERROR(RestoreState());
      left_behind_.push_back(std::move(next));
      return status;
    }
    return Recovered{.comm = std::move(next),
                     .steps = plan->steps,
                     .entered = plan->newcomers,
                     .source = transfer.source,
                     .repaired = std::move(repaired_)};
  }

  // The group in which it failed last. All of them stay until the end: a Joinable may still be in
  // an earlier one.
  Communicator& left_behind() { return *left_behind_.back(); }
  // Returns whether newcomers were in that group, which may be why it failed.
  bool has_newcomers() const { return has_newcomers_; }

 private:
  absl::Duration TimeLeft(const Communicator& next) const {
    return std::min(next.timeout(), deadline_ - SteadyNow());
  }

  RecoveryFacts Facts() const {
    RecoveryFacts facts;
    std::vector<std::string> names, counts;
    for (const Joinable* joinable : joinables_) {
      names.push_back(joinable->join_name());
      if (joinable->is_taking_over_)
        facts.state.Worsen(
            {StateKind::kTorn, absl::StrCat(joinable->join_name(),
                                            " has not received the state of another rank yet")});
      facts.state.Worsen(joinable->CheckState());
    }
    facts.names = absl::StrJoin(names, ", ");
    facts.is_newcomer = is_newcomer_;
    for (const Joinable* optimizer : optimizers_) {
      facts.counts.push_back(optimizer->steps_finished());
      counts.push_back(absl::StrCat(optimizer->join_name(), " ", optimizer->steps_finished()));
    }
    facts.steps = options_.steps;
    if (options_.steps >= 0 || is_newcomer_) return facts;
    if (optimizers_.empty()) {
      facts.error = absl::InvalidArgumentError(
          "no optimizer is in the list: set RecoveryOptions::steps to the number of steps that "
          "this rank has finished, and name the optimizer's state with "
          "DataParallel::SetOptimizerState()");
      return facts;
    }
    const auto [least, most] = std::minmax_element(facts.counts.begin(), facts.counts.end());
    facts.steps = *least;
    if (*least != *most)
      facts.state.Worsen({StateKind::kTorn,
                          absl::StrCat("its optimizers have finished different numbers of steps: ",
                                       absl::StrJoin(counts, ", "))});
    return facts;
  }

  absl::Status KeepState() {
    std::set<const void*> kept;
    for (Joinable* joinable : joinables_) {
      EK_ASSIGN_OR_RETURN(Restore restore, joinable->KeepState(kept));
      kept_.push_back({.restore = std::move(restore), .last_update = joinable->last_update_});
    }
    return absl::OkStatus();
  }

  // If the transfer has failed, this rank has its own state again, where that can be done.
  absl::Status RestoreState() {
    const std::vector<Kept> all = std::exchange(kept_, {});
    if (std::ranges::any_of(all, [](const Kept& kept) { return kept.restore == nullptr; }))
      return absl::OkStatus();
    for (size_t i = 0; i < all.size(); ++i) {
      EK_RETURN_IF_ERROR(all[i].restore());
      joinables_[i]->last_update_ = all[i].last_update;
    }
    if (all.empty()) return absl::OkStatus();
    for (Joinable* joinable : joinables_) joinable->is_taking_over_ = false;
    return absl::OkStatus();
  }

  absl::StatusOr<RecoveryPlan> Agree(Communicator& next) {
    EK_ASSIGN_OR_RETURN(
        const ControlChannel::Parts parts,
        next.control().Exchange("recover", internal::ToBytes(Facts()), TimeLeft(next)));
    std::vector<RecoveryFacts> by_rank;
    has_newcomers_ = false;
    for (const std::string& part : parts) {
      EK_ASSIGN_OR_RETURN(
          by_rank.emplace_back(),
          internal::FromBytes<RecoveryFacts>(part, "the facts of a rank before its recovery"));
      has_newcomers_ = has_newcomers_ || by_rank.back().is_newcomer;
    }
    return internal::PlanRecovery(by_rank);
  }

  absl::Status Move(const RecoveryPlan& plan, Communicator& next, StateTransfer& transfer) {
    GroupChange change{.source = plan.source,
                       .last_update = optimizers_.empty() ? -1 : 0,
                       .ahead = plan.ahead[next.rank()],
                       .has_newcomers = !plan.newcomers.empty()};
    for (const Joinable* optimizer : optimizers_) {
      change.last_update = std::max(change.last_update, optimizer->last_update_);
    }
    kept_.clear();
    if (change.ahead > 0) EK_RETURN_IF_ERROR(KeepState());
    for (Joinable* joinable : joinables_) EK_RETURN_IF_ERROR(joinable->ReplaceGroup(&next, change));

    // From here on a rank that is not where the source is has some of its state and some of its
    // own.
    for (Joinable* joinable : joinables_) joinable->is_taking_over_ = change.ahead != 0;
    transfer = {.source = plan.source, .steps = plan.steps};
    for (size_t rank = 0; rank < plan.ahead.size(); ++rank) {
      if (plan.ahead[rank] == 0) transfer.holders.push_back(static_cast<int>(rank));
    }
    for (Joinable* joinable : joinables_) {
      const size_t known = transfer.repaired.size();
      const absl::Status taken = joinable->TakeOver(transfer);
      joinable->is_taking_over_ = joinable->is_taking_over_ || transfer.is_torn;
      for (size_t i = known; i < transfer.repaired.size(); ++i)
        repaired_.push_back(absl::StrCat(joinable->join_name(), ": ", transfer.repaired[i]));
      EK_RETURN_IF_ERROR(Annotate(taken, joinable->join_name()));
    }
    // All or nobody: a rank that went on would meet others that have not got its state.
    EK_RETURN_IF_ERROR(next.control().Exchange("recovered", "", TimeLeft(next)).status());
    for (size_t i = 0; i < optimizers_.size(); ++i)
      optimizers_[i]->steps_finished_ = plan.counts[i];
    for (Joinable* joinable : joinables_) joinable->is_taking_over_ = false;
    kept_.clear();
    return absl::OkStatus();
  }

  const std::vector<Joinable*> joinables_;  // InOrder().
  std::vector<Joinable*> optimizers_;       // Those of them that count steps.
  const RecoveryOptions& options_;
  const absl::Time deadline_;
  const bool is_newcomer_;
  bool has_newcomers_ = false;
  // The state of a Joinable, and the step of its last update, by which kept buffers are found.
  struct Kept {
    Restore restore;
    int64_t last_update = 0;
  };
  std::vector<std::string> repaired_;  // In all groups.
  std::vector<Kept> kept_;             // By Joinable; empty: this rank keeps no state of its own.
  std::vector<std::unique_ptr<Communicator>> left_behind_;
};

namespace {

absl::StatusOr<Recovered> RecoverFrom(absl::string_view caller,
                                      absl::Span<Joinable* const> joinables, Communicator& from,
                                      const RecoveryOptions& options) {
  EK_ASSIGN_OR_RETURN(std::vector<Joinable*> ordered, InOrder(caller, joinables));
  for (const Joinable* joinable : ordered) {
    if (joinable->join_config().in_loop)
      return absl::FailedPreconditionError(
          absl::StrCat(caller, " inside RunJoined(): call it when that has returned"));
  }
  const absl::Duration longest_wait = options.wait_for_replacement;
  const absl::Time deadline = SteadyNow() + options.timeout + 3 * longest_wait;
  RecoveryRun run(std::move(ordered), options, deadline, from.waiting());
  std::set<int> lost;                       // Numbers in the job.
  absl::Duration waits = 2 * longest_wait;  // Of all calls of Regroup() together.
  for (Communicator* group = &from;;) {
    const absl::Time asks = SteadyNow();
    EK_ASSIGN_OR_RETURN(
        Regrouped next,
        group->Regroup({.timeout = std::min(options.timeout, deadline - asks),
                        .wait_for_replacement =
                            std::min(std::max(waits, absl::Microseconds(1)), longest_wait)}));
    waits -= SteadyNow() - asks;
    lost.insert(next.lost.begin(), next.lost.end());
    absl::StatusOr<Recovered> recovered = run.In(std::move(next.comm));
    if (recovered.ok()) {
      for (int rank = 0; rank < from.world_size(); ++rank) {
        if (lost.contains(from.members()[rank])) recovered->lost.push_back(rank);
      }
      return recovered;
    }
    // Another rank was lost meanwhile, one kept the others waiting, or a newcomer does not fit:
    // once more, with those who come.
    const bool is_passing =
        absl::IsUnavailable(recovered.status()) || absl::IsDeadlineExceeded(recovered.status()) ||
        (absl::IsInvalidArgument(recovered.status()) && run.has_newcomers() && !from.waiting());
    if (!is_passing || SteadyNow() >= deadline) return Annotate(recovered.status(), caller);
    group = &run.left_behind();
  }
}

}  // namespace

absl::StatusOr<Recovered> Recover(absl::Span<Joinable* const> joinables, Communicator& failed,
                                  const RecoveryOptions& options) {
  if (failed.waiting()) {
    return absl::FailedPreconditionError(absl::StrCat(
        "Recover: this process has not entered the group yet (EVENKEEL_NEWCOMER): call "
        "Enter() first",
        options.why.ok() ? "" : "; its error was: ", options.why.message()));
  }
  if (!options.why.ok()) failed.Abort(options.why);
  return RecoverFrom("Recover", joinables, failed, options);
}

absl::StatusOr<Recovered> Enter(absl::Span<Joinable* const> joinables, Communicator& waiting,
                                const RecoveryOptions& options) {
  if (!waiting.waiting())
    return absl::FailedPreconditionError(
        "Enter in a process that is in the group: it is for newcomers (Communicator::waiting())");
  return RecoverFrom("Enter", joinables, waiting, options);
}

}  // namespace evenkeel
