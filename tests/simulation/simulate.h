// Runs a scenario of tests/faults/ in a simulated world: each rank is a process on a host of its
// own, over the backend tcp.
//
//   SimulatedRun run = Simulate(scenario, weather, /*limit=*/90 * kSecond);
//   Verdict verdict = Judge(scenario, run.outcome);
//
// Threads: once in a process, whose end must be _exit(): threads of lost ranks never end.

#ifndef EVENKEEL_TESTS_SIMULATION_SIMULATE_H_
#define EVENKEEL_TESTS_SIMULATION_SIMULATE_H_

#include <cstdint>
#include <string>

#include "evenkeel/tests/faults/scenario.h"
#include "evenkeel/tests/faults/verdict.h"
#include "evenkeel/tests/simulation/weather.h"
#include "evenkeel/tests/simulation/world.h"

namespace evenkeel::simulation {

struct SimulatedRun {
  Outcome outcome;
  std::string leftovers;    // Threads and descriptors that remain, wrong uses of descriptors.
  uint64_t trace_hash = 0;  // Equal runs have the same.
  Nanos time = 0;           // In the world.
  int64_t operations = 0;
};

SimulatedRun Simulate(const Scenario& scenario, const Weather& weather, Nanos limit);

}  // namespace evenkeel::simulation

#endif  // EVENKEEL_TESTS_SIMULATION_SIMULATE_H_
