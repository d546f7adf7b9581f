#include "evenkeel/tools/predict/cluster.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <map>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "evenkeel/comm/hierarchical/thresholds.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/tcp/thresholds.h"
#include "evenkeel/files/strict_json.h"
#include "nlohmann/json.hpp"

namespace evenkeel {
namespace {

using Json = nlohmann::json;

constexpr double kNsPerSecond = 1e9;
constexpr double kMib = 1 << 20;

// The largest part of a collective's time before the last gradient with which it still is a sample
// of the link: while all processors compute, a collective waits for them.
constexpr double kMostHidden = 0.5;

// Returns the number of ranks per processor.
double RanksPerCore(int ranks, int cores) {
  return cores == 0 ? 1 : std::max(1.0, static_cast<double>(ranks) / cores);
}

Load Times(double factor, const Load& load) {
  return {.turns = factor * load.turns, .bytes = factor * load.bytes};
}

// Each rank of a host adds up its share of the bytes from all ranks' memory: all of the bytes
// per processor.
Load InMemory(int ranks, int cores, int64_t bytes) {
  return Times(RanksPerCore(ranks, cores), {.turns = 1, .bytes = static_cast<double>(bytes)});
}

// A bucket of a step, over all ranks, by a clock that they share.
struct BucketSpan {
  int ranks = 0;
  int64_t bytes = 0;
  double computed = -std::numeric_limits<double>::infinity();  // The last gradient of all.
  double launched = -std::numeric_limits<double>::infinity();
  double reduced = std::numeric_limits<double>::infinity();
};

// Returns the spans by step and bucket.
std::map<std::pair<int64_t, size_t>, BucketSpan> SpansOf(const TracedRun& run) {
  std::map<std::pair<int64_t, size_t>, BucketSpan> spans;
  for (const TracedStep& step : run.steps) {
    for (size_t b = 0; b < step.buckets.size(); ++b) {
      const TracedBucket& bucket = step.buckets[b];
      BucketSpan& span = spans[{step.number, b}];
      ++span.ranks;
      span.bytes = bucket.bytes;
      span.computed = std::max(span.computed, step.at + step.last_gradient);
      // The first bucket also waits for the ranks' agreement.
      span.launched = std::max(span.launched, step.at + (b == 0 ? bucket.start : bucket.ready));
      span.reduced = std::min(span.reduced, step.at + bucket.reduced);
    }
  }
  return spans;
}

}  // namespace

absl::string_view NameOf(Level level) {
  static constexpr absl::string_view kNames[kLevels] = {"memory", "host", "network"};
  return kNames[static_cast<int>(level)];
}

Load TcpAllReduce(int ranks, int64_t bytes) {
  const double n = ranks, all = static_cast<double>(bytes);
  if (ranks == 1 || bytes == 0) return {};
  if (ranks <= kTcpFewRanks && bytes * (ranks - 1) <= kTcpMostDirect)
    return {.turns = 1, .bytes = (n - 1) * all};
  if (bytes <= kTcpMostInRounds) {
    const auto power = std::bit_floor(static_cast<unsigned>(ranks));
    const double rounds =
        std::bit_width(power) - 1 + (power == static_cast<unsigned>(ranks) ? 0 : 2);
    return {.turns = rounds, .bytes = rounds * all};
  }
  return {.turns = 2 * (n - 1), .bytes = 2 * (n - 1) / n * all};
}

Load TcpBroadcast(int ranks, int64_t bytes) {
  const double all = static_cast<double>(bytes);
  if (ranks == 1 || bytes == 0) return {};
  if (bytes <= kTcpMostInRounds) {
    const double rounds = std::bit_width(static_cast<unsigned>(ranks - 1));
    return {.turns = rounds, .bytes = rounds * all};
  }
  // A chain, in pieces: the first piece passes all other ranks before it reaches the last one.
  const auto piece = static_cast<double>(std::min(bytes, kTcpPieceBytes));
  return {.turns = static_cast<double>(ranks - 1), .bytes = all + (ranks - 2) * piece};
}

double Cluster::SecondsOf(Level level, const Load& load) const {
  const LinkCost& cost = costs[static_cast<int>(level)];
  return (load.turns * static_cast<double>(cost.latency_ns) +
          load.bytes / kMib * static_cast<double>(cost.ns_per_mib)) /
         kNsPerSecond;
}

double Cluster::OverTcp(int ranks, const Load& load) const {
  return std::max(SecondsOf(Level::kNetwork, load),
                  SecondsOf(Level::kHost, Times(RanksPerCore(ranks, cores), load)));
}

double Cluster::AllReduce(const Layout& where, int64_t bytes) const {
  if (where.ranks == 1 || bytes == 0) return 0;
  if (backend == "tcp") return OverTcp(where.ranks, TcpAllReduce(where.ranks, bytes));
  if (backend == "shm" || where.hosts() == 1)
    return SecondsOf(Level::kMemory, InMemory(where.ranks, cores, bytes));
  if (where.ranks_per_host == 1) return OverTcp(where.hosts(), TcpAllReduce(where.hosts(), bytes));
  // Chunks overlap: the reduction and the broadcast of a chunk within a host, each of which moves
  // about half of the bytes of an all-reduce, run while another chunk is on the link.
  double seconds = 0;
  for (int64_t at = 0; at < bytes; at += kHierarchicalChunkBytes) {
    const int64_t chunk = std::min(bytes - at, kHierarchicalChunkBytes);
    Load halves = InMemory(where.ranks, cores, chunk);
    halves.turns *= 2;
    const double inside = SecondsOf(Level::kMemory, halves);
    const double between = OverTcp(where.hosts(), TcpAllReduce(where.hosts(), chunk));
    seconds += at == 0 ? inside + between : std::max(inside, between);
  }
  return seconds;
}

double Cluster::Broadcast(const Layout& where, int64_t bytes) const {
  if (where.ranks == 1 || bytes == 0) return 0;
  if (backend == "tcp") return OverTcp(where.ranks, TcpBroadcast(where.ranks, bytes));
  const double inside = where.ranks_per_host == 1 && backend != "shm"
                            ? 0
                            : SecondsOf(Level::kMemory, InMemory(where.ranks, cores, bytes));
  if (backend == "shm" || where.hosts() == 1) return inside;
  return inside + OverTcp(where.hosts(), TcpBroadcast(where.hosts(), bytes));
}

absl::StatusOr<Cluster> FitCluster(const std::string& backend, int cores,
                                   std::span<const LevelSample> samples) {
  if (backend != "shm" && backend != "tcp" && backend != "hierarchical") {
    return absl::InvalidArgumentError(
        absl::StrCat("the backend is \"", backend, "\"; it must be shm, tcp or hierarchical"));
  }
  Cluster cluster{.backend = backend, .cores = cores};
  // The times of each size, both per turn, so that different numbers of ranks lie on one line.
  std::array<std::map<int64_t, std::vector<int64_t>>, kLevels> of_levels;
  for (const LevelSample& sample : samples) {
    of_levels[static_cast<int>(sample.level)][std::llround(sample.load.bytes / sample.load.turns)]
        .push_back(std::llround(kNsPerSecond * sample.seconds / sample.load.turns));
  }
  const auto is_missing = [&](Level level) { return of_levels[static_cast<int>(level)].empty(); };
  if (backend != "tcp" && is_missing(Level::kMemory)) {
    return absl::InvalidArgumentError(
        "no sample of shared memory; give --links the trace of a run over shm, or the rows of "
        "bench_collectives over shm");
  }
  if (backend != "shm" && is_missing(Level::kHost) && is_missing(Level::kNetwork)) {
    return absl::InvalidArgumentError(
        "no sample of a network; give --links the trace of a run over tcp, or the rows of "
        "bench_collectives over tcp");
  }
  for (int level = 0; level < kLevels; ++level) {
    std::vector<LinkSample> medians;  // A sample that something else delayed does not count.
    for (const auto& [bytes, times] : of_levels[level])
      medians.push_back({.bytes = bytes, .ns = MedianOf(times)});
    cluster.costs[level] = FitLink(medians);
  }
  return cluster;
}

std::vector<LevelSample> SamplesOf(const TracedRun& run, int cores) {
  if (run.ranks == 1 || (run.backend != "shm" && run.backend != "tcp")) return {};
  // A reduce-scatter is the first half of an all-reduce.
  const double part = run.is_sliced ? 0.5 : 1;
  const bool is_shm = run.backend == "shm";
  struct Bucket {
    std::vector<LevelSample> samples;
    size_t hidden = 0;  // The number of hidden ones.
  };
  std::map<size_t, Bucket> buckets;
  double link_is_free = 0;
  for (const auto& [key, span] : SpansOf(run)) {
    const double start = key.second == 0 ? span.launched : std::max(span.launched, link_is_free);
    const double seconds = span.reduced - start;
    link_is_free = span.reduced;
    // A rank was not traced in this step, or the clocks of the ranks' hosts differ.
    if (span.ranks < run.ranks || seconds <= 0) continue;
    Bucket& bucket = buckets[key.second];
    bucket.hidden += span.computed - start > kMostHidden * seconds ? 1 : 0;
    bucket.samples.push_back({.level = is_shm ? Level::kMemory : Level::kNetwork,
                              .load = Times(part, is_shm ? InMemory(run.ranks, cores, span.bytes)
                                                         : TcpAllReduce(run.ranks, span.bytes)),
                              .seconds = seconds});
  }
  // Hidden buckets are left out in all steps: the steps in which such a bucket is not hidden are
  // those in which it took longest.
  const auto is_hidden = [](const Bucket& bucket) {
    return 2 * bucket.hidden > bucket.samples.size();
  };
  const bool all_are_hidden =
      std::ranges::all_of(buckets, [&](const auto& entry) { return is_hidden(entry.second); });
  std::vector<LevelSample> samples;
  for (const auto& [number, bucket] : buckets) {
    if (is_hidden(bucket) && !all_are_hidden) continue;
    samples.insert(samples.end(), bucket.samples.begin(), bucket.samples.end());
  }
  return samples;
}

absl::StatusOr<std::vector<LevelSample>> ParseRows(const std::string& name, absl::string_view text,
                                                   int cores) {
  std::vector<LevelSample> samples;
  EK_ASSIGN_OR_RETURN(const Json rows, internal::ParseStrictJson(text, /*max_depth=*/8, name,
                                                                 internal::JsonRoot::kAny));
  try {
    if (!rows.is_array())
      return absl::InvalidArgumentError(
          absl::StrCat(name, ": it is neither a trace nor rows of bench_collectives --json"));
    for (const Json& row : rows) {
      if (row.at("op") != "all_reduce" || row.at("timing") != "each") continue;
      const bool is_shm = row.at("backend") == "shm" && row.at("registered") == true;
      if (!is_shm && row.at("backend") != "tcp") continue;
      const int ranks = row.at("world");
      const int64_t bytes = row.at("bytes");
      const double us = row.at("median_us");
      if (ranks < 2 || bytes < 1 || !(us > 0)) {
        return absl::InvalidArgumentError(absl::StrCat(name, ": a row has ", ranks, " ranks, ",
                                                       bytes, " bytes and ", us,
                                                       " us, which must be positive"));
      }
      samples.push_back(
          {.level = is_shm ? Level::kMemory : Level::kHost,
           .load = is_shm ? InMemory(ranks, cores, bytes)
                          : Times(RanksPerCore(ranks, cores), TcpAllReduce(ranks, bytes)),
           .seconds = 1e-6 * us});
    }
  } catch (const Json::exception& error) {
    return absl::InvalidArgumentError(
        absl::StrCat(name, ": a row is not one of bench_collectives --json: ", error.what()));
  }
  if (!samples.empty()) return samples;
  return absl::InvalidArgumentError(
      absl::StrCat(name, ": no row is an all_reduce over tcp, or over shm in registered memory"));
}

}  // namespace evenkeel
