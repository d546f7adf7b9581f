#include "evenkeel/tools/bench/rank_processes.h"

#include <cstdlib>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "evenkeel/tools/bench/case.h"
#include "evenkeel/tools/bench/peer.h"
#include "evenkeel/tools/bench/process.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel::bench {
namespace {

using testing::HasSubstr;

constexpr char kTool[] = "tools/bench_collectives";

class RankProcessesTest : public testing::Test {
 protected:
  RankProcessesTest() {
    folder_ = std::string(std::getenv("TEST_TMPDIR")) + "/" +
              testing::UnitTest::GetInstance()->current_test_info()->name();
    std::filesystem::remove_all(folder_);
    std::filesystem::create_directories(folder_);
  }

  // Ranks that copy, each started by the shell, which may do other things as well.
  absl::StatusOr<std::unique_ptr<Peer>> Start(const std::string& script, int world = 2) {
    RankOptions options{
        .name = "copies", .world = world, .folder = folder_, .patience = absl::Seconds(20)};
    for (int rank = 0; rank < world; ++rank) {
      options.programs.push_back({.command = {"/bin/sh", "-c", script, kTool, "--as_rank", "memcpy",
                                              folder_, std::to_string(world)},
                                  .variables = {{"RANK", std::to_string(rank)},
                                                {"WORLD_SIZE", std::to_string(world)},
                                                {"LOCAL_RANK", std::to_string(rank)},
                                                {"LOCAL_WORLD_SIZE", std::to_string(world)}}});
    }
    return StartRanks(options);
  }

  std::string folder_;
};

TEST_F(RankProcessesTest, MeasuresChecksAndForgets) {
  absl::StatusOr<std::unique_ptr<Peer>> peer = Start("exec $0 $@", 3);
  ASSERT_TRUE(peer.ok()) << peer.status();
  const Case what{.op = Op::kAllReduce, .bytes = 4096, .world = 3};
  for (int i = 0; i < 2; ++i) {
    const auto seconds = (*peer)->Time(what, {.warmups = 1, .repetitions = 7});
    ASSERT_TRUE(seconds.ok()) << seconds.status();
    EXPECT_EQ(seconds->size(), 7u);
    for (const double each : *seconds) EXPECT_GT(each, 0);
    EXPECT_GT((*peer)->Loop(what, {.repetitions = 7}).value_or(0), 0);
    EXPECT_TRUE((*peer)->Check(what).ok());
    EXPECT_TRUE((*peer)->Forget().ok());
  }
  const auto refused = (*peer)->Time({.op = Op::kBarrier, .world = 3}, {});
  EXPECT_EQ(refused.status(), absl::UnimplementedError("copies: a barrier copies nothing"));
  EXPECT_TRUE((*peer)->Check(what).ok()) << "goes on";
}

TEST_F(RankProcessesTest, ARankThatDoesNotComeIsNamedWithWhatItSaid) {
  const absl::Time begin = absl::Now();
  const auto peer = Start("echo the dog ate my socket; exit 4");
  EXPECT_THAT(peer.status().message(),
              HasSubstr("copies: a rank ended before it connected; the log: the dog ate my"));
  EXPECT_LT(absl::Now() - begin, absl::Seconds(10));
}

TEST_F(RankProcessesTest, ARankThatDiesEndsTheMeasurement) {
  // Rank 1 is killed while it waits for more.
  absl::StatusOr<std::unique_ptr<Peer>> peer = Start(
      "[ $RANK = 0 ] && exec $0 $@; (while [ ! -e $3/die ]; do sleep 0.01; done; kill -9 $$) & "
      "exec $0 $@");
  ASSERT_TRUE(peer.ok()) << peer.status();
  const Case what{.op = Op::kAllReduce, .bytes = 4096, .world = 2};
  ASSERT_TRUE((*peer)->Check(what).ok());
  RunToEnd({.command = {"touch", folder_ + "/die"}}, folder_ + "/touched").IgnoreError();
  absl::Status status;
  for (const absl::Time end = absl::Now() + absl::Seconds(20); status.ok() && absl::Now() < end;) {
    status = (*peer)->Check(what);
  }
  EXPECT_THAT(status.message(),
              HasSubstr("copies: rank 1 disconnected at \"check all_reduce float32 4096 0\""));
}

TEST_F(RankProcessesTest, AProgramThatIsNotThereIsNamed) {
  const auto peer = StartRanks(
      {.name = "none", .world = 1, .folder = folder_, .programs = {{.command = {"/no/such"}}}});
  EXPECT_THAT(peer.status().message(), HasSubstr("cannot run /no/such: No such file"));
}

}  // namespace
}  // namespace evenkeel::bench
