#include "evenkeel/tests/simulation/weather.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"

namespace evenkeel::simulation {
namespace {

std::string Text(Nanos nanos) { return absl::FormatDuration(absl::Nanoseconds(nanos)); }

}  // namespace

Weather DrawWeather(uint64_t seed, int hosts) {
  Draws draws(seed ^ 0x77ea7be2);
  Weather weather;
  weather.world.seed = seed;
  weather.world.switch_one_in = 1 << draws.Below(7);
  weather.world.pause_one_in = 1 << draws.Below(6);
  weather.world.longest_pause = draws.Magnitude(2 * kMicrosecond, 20 * kMillisecond);
  if (draws.OneIn(3)) return weather;
  weather.network.latency = draws.Magnitude(5 * kMicrosecond, 5 * kMillisecond);
  weather.network.jitter = draws.Magnitude(kMicrosecond, 5 * kMillisecond);
  weather.network.bytes_per_second = draws.Magnitude(10'000'000, 10'000'000'000);
  weather.network.window = static_cast<int>(draws.Magnitude(512, 1 << 20));
  if (draws.OneIn(3)) weather.network.lost_one_in = static_cast<int>(draws.Magnitude(20, 1000));
  weather.clock_spread = draws.Magnitude(kMillisecond, 3600 * kSecond);
  weather.clock_drift = 200 * draws.Fraction();
  if (draws.OneIn(3)) {
    weather.slow_host = draws.Below(hosts);
    weather.slowness = static_cast<int>(draws.Magnitude(2, 10));
  }
  return weather;
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
