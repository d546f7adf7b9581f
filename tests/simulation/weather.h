// The conditions of one simulated run: how threads are scheduled, the network, the clocks, and the
// machines of the ranks.
//
//   Weather weather = DrawWeather(seed, /*ranks=*/4, {"tcp", "shm"});
//   std::string text = Describe(weather);  // "a switch at 1 in 8 operations, ..."
//
// Threads: pure functions of values.

#ifndef EVENKEEL_TESTS_SIMULATION_WEATHER_H_
#define EVENKEEL_TESTS_SIMULATION_WEATHER_H_

#include <cstdint>
#include <string>
#include <vector>

#include "evenkeel/tests/simulation/network.h"
#include "evenkeel/tests/simulation/world.h"

namespace evenkeel::simulation {

// A partition that heals before a rank may be declared lost. The machines in `here` lose what they
// send to the others, and what the others send to them unless it is one-way.
struct Blip {
  Nanos when = 0, lasts = 0;
  std::vector<int> here;
  bool is_one_way = false;
};

// The clock of one machine is set, as by NTP, by an administrator, or when a virtual machine
// continues.
struct ClockJump {
  Nanos when = 0, by = 0;
  int machine = 0;
};

struct Weather {
  WorldOptions world;
  NetworkOptions network;
  Nanos clock_spread = 0;  // The largest difference between the hosts' times of day.
  double clock_drift = 0;  // The largest error of their rates, in parts per million.
  int slow_host = -1;      // The host whose threads pause longer; -1: none.
  int slowness = 1;        // The factor of its pauses.
  std::vector<Blip> blips;
  std::vector<ClockJump> jumps;
  std::string backend = "tcp";
  // By rank. Over tcp, each rank has a machine of its own, and so has the store; over shm, all are
  // on one; over hierarchical, a machine may have several ranks.
  std::vector<int> machines;
  int machine_of_store = 0;
  // Losses come when their rank has come to so many more points at which it may lose the processor:
  // so they come in the midst of operations, most of which take no time.
  int points_to_loss = 0;
};

// Returns random conditions for so many ranks, over one of these backends. In a third of the runs
// only the scheduling is random. Other conditions of a seed do not depend on `backends` as long as
// "tcp" is drawn.
Weather DrawWeather(uint64_t seed, int ranks, const std::vector<std::string>& backends);
std::string Describe(const Weather& weather);
// Makes the blips and the jumps happen.
void Schedule(const Weather& weather, World& world, Network& network);
// Returns weathers that have one disturbance less than this one.
std::vector<Weather> Simpler(const Weather& weather);

}  // namespace evenkeel::simulation

#endif  // EVENKEEL_TESTS_SIMULATION_WEATHER_H_
