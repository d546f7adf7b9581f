// The ranks of one simulated run: what they do, what happens to them, and the judge of how they
// end.
//
//   std::unique_ptr<Play> play = MakePlay(seed, {.world_sizes = {2, 3, 8}});
//   PlayedRun run = Perform(*play, DrawWeather(seed, play->world_size()), 90 * kSecond);
//
// Each rank is a process on a host of its own, over the backend tcp; groups above kMostConnected
// ranks only have a control plane, because tcp connects each rank with each other one. The store's
// host is another one, as with a launcher, unless rank 0 hosts it.
//
// Threads: Perform() once in a process, whose end must be _exit(): threads of lost ranks never end.

#ifndef EVENKEEL_TESTS_SIMULATION_PLAY_H_
#define EVENKEEL_TESTS_SIMULATION_PLAY_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/tests/faults/verdict.h"
#include "evenkeel/tests/simulation/network.h"
#include "evenkeel/tests/simulation/weather.h"
#include "evenkeel/tests/simulation/world.h"

namespace evenkeel::simulation {

struct Stage {
  World& world;
  Network& network;
  std::vector<Host*> ranks;
  Host* store = nullptr;  // Rank 0's, if that hosts it.
  std::string warnings;   // Of all ranks, a line each.
  std::string crash;      // Of a rank that could not make its group, and why.
};

class Play {
 public:
  virtual ~Play() = default;

  virtual std::string Describe() const = 0;
  virtual int world_size() const = 0;
  virtual bool rank0_hosts() const = 0;
  virtual std::string backend() const { return "tcp"; }
  virtual CommunicatorOptions options() const = 0;
  // Before the ranks begin.
  virtual void Prepare(Stage&) {}
  // On a thread of the rank's host.
  virtual void RunRank(int rank, std::unique_ptr<Communicator> comm, Stage& stage) = 0;
  // Plays that differ from this one by one thing less: a rank, a loop, a call, a loss.
  virtual std::vector<std::unique_ptr<Play>> Simpler() const { return {}; }
  // `is_over`: every rank that can end has ended.
  virtual Verdict Judge(bool is_over, const Stage& stage) = 0;
};

inline constexpr int kMostConnected = 128;

struct PlayOptions {
  std::vector<int> world_sizes = {2, 3, 4, 5, 8};
};
// A seed's play: an injected fault (tests/faults/), a drawn program, or a training that goes on
// after losses.
std::unique_ptr<Play> MakePlay(uint64_t seed, const PlayOptions& options);
std::unique_ptr<Play> MakeFaultPlay(uint64_t seed, const PlayOptions& options);
std::unique_ptr<Play> MakeProgramPlay(uint64_t seed, const PlayOptions& options);
std::unique_ptr<Play> MakeElasticPlay(uint64_t seed, const PlayOptions& options);

struct PlayedRun {
  Verdict verdict;
  std::string warnings;
  uint64_t trace_hash = 0;  // Equal runs have the same.
  Nanos time = 0;           // In the world.
  int64_t operations = 0;
};
PlayedRun Perform(Play& play, const Weather& weather, Nanos limit);

}  // namespace evenkeel::simulation

#endif  // EVENKEEL_TESTS_SIMULATION_PLAY_H_
