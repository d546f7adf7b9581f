#include "evenkeel/tools/measure/rank_job.h"

#include <cstdio>
#include <string>
#include <vector>

#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/local/local.h"
#include "evenkeel/comm/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

TEST(RankJobTest, ARankThatFailsIsNamed) {
  EXPECT_TRUE(RunRankProcesses("job", {.ranks = 2, .command = {"/bin/true"}}).ok());
  const absl::Status failed = RunRankProcesses(
      "job", {.ranks = 2, .command = {"/bin/sh", "-c", "[ $RANK = 0 ] || exit 4"}});
  EXPECT_EQ(failed, absl::UnavailableError("job: rank 1 ended with exit code 4"));
  EXPECT_EQ(RunRankProcesses("mpirun", {.ranks = 1, .command = {"/bin/false"}}),
            absl::UnavailableError("mpirun ended with exit code 1"));
  EXPECT_THAT(RunRankProcesses("job", {.ranks = 1, .command = {"/no/such"}}).message(),
              HasSubstr("/no/such"));
}

TEST(RankJobTest, ACommandOfTheShellIsQuotedAndEnds) {
  // A signal that is ignored stays so in the program that takes its place.
  const std::string line = ShellCommand(
      {"/bin/sh", "-c", "trap '' TERM; echo \"$1 it's\"; exec sleep 300", "sh", "$HOME"},
      absl::Seconds(1));
  FILE* const pipe = popen(line.c_str(), "r");
  char text[32] = "";
  EXPECT_NE(fgets(text, sizeof(text), pipe), nullptr);
  EXPECT_STREQ(text, "$HOME it's\n");
  EXPECT_NE(pclose(pipe), 0);
}

TEST(RankJobTest, AllRanksGetTheNumbersOfAll) {
  const absl::Status status = RunRanks(3, [](Communicator& comm) -> absl::Status {
    const double rank = comm.rank();
    EK_ASSIGN_OR_RETURN(const std::vector<Numbers> all, GatherNumbers(comm, {rank, -rank}));
    EXPECT_THAT(all, ElementsAre(ElementsAre(0, 0), ElementsAre(1, -1), ElementsAre(2, -2)));
    EK_ASSIGN_OR_RETURN(const Numbers largest, LargestOf(comm, {rank, -rank}));
    EXPECT_THAT(largest, ElementsAre(2, 0));
    EK_ASSIGN_OR_RETURN(const Numbers none, LargestOf(comm, {}));
    EXPECT_TRUE(none.empty());
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

TEST(RankJobTest, DifferentCountsAreAnError) {
  const absl::Status status = RunRanks(2, [](Communicator& comm) -> absl::Status {
    const Numbers mine(1 + comm.rank());
    EXPECT_THAT(LargestOf(comm, mine).status().message(), HasSubstr("ranks measured "));
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
}

}  // namespace
}  // namespace evenkeel
