// A training of four ranks loses one in the middle of an epoch, or two: the others finish it. On
// all of them weights and momentum are then equal, and those of a plain loop that did the steps
// with whoever was there. Ranks are threads, and processes that are killed.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "evenkeel/comm/testing/tested_group.h"
#include "evenkeel/tests/child_processes.h"
#include "evenkeel/tests/elastic/elastic_rank.h"
#include "evenkeel/tests/toy_training.h"

namespace evenkeel {
namespace {

using testing::SizeIs;

using Reports = std::vector<ElasticReport>;

struct Dead {};  // Thrown by a thread that drops everything.

Reports RunAsThreads(const ElasticTraining& training) {
  auto group = CreateTestGroup(static_cast<int>(training.inputs.size()));
  EXPECT_TRUE(group.ok()) << group.status();
  std::vector<absl::StatusOr<ElasticReport>> reports(training.inputs.size(),
                                                     absl::CancelledError("lost"));
  std::vector<std::thread> threads;
  for (size_t rank = 0; rank < reports.size(); ++rank) {
    threads.emplace_back([&, rank, comm = std::move((*group)[rank])]() mutable {
      try {
        reports[rank] = TrainElastically(std::move(comm), training, {.die = [] { throw Dead(); }});
      } catch (const Dead&) {
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  Reports survivors;
  for (absl::StatusOr<ElasticReport>& report : reports) {
    if (absl::IsCancelled(report.status())) continue;
    EXPECT_TRUE(report.ok()) << report.status();
    if (report.ok()) survivors.push_back(*std::move(report));
  }
  return survivors;
}

Reports RunAsProcesses(const ElasticTraining& training) {
  ChildProcesses launch;
  const absl::Status started =
      launch.Start({"tools/launch", absl::StrCat("--nproc=", training.inputs.size()),
                    "--on_failure=continue", "--", "tests/elastic_rank", ToText(training)},
                   {});
  EXPECT_TRUE(started.ok()) << started;
  Reports survivors;
  EXPECT_TRUE(launch.Listen(absl::Now() + absl::Seconds(60), [&](int, absl::string_view line) {
    absl::StatusOr<ElasticReport> report = ElasticReportFromLine(line);
    EXPECT_TRUE(report.ok()) << report.status();
    if (report.ok()) survivors.push_back(*std::move(report));
  })) << launch.complaints(0);
  EXPECT_THAT(launch.complaints(0), testing::HasSubstr("went on and ended well"));
  EXPECT_THAT(launch.complaints(0), testing::Not(testing::HasSubstr("Sanitizer")));
  return survivors;
}

struct Case {
  const char* name;
  ElasticTraining training;
};

const Case kCases[] = {
    {"RankZeroInBackward", {{6, 6, 6, 6}, false, {{0, 3, StepPoint::kBackward}}}},
    {"AnotherInBackward", {{6, 6, 6, 6}, false, {{2, 3, StepPoint::kBackward}}}},
    {"InTheFirstStep", {{6, 6, 6, 6}, false, {{1, 0, StepPoint::kBackward}}}},
    {"BeforeItsRecord", {{6, 6, 6, 6}, false, {{3, 4, StepPoint::kBeforeRecord}}}},
    {"BetweenReductionAndOptimizer", {{6, 6, 6, 6}, false, {{1, 2, StepPoint::kReduced}}}},
    {"RankZeroAfterTheOptimizer", {{6, 6, 6, 6}, false, {{0, 2, StepPoint::kStepped}}}},
    {"AfterTheLastStep", {{6, 6, 6, 6}, false, {{2, 5, StepPoint::kStepped}}}},
    {"RankZeroWithJoin", {{6, 6, 6, 6}, true, {{0, 3, StepPoint::kBackward}}}},
    {"UnevenAllHaveInputs", {{5, 7, 4, 6}, true, {{3, 2, StepPoint::kBackward}}}},
    {"UnevenAnotherHasRunDry", {{5, 7, 2, 6}, true, {{0, 3, StepPoint::kBackward}}}},
    {"UnevenTheLongest", {{3, 7, 2, 5}, true, {{1, 6, StepPoint::kBackward}}}},
    {"TwoOneAfterTheOther",
     {{7, 7, 7, 7}, false, {{0, 2, StepPoint::kBackward}, {3, 5, StepPoint::kReduced}}}},
};

class ElasticTest : public testing::TestWithParam<Case> {
 protected:
  void Check(const Reports& survivors) {
    const ElasticTraining& training = GetParam().training;
    ASSERT_THAT(survivors, SizeIs(training.inputs.size() - training.losses.size()));
    EXPECT_THAT(WrongIn(training, survivors), testing::IsEmpty());
    EXPECT_THAT(UnlikePlanned(training, survivors[0]), testing::IsEmpty());
    for (const ElasticReport& report : survivors) EXPECT_LT(report.seconds_without_group, 10);
  }
};

TEST_P(ElasticTest, ThreadsFinishTheEpoch) { Check(RunAsThreads(GetParam().training)); }
TEST_P(ElasticTest, ProcessesFinishTheEpoch) { Check(RunAsProcesses(GetParam().training)); }

// Over the other backends every third one.
std::vector<Case> Cases() {
  std::vector<Case> cases;
  for (size_t i = 0; i < std::size(kCases); i += TheTestBackend().is_in_full ? 1 : 3)
    cases.push_back(kCases[i]);
  return cases;
}

INSTANTIATE_TEST_SUITE_P(, ElasticTest, testing::ValuesIn(Cases()),
                         [](const testing::TestParamInfo<Case>& info) {
                           return std::string(info.param.name);
                         });

TEST(ElasticReferenceTest, IsThePlainTrainingWhereNobodyIsLost) {
  EXPECT_EQ(TrainElasticallyAlone({.inputs = {3, 2}}, {}).weights,
            TrainToyAlone(GroupSteps({{0, 1, 2}, {0, 1}})).back().weights);
}

TEST(ElasticReferenceTest, DependsOnWhoIsLostAndWhen) {
  const std::vector<int> inputs = {4, 4, 4};
  const std::vector<float> weights = TrainElasticallyAlone({.inputs = inputs}, {{2, {0}}}).weights;
  EXPECT_FALSE(IsClose(weights, TrainElasticallyAlone({.inputs = inputs}, {{2, {1}}}).weights));
  EXPECT_FALSE(IsClose(weights, TrainElasticallyAlone({.inputs = inputs}, {{3, {0}}}).weights));
  EXPECT_FALSE(IsClose(weights, TrainElasticallyAlone({.inputs = inputs}, {}).weights));
}

}  // namespace
}  // namespace evenkeel
