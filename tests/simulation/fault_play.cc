// A scenario of tests/faults/.

#include <utility>

#include "absl/strings/str_cat.h"
#include "evenkeel/tests/faults/faulty_rank.h"
#include "evenkeel/tests/faults/scenario.h"
#include "evenkeel/tests/simulation/play.h"

namespace evenkeel::simulation {
namespace {

class FaultPlay : public Play {
 public:
  explicit FaultPlay(Scenario scenario) : scenario_(std::move(scenario)) {
    outcome_.reports.resize(scenario_.world_size());
    for (int rank = 0; rank < scenario_.world_size(); ++rank) outcome_.reports[rank].rank = rank;
  }

  std::string Describe() const override { return evenkeel::Describe(scenario_); }
  int world_size() const override { return scenario_.world_size(); }
  bool rank0_hosts() const override { return scenario_.rank0_hosts; }
  CommunicatorOptions options() const override { return OptionsOf(scenario_); }

  void RunRank(int rank, std::unique_ptr<Communicator> comm, Stage& stage) override {
    Host* const host = stage.ranks[rank];
    FaultSite site;
    site.say = [this](const RankReport& report) { outcome_.reports[report.rank] = report; };
    site.die = [&] { stage.world.Kill(host); };
    site.stop = [&] { stage.world.Stop(host); };
    site.cut = [&] { CutOff(host, stage); };
    const RankReport report = RunFaultyRank(scenario_, *comm, site);
    outcome_.reports[rank] = report;
  }

  Verdict Judge(bool is_over, const Stage& stage) override {
    outcome_.is_over = is_over;
    outcome_.crash = stage.crash;
    outcome_.complaints = stage.warnings;
    // A retransmission may take the time for which the others would wait for the slow rank.
    if (scenario_.fault == Fault::kSlow && stage.network.loses_packets())
      absl::StrAppend(&outcome_.complaints, "rank ", scenario_.victim, " is slow");
    Verdict verdict = evenkeel::Judge(scenario_, outcome_);
    if (verdict.is_good()) return verdict;
    for (const RankReport& report : outcome_.reports) {
      verdict.complaints.push_back(
          absl::StrCat("  rank ", report.rank, ": ", report.result.steps, " steps, ",
                       report.ended == 0 ? "not ended" : report.result.status.ToString()));
    }
    return verdict;
  }

 private:
  void CutOff(Host* victim, Stage& stage) const {
    if (scenario_.fault == Fault::kStoreSilent) return stage.network.Cut(victim, stage.store);
    if (scenario_.fault == Fault::kStoreReset) return stage.network.Reset(victim, stage.store);
    for (Host* const other : stage.ranks) {
      if (other != victim) stage.network.Reset(victim, other);
    }
  }

  const Scenario scenario_;
  Outcome outcome_;
};

}  // namespace

std::unique_ptr<Play> MakeFaultPlay(uint64_t seed, const PlayOptions& options) {
  return std::make_unique<FaultPlay>(
      MakeScenario(seed, 0, {.world_sizes = options.world_sizes, .with_threads = false}));
}

}  // namespace evenkeel::simulation
