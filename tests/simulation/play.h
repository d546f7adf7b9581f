// The ranks of one simulated run: their program, their faults, and the judgement of their ends.
//
//   std::unique_ptr<Play> play = MakePlay(seed, {.world_sizes = {2, 3, 8}});
//   PlayedRun run = Perform(*play, DrawWeather(seed, play->world_size(), {"tcp"}), 90 * kSecond);
//
// Each rank is a process; groups of more than kMostConnected ranks have a control plane only,
// because tcp connects every pair of ranks. The store has a process of its own, as with a launcher,
// unless rank 0 hosts it.
//
// Threads: Perform() runs once in a process, which must end by _exit(): threads of lost ranks never
// end.

#ifndef EVENKEEL_TESTS_SIMULATION_PLAY_H_
#define EVENKEEL_TESTS_SIMULATION_PLAY_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/rendezvous/tcp_store_server.h"
#include "evenkeel/tests/faults/verdict.h"
#include "evenkeel/tests/simulation/network.h"
#include "evenkeel/tests/simulation/weather.h"
#include "evenkeel/tests/simulation/world.h"

namespace evenkeel::simulation {

struct Stage {
  World& world;
  Network& network;
  std::vector<Host*> ranks;  // Those of the first group, and after them those of newcomers.
  Host* store = nullptr;     // Rank 0's host, if rank 0 hosts the store.
  int points_to_loss = 0;
  std::string warnings;  // The warnings of all ranks, one per line.
  std::string crash;     // The errors of ranks that could not make their group.
  // Starts a process of Play::newcomers() as the process of this number (EVENKEEL_NEWCOMER) in its
  // place.
  std::function<void(int newcomer, int incarnation)> start;
};

// A process that may be started in the place of a lost rank.
struct Newcomer {
  int place = 0;
  bool has_own_machine = false;  // False: it is on that of the lost rank.
};

class Play {
 public:
  virtual ~Play() = default;

  virtual std::string Describe() const = 0;
  virtual int world_size() const = 0;
  virtual bool rank0_hosts() const = 0;
  virtual bool moves_data() const { return true; }
  virtual CommunicatorOptions options() const = 0;
  virtual std::vector<Newcomer> newcomers() const { return {}; }
  // Called before the ranks run.
  virtual void Prepare(Stage&) {}
  // Returns the store, on whose host it is called.
  virtual absl::StatusOr<std::shared_ptr<void>> HostStore(const TcpStoreServerOptions& options);
  // Called on the store's host now and then, until the last process has ended.
  virtual void Tend(Stage&) {}
  // Called on a thread of the rank's host. The numbers of newcomers follow those of the ranks.
  virtual void RunRank(int rank, std::unique_ptr<Communicator> comm, Stage& stage) = 0;
  // Returns plays that have one element less than this one: a rank, a loop, a call or a loss.
  virtual std::vector<std::unique_ptr<Play>> Simpler() const { return {}; }
  // `is_over`: every rank that can end has ended.
  virtual Verdict Judge(bool is_over, const Stage& stage) = 0;
};

inline constexpr int kMostConnected = 128;

struct PlayOptions {
  std::vector<int> world_sizes = {2, 3, 4, 5, 8};
};
// Return the play of a seed: an injected fault (tests/faults/), a random program, a training that
// continues after losses, one with newcomers in the places of lost ranks, or one on ranks of
// changing speed. MakePlay() chooses between the first three.
std::unique_ptr<Play> MakePlay(uint64_t seed, const PlayOptions& options);
std::unique_ptr<Play> MakeFaultPlay(uint64_t seed, const PlayOptions& options);
std::unique_ptr<Play> MakeProgramPlay(uint64_t seed, const PlayOptions& options);
std::unique_ptr<Play> MakeElasticPlay(uint64_t seed, const PlayOptions& options);
std::unique_ptr<Play> MakeReplacePlay(uint64_t seed, const PlayOptions& options);
std::unique_ptr<Play> MakeBalancePlay(uint64_t seed, const PlayOptions& options);

struct PlayedRun {
  Verdict verdict;
  std::string warnings;
  uint64_t trace_hash = 0;  // Equal runs have equal hashes.
  Nanos time = 0;           // The virtual time at the end.
  int64_t operations = 0;
};
PlayedRun Perform(Play& play, const Weather& weather, Nanos limit);

}  // namespace evenkeel::simulation

#endif  // EVENKEEL_TESTS_SIMULATION_PLAY_H_
