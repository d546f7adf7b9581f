#include "evenkeel/tools/predict/speed_model.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <numbers>
#include <random>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/tools/measure/paired_ratio.h"

namespace evenkeel {
namespace {

constexpr int kResamples = 200;
constexpr double kOutside = 0.025;           // The part of the resampled steps on either side.
constexpr double kDeviationPerMad = 1.4826;  // For a normal distribution.
constexpr double kHalf = 0.5;  // A reduce-scatter's and an all-gather's part of an all-reduce.

// The same step of all ranks.
using Row = std::vector<const TracedStep*>;

std::vector<Row> RowsOf(std::span<const TracedRun> runs) {
  std::vector<Row> rows;
  for (const TracedRun& run : runs) {
    std::vector<const TracedStep*> steps;
    for (const TracedStep& step : run.steps) steps.push_back(&step);
    std::ranges::stable_sort(steps, {}, &TracedStep::number);
    for (const TracedStep* step : steps) {
      if (rows.empty() || rows.back().front()->number != step->number || step == steps.front())
        rows.emplace_back();
      rows.back().push_back(step);
    }
  }
  return rows;
}

template <typename Value>
double MedianOver(std::span<const Row> rows, Value value) {
  std::vector<double> values;
  for (const Row& row : rows) {
    for (const TracedStep* step : row) values.push_back(value(*step));
  }
  return MedianOf(values);
}

// Returns the spread of the deviations from the mean of the ranks in each step, so that a delay of
// all ranks does not count.
double SpreadOf(std::span<const Row> rows, double compute) {
  std::vector<double> deviations;
  for (const Row& row : rows) {
    const auto n = static_cast<double>(row.size());
    if (row.size() < 2) continue;
    double mean = 0;
    for (const TracedStep* step : row) mean += step->compute / n;
    for (const TracedStep* step : row)
      deviations.push_back(std::abs(step->compute - mean) * std::sqrt(n / (n - 1)));
  }
  return deviations.empty() || compute <= 0 ? 0 : kDeviationPerMad * MedianOf(deviations) / compute;
}

// Returns the time in which an optimizer of slices gathers the values of all buckets.
double GatherSeconds(const StepParts& parts, const Cluster& cluster, const Layout& where) {
  double seconds = 0;
  for (const StepParts::Bucket& bucket : parts.buckets)
    seconds += kHalf * cluster.AllReduce(where, bucket.bytes);
  return parts.is_sliced ? seconds : 0;
}

// `cluster` and `where` are those of the run.
StepParts PartsOf(std::span<const Row> rows, const TracedRun& run, const Cluster& cluster,
                  const Layout& where) {
  StepParts parts{.buffer_bytes = run.buffer_bytes, .is_sliced = run.is_sliced};
  const auto median = [&](auto value) { return MedianOver(rows, value); };
  parts.begin = std::max(0.0, median([](const auto& s) { return s.begin; }) -
                                  cluster.Broadcast(where, parts.buffer_bytes));
  parts.compute = median([](const auto& s) { return s.compute; });
  parts.optimizer = median([](const auto& s) { return s.optimizer; });
  parts.last_gradient = median([](const auto& s) { return s.last_gradient - s.begin; });
  parts.tail = median([](const auto& s) {
    const double computed = s.begin + s.compute;
    return computed + s.wait - std::max(computed, s.buckets.back().reduced);
  });
  parts.tail = std::max(0.0, parts.tail);
  for (size_t b = 0; b < rows.front().front()->buckets.size(); ++b) {
    parts.buckets.push_back(
        {.bytes = rows.front().front()->buckets[b].bytes,
         .ready = median([b](const auto& s) { return s.buckets[b].ready - s.begin; })});
  }
  parts.spread = SpreadOf(rows, parts.compute);
  if (parts.is_sliced) {
    parts.optimizer =
        where.ranks * std::max(0.0, parts.optimizer - GatherSeconds(parts, cluster, where));
  }
  return parts;
}

absl::Status CheckRuns(std::span<const TracedRun> runs) {
  if (runs.empty()) return absl::InvalidArgumentError("no profile; give --profile=TRACE.json");
  const auto sizes = [](const TracedRun& run) {
    std::vector<int64_t> bytes;
    for (const TracedBucket& bucket : run.steps.front().buckets) bytes.push_back(bucket.bytes);
    return bytes;
  };
  for (const TracedRun& run : runs) {
    if (sizes(run) == sizes(runs.front()) && run.ranks == runs.front().ranks &&
        run.buffer_bytes == runs.front().buffer_bytes && run.backend == runs.front().backend &&
        run.is_sliced == runs.front().is_sliced)
      continue;
    return absl::InvalidArgumentError(
        absl::StrCat(run.name, " and ", runs.front().name,
                     " differ in their buckets, buffers, ranks, backend or sharding; the traces of "
                     "one profile must be of the same training"));
  }
  return absl::OkStatus();
}

// Appends as many elements as `from` has, each a random one of them.
template <typename T>
void Resample(const std::vector<T>& from, std::mt19937_64& random, std::vector<T>& to) {
  for (size_t i = 0; i < from.size(); ++i) to.push_back(from[random() % from.size()]);
}

void Scale(LinkCost& cost, double factor) {
  cost.latency_ns = std::llround(factor * static_cast<double>(cost.latency_ns));
  cost.ns_per_mib = std::llround(factor * static_cast<double>(cost.ns_per_mib));
}

}  // namespace

double ExpectedLargest(int count) {
  // The integral of x over the density of the largest, n f(x) F(x)^(n - 1).
  constexpr double kStep = 0.01, kEnd = 9;
  const double n = count;
  double sum = 0;
  for (double x = -kEnd; x < kEnd; x += kStep) {
    const double density = std::exp(-x * x / 2) / std::sqrt(2 * std::numbers::pi);
    const double below = 0.5 * std::erfc(-x / std::numbers::sqrt2);
    sum += kStep * x * n * density * std::pow(below, n - 1);
  }
  return sum;
}

Forecast Simulate(const StepParts& parts, const Cluster& cluster, const Layout& where,
                  double agreed) {
  const double slowest = 1 + parts.spread * ExpectedLargest(where.ranks);
  const double begun = parts.begin + cluster.Broadcast(where, parts.buffer_bytes);
  Forecast forecast{.where = where};
  double reduced = 0;
  for (const StepParts::Bucket& bucket : parts.buckets) {
    const double seconds = (parts.is_sliced ? kHalf : 1) * cluster.AllReduce(where, bucket.bytes);
    reduced = std::max({begun + slowest * bucket.ready, agreed, reduced}) + seconds;
    forecast.communication += seconds;
  }
  const double finished = std::max(begun + slowest * parts.compute, reduced) + parts.tail;
  const double gather = GatherSeconds(parts, cluster, where);
  forecast.communication += gather;
  forecast.exposed = std::max(0.0, finished - (begun + slowest * parts.last_gradient)) + gather;
  forecast.step = finished + parts.optimizer / (parts.is_sliced ? where.ranks : 1) + gather;
  return forecast;
}

absl::StatusOr<SpeedModel> SpeedModel::Fit(std::span<const TracedRun> runs,
                                           std::span<const LevelSample> links,
                                           const ModelOptions& options) {
  EK_RETURN_IF_ERROR(CheckRuns(runs));
  const TracedRun& first = runs.front();
  SpeedModel model;
  model.options_ = options;
  if (options.backend.empty()) model.options_.backend = first.backend;
  for (const TracedRun& run : runs) {
    for (const LevelSample& sample : SamplesOf(run, options.cores))
      model.samples_.push_back(sample);
  }
  model.samples_.insert(model.samples_.end(), links.begin(), links.end());

  const std::vector<Row> rows = RowsOf(runs);
  const auto fit = [&](std::span<const Row> some_rows, std::span<const LevelSample> some_samples,
                       StepParts& parts, Cluster& cluster) -> absl::Status {
    EK_ASSIGN_OR_RETURN(cluster, FitCluster(model.options_.backend, options.cores, some_samples));
    Cluster of_run = cluster;
    of_run.backend = first.backend;
    const Layout where{.ranks = first.ranks,
                       .ranks_per_host = first.backend == "shm" ? first.ranks : 1};
    parts = PartsOf(some_rows, first, of_run, where);
    return absl::OkStatus();
  };
  EK_RETURN_IF_ERROR(fit(rows, model.samples_, model.parts_, model.cluster_));

  std::array<std::vector<LevelSample>, kLevels> of_levels;
  for (const LevelSample& sample : model.samples_)
    of_levels[static_cast<int>(sample.level)].push_back(sample);
  std::mt19937_64 random(1);
  for (int i = 0; i < kResamples; ++i) {
    std::vector<Row> some_rows;
    std::vector<LevelSample> some_samples;
    Resample(rows, random, some_rows);
    for (const auto& of_level : of_levels) Resample(of_level, random, some_samples);
    Resampled& again = model.resampled_.emplace_back();
    EK_RETURN_IF_ERROR(fit(some_rows, some_samples, again.parts, again.cluster));
    for (int level = 0; level < kLevels; ++level) {
      if (of_levels[level].empty()) continue;
      const LevelSample& one = of_levels[level][random() % of_levels[level].size()];
      const double fitted = model.cluster_.SecondsOf(one.level, one.load);
      if (fitted > 0) Scale(again.cluster.costs[level], one.seconds / fitted);
    }
  }
  return model;
}

Forecast SpeedModel::At(const Layout& where) const {
  const double agreed =
      where.ranks == 1 ? 0 : options_.agreement + options_.agreement_per_rank * where.ranks;
  Forecast forecast = Simulate(parts_, cluster_, where, agreed);
  std::vector<double> steps;
  for (const Resampled& one : resampled_)
    steps.push_back(Simulate(one.parts, one.cluster, where, agreed).step);
  std::ranges::sort(steps);
  const auto outside = static_cast<size_t>(kOutside * static_cast<double>(steps.size()));
  forecast.low = std::min(forecast.step, steps[outside]);
  forecast.high = std::max(forecast.step, steps[steps.size() - 1 - outside]);
  return forecast;
}

}  // namespace evenkeel
