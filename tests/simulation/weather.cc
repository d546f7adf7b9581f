#include "evenkeel/tests/simulation/weather.h"

#include <algorithm>
#include <memory>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/time.h"

namespace evenkeel::simulation {
namespace {

constexpr int kUsualRanks = 16;
// With the time of retransmission, a quarter less than the silence after which ranks are lost.
constexpr Nanos kLongestBlip = 400 * kMillisecond;

// A look of a thread that spins takes as long as a reading of the clock.
constexpr Nanos kShortestReading = 200, kLongestReading = 10 * kMicrosecond;

// A heartbeat takes some ten operations of both hosts. A host that pauses for longer in each of
// them (half of this on average) is silent for as long as one that is lost.
constexpr Nanos kLongestPauses = 40 * kMillisecond;

constexpr Nanos kShortestJump = 10 * kMillisecond, kLongestJump = 10'000 * kSecond;

bool Contains(const std::vector<int>& list, int element) {
  return std::find(list.begin(), list.end(), element) != list.end();
}

std::string Text(Nanos nanos) { return absl::FormatDuration(absl::Nanoseconds(nanos)); }

// In turn, in blocks, or any.
std::vector<int> DrawMachines(Draws& draws, int ranks) {
  const int count = static_cast<int>(draws.Magnitude(2, std::max(2, ranks)));
  const int order = draws.Below(3);
  std::vector<int> machines;
  for (int rank = 0; rank < ranks; ++rank) {
    machines.push_back(order == 0   ? rank % count
                       : order == 1 ? rank * count / ranks
                                    : draws.Below(count));
  }
  return machines;
}

void DrawBackend(Draws& draws, int ranks, const std::vector<std::string>& backends,
                 Weather& weather) {
  weather.backend = backends[draws.Below(static_cast<int>(backends.size()))];
  weather.machine_of_store = ranks;
  if (weather.backend == "tcp") {
    weather.machines.resize(ranks);
    std::iota(weather.machines.begin(), weather.machines.end(), 0);
    return;
  }
  weather.world.clock_reading =
      draws.Magnitude(kShortestReading, kLongestReading / std::max(1, ranks / kUsualRanks));
  if (draws.OneIn(2)) weather.world.processors = 1;
  if (weather.backend == "hierarchical") {
    weather.machines = DrawMachines(draws, ranks);
  } else {
    weather.machines.assign(ranks, 0);
    weather.machine_of_store = 0;
  }
  if (draws.OneIn(2)) weather.points_to_loss = static_cast<int>(draws.Magnitude(1, 3000));
}

void DrawConditions(uint64_t seed, int ranks, Weather& weather) {
  Draws draws(seed ^ 0x77ea7be2);
  weather.world.switch_one_in = 1 << draws.Below(7);
  // The thread of the hub reads a message of each rank: in a large group, equal pauses would be an
  // overload that no promise covers.
  weather.world.pause_one_in = (1 << draws.Below(6)) * std::max(1, ranks / kUsualRanks);
  weather.world.longest_pause = draws.Magnitude(2 * kMicrosecond, 20 * kMillisecond);
  if (draws.OneIn(3)) return;
  weather.network.latency = draws.Magnitude(5 * kMicrosecond, 5 * kMillisecond);
  weather.network.jitter = draws.Magnitude(kMicrosecond, 5 * kMillisecond);
  weather.network.bytes_per_second = draws.Magnitude(10'000'000, 10'000'000'000);
  weather.network.window =
      static_cast<int>(draws.Magnitude(512 * std::max(1, ranks / kUsualRanks), 1 << 20));
  if (draws.OneIn(3)) weather.network.lost_one_in = static_cast<int>(draws.Magnitude(20, 1000));
  weather.clock_spread = draws.Magnitude(kMillisecond, 3600 * kSecond);
  weather.clock_drift = 200 * draws.Fraction();
  if (draws.OneIn(3)) {
    weather.slow_host = draws.Below(ranks);
    const Nanos pauses = weather.world.longest_pause / weather.world.switch_one_in /
                         weather.world.pause_one_in;  // The longest, divided among operations.
    weather.slowness = static_cast<int>(
        std::min(draws.Magnitude(2, 10), std::max<Nanos>(kLongestPauses / (pauses + 1), 1)));
  }
  if (!draws.OneIn(3)) return;
  weather.blips.resize(1 + draws.Below(2));
  for (Blip& blip : weather.blips) {
    blip = {.when = draws.Magnitude(kMillisecond, 3 * kSecond),
            .lasts = draws.Magnitude(kMillisecond, kLongestBlip),
            .is_one_way = draws.OneIn(2)};
    const bool is_one_host = draws.OneIn(2);
    const int one = draws.Below(ranks + 1);
    for (int host = 0; host <= ranks; ++host) {
      if (is_one_host ? host == one : draws.OneIn(2)) blip.here.push_back(host);
    }
  }
}

void DrawJumps(uint64_t seed, Weather& weather) {
  Draws draws(seed ^ 0xc10c5e7);
  if (!draws.OneIn(4)) return;
  weather.jumps.resize(1 + draws.Below(2));
  for (ClockJump& jump : weather.jumps) {
    jump.when = draws.Magnitude(kMillisecond, 3 * kSecond);
    jump.by = draws.Magnitude(kShortestJump, kLongestJump);
    if (draws.OneIn(2)) jump.by = -jump.by;
    const size_t host = draws.Below(static_cast<int>(weather.machines.size()) + 1);
    jump.machine =
        host < weather.machines.size() ? weather.machines[host] : weather.machine_of_store;
  }
}

}  // namespace

Weather DrawWeather(uint64_t seed, int ranks, const std::vector<std::string>& backends) {
  Weather weather;
  weather.world.seed = seed;
  DrawConditions(seed, ranks, weather);
  Draws draws(seed ^ 0xbacce4d);
  DrawBackend(draws, ranks, backends, weather);
  DrawJumps(seed, weather);
  return weather;
}

void Schedule(const Weather& weather, World& world, Network& network) {
  for (const Blip& blip : weather.blips) {
    const auto change = [&world, &network,
                         blip](void (Network::*change)(const Host*, const Host*)) {
      for (const std::unique_ptr<Host>& here : world.hosts()) {
        for (const std::unique_ptr<Host>& there : world.hosts()) {
          if (!Contains(blip.here, here->machine) || Contains(blip.here, there->machine)) continue;
          (network.*change)(here.get(), there.get());
          if (!blip.is_one_way) (network.*change)(there.get(), here.get());
        }
      }
    };
    world.At(blip.when, [change] { change(&Network::CutOneWay); });
    world.At(blip.when + blip.lasts, [change] { change(&Network::HealOneWay); });
  }
  for (const ClockJump& jump : weather.jumps) {
    world.At(jump.when, [&world, jump] {
      for (const std::unique_ptr<Host>& host : world.hosts()) {
        if (host->machine == jump.machine) world.SetClock(host.get(), jump.by);
      }
    });
  }
}

std::string Describe(const Weather& weather) {
  std::string text = absl::StrCat(
      "a switch at 1 in ", weather.world.switch_one_in, " operations, 1 in ",
      weather.world.pause_one_in, " of them with a pause of up to ",
      Text(weather.world.longest_pause), "; latency ", Text(weather.network.latency), " + ",
      Text(weather.network.jitter), ", ", weather.network.bytes_per_second / 1'000'000,
      " MB/s, window ", weather.network.window, " bytes");
  if (weather.network.lost_one_in > 0)
    absl::StrAppend(&text, ", 1 in ", weather.network.lost_one_in, " packets lost");
  if (weather.clock_spread > 0) {
    absl::StrAppend(&text, "; clocks differ by ", Text(weather.clock_spread), ", drift ",
                    static_cast<int>(weather.clock_drift), " ppm");
  }
  if (weather.slow_host >= 0) {
    absl::StrAppend(&text, "; host ", weather.slow_host, " pauses ", weather.slowness,
                    " times as long");
  }
  for (const Blip& blip : weather.blips) {
    absl::StrAppend(&text, "; from ", Text(blip.when), " for ", Text(blip.lasts), " machines ",
                    absl::StrJoin(blip.here, ","),
                    blip.is_one_way ? " lose what they send to the others" : " are cut off");
  }
  for (const ClockJump& jump : weather.jumps) {
    absl::StrAppend(&text, "; at ", Text(jump.when), " the clock of machine ", jump.machine,
                    " is set by ", Text(jump.by));
  }
  if (weather.backend == "tcp") return text;
  return absl::StrCat(
      text, "; over ", weather.backend, ", ranks on machines ",
      absl::StrJoin(weather.machines, ","), ", ",
      weather.world.processors == 1 ? "each with one processor, " : "",
      "a reading of a clock takes ", Text(weather.world.clock_reading),
      weather.points_to_loss == 0
          ? ""
          : absl::StrCat("; losses come ", weather.points_to_loss, " points later"));
}

std::vector<Weather> Simpler(const Weather& weather) {
  std::vector<Weather> simpler;
  const NetworkOptions calm;
  const auto add = [&](Weather next) { simpler.push_back(std::move(next)); };
  if (weather.clock_spread != 0) {
    Weather next = weather;
    next.clock_spread = 0;
    next.clock_drift = 0;
    add(next);
  }
  for (size_t i = 0; i < weather.blips.size(); ++i) {
    Weather next = weather;
    next.blips.erase(next.blips.begin() + static_cast<int>(i));
    add(next);
  }
  for (size_t i = 0; i < weather.jumps.size(); ++i) {
    Weather next = weather;
    next.jumps.erase(next.jumps.begin() + static_cast<int>(i));
    add(next);
  }
  if (weather.slow_host >= 0) {
    Weather next = weather;
    next.slow_host = -1;
    add(next);
  }
  if (weather.world.processors == 1) {
    Weather next = weather;
    next.world.processors = WorldOptions().processors;
    add(next);
  }
  if (weather.network.lost_one_in != 0) {
    Weather next = weather;
    next.network.lost_one_in = 0;
    add(next);
  }
  if (weather.network.latency != calm.latency || weather.network.window != calm.window) {
    Weather next = weather;
    next.network = calm;
    next.network.lost_one_in = weather.network.lost_one_in;
    add(next);
  }
  return simpler;
}

}  // namespace evenkeel::simulation
