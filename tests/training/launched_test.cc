// The program as a rank of somebody else's job: variables as torchrun and others set them, by hand.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "evenkeel/tests/training/program.h"
#include "evenkeel/tests/training/small_data.h"
#include "evenkeel/tests/training/train_program.h"

namespace evenkeel {
namespace {

using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;
using testing::SizeIs;

using Variables = std::map<std::string, std::string>;

// One that was free a moment ago.
int FreePort() {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(address);
  EXPECT_EQ(bind(fd, reinterpret_cast<sockaddr*>(&address), size), 0);
  EXPECT_EQ(getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size), 0);
  close(fd);
  return ntohs(address.sin_port);
}

Variables RankVariables(int rank, int ranks) {
  return {{"RANK", absl::StrCat(rank)},
          {"WORLD_SIZE", absl::StrCat(ranks)},
          {"LOCAL_RANK", absl::StrCat(rank)},
          {"LOCAL_WORLD_SIZE", absl::StrCat(ranks)},
          {"EVENKEEL_SECRET", "the secret of this test"}};
}

// Two ranks with these flags and, each, its variables and the common ones.
std::vector<std::unique_ptr<Program>> StartTwoRanks(const std::vector<std::string>& flags,
                                                    const Variables& common) {
  std::vector<std::string> command = {
      kTrain,
      "--model=mlp",
      "--hidden=8",
      "--batch_size=4",
      "--shuffle=false",
      "--epochs=1",
      "--data=" + WriteSmallData("data", {.train = 40, .test = 11})};
  command.insert(command.end(), flags.begin(), flags.end());
  std::vector<std::unique_ptr<Program>> programs;
  for (int rank = 0; rank < 2; ++rank) {
    ProgramOptions options{.environment = RankVariables(rank, 2)};
    options.environment.insert(common.begin(), common.end());
    programs.push_back(std::make_unique<Program>(command, options));
  }
  return programs;
}

std::vector<Ended> RunTwoRanks(const std::vector<std::string>& flags, const Variables& common) {
  std::vector<Ended> ended;
  for (const auto& program : StartTwoRanks(flags, common)) ended.push_back(program->Wait());
  return ended;
}

Variables StoreInFolder(const std::string& name) {
  const std::string folder = TempPath(name);
  mkdir(folder.c_str(), 0700);
  return {{"EVENKEEL_STORE", folder}};
}

void ExpectOneRun(const std::vector<Ended>& ended) {
  for (const Ended& rank : ended) {
    EXPECT_EQ(rank.code, 0) << rank.err;
    EXPECT_THAT(rank.err, IsEmpty());
  }
  EXPECT_THAT(ended[0].out, HasSubstr("on 2 ranks over shm"));
  EXPECT_THAT(ended[0].out, HasSubstr("test_accuracy="));
  EXPECT_THAT(ended[1].out, IsEmpty());  // Rank 0 speaks.
}

TEST(LaunchedTest, RanksMeetAtMasterAddressAndPort) {
  ExpectOneRun(
      RunTwoRanks({}, {{"MASTER_ADDR", "127.0.0.1"}, {"MASTER_PORT", absl::StrCat(FreePort())}}));
}

TEST(LaunchedTest, RanksMeetInAFolder) {
  ExpectOneRun(RunTwoRanks({"--rank_steps=3,5"}, StoreInFolder("store")));
}

TEST(LaunchedTest, WeightsAreThoseOfRanksThatWeStart) {
  const std::string launched = TempPath("launched.safetensors"),
                    started = TempPath("started.safetensors");
  ExpectOneRun(RunTwoRanks({"--save=" + launched}, StoreInFolder("weights_store")));
  const Ended ended =
      Train({"--model=mlp", "--hidden=8", "--batch_size=4", "--shuffle=false", "--epochs=1",
             "--nproc=2", "--save=" + started, "--data=" + TempPath("data")});
  EXPECT_EQ(ended.code, 0) << ended.err;
  EXPECT_EQ(MaxDifference(ReadWeights(launched), ReadWeights(started)), 0);
}

TEST(LaunchedTest, OneRankSpeaksWhenAllHaveTheSameError) {
  const std::vector<Ended> ended = RunTwoRanks({"--freeze=conv@0:1"}, StoreInFolder("error_store"));
  for (const Ended& rank : ended) EXPECT_EQ(rank.code, 1);
  EXPECT_THAT(Lines(ended[0].err), SizeIs(1));
  EXPECT_THAT(ended[0].err, HasSubstr("train: --freeze: no parameter begins with \"conv\""));
  EXPECT_THAT(ended[1].err, IsEmpty());
}

// Some launchers kill the other ranks as soon as one has failed.
TEST(LaunchedTest, TheErrorIsReportedBeforeAnyRankEnds) {
  const auto programs = StartTwoRanks({"--freeze=conv@0:1"}, StoreInFolder("killed_store"));
  EXPECT_EQ(programs[1]->Wait().code, 1);
  kill(programs[0]->pid(), SIGKILL);
  EXPECT_THAT(programs[0]->Wait().err,
              HasSubstr("train: --freeze: no parameter begins with \"conv\""));
}

TEST(LaunchedTest, WhatOnlyOneRankCannotReadIsToldWithItsNumber) {
  const std::vector<Ended> ended =
      RunTwoRanks({"--init=" + TempPath("missing.safetensors")}, StoreInFolder("init_store"));
  for (const Ended& rank : ended) EXPECT_EQ(rank.code, 1);
  EXPECT_THAT(Lines(ended[0].err + ended[1].err), SizeIs(1));
  EXPECT_THAT(ended[0].err, HasSubstr("train: rank 0: --init: "));
}

TEST(LaunchedTest, ThreadsAreNoBackendForProcesses) {
  const std::vector<Ended> ended = RunTwoRanks({"--backend=local"}, StoreInFolder("local_store"));
  for (const Ended& rank : ended) {
    EXPECT_EQ(rank.code, 1);
    EXPECT_THAT(rank.err, HasSubstr("backend local is for ranks that are threads of one process"));
    EXPECT_THAT(rank.err, HasSubstr("choose auto"));
    EXPECT_THAT(rank.out, Not(HasSubstr("test_accuracy")));
  }
}

TEST(LaunchedTest, RanksThatAreThereAreNotToBeStarted) {
  const Variables common = StoreInFolder("nproc_store");
  for (const Ended& rank : RunTwoRanks({"--nproc=7"}, common)) {
    EXPECT_EQ(rank.code, 1);
    EXPECT_THAT(Lines(rank.err), SizeIs(1));
    EXPECT_THAT(
        rank.err,
        HasSubstr(
            "--nproc=7 conflicts with the 2 ranks of this process's launcher; leave --nproc out"));
  }
  ExpectOneRun(RunTwoRanks({"--nproc=2"}, common));
}

TEST(LaunchedTest, VariablesThatMakeNoSenseAreOneSentence) {
  const Ended ended = Train({"--model=mlp"}, {.environment = {{"RANK", "5"}, {"WORLD_SIZE", "2"}}});
  EXPECT_NE(ended.code, 0);
  EXPECT_THAT(Lines(ended.err), SizeIs(1));
  EXPECT_THAT(ended.err, HasSubstr("RANK"));
}

}  // namespace
}  // namespace evenkeel
