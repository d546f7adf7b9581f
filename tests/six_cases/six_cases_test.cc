// The table of cases.h, row by row: ranks as threads, and as processes by the program that people
// run.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "evenkeel/comm/testing/tested_group.h"
#include "evenkeel/tests/child_processes.h"
#include "evenkeel/tests/six_cases/cases.h"

namespace evenkeel {
namespace {

using testing::Contains;
using testing::Each;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;

constexpr absl::Duration kTimeout = absl::Seconds(15);
// A deadlock is reported after a second and two beats. The program below has the default interval.
constexpr absl::Duration kBeat = absl::Milliseconds(50);

std::vector<RankReport> RunAll(const UnevenCase& uneven, const std::vector<int>& inputs,
                               const TestGroup& group) {
  std::vector<RankReport> reports(group.size());
  std::vector<std::thread> threads;
  for (size_t rank = 0; rank < group.size(); ++rank) {
    threads.emplace_back(
        [&, rank] { reports[rank] = RunCase(uneven, inputs[rank], *group[rank]); });
  }
  for (std::thread& thread : threads) thread.join();
  return reports;
}

class SixCasesTest : public testing::TestWithParam<std::tuple<UnevenCase, std::vector<int>>> {};

TEST_P(SixCasesTest, EndsOnEveryRankAsPromised) {
  const auto& [uneven, inputs] = GetParam();
  const absl::StatusOr<TestGroup> group = CreateTestGroup(
      static_cast<int>(inputs.size()), {.timeout = kTimeout, .watch = {.beat = kBeat}});
  ASSERT_TRUE(group.ok()) << group.status();
  EXPECT_THAT(Judge(uneven, inputs, RunAll(uneven, inputs, *group)), IsEmpty());
}

std::string NameOf(const testing::TestParamInfo<SixCasesTest::ParamType>& info) {
  const auto& [uneven, inputs] = info.param;
  const std::string number = std::string(uneven.name).substr(0, std::string(uneven.name).find(' '));
  return absl::StrCat("Case", number, "Inputs", absl::StrJoin(inputs, "And"));
}

const std::vector<std::vector<int>> kInputs = {{5, 6}, {1, 2}, {3, 0, 2}};

INSTANTIATE_TEST_SUITE_P(, SixCasesTest,
                         testing::Combine(testing::ValuesIn(kUnevenCases),
                                          testing::ValuesIn(kInputs)),
                         NameOf);

TEST(SixCasesProgramTest, EveryCaseKeepsItsPromises) {
  ChildProcesses program;
  ASSERT_TRUE(program
                  .Start({"tests/six_cases", absl::StrCat("--backends=", TheTestBackend().name),
                          "--at_once"},
                         {})
                  .ok());
  std::vector<std::string> lines;
  EXPECT_TRUE(program.Listen(absl::Now() + absl::Minutes(10),
                             [&](int, absl::string_view line) { lines.emplace_back(line); }));
  EXPECT_THAT(lines, Each(Not(HasSubstr("BROKEN"))));
  EXPECT_THAT(lines, Contains("All promises are kept."));
}

// The judge's verdict on reports that are wrong.
class JudgeTest : public testing::Test {
 protected:
  static constexpr UnevenCase kRight = kUnevenCases[0], kWrong = kUnevenCases[2];
  const std::vector<int> inputs_ = {1, 2};

  // As they should be.
  std::vector<RankReport> Good(const UnevenCase& uneven) {
    const std::vector<ToyState> alone = TrainToyAlone(GroupSteps({{0}, {0, 1}}));
    std::vector<RankReport> reports(2);
    for (int rank = 0; rank < 2; ++rank) {
      RankReport& report = reports[rank];
      report = {.rank = rank, .diverged = 1000000000, .ended = 2000000000};
      report.result.steps = uneven.is_right ? inputs_[rank] : 1;
      report.result.last = alone[report.result.steps];
      if (uneven.is_right) {
        report.result.ended = alone.back();
      } else {
        report.result.status =
            absl::FailedPreconditionError("rank 0 has left at #1; rank 1 is at #1 barrier (user)");
      }
    }
    return reports;
  }

  void ExpectComplaint(const UnevenCase& uneven, const std::vector<RankReport>& reports,
                       const std::string& what) {
    EXPECT_THAT(Judge(uneven, inputs_, reports), Contains(HasSubstr(what)));
  }
};

TEST_F(JudgeTest, FindsNothingWhereAllIsWell) {
  EXPECT_THAT(Judge(kRight, inputs_, Good(kRight)), IsEmpty());
  EXPECT_THAT(Judge(kWrong, inputs_, Good(kWrong)), IsEmpty());
}

TEST_F(JudgeTest, FindsEachBrokenPromise) {
  auto reports = Good(kRight);
  reports[1].result.ended.weights[3] += 0.01f;
  ExpectComplaint(kRight, reports, "rank 1 ends with wrong weights");
  ExpectComplaint(kRight, reports, "rank 1 does not end as rank 0 does");

  reports = Good(kRight);
  reports[0].result.ended.momentum[3] += 0.01f;
  ExpectComplaint(kRight, reports, "rank 0 ends with a wrong momentum");

  reports = Good(kRight);
  reports[0].result.status = absl::UnavailableError("rank 1 was lost");
  ExpectComplaint(kRight, reports, "but the program is right");

  reports = Good(kWrong);
  reports[0].result.last.weights[0] += 0.01f;
  ExpectComplaint(kWrong, reports, "rank 0 has wrong weights after 1 steps");

  reports = Good(kWrong);
  reports[0].ended += 5000000000;
  ExpectComplaint(kWrong, reports, "rank 0 ended 6 s after");
  reports[0].ended = 0;
  ExpectComplaint(kWrong, reports, "rank 0 has not ended");

  reports = Good(kWrong);
  reports[1].result.status = absl::OkStatus();
  ExpectComplaint(kWrong, reports, "rank 1 reports success");
  const std::pair<const char*, const char*> kIncomplete[] = {
      {"rank 0 is at #1 barrier", "of two ranks where"},
      {"ranks 0,1 disagree: barrier", "of two ranks where"},
      {"ranks 0,1 are at #1", "without the operation"}};
  for (const auto& [message, complaint] : kIncomplete) {
    reports[1].result.status = absl::FailedPreconditionError(message);
    ExpectComplaint(kWrong, reports, complaint);
  }
}

}  // namespace
}  // namespace evenkeel
