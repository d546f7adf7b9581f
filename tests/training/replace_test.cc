// Ranks that are killed again and again, with --on_failure=replace: the run ends with the weights,
// the optimizer's state and the numbers of each epoch of a run that lost none, bit for bit.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <memory>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "evenkeel/comm/testing/tested_group.h"
#include "evenkeel/tests/training/program.h"
#include "evenkeel/tests/training/replaced_run.h"
#include "evenkeel/tests/training/small_data.h"
#include "evenkeel/tests/training/train_program.h"

namespace evenkeel {
namespace {

using testing::HasSubstr;

constexpr int kRanks = ReplacedRun::kRanks;
// Some ranks have a batch more than others.
constexpr SmallData kData{.train = 60 * kRanks * 4 + 6, .test = 50};

// tests/campaign has the other models and backends, whose newcomers it starts itself.
TEST(ReplaceTest, TheRunEndsAsIfNoRankHadBeenLost) {
  const std::vector<std::string> flags = {"--model=mlp", "--data=" + WriteSmallData("data", kData)};
  ReplacedRun undisturbed(flags);
  const Ended whole = undisturbed.Wait();
  ASSERT_EQ(whole.code, 0) << whole.err;

  std::mt19937 random(testing::UnitTest::GetInstance()->random_seed());
  ReplacedRun run(flags);
  int kills = 0;
  size_t steps = 3 + random() % 10;
  for (; kills < 5 && run.WaitForSteps(steps); steps += 1 + random() % 12)
    kills += run.Kill(static_cast<int>(random() % kRanks));
  const Ended ended = run.Wait();
  EXPECT_EQ(ended.code, 0) << ended.err;
  EXPECT_THAT(ended.err, HasSubstr("lost and replaced")) << kills << " kills";
  EXPECT_THAT(ended.err, HasSubstr("4 ranks continue after step"));
  for (const nlohmann::json& lost : run.Events("lost")) EXPECT_EQ(lost.at("replaced"), true);
  EXPECT_EQ(run.Events("epoch"), undisturbed.Events("epoch"));
  EXPECT_EQ(run.Steps(), undisturbed.Steps());
  ASSERT_EQ(run.Events("test").size(), 1) << ended.err;
  EXPECT_EQ(run.Events("test")[0].at("state_hash"), undisturbed.Events("test")[0].at("state_hash"));
  EXPECT_EQ(run.Events("test")[0].at("loss"), undisturbed.Events("test")[0].at("loss"));
  EXPECT_THAT(ProcessesWith("replaced"), testing::IsEmpty());
}

// Nothing is lost. Exhausted ranks follow the steps of a model with buffers, which are made equal
// at the end of each step, as they do without replacement.
TEST(ReplaceUnevenTest, EndsWithTheWeightsOfARunWithoutReplacement) {
  const std::vector<std::string> flags = {"--model=cnn", "--data=" + WriteSmallData("data", kData)};
  std::vector<std::string> plain_flags = flags;
  plain_flags.push_back("--on_failure=stop");
  ReplacedRun run(flags), plain(plain_flags);
  const Ended ended = run.Wait();
  ASSERT_EQ(ended.code, 0) << ended.err;
  ASSERT_EQ(plain.Wait().code, 0);
  EXPECT_EQ(run.Events("test")[0].at("state_hash"), plain.Events("test")[0].at("state_hash"));
}

// The newcomer has not evaluated the last epoch, and the others have. Rank 0 is stopped after it
// has reported that, and the others wait for it in one of the agreements that follow.
TEST(ReplaceAtTheEndTest, ALossAfterTheLastEvaluation) {
  const std::vector<std::string> flags = {"--model=mlp", "--data=" + WriteSmallData("data", kData)};
  ReplacedRun undisturbed(flags);
  ASSERT_EQ(undisturbed.Wait().code, 0);
  int hits = 0;
  for (int attempt = 0; attempt < 20 && hits < 2; ++attempt) {
    ReplacedRun run(flags);
    EXPECT_TRUE(run.WaitForSteps(1));
    const pid_t rank0 = run.PidOf(0);
    ASSERT_GT(rank0, 0);
    run.AwaitLines("\"event\":\"epoch\"", 2);
    const bool is_stopped = kill(rank0, SIGSTOP) == 0 && run.Events("test").empty();
    if (is_stopped) absl::SleepFor(absl::Milliseconds(100));
    kill(rank0, is_stopped ? SIGKILL : SIGCONT);
    const Ended ended = run.Wait();
    hits += is_stopped;
    EXPECT_EQ(ended.code, 0) << ended.err;
    ASSERT_EQ(run.Events("test").size(), 1) << ended.err;
    EXPECT_EQ(run.Events("test")[0].at("state_hash"),
              undisturbed.Events("test")[0].at("state_hash"));
  }
  EXPECT_GT(hits, 0);
}

}  // namespace
}  // namespace evenkeel
