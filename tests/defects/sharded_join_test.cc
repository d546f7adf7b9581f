// A sharded optimizer, or one with momentum, and ranks that become exhausted: the result is that of
// plain training on the same sums, the optimizer's state included. Elsewhere an exhausted rank's
// shard is stepped with its own stale gradient, a sharded optimizer that is first or alone in the
// list mismatches its collectives, and an exhausted rank's momentum stays behind.

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "evenkeel/comm/testing/tested_group.h"
#include "evenkeel/tests/toy_training.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

const std::vector<std::vector<int>> kInputs[] = {
    {{0, 1}, {0, 1, 2, 3, 4}},  // Two and five: the patterns in which others were found to be
                                // wrong.
    {{0, 1, 2, 3, 4}, {0, 1}},
    {{}, {0, 1, 2}},
    {{0}, {0, 1, 2}, {0, 1}},
    {{0, 1}, {}, {0, 1, 2, 3}, {}, {0}},
};

void ExpectPlainTraining(const ToySettings& settings) {
  for (const std::vector<std::vector<int>>& inputs : kInputs) {
    std::vector<std::string> counts;
    for (const std::vector<int>& batches : inputs) counts.push_back(absl::StrCat(batches.size()));
    SCOPED_TRACE(absl::StrCat("inputs ", absl::StrJoin(counts, ",")));
    const int world = static_cast<int>(inputs.size());
    std::vector<ToyStep> steps = GroupSteps(inputs);
    for (const ToyStep& step : GroupSteps(std::vector(world, settings.even_batches)))
      steps.push_back(step);
    const ToyState expected = TrainToyAlone(steps).back();
    std::vector<ToyResult> results(world);
    const absl::Status status = RunTestRanks(world, [&](Communicator& comm) {
      ToySettings mine = settings;
      mine.batches = inputs[comm.rank()];
      results[comm.rank()] = TrainToy(comm, mine);
      return results[comm.rank()].status;
    });
    ASSERT_TRUE(status.ok()) << status;
    for (int rank = 0; rank < world; ++rank) {
      EXPECT_TRUE(IsClose(results[rank].ended.weights, expected.weights)) << "rank " << rank;
      EXPECT_TRUE(IsClose(results[rank].ended.momentum, expected.momentum)) << "rank " << rank;
      EXPECT_EQ(results[rank].ended.weights, results[0].ended.weights) << "rank " << rank;
      EXPECT_EQ(results[rank].ended.momentum, results[0].ended.momentum) << "rank " << rank;
    }
  }
}

TEST(ShardedJoinTest, AShardOfADryRankIsSteppedWithTheGroupsGradients) {
  ExpectPlainTraining({.joins = true, .is_sharded = true});
}

TEST(ShardedJoinTest, AShardedOptimizerMayBeFirstInTheList) {
  ExpectPlainTraining({.joins = true, .list = ToyList::kOptimizerFirst, .is_sharded = true});
}

TEST(ShardedJoinTest, AShardedOptimizerMayBeAloneInTheList) {
  ExpectPlainTraining({.joins = true, .list = ToyList::kOptimizerAlone, .is_sharded = true});
}

// The second loop would show a momentum that had stayed behind: weights are broadcast at the end of
// a join, and drift apart again afterwards.
TEST(JoinedMomentumTest, AnEvenEpochAfterAnUnevenOneIsPlainTraining) {
  for (const bool is_sharded : {false, true}) {
    SCOPED_TRACE(is_sharded ? "sharded" : "unsharded");
    ExpectPlainTraining({.joins = true, .even_batches = {7, 8, 9}, .is_sharded = is_sharded});
  }
}

}  // namespace
}  // namespace evenkeel
