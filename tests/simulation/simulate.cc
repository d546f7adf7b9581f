#include "evenkeel/tests/simulation/simulate.h"

#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/environment.h"
#include "evenkeel/comm/factory.h"
#include "evenkeel/comm/rendezvous/tcp_store_server.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/tests/faults/faulty_rank.h"
#include "evenkeel/tests/simulation/network.h"

namespace evenkeel::simulation {
namespace {

constexpr char kSecret[] = "of the simulated job";
constexpr int kPort = 29400;

class Simulation {
 public:
  Simulation(const Scenario& scenario, const Weather& weather)
      : scenario_(scenario), world_(weather.world), network_(&world_, weather.network) {
    run_.outcome.reports.resize(scenario.world_size());
    Draws draws(weather.world.seed + 1);
    for (int rank = 0; rank < scenario.world_size() + (scenario.rank0_hosts ? 0 : 1); ++rank) {
      Host host{.name = rank < scenario.world_size() ? absl::StrCat("rank ", rank) : "store",
                .slowness = rank == weather.slow_host ? weather.slowness : 1};
      if (weather.clock_spread > 0) {
        host.clock_offset =
            static_cast<Nanos>(draws.Fraction() * static_cast<double>(weather.clock_spread));
        host.clock_drift = weather.clock_drift * (2 * draws.Fraction() - 1);
      }
      hosts_.push_back(world_.AddHost(host));
      if (rank < scenario.world_size()) run_.outcome.reports[rank].rank = rank;
    }
  }

  SimulatedRun Run(Nanos limit) {
    if (!scenario_.rank0_hosts) world_.Start(hosts_.back(), [this] { HostStore(); });
    for (int rank = 0; rank < scenario_.world_size(); ++rank)
      world_.Start(hosts_[rank], [this, rank] { RunRank(rank); });
    run_.outcome.is_over = world_.Run(limit);
    if (!run_.outcome.is_over) run_.leftovers = world_.Unfinished();
    if (run_.outcome.is_over) {
      const int threads = world_.LeftBehind(), files = network_.OpenFiles();
      if (threads > 0) absl::StrAppend(&run_.leftovers, threads, " threads; ");
      if (files > 0) absl::StrAppend(&run_.leftovers, files, " descriptors; ");
    }
    absl::StrAppend(&run_.leftovers, network_.misuse());
    run_.trace_hash = world_.trace_hash();
    run_.time = world_.now();
    run_.operations = world_.operations();
    return std::move(run_);
  }

 private:
  Host* StoreHost() const { return hosts_[scenario_.rank0_hosts ? 0 : scenario_.world_size()]; }

  // As a launcher does, until the last rank has ended.
  void HostStore() {
    const std::string address = absl::StrCat(Network::AddressOf(*StoreHost()), ":", kPort);
    absl::StatusOr<std::unique_ptr<TcpStoreServer>> server =
        TcpStoreServer::Create({.address = address,
                                .secret = kSecret,
                                .world_size = scenario_.world_size(),
                                .host = "the simulation"});
    if (!server.ok()) absl::StrAppend(&run_.outcome.crash, server.status().ToString());
    while (!HaveAllEnded()) absl::SleepFor(absl::Milliseconds(100));
  }

  bool HaveAllEnded() const {
    for (int rank = 0; rank < scenario_.world_size(); ++rank) {
      const Host& host = *hosts_[rank];
      if (!host.is_dead && !host.is_stopped && !has_ended_.contains(rank)) return false;
    }
    return true;
  }

  void RunRank(int rank) {
    absl::Status status = TryToRunRank(rank);
    has_ended_.insert(rank);
    if (status.ok()) return;
    absl::StrAppend(&run_.outcome.crash, "rank ", rank, ": ", status.ToString(), "; ");
  }

  absl::Status TryToRunRank(int rank) {
    EK_ASSIGN_OR_RETURN(Environment environment, EnvironmentOfRank(rank, scenario_.world_size()));
    environment.store_addresses = {absl::StrCat(Network::AddressOf(*StoreHost()), ":", kPort)};
    environment.secret = kSecret;
    environment.is_one_host = false;
    environment.rank_zero_hosts = scenario_.rank0_hosts;
    environment.hosts_store = scenario_.rank0_hosts && rank == 0;
    FactoryOptions options{.backend = "tcp", .communicator = OptionsOf(scenario_)};
    options.communicator.watch.warn = [this, rank](const std::string& text) {
      absl::StrAppend(&run_.outcome.complaints, "[", rank, "] ", text, "\n");
    };
    EK_ASSIGN_OR_RETURN(std::unique_ptr<Communicator> comm,
                        CreateCommunicator(environment, options));
    Host* const host = hosts_[rank];
    FaultSite site;
    site.say = [this](const RankReport& report) { run_.outcome.reports[report.rank] = report; };
    site.die = [this, host] { world_.Kill(host); };
    site.stop = [this, host] { world_.Stop(host); };
    site.cut = [this, host] { CutOff(host); };
    const RankReport report = RunFaultyRank(scenario_, *comm, site);
    run_.outcome.reports[rank] = report;
    return absl::OkStatus();
  }

  void CutOff(Host* victim) {
    if (scenario_.fault == Fault::kStoreSilent) return network_.Cut(victim, StoreHost());
    if (scenario_.fault == Fault::kStoreReset) return network_.Reset(victim, StoreHost());
    for (Host* const other : hosts_) {
      if (other != victim && other != StoreHost()) network_.Reset(victim, other);
    }
  }

  const Scenario& scenario_;
  World world_;
  Network network_;
  std::vector<Host*> hosts_;  // By rank; then the store's, if no rank hosts it.
  std::set<int> has_ended_;
  SimulatedRun run_;
};

}  // namespace

SimulatedRun Simulate(const Scenario& scenario, const Weather& weather, Nanos limit) {
  // Leaked: threads of dead hosts still refer to it.
  return (new Simulation(scenario, weather))->Run(limit);
}

}  // namespace evenkeel::simulation
