#include "evenkeel/bucket/plan/cost_model.h"

#include <algorithm>
#include <cstddef>
#include <limits>
#include <utility>

#include "absl/numeric/int128.h"

namespace evenkeel {
namespace {

constexpr int64_t kMib = int64_t{1} << 20;
constexpr size_t kMaxFitted = 512;  // Samples of which all pairs are looked at.

// At most kMaxFitted of them, evenly taken from small to large.
std::vector<LinkSample> Thinned(std::span<const LinkSample> samples) {
  std::vector<LinkSample> all(samples.begin(), samples.end());
  std::ranges::sort(all, {}, [](const LinkSample& s) { return std::pair(s.bytes, s.ns); });
  if (all.size() <= kMaxFitted) return all;
  std::vector<LinkSample> some;
  for (size_t i = 0; i < kMaxFitted; ++i)
    some.push_back(all[i * (all.size() - 1) / (kMaxFitted - 1)]);
  return some;
}

// The sum of all: for samples that say nothing of the latency.
LinkCost OnlyBandwidth(std::span<const LinkSample> samples) {
  absl::int128 bytes = 0, ns = 0;
  for (const LinkSample& sample : samples) {
    bytes += sample.bytes;
    ns += sample.ns;
  }
  if (bytes == 0)
    return {.latency_ns = samples.empty() ? 0 : static_cast<int64_t>(ns / samples.size())};
  return {.ns_per_mib = static_cast<int64_t>(ns * kMib / bytes)};
}

// Where in the plan each gradient goes, and how many of its bucket are still to come.
struct Countdown {
  explicit Countdown(const BucketPlan& plan, size_t param_count) : bucket_of(param_count, -1) {
    for (size_t b = 0; b < plan.buckets.size(); ++b) {
      missing.push_back(static_cast<int>(plan.buckets[b].size()));
      for (int param : plan.buckets[b]) bucket_of[param] = static_cast<int>(b);
    }
  }
  std::vector<int> bucket_of;
  std::vector<int> missing;
};

}  // namespace

int64_t LinkCost::ReductionNs(int64_t bytes) const {
  return latency_ns + static_cast<int64_t>(absl::int128(bytes) * ns_per_mib / kMib);
}

double LinkCost::bytes_per_second() const {
  if (ns_per_mib == 0) return std::numeric_limits<double>::infinity();
  return static_cast<double>(kMib) * 1e9 / static_cast<double>(ns_per_mib);
}

int64_t MedianOf(std::vector<int64_t> values) {
  if (values.empty()) return 0;
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

bool CanFit(std::span<const LinkSample> samples) {
  if (samples.empty()) return false;
  const auto [smallest, largest] = std::ranges::minmax_element(samples, {}, &LinkSample::bytes);
  return largest->bytes > 0 && largest->bytes / 2 >= smallest->bytes;
}

LinkCost FitLink(std::span<const LinkSample> samples) {
  if (!CanFit(samples)) return OnlyBandwidth(samples);
  const std::vector<LinkSample> some = Thinned(samples);
  std::vector<int64_t> slopes;
  for (size_t i = 0; i < some.size(); ++i) {
    for (size_t j = i + 1; j < some.size(); ++j) {
      if (some[j].bytes == some[i].bytes) continue;
      slopes.push_back(static_cast<int64_t>(absl::int128(some[j].ns - some[i].ns) * kMib /
                                            (some[j].bytes - some[i].bytes)));
    }
  }
  LinkCost link{.ns_per_mib = MedianOf(std::move(slopes))};
  if (link.ns_per_mib < 0) link.ns_per_mib = 0;
  std::vector<int64_t> rests;
  for (const LinkSample& sample : some) rests.push_back(sample.ns - link.ReductionNs(sample.bytes));
  link.latency_ns = MedianOf(std::move(rests));
  return link.latency_ns >= 0 ? link : OnlyBandwidth(samples);
}

Prediction Predict(const BucketPlan& plan, std::span<const ParamSpec> specs,
                   std::span<const int64_t> ready_ns, const LinkCost& link) {
  Countdown countdown(plan, specs.size());
  std::vector<int> arrival;
  for (size_t p = 0; p < specs.size(); ++p) {
    if (countdown.bucket_of[p] >= 0) arrival.push_back(static_cast<int>(p));
  }
  std::ranges::stable_sort(arrival, {}, [&](int param) { return ready_ns[param]; });

  Prediction prediction;
  prediction.buckets.resize(plan.buckets.size());
  int64_t held_up = 0;  // By launches.
  int64_t link_is_free = 0;
  size_t next = 0;  // To launch.
  for (int param : arrival) {
    const int b = countdown.bucket_of[param];
    if (--countdown.missing[b] > 0) continue;
    prediction.buckets[b].ready_ns = ready_ns[param] + held_up;
    for (; next < plan.buckets.size() && countdown.missing[next] == 0; ++next) {
      BucketPrediction& bucket = prediction.buckets[next];
      int64_t bytes = 0;
      for (int member : plan.buckets[next]) bytes += specs[member].bytes();
      bucket.launched_ns = ready_ns[param] + held_up;
      bucket.reduced_ns = std::max(bucket.launched_ns, link_is_free) + link.ReductionNs(bytes);
      link_is_free = bucket.reduced_ns;
      held_up += link.launch_ns;
    }
  }
  if (arrival.empty()) return prediction;
  prediction.last_gradient_ns = ready_ns[arrival.back()];
  prediction.end_ns = std::max(prediction.last_gradient_ns + held_up, link_is_free);
  prediction.exposed_ns = prediction.end_ns - prediction.last_gradient_ns;
  return prediction;
}

}  // namespace evenkeel
