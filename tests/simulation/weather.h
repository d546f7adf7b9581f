// The conditions of one simulated run: how threads are scheduled, the network, the clocks.
//
//   Weather weather = DrawWeather(seed);
//   std::string text = Describe(weather);     // "switches 1/8, latency 20us, ..."
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

struct Weather {
  WorldOptions world;
  NetworkOptions network;
  Nanos clock_spread = 0;  // Clocks of the day differ by up to so much,
  double clock_drift = 0;  // and go wrong by up to so many parts per million.
  int slow_host = -1;      // The threads of this host pause so many times as long.
  int slowness = 1;
};

// Calm in a third of the runs.
Weather DrawWeather(uint64_t seed, int hosts);
std::string Describe(const Weather& weather);
// Weathers that differ from this one by one disturbance less.
std::vector<Weather> Simpler(const Weather& weather);

}  // namespace evenkeel::simulation

#endif  // EVENKEEL_TESTS_SIMULATION_WEATHER_H_
