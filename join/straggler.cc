#include "evenkeel/join/straggler.h"

#include "evenkeel/comm/communicator.h"
#include "evenkeel/join/phase.h"
#include "evenkeel/join/steps/step_control.h"

namespace evenkeel {

PhaseScope::PhaseScope(Communicator& comm, StepPhase phase)
    : comm_(comm), before_(StepControl::Of(comm).phases().Enter(phase)) {}

PhaseScope::~PhaseScope() { StepControl::Of(comm_).phases().Enter(before_); }

namespace {

// The ranks of a group may have other numbers in the job.
StragglerReport WithNumbers(const Communicator& comm, StragglerReport report) {
  for (StragglerReport::Rank& rank : report.ranks) rank.rank = comm.members()[rank.rank];
  return report;
}

}  // namespace

StragglerReport StragglersOf(Communicator& comm) {
  return WithNumbers(comm, StepControl::Of(comm).WithStragglers(
                               [](const StragglerDetector& all) { return all.All(); }));
}

StragglerReport RecentStragglersOf(Communicator& comm) {
  return WithNumbers(comm, StepControl::Of(comm).WithStragglers(
                               [](const StragglerDetector& all) { return all.Recent(); }));
}

std::string StragglerNews(Communicator& comm, const std::function<std::string(int rank)>& name_of) {
  const bool is_news = StepControl::Of(comm).WithStragglers(
      [](StragglerDetector& detector) { return detector.TakeNews(); });
  return is_news ? RecentStragglersOf(comm).Stragglers(name_of) : "";
}

}  // namespace evenkeel
