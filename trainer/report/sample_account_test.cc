#include "evenkeel/trainer/report/sample_account.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "evenkeel/files/file_io.h"

namespace evenkeel {
namespace {

using testing::HasSubstr;
using testing::Key;
using testing::Not;
using testing::SizeIs;
using testing::UnorderedElementsAre;

// An epoch of 8 samples, of which each of two ranks uses two in a step.
constexpr int kSamples = 8;

// The logs of one test, in a folder of its own.
class SampleAccountTest : public testing::Test {
 protected:
  SampleAccountTest()
      : folder_(absl::StrCat(testing::TempDir(), "/",
                             testing::UnitTest::GetInstance()->current_test_info()->name())) {
    std::filesystem::remove_all(folder_);
    EXPECT_EQ(NextSampleAttempt(folder_).value_or(-1), 0);
  }

  SampleLog Log(int rank, int incarnation = 0, int attempt = 0) const {
    return SampleLog(folder_, {.attempt = attempt, .rank = rank, .incarnation = incarnation});
  }
  static void Enter(SampleLog& log, int number, int64_t from, int epochs = 1) {
    EXPECT_TRUE(log.EnterGroup({.number = number,
                                .from = from,
                                .ranks = {0, 1},
                                .samples = kSamples,
                                .epochs = epochs})
                    .ok());
  }
  static void Write(SampleLog& log, int64_t step, const std::vector<int32_t>& samples,
                    int epoch = 0) {
    EXPECT_TRUE(log.Write(step, epoch, samples).ok());
  }
  SampleAccount Read() const {
    const absl::StatusOr<SampleAccount> account = ReadSampleLogs(folder_);
    EXPECT_TRUE(account.ok()) << account.status();
    return account.value_or(SampleAccount());
  }

  const std::string folder_;
};

TEST_F(SampleAccountTest, ARunUsesEachSampleOnce) {
  SampleLog log0 = Log(0), log1 = Log(1);
  for (SampleLog* const log : {&log0, &log1}) {
    Enter(*log, 0, 0, /*epochs=*/2);
    const int first = log == &log0 ? 0 : 2;
    for (int epoch = 0; epoch < 2; ++epoch) {
      Write(*log, 2 * epoch, {first, first + 1}, epoch);
      Write(*log, 2 * epoch + 1, {first + 4, first + 5}, epoch);
    }
    EXPECT_TRUE(log->End(4).ok());
  }
  const SampleAccount account = Read();
  EXPECT_TRUE(account.is_once());
  EXPECT_TRUE(account.has_ended);
  EXPECT_EQ(account.steps, 4);
  EXPECT_EQ(Describe(account),
            "epoch 0: each of 8 samples once\nepoch 1: each of 8 samples once\n"
            "4 steps in 1 group\n");
}

// Rank 1 is lost in step 1, after it has contributed (its line counts) or before (the group goes on
// from that step, and its line does not count).
TEST_F(SampleAccountTest, ALineCountsUnlessALaterGroupRepeatsItsStep) {
  for (const int from : {1, 2}) {
    SCOPED_TRACE(from);
    std::filesystem::remove_all(folder_);
    EXPECT_TRUE(NextSampleAttempt(folder_).ok());
    SampleLog log0 = Log(0), log1 = Log(1), newcomer = Log(1, /*incarnation=*/1);
    Enter(log0, 0, 0);
    Enter(log1, 0, 0);
    for (int step = 0; step < 2; ++step) {
      Write(log0, step, {4 * step, 4 * step + 1});
      Write(log1, step, {4 * step + 2, 4 * step + 3});
    }
    Enter(log0, 1, from);
    Enter(newcomer, 1, from);
    if (from == 1) {
      Write(log0, 1, {4, 5});
      Write(newcomer, 1, {6, 7});
    }
    EXPECT_TRUE(log0.End(2).ok());
    EXPECT_TRUE(newcomer.End(2).ok());
    const SampleAccount account = Read();
    EXPECT_TRUE(account.is_once()) << Describe(account);
    EXPECT_THAT(account.groups, SizeIs(2));
  }
}

TEST_F(SampleAccountTest, TheLastStepCountsWithTheEndOfTheRun) {
  SampleLog log = Log(0);
  Enter(log, 0, 0);
  Write(log, 0, {0, 1, 2, 3});
  Write(log, 1, {4, 5, 6, 7});
  SampleAccount account = Read();
  EXPECT_FALSE(account.is_once());
  EXPECT_TRUE(account.is_once(/*may_miss=*/true));
  EXPECT_THAT(Describe(account),
              HasSubstr("sample 4 is missing; not counted: step 1 on rank 0 (group 0)\n"));
  EXPECT_THAT(Describe(account), HasSubstr("1 steps in 1 group; the run has not ended"));
  EXPECT_TRUE(log.End(2).ok());
  EXPECT_TRUE(Read().is_once());
}

TEST_F(SampleAccountTest, MissingAndRepeatedSamplesAreListedWithTheirUses) {
  SampleLog log0 = Log(0), newcomer = Log(1, /*incarnation=*/2);
  Enter(log0, 0, 0);
  Enter(newcomer, 1, 1);
  Write(log0, 0, {0, 1, 2, 3});
  Write(newcomer, 1, {3, 4, 5, 6});
  EXPECT_TRUE(newcomer.End(2).ok());
  const SampleAccount account = Read();
  EXPECT_FALSE(account.is_once(/*may_miss=*/true));
  EXPECT_THAT(account.epochs.at(0).first_missing, UnorderedElementsAre(Key(7)));
  EXPECT_THAT(account.epochs.at(0).first_repeated, UnorderedElementsAre(Key(3)));
  EXPECT_EQ(Describe(account),
            "epoch 0: 7 of 8 samples, 1 of them more than once\n"
            "  sample 7 is missing\n"
            "  sample 3 is repeated: step 0 on rank 0 (group 0), step 1 on rank 1+2 (group 1)\n"
            "2 steps in 2 groups\n");
}

// An epoch without a line has no samples at all.
TEST_F(SampleAccountTest, AnEpochThatTheRunHasNotReachedIsMissing) {
  SampleLog log = Log(0);
  Enter(log, 0, 0, /*epochs=*/2);
  Write(log, 0, {0, 1, 2, 3, 4, 5, 6, 7});
  EXPECT_TRUE(log.End(1).ok());
  const SampleAccount account = Read();
  EXPECT_FALSE(account.is_once());
  EXPECT_EQ(account.epochs.at(1).missing, kSamples);
  EXPECT_EQ(account.epochs.at(0).missing, 0);
}

// The checkpoint from which a run is resumed may be older than its last step.
TEST_F(SampleAccountTest, ALaterAttemptRepeatsTheStepsFromItsFirstOneOn) {
  SampleLog killed = Log(0);
  Enter(killed, 0, 0);
  Write(killed, 0, {0, 1, 2, 3});
  Write(killed, 1, {4, 5, 6});
  ASSERT_EQ(NextSampleAttempt(folder_).value_or(-1), 1);
  SampleLog resumed = Log(0, 0, /*attempt=*/1);
  Enter(resumed, 0, 1);
  Write(resumed, 1, {4, 5, 6, 7});
  EXPECT_TRUE(resumed.End(2).ok());
  EXPECT_TRUE(Read().is_once());
}

TEST_F(SampleAccountTest, ATornLastLineIsIgnoredAndADamagedOneIsAnError) {
  SampleLog log = Log(0);
  Enter(log, 0, 0);
  Write(log, 0, {0, 1, 2, 3, 4, 5, 6, 7});
  const std::string path = absl::StrCat(folder_, "/attempt0-rank0-0", kSampleLogSuffix);
  std::ofstream(path, std::ios::app) << "{\"step\":1,\"epoch\":0,\"sam";
  EXPECT_EQ(Read().steps, 0);
  std::ofstream(path, std::ios::app) << "\n";
  EXPECT_THAT(ReadSampleLogs(folder_).status().message(), HasSubstr(path));
  EXPECT_THAT(ReadSampleLogs(testing::TempDir() + "/absent").status(), Not(absl::OkStatus()));
}

TEST_F(SampleAccountTest, FilesThatDifferInAGroupAreAnError) {
  SampleLog log0 = Log(0), log1 = Log(1);
  Enter(log0, 0, 0);
  Enter(log1, 0, 1);
  EXPECT_THAT(ReadSampleLogs(folder_).status().message(), HasSubstr("another file says from step"));
}

// The account is an error, or a value; damage takes no time or memory.
TEST(SampleAccountFuzzTest, DamagedBytesDoNoHarm) {
  const std::string good =
      "{\"attempt\":0,\"rank\":0,\"incarnation\":0,\"group\":0,\"from\":0,\"ranks\":[0],"
      "\"samples\":4,\"epochs\":1}\n{\"step\":0,\"epoch\":0,\"samples\":[0,1,2,3]}\n{\"end\":1}\n";
  ASSERT_TRUE(AddUpSamples({{"good", good}})->is_once());
  std::mt19937 random(1);
  constexpr absl::string_view kBytes = "0123456789-,:[]{}\"e.\n ";
  for (int round = 0; round < 5000; ++round) {
    std::string text = good;
    for (int change = 0; change <= round % 4; ++change)
      text.replace(random() % text.size(), random() % 3, 1, kBytes[random() % kBytes.size()]);
    const absl::StatusOr<SampleAccount> account = AddUpSamples({{"damaged", text}});
    EXPECT_TRUE(!account.ok() || !Describe(*account).empty()) << text;
  }
}

TEST(SampleLogTest, KnowsTheNumberOfAGroup) {
  EXPECT_EQ(GroupNumber("world"), 0);
  EXPECT_EQ(GroupNumber("world+12"), 12);
}

}  // namespace
}  // namespace evenkeel
