// The survivors' new group, then: what each has -> one plan -> every Joinable into the group -> the
// source's state.

#include "evenkeel/join/recovery.h"

#include <algorithm>
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
  RecoveryRun(std::vector<Joinable*> joinables, const RecoveryOptions& options, absl::Time deadline)
      : joinables_(std::move(joinables)), options_(options), deadline_(deadline) {
    for (Joinable* joinable : joinables_) {
      if (joinable->steps_finished() >= 0) optimizers_.push_back(joinable);
    }
  }

  absl::StatusOr<Recovered> In(std::unique_ptr<Communicator> next) {
    absl::StatusOr<RecoveryPlan> plan = Agree(*next);
    absl::Status status = plan.status();
    if (status.ok()) status = Move(*plan, *next);
    if (!status.ok()) {
      next->Abort(status);
      left_behind_.push_back(std::move(next));
      return status;
    }
    return Recovered{.comm = std::move(next), .steps = plan->steps, .source = plan->source};
  }

  // The group in which it failed last. All of them stay until the end: a Joinable may still be in
  // an earlier one.
  Communicator& left_behind() { return *left_behind_.back(); }

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
    for (const Joinable* optimizer : optimizers_) {
      facts.counts.push_back(optimizer->steps_finished());
      counts.push_back(absl::StrCat(optimizer->join_name(), " ", optimizer->steps_finished()));
    }
    facts.steps = options_.steps;
    if (options_.steps >= 0) return facts;
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

  absl::StatusOr<RecoveryPlan> Agree(Communicator& next) const {
    EK_ASSIGN_OR_RETURN(
        const ControlChannel::Parts parts,
        next.control().Exchange("recover", internal::ToBytes(Facts()), TimeLeft(next)));
    std::vector<RecoveryFacts> by_rank;
    for (const std::string& part : parts) {
      EK_ASSIGN_OR_RETURN(
          by_rank.emplace_back(),
          internal::FromBytes<RecoveryFacts>(part, "the facts of a rank before its recovery"));
    }
    return internal::PlanRecovery(by_rank);
  }

  absl::Status Move(const RecoveryPlan& plan, Communicator& next) {
    GroupChange change{.source = plan.source,
                       .last_update = optimizers_.empty() ? -1 : 0,
                       .ahead = plan.ahead[next.rank()]};
    for (const Joinable* optimizer : optimizers_) {
      change.last_update = std::max(change.last_update, optimizer->last_update_);
    }
    for (Joinable* joinable : joinables_) EK_RETURN_IF_ERROR(joinable->ReplaceGroup(&next, change));

    // From here on a rank that is not where the source is has some of its state and some of its
    // own.
    for (Joinable* joinable : joinables_) joinable->is_taking_over_ = change.ahead != 0;
    StateTransfer transfer{.source = plan.source, .steps = plan.steps};
    for (Joinable* joinable : joinables_) {
      EK_RETURN_IF_ERROR(Annotate(joinable->TakeOver(transfer), joinable->join_name()));
    }
    // All or nobody: a rank that went on would meet others that have not got its state.
    EK_RETURN_IF_ERROR(next.control().Exchange("recovered", "", TimeLeft(next)).status());
    for (size_t i = 0; i < optimizers_.size(); ++i)
      optimizers_[i]->steps_finished_ = plan.counts[i];
    for (Joinable* joinable : joinables_) joinable->is_taking_over_ = false;
    return absl::OkStatus();
  }

  const std::vector<Joinable*> joinables_;  // InOrder().
  std::vector<Joinable*> optimizers_;       // Those of them that count steps.
  const RecoveryOptions& options_;
  const absl::Time deadline_;
  std::vector<std::unique_ptr<Communicator>> left_behind_;
};

namespace {

// Ranks of `before` that are not in `after`.
std::vector<int> Lost(const Communicator& before, const Communicator& after) {
  std::vector<int> lost;
  for (int rank = 0; rank < before.world_size(); ++rank) {
    const std::vector<int>& members = after.members();
    if (std::find(members.begin(), members.end(), before.members()[rank]) == members.end())
      lost.push_back(rank);
  }
  return lost;
}

}  // namespace

absl::StatusOr<Recovered> Recover(absl::Span<Joinable* const> joinables, Communicator& failed,
                                  const RecoveryOptions& options) {
  EK_ASSIGN_OR_RETURN(std::vector<Joinable*> ordered, InOrder("Recover", joinables));
  for (const Joinable* joinable : ordered) {
    if (joinable->join_config().in_loop)
      return absl::FailedPreconditionError(
          "Recover inside RunJoined(): call it when that has returned");
  }
  if (!options.why.ok()) failed.Abort(options.why);
  const absl::Time deadline = SteadyNow() + options.timeout;
  RecoveryRun run(std::move(ordered), options, deadline);
  Communicator* from = &failed;
  while (true) {
    EK_ASSIGN_OR_RETURN(std::unique_ptr<Communicator> next, from->Shrink(deadline - SteadyNow()));
    const std::vector<int> lost = Lost(failed, *next);
    absl::StatusOr<Recovered> recovered = run.In(std::move(next));
    if (recovered.ok()) {
      recovered->lost = lost;
      return recovered;
    }
    // Another rank was lost meanwhile, or one kept the others waiting: once more, with those who
    // come.
    const bool is_passing =
        absl::IsUnavailable(recovered.status()) || absl::IsDeadlineExceeded(recovered.status());
    if (!is_passing || SteadyNow() >= deadline) return Annotate(recovered.status(), "Recover");
    from = &run.left_behind();
  }
}

}  // namespace evenkeel
