#include "evenkeel/tests/simulation/play.h"

#include <algorithm>
#include <set>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "evenkeel/comm/environment.h"
#include "evenkeel/comm/factory.h"
#include "evenkeel/comm/status.h"

namespace evenkeel::simulation {
namespace {

constexpr char kSecret[] = "of the simulated job";
constexpr int kPort = 29400;

class Performance {
 public:
  Performance(Play& play, const Weather& weather)
      : play_(play),
        weather_(weather),
        world_(weather.world),
        network_(&world_, weather.network),
        stage_{world_, network_, {}} {
    stage_.points_to_loss = weather.points_to_loss;
    Draws draws(weather.world.seed + 1);
    for (int rank = 0; rank < play.world_size(); ++rank) {
      stage_.ranks.push_back(AddHost({.name = absl::StrCat("rank ", rank),
                                      .machine = weather.machines[rank],
                                      .slowness = rank == weather.slow_host ? weather.slowness : 1},
                                     draws));
      incarnations_.push_back(0);
    }
    stage_.store = play.rank0_hosts()
                       ? stage_.ranks[0]
                       : AddHost({.name = "store", .machine = weather.machine_of_store}, draws);
    // They exist from the beginning, so that the network can fail for them, too.
    for (const Newcomer& newcomer : play.newcomers()) {
      const bool has_own_machine = newcomer.has_own_machine && weather.backend != "shm";
      stage_.ranks.push_back(
          AddHost({.name = absl::StrCat("newcomer ", newcomer.place),
                   .machine = has_own_machine ? -1 : weather.machines[newcomer.place]},
                  draws));
      places_.push_back(newcomer.place);
      incarnations_.push_back(0);
    }
    stage_.start = [this](int newcomer, int incarnation) {
      const int rank = play_.world_size() + newcomer;
      incarnations_[rank] = incarnation;
      world_.Start(stage_.ranks[rank], [this, rank] { RunRank(rank); });
    };
  }

  PlayedRun Run(Nanos limit) {
    if (!play_.rank0_hosts()) world_.Start(stage_.store, [this] { HostStore(); });
    for (int rank = 0; rank < play_.world_size(); ++rank)
      world_.Start(stage_.ranks[rank], [this, rank] { RunRank(rank); });
    Schedule(weather_, world_, network_);
    play_.Prepare(stage_);
    const bool is_over = world_.Run(limit);
    PlayedRun run{.verdict = play_.Judge(is_over, stage_),
                  .warnings = stage_.warnings,
                  .trace_hash = world_.trace_hash(),
                  .time = world_.now(),
                  .operations = world_.operations()};
    const std::string leftovers = Leftovers(is_over);
    if (leftovers.empty()) return run;
    run.verdict.is_other = true;
    run.verdict.complaints.push_back(leftovers);
    return run;
  }

 private:
  Host* AddHost(Host host, Draws& draws) {
    if (weather_.clock_spread > 0) {
      host.clock_offset =
          static_cast<Nanos>(draws.Fraction() * static_cast<double>(weather_.clock_spread));
      host.clock_drift = weather_.clock_drift * (2 * draws.Fraction() - 1);
    }
    for (const std::unique_ptr<Host>& earlier : world_.hosts()) {
      if (earlier->machine != host.machine) continue;
      host.clock_offset = earlier->clock_offset;
      host.clock_drift = earlier->clock_drift;
    }
    return world_.AddHost(host);
  }

  std::string Leftovers(bool is_over) const {
    std::string text = network_.misuse();
    if (!is_over) return absl::StrCat(text, "not ended: ", world_.Unfinished());
    const int threads = world_.LeftBehind(), files = network_.OpenFiles();
    if (threads > 0) absl::StrAppend(&text, threads, " threads are left; ");
    if (files > 0) absl::StrAppend(&text, files, " descriptors are left");
    return text;
  }

  // Hosts the store as a launcher does, until the last rank has ended.
  void HostStore() {
    const std::string address = absl::StrCat(Network::AddressOf(*stage_.store), ":", kPort);
    const absl::StatusOr<std::shared_ptr<void>> store =
        play_.HostStore({.address = address,
                         .secret = kSecret,
                         .world_size = play_.world_size(),
                         .host = "the simulation"});
    if (!store.ok()) absl::StrAppend(&stage_.crash, store.status().ToString());
    while (!HaveAllEnded()) {
      absl::SleepFor(absl::Milliseconds(100));
      play_.Tend(stage_);
    }
  }

  bool HaveAllEnded() const {
    for (int rank = 0; rank < static_cast<int>(stage_.ranks.size()); ++rank) {
      const Host& host = *stage_.ranks[rank];
      const bool has_started = rank < play_.world_size() || incarnations_[rank] > 0;
      if (has_started && !host.is_dead && !host.is_stopped && !has_ended_.contains(rank))
        return false;
    }
    return true;
  }

  void RunRank(int rank) {
    absl::StatusOr<std::unique_ptr<Communicator>> comm = MakeGroup(rank);
    if (comm.ok()) {
      play_.RunRank(rank, *std::move(comm), stage_);
    } else {
      absl::StrAppend(&stage_.crash, "rank ", rank, ": ", comm.status().ToString(), "; ");
    }
    has_ended_.insert(rank);
  }

  absl::StatusOr<std::unique_ptr<Communicator>> MakeGroup(int rank) {
    const int place = rank < play_.world_size() ? rank : places_[rank - play_.world_size()];
    EK_ASSIGN_OR_RETURN(Environment environment, EnvironmentOfRank(place, play_.world_size()));
    environment.newcomer = incarnations_[rank];
    environment.store_addresses = {absl::StrCat(Network::AddressOf(*stage_.store), ":", kPort)};
    environment.secret = kSecret;
    environment.is_one_host = false;
    environment.rank_zero_hosts = play_.rank0_hosts();
    environment.hosts_store = play_.rank0_hosts() && rank == 0;
    FactoryOptions options{.backend = play_.moves_data() ? weather_.backend : "none",
                           .communicator = play_.options()};
    options.communicator.watch.warn = [this, rank](const std::string& text) {
      absl::StrAppend(&stage_.warnings, "[", rank, "] ", text, "\n");
    };
    return CreateCommunicator(environment, options);
  }

  Play& play_;
  const Weather weather_;
  World world_;
  Network network_;
  Stage stage_;
  std::vector<int> places_;        // Of newcomers.
  std::vector<int> incarnations_;  // Of ranks and newcomers; 0: a rank, or not started.
  std::set<int> has_ended_;
};

}  // namespace

absl::StatusOr<std::shared_ptr<void>> Play::HostStore(const TcpStoreServerOptions& options) {
  EK_ASSIGN_OR_RETURN(std::shared_ptr<TcpStoreServer> server, TcpStoreServer::Create(options));
  return std::shared_ptr<void>(std::move(server));
}

std::unique_ptr<Play> MakePlay(uint64_t seed, const PlayOptions& options) {
  const bool is_large = std::any_of(options.world_sizes.begin(), options.world_sizes.end(),
                                    [](int world_size) { return world_size > kMostConnected; });
  if (is_large) return MakeProgramPlay(seed, options);  // The other plays move data.
  switch (Draws(seed).Below(5)) {
    case 0:
    case 1:
      return MakeFaultPlay(seed, options);
    case 2:
      return MakeElasticPlay(seed, options);
    default:
      return MakeProgramPlay(seed, options);
  }
}

PlayedRun Perform(Play& play, const Weather& weather, Nanos limit) {
  // Leaked: threads of lost hosts still refer to it.
  return (new Performance(play, weather))->Run(limit);
}

}  // namespace evenkeel::simulation
