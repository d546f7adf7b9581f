// The ranks of a group find the one that makes them wait, over every backend.

#include "evenkeel/join/straggler.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <future>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "evenkeel/bucket/data_parallel.h"
#include "evenkeel/bucket/parameter_set.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/testing/tested_group.h"
#include "evenkeel/join/join.h"
#include "evenkeel/join/steps/step_control.h"
#include "evenkeel/tests/stragglers/delayed_training.h"

namespace evenkeel {
namespace {

using testing::HasSubstr;
using testing::StartsWith;

// The first reduction begins the first interval, whose times come with the record after the next
// step: that makes two steps more than the report has.
constexpr int kSteps = 502;
// With a delay as long as a step, 500 steps last longer than the 10 seconds that make a straggler.
constexpr absl::Duration kStep = absl::Microseconds(10500);

// Runs the steps, and returns the news, which must be the same on all ranks.
std::string NewsAfter(int world_size, const DelaySetting& setting) {
  absl::Mutex mutex;
  std::string news = "none";
  const absl::Status status = RunTestRanks(world_size, [&](Communicator& comm) -> absl::Status {
    EK_ASSIGN_OR_RETURN(const auto training, DelayedTraining::Create(&comm, setting));
    EK_RETURN_IF_ERROR(training->Run(kSteps));
    EK_RETURN_IF_ERROR(comm.Barrier());
    const std::string own = StragglerNews(comm);
    EXPECT_EQ(StragglerNews(comm), "");
    absl::MutexLock lock(&mutex);
    EXPECT_TRUE(news == "none" || news == own) << news << " and " << own;
    news = own;
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
  return news;
}

struct SlowJob {
  int world_size;
  DelaySetting setting;
};
enum SlowJobName { kSlowLoader, kSlowBackward, kOneRank, kSlowJobs };
const SlowJob kSlowJob[kSlowJobs] = {
    {2, {.delay = Delay::kLoader, .rank = 1, .fraction = 1, .step = kStep}},
    {3,
     {.delay = Delay::kBackward, .rank = 0, .fraction = 1, .step = kStep, .placement = Slices{}}},
    {1, {.delay = Delay::kLoader, .fraction = 1, .step = kStep}},
};

class StragglerTest : public testing::Test {
 protected:
  // Jobs that no test asked for.
  static void TearDownTestSuite() { running_.clear(); }

  // Returns the news of one of the jobs. Their ranks sleep for most of the 10 seconds, so the first
  // call starts them all.
  static std::string NewsOf(SlowJobName name) {
    if (!running_.contains(name)) {
      for (int job = 0; job < kSlowJobs; ++job) {
        if (running_.contains(job)) continue;
        running_[job] = std::async(std::launch::async, [&slow = kSlowJob[job]] {
          return NewsAfter(slow.world_size, slow.setting);
        });
      }
    }
    return running_.extract(name).mapped().get();
  }

 private:
  static std::map<int, std::future<std::string>> running_;  // The end of a future awaits its job.
};
std::map<int, std::future<std::string>> StragglerTest::running_;

TEST_F(StragglerTest, ASlowLoader) {
  const std::string news = NewsOf(kSlowLoader);
  EXPECT_THAT(news, StartsWith("rank 1 cost the group "));
  EXPECT_THAT(news, HasSubstr(" % of the last 500 steps: input"));
}

TEST_F(StragglerTest, ASlowBackwardWithASplitOptimizer) {
  const std::string news = NewsOf(kSlowBackward);
  EXPECT_THAT(news, StartsWith("rank 0 cost the group "));
  EXPECT_THAT(news, HasSubstr(": backward"));
}

TEST_F(StragglerTest, TheTableHasThePhasesOfAllRanks) {
  const absl::Status status = RunTestRanks(2, [&](Communicator& comm) -> absl::Status {
    const DelaySetting setting{.delay = Delay::kSaving, .rank = 1, .fraction = 1};
    EK_ASSIGN_OR_RETURN(const auto training, DelayedTraining::Create(&comm, setting));
    EK_RETURN_IF_ERROR(training->Run(52));
    EK_RETURN_IF_ERROR(comm.Barrier());
    const StragglerReport report = StragglersOf(comm);
    EXPECT_EQ(report.steps, 50);
    EXPECT_GE(report.time, 50 * setting.step);
    for (const StragglerReport::Rank& rank : report.ranks) {
      EXPECT_GE(rank.mean.busy(StepPhase::kForward), 950);
      EXPECT_GE(rank.mean.busy(StepPhase::kBackward), 1600);
      EXPECT_GT(rank.mean.busy(StepPhase::kOptimizer), 0);
    }
    // Twice 25 steps' worth of delay.
    EXPECT_GE(report.ranks[1].mean.busy(StepPhase::kSaving), 2950);
    EXPECT_GE(report.ranks[0].waited_for_others, absl::Milliseconds(1));
    EXPECT_EQ(report.ranks[1].phase, StepPhase::kSaving);
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST_F(StragglerTest, TheTableHasTheTimesAtWhichBucketsWereReady) {
  const absl::Status status = RunTestRanks(2, [&](Communicator& comm) -> absl::Status {
    const DelaySetting setting{.delay = Delay::kBackward, .rank = 1, .fraction = 2, .step = kStep};
    EK_ASSIGN_OR_RETURN(const auto training, DelayedTraining::Create(&comm, setting));
    EK_RETURN_IF_ERROR(training->Run(42));
    EK_RETURN_IF_ERROR(comm.Barrier());
    const StragglerReport report = StragglersOf(comm);
    const BucketsReady& fast = report.ranks[0].mean.ready;
    const BucketsReady& slow = report.ranks[1].mean.ready;
    EXPECT_GT(fast.first_us, 0);
    EXPECT_GT(fast.last_us, fast.first_us);
    // The delay is between the two buckets, in all steps but the first, which has one bucket.
    EXPECT_GE(slow.last_us - slow.first_us, absl::ToInt64Microseconds(1.9 * kStep));
    EXPECT_THAT(report.Table(), HasSubstr(" all ready\n"));
    EXPECT_THAT(StepControl::Of(comm).StatusJson(), HasSubstr("\"ready_ms\":{\"first\":"));
    return comm.Barrier();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST_F(StragglerTest, ABucketWithoutGradientsIsNotTheFirstOne) {
  const absl::Status status = RunTestRanks(2, [&](Communicator& comm) -> absl::Status {
    std::vector<float> values(32), gradients(32);
    ParameterSet params;
    // With this cap the unused one has a bucket of its own, and the others share one.
    const absl::Span<float> value = absl::MakeSpan(values), gradient = absl::MakeSpan(gradients);
    params.Add("last", value.subspan(0, 8), gradient.subspan(0, 8));
    params.Add("first", value.subspan(8, 8), gradient.subspan(8, 8));
    params.Add("unused", value.subspan(16), gradient.subspan(16));
    EK_ASSIGN_OR_RETURN(
        const auto ddp,
        DataParallel::Create(&comm, &params, {},
                             {.reducer = {.caps = {Bytes{64}}, .find_unused = true}}));
    for (int step = 0; step < 8; ++step) {
      params.ClearGradients();
      EK_RETURN_IF_ERROR(ddp->BeginStep());
      EK_RETURN_IF_ERROR(ddp->MarkUnused({2}));
      for (const int param : {1, 0}) {
        params.SetGradState(param, GradState::kLocal);
        EK_RETURN_IF_ERROR(ddp->GradientReady(param));
        if (param == 1) absl::SleepFor(absl::Milliseconds(5));
      }
      EK_RETURN_IF_ERROR(ddp->FinishStep());
    }
    EXPECT_EQ(ddp->buckets().size(), 2u);
    EK_RETURN_IF_ERROR(comm.Barrier());
    for (const StragglerReport::Rank& rank : StragglersOf(comm).ranks)
      EXPECT_GE(rank.mean.ready.first_us, 4990);
    return comm.Barrier();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST_F(StragglerTest, ExhaustedRanksHadNoInput) {
  const absl::Status status = RunTestRanks(3, [&](Communicator& comm) -> absl::Status {
    EK_ASSIGN_OR_RETURN(const auto training,
                        DelayedTraining::Create(&comm, {.step = absl::Milliseconds(1)}));
    for (int epoch = 0; epoch < 2; ++epoch) {
      EK_RETURN_IF_ERROR(RunJoined({&training->ddp(), &training->optimizer()}, {}, [&](JoinScope&) {
        return training->Run(comm.rank() == 1 ? 20 : 40);
      }));
    }
    const StragglerReport report = StragglersOf(comm);
    // Each epoch's first interval, and those that a rank without input has begun, do not count.
    EXPECT_GE(report.steps, 70);
    EXPECT_LE(report.steps, 80);
    EXPECT_GT(report.ranks[1].without_input, 0.05);
    EXPECT_LT(report.ranks[1].without_input, 0.95);
    EXPECT_EQ(report.ranks[0].without_input, 0);
    EXPECT_THAT(report.RanksWithoutInput(), StartsWith("rank 1 had no input for "));
    return comm.Barrier();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST_F(StragglerTest, OneRankHasNoOtherToWaitForIt) { EXPECT_EQ(NewsOf(kOneRank), ""); }

}  // namespace
}  // namespace evenkeel
