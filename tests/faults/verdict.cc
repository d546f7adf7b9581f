#include "evenkeel/tests/faults/verdict.h"

#include <set>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "evenkeel/tests/faults/faulty_rank.h"
#include "evenkeel/tests/toy_training.h"

namespace evenkeel {
namespace {

// A contradiction is noticed within this time; a silent fault takes a timeout first.
constexpr absl::Duration kAtOnce = absl::Seconds(5);
constexpr absl::Duration kSoon = absl::Seconds(3);

absl::Duration Limit(const Scenario& scenario) {
  if (scenario.fault == Fault::kStoreSilent) return kSilence + kSoon;
  if (scenario.fault != Fault::kStopped) return kAtOnce;
  return kSoon + (scenario.as_processes ? kSilence : OptionsOf(scenario).timeout);
}

class Judgement {
 public:
  Judgement(const Scenario& scenario, const Outcome& outcome)
      : scenario_(scenario),
        outcome_(outcome),
        alone_(TrainToyAlone(GroupSteps(scenario.batches()))) {}

  Verdict Pass() {
    if (!outcome_.is_over) Complain(verdict_.hangs, "it was not over in time");
    if (!outcome_.crash.empty()) Complain(verdict_.is_other, outcome_.crash);
    for (const RankReport& report : outcome_.reports)
      all_succeed_ = all_succeed_ && report.result.status.ok();
    for (const RankReport& report : outcome_.reports) JudgeRank(report);
    if (scenario_.fault == Fault::kSlow &&
        !NamedRanks(outcome_.complaints).contains(scenario_.victim)) {
      Complain(verdict_.is_unnamed, "nobody was warned of the slow rank");
    }
    return std::move(verdict_);
  }

 private:
  bool MayBeSilent(int rank) const {
    return rank == scenario_.victim &&
           (scenario_.fault == Fault::kKilled ||
            (scenario_.fault == Fault::kStopped && scenario_.as_processes));
  }
  int64_t TimeOfFault() const { return outcome_.reports[scenario_.victim].diverged; }

  void Complain(bool& kind, absl::string_view what) {
    kind = true;
    verdict_.complaints.emplace_back(what);
  }

  void JudgeRank(const RankReport& report) {
    const std::string who = absl::StrCat("rank ", report.rank, " ");
    if (report.ended == 0) {
      if (!MayBeSilent(report.rank))
        Complain(verdict_.hangs, absl::StrCat(who, "has said nothing"));
      return;
    }
    JudgeNumbers(report, who);
    if (scenario_.must_succeed()) {
      if (!report.result.status.ok()) {
        Complain(
            verdict_.is_other,
            absl::StrCat(who, "fails, but nothing is wrong: ", report.result.status.ToString()));
      }
      return;
    }
    if (all_succeed_ && scenario_.may_succeed()) return;
    if (TimeOfFault() == 0)
      return Complain(verdict_.is_other, absl::StrCat(who, "ended before the fault happened"));
    if (report.result.status.ok())
      return Complain(verdict_.is_other, absl::StrCat(who, "reports success"));
    JudgeMessage(report, who);
    JudgeTime(report, who);
  }

  // Whatever its end: no step may have used a wrong gradient.
  void JudgeNumbers(const RankReport& report, const std::string& who) {
    const ToyResult& result = report.result;
    if (report.has_wrong_data)
      Complain(verdict_.is_wrong, absl::StrCat(who, "got wrong data from a collective"));
    if (result.steps >= static_cast<int>(alone_.size()) ||
        !IsClose(result.last.weights, alone_[result.steps].weights)) {
      Complain(verdict_.is_wrong,
               absl::StrCat(who, "has wrong weights after ", result.steps, " steps"));
    }
    if (!result.status.ok()) return;
    const ToyState& first = outcome_.reports[0].result.ended;
    if (!IsClose(result.ended.weights, alone_.back().weights) ||
        !IsClose(result.ended.momentum, alone_.back().momentum)) {
      Complain(verdict_.is_wrong, absl::StrCat(who, "ends with wrong weights or a wrong momentum"));
    }
    if (outcome_.reports[0].result.status.ok() &&
        (result.ended.weights != first.weights || result.ended.momentum != first.momentum)) {
      Complain(verdict_.is_wrong, absl::StrCat(who, "does not end as rank 0 does"));
    }
  }

  // A victim that was cut off can't know that it is the one.
  void JudgeMessage(const RankReport& report, const std::string& who) {
    const std::string message(report.result.status.message());
    const std::set<int> named = NamedRanks(message);
    const std::string said =
        absl::StrCat(who, "says \"", report.result.status.ToString(), "\", which ");
    const bool is_victim = report.rank == scenario_.victim;
    if (!named.contains(scenario_.victim) && (!is_victim || scenario_.disagrees())) {
      Complain(verdict_.is_unnamed, absl::StrCat(said, "does not name rank ", scenario_.victim));
    } else if (scenario_.disagrees() && named.size() < 2) {
      Complain(verdict_.is_unnamed, absl::StrCat(said, "names one side alone"));
    }
    if (scenario_.fault == Fault::kError && !absl::StrContains(message, kBodyError)) {
      Complain(verdict_.is_unnamed, absl::StrCat(said, "does not say what happened there"));
    }
  }

  void JudgeTime(const RankReport& report, const std::string& who) {
    if (report.rank == scenario_.victim) return;
    const double seconds = (report.ended - TimeOfFault()) * 1e-9;
    verdict_.seconds.push_back(seconds);
    if (seconds > absl::ToDoubleSeconds(Limit(scenario_))) {
      Complain(verdict_.is_other, absl::StrCat(who, "reports it after ", seconds, " s"));
    }
  }

  const Scenario& scenario_;
  const Outcome& outcome_;
  const std::vector<ToyState> alone_;
  bool all_succeed_ = true;
  Verdict verdict_;
};

}  // namespace

Verdict Judge(const Scenario& scenario, const Outcome& outcome) {
  return Judgement(scenario, outcome).Pass();
}

}  // namespace evenkeel
