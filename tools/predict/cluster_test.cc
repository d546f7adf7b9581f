#include "evenkeel/tools/predict/cluster.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace evenkeel {
namespace {

using testing::HasSubstr;

constexpr int64_t kMib = 1 << 20;

// Costs that are easy to compute with: 1 ms a turn and 10 ms a MiB, or a tenth of this.
LinkCost Cost(double factor = 1) {
  return {.latency_ns = static_cast<int64_t>(1e6 * factor),
          .ns_per_mib = static_cast<int64_t>(1e7 * factor)};
}
Cluster Of(const std::string& backend, double memory, double host, double network, int cores = 0) {
  return {.backend = backend, .cores = cores, .costs = {Cost(memory), Cost(host), Cost(network)}};
}
Layout Apart(int ranks) { return {.ranks = ranks, .ranks_per_host = 1}; }
Layout Together(int ranks) { return {.ranks = ranks, .ranks_per_host = ranks}; }

TEST(TcpLoadTest, FollowsTheAlgorithmsOfTheBackend) {
  struct Case {
    int ranks;
    int64_t bytes;
    double turns, moved;
  };
  for (const Case& c : std::vector<Case>{
           {1, kMib, 0, 0},
           {2, 0, 0, 0},
           {4, 1000, 1, 3000},        // Directly to the three others.
           {16, 1000, 4, 4000},       // Doubling.
           {12, 1000, 5, 5000},       // Three rounds of 8, one before and one after.
           {2, kMib, 2, kMib},        // A ring.
           {4, kMib, 6, 1.5 * kMib},  //
           {16, 33 << 10, 30, 61.875 * 1024},
       }) {
    SCOPED_TRACE(testing::Message() << c.ranks << " ranks, " << c.bytes << " bytes");
    const Load load = TcpAllReduce(c.ranks, c.bytes);
    EXPECT_DOUBLE_EQ(load.turns, c.turns);
    EXPECT_DOUBLE_EQ(load.bytes, c.moved);
  }
  EXPECT_DOUBLE_EQ(TcpBroadcast(8, 1000).turns, 3);
  EXPECT_DOUBLE_EQ(TcpBroadcast(5, 1000).turns, 3);
  EXPECT_DOUBLE_EQ(TcpBroadcast(4, kMib).bytes, 2 * kMib);  // And twice a piece of half a MiB.
}

TEST(ClusterTest, TcpTakesAsLongAsTheSlowerOfHostAndNetwork) {
  // A ring of four: 6 turns of 1 ms, 1.5 MiB of 10 ms.
  EXPECT_NEAR(Of("tcp", 0, 0.1, 1).AllReduce(Apart(4), kMib), 0.021, 1e-9);
  // Two processors for four ranks: the host's tenth counts twice.
  EXPECT_NEAR(Of("tcp", 0, 0.1, 0.01, 2).AllReduce(Apart(4), kMib), 0.0042, 1e-9);
  EXPECT_NEAR(Of("tcp", 0, 0.1, 0.01, 0).AllReduce(Apart(4), kMib), 0.0021, 1e-9);
}

TEST(ClusterTest, RanksOfAHostShareItsProcessors) {
  EXPECT_NEAR(Of("shm", 1, 0, 0, 2).AllReduce(Together(2), kMib), 0.011, 1e-9);
  EXPECT_NEAR(Of("shm", 1, 0, 0, 2).AllReduce(Together(8), kMib), 0.044, 1e-9);
  EXPECT_NEAR(Of("shm", 1, 0, 0, 0).AllReduce(Together(8), kMib), 0.011, 1e-9);
  EXPECT_NEAR(Of("shm", 1, 0, 0, 2).Broadcast(Together(4), kMib), 0.022, 1e-9);
}

TEST(ClusterTest, HierarchicalWorksOnTwoChunksAtATime) {
  // Two hosts of four ranks. A chunk of 4 MiB: 1 + 1 ms and 40 ms inside, 2 ms and 40 ms between.
  const Cluster cluster = Of("hierarchical", 1, 0, 1);
  const Layout where{.ranks = 8, .ranks_per_host = 4};
  EXPECT_NEAR(cluster.AllReduce(where, 4 * kMib), 0.084, 1e-9);
  EXPECT_NEAR(cluster.AllReduce(where, 12 * kMib), 0.084 + 2 * 0.042, 1e-9);
  EXPECT_NEAR(cluster.AllReduce(where, 5 * kMib), 0.084 + 0.012, 1e-9);
  // One rank per host costs the same as tcp, and one host the same as shm.
  EXPECT_EQ(cluster.AllReduce(Apart(4), kMib), Of("tcp", 1, 0, 1).AllReduce(Apart(4), kMib));
  EXPECT_EQ(cluster.AllReduce(Together(4), kMib), Of("shm", 1, 0, 1).AllReduce(Together(4), kMib));
}

TEST(ClusterTest, NothingToMoveCostsNothing) {
  for (const char* backend : {"shm", "tcp", "hierarchical"}) {
    const Cluster cluster = Of(backend, 1, 1, 1);
    EXPECT_EQ(cluster.AllReduce(Apart(1), kMib), 0);
    EXPECT_EQ(cluster.AllReduce(Together(4), 0), 0);
    EXPECT_EQ(cluster.Broadcast(Together(4), 0), 0);
  }
}

TEST(ClusterTest, MoreRanksAndMoreBytesNeverTakeLess) {
  for (const char* backend : {"shm", "tcp", "hierarchical"}) {
    const Cluster cluster = Of(backend, 1, 0.1, 1, 2);
    const auto place = [&](int ranks) {
      return Layout{.ranks = ranks, .ranks_per_host = backend[0] == 's' ? ranks : 1};
    };
    for (const int64_t bytes : {100 << 10, 1 << 20, 100 << 20}) {
      for (int ranks = 2; ranks <= 8192; ranks *= 2) {
        SCOPED_TRACE(testing::Message() << backend << ", " << ranks << " ranks, " << bytes);
        EXPECT_GE(cluster.AllReduce(place(2 * ranks), bytes),
                  cluster.AllReduce(place(ranks), bytes));
        EXPECT_GE(cluster.AllReduce(place(ranks), 2 * bytes),
                  cluster.AllReduce(place(ranks), bytes));
      }
    }
  }
}

std::vector<LevelSample> SamplesOf(const Cluster& cluster, Level level) {
  std::vector<LevelSample> samples;
  for (const int ranks : {2, 4}) {
    for (const int64_t bytes : {64 << 10, 1 << 20, 5 << 20}) {
      const Load load = TcpAllReduce(ranks, bytes);
      samples.push_back({level, load, cluster.SecondsOf(level, load)});
    }
  }
  return samples;
}

TEST(FitClusterTest, RecoversTheCostsOfASyntheticLinkAndPredictsOtherRanks) {
  const Cluster truth = Of("tcp", 0, 0, 0.3);
  std::vector<LevelSample> samples = SamplesOf(truth, Level::kNetwork);
  samples[1].seconds *= 10;  // One that another program delayed.
  const auto fitted = FitCluster("tcp", 0, samples);
  ASSERT_TRUE(fitted.ok()) << fitted.status();
  const LinkCost& network = fitted->costs[static_cast<int>(Level::kNetwork)];
  EXPECT_NEAR(network.latency_ns, 3e5, 3e3);
  EXPECT_NEAR(network.ns_per_mib, 3e6, 3e4);
  EXPECT_NEAR(fitted->AllReduce(Apart(64), 7 * kMib), truth.AllReduce(Apart(64), 7 * kMib), 1e-3);
}

TEST(FitClusterTest, ADelayedSampleOfASizeDoesNotCount) {
  // The larger size takes more than its bytes, so there is no latency to be found.
  std::vector<LevelSample> samples;
  for (const double seconds : {0.001, 0.001, 0.001, 0.1})
    samples.push_back({Level::kMemory, {.turns = 1, .bytes = kMib}, seconds});
  samples.push_back({Level::kMemory, {.turns = 1, .bytes = 4 * kMib}, 0.005});
  const auto fitted = FitCluster("shm", 0, samples);
  ASSERT_TRUE(fitted.ok()) << fitted.status();
  EXPECT_NEAR(fitted->AllReduce(Together(2), 5 * kMib), 0.006, 1e-6);
}

TEST(FitClusterTest, NamesWhatIsMissing) {
  const auto message = [](const char* backend, Level level) {
    const std::vector<LevelSample> samples = SamplesOf(Of("tcp", 1, 1, 1), level);
    return std::string(FitCluster(backend, 0, samples).status().message());
  };
  EXPECT_THAT(message("gloo", Level::kHost), HasSubstr("must be shm, tcp or hierarchical"));
  EXPECT_THAT(message("shm", Level::kNetwork), HasSubstr("no sample of shared memory"));
  EXPECT_THAT(message("tcp", Level::kMemory), HasSubstr("no sample of a network"));
  EXPECT_THAT(message("hierarchical", Level::kMemory), HasSubstr("no sample of a network"));
  EXPECT_EQ(message("tcp", Level::kHost), "");
}

TEST(SamplesOfTest, BeginWhenTheLastRankHasLaunchedABucket) {
  TracedRun run{.backend = "tcp", .ranks = 2};
  for (int rank : {0, 1}) {
    run.steps.push_back({.number = 5, .rank = rank, .at = 1 + rank * 0.1, .seconds = 1});
    run.steps.back().buckets = {{.bytes = kMib, .start = 0.2, .reduced = 0.5}};
  }
  const std::vector<LevelSample> samples = evenkeel::SamplesOf(run, 0);
  ASSERT_EQ(samples.size(), 1);
  EXPECT_EQ(samples[0].level, Level::kNetwork);
  EXPECT_NEAR(samples[0].seconds, 1.5 - 1.3, 1e-9);
  EXPECT_DOUBLE_EQ(samples[0].load.turns, 2);
  // The next one begins when it is ready on all ranks, and the first one is reduced: at 1.5. Rank 1
  // notices that at 1.6.
  for (TracedStep& step : run.steps)
    step.buckets.push_back({.bytes = 3 * kMib, .ready = 0.3, .start = 0.5, .reduced = 0.55});
  ASSERT_EQ(evenkeel::SamplesOf(run, 0).size(), 2);
  EXPECT_NEAR(evenkeel::SamplesOf(run, 0)[1].seconds, 1.55 - 1.5, 1e-9);
  // One that backward hides counts only where there is no other.
  for (TracedStep& step : run.steps) {
    step.last_gradient = 0.45;
    step.buckets[1] = {.bytes = 2 * kMib, .ready = 0.5, .start = 0.5, .reduced = 0.8};
  }
  ASSERT_EQ(evenkeel::SamplesOf(run, 0).size(), 1);
  EXPECT_DOUBLE_EQ(evenkeel::SamplesOf(run, 0)[0].load.bytes, 2 * kMib);
  // Not even in the step in which it took long: the others are missing then.
  for (int64_t number : {6, 7, 8}) {
    for (int rank : {0, 1}) {
      TracedStep step = run.steps[rank];
      step.number = number;
      if (number == 7) step.buckets[0].reduced = 0.9;
      run.steps.push_back(step);
    }
  }
  for (const LevelSample& sample : evenkeel::SamplesOf(run, 0))
    EXPECT_DOUBLE_EQ(sample.load.bytes, 2 * kMib);
  run.backend = "hierarchical";
  EXPECT_TRUE(evenkeel::SamplesOf(run, 0).empty());
}

TEST(ParseRowsTest, TakesAllReducesOfTcpAndOfRegisteredMemory) {
  const std::string row = R"({"op":"all_reduce","timing":"each","world":4,"bytes":1048576,)";
  const auto samples =
      ParseRows("r.json",
                "[" + row + R"("backend":"tcp","registered":false,"median_us":30},)" + row +
                    R"("backend":"shm","registered":true,"median_us":50},)" + row +
                    R"("backend":"shm","registered":false,"median_us":90},)" +
                    R"({"op":"barrier","timing":"each"}])",
                /*cores=*/2);
  ASSERT_TRUE(samples.ok()) << samples.status();
  ASSERT_EQ(samples->size(), 2);
  EXPECT_EQ(samples->front().level, Level::kHost);
  EXPECT_DOUBLE_EQ(samples->front().load.turns, 12);  // 6, for two ranks on each processor.
  EXPECT_NEAR(samples->front().seconds, 30e-6, 1e-12);
  EXPECT_EQ(samples->back().level, Level::kMemory);
  EXPECT_DOUBLE_EQ(samples->back().load.bytes, 2 * kMib);
}

TEST(ParseRowsTest, RefusesOtherFiles) {
  const auto message = [](const char* text) {
    return std::string(ParseRows("r.json", text, 0).status().message());
  };
  EXPECT_THAT(message("{}"), HasSubstr("r.json: it is neither"));
  EXPECT_THAT(message("x"), HasSubstr("r.json is not JSON at line 1, column 1"));
  EXPECT_THAT(message("[{}]"), HasSubstr("r.json: a row is not one of"));
  EXPECT_THAT(message(R"([{"op":"all_reduce","timing":"each","backend":"tcp","registered":false,)"
                      R"("world":2,"bytes":0,"median_us":1}])"),
              HasSubstr("r.json: a row has 2 ranks, 0 bytes and 1 us"));
  EXPECT_THAT(message("[]"), HasSubstr("r.json: no row is an all_reduce"));
}

}  // namespace
}  // namespace evenkeel
