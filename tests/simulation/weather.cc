#include "evenkeel/tests/simulation/weather.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/time.h"

namespace evenkeel::simulation {
namespace {

constexpr int kUsualRanks = 16;
// With the time of retransmission, a quarter less than the silence after which ranks are lost.
constexpr Nanos kLongestBlip = 400 * kMillisecond;

bool Contains(const std::vector<int>& list, int element) {
  return std::find(list.begin(), list.end(), element) != list.end();
}

std::string Text(Nanos nanos) { return absl::FormatDuration(absl::Nanoseconds(nanos)); }

}  // namespace

Weather DrawWeather(uint64_t seed, int ranks) {
  Draws draws(seed ^ 0x77ea7be2);
  Weather weather;
  weather.world.seed = seed;
  weather.world.switch_one_in = 1 << draws.Below(7);
  // The thread of the hub reads a message of each rank: in a large group, equal pauses would be an
  // overload that no promise covers.
  weather.world.pause_one_in = (1 << draws.Below(6)) * std::max(1, ranks / kUsualRanks);
  weather.world.longest_pause = draws.Magnitude(2 * kMicrosecond, 20 * kMillisecond);
  if (draws.OneIn(3)) return weather;
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
    weather.slowness = static_cast<int>(draws.Magnitude(2, 10));
  }
  if (!draws.OneIn(3)) return weather;
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
  return weather;
}

void Schedule(const Weather& weather, World& world, Network& network) {
  for (const Blip& blip : weather.blips) {
    const auto change = [&world, &network,
                         blip](void (Network::*change)(const Host*, const Host*)) {
      for (const std::unique_ptr<Host>& here : world.hosts()) {
        for (const std::unique_ptr<Host>& there : world.hosts()) {
          if (!Contains(blip.here, here->id) || Contains(blip.here, there->id)) continue;
          (network.*change)(here.get(), there.get());
          if (!blip.is_one_way) (network.*change)(there.get(), here.get());
        }
      }
    };
    world.At(blip.when, [change] { change(&Network::CutOneWay); });
    world.At(blip.when + blip.lasts, [change] { change(&Network::HealOneWay); });
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
    absl::StrAppend(&text, "; from ", Text(blip.when), " for ", Text(blip.lasts), " hosts ",
                    absl::StrJoin(blip.here, ","),
                    blip.is_one_way ? " lose what they send to the others" : " are cut off");
  }
  return text;
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
  if (weather.slow_host >= 0) {
    Weather next = weather;
    next.slow_host = -1;
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
