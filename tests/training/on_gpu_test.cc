// The program on GPUs, from its flags to its last line, against itself on the CPU: every step's
// loss, and the test's.
//
// Bounds: float32 on both sides, in another order; a first loss is off by some units of its
// precision, and what Adam makes of near-zero gradients grows from step to step. In 16 bits each
// layer rounds to 2^-8 or 2^-11.

#include <gtest/gtest.h>

#include <ostream>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "evenkeel/comm/device/testing/gpu_test_support.h"
#include "evenkeel/tests/training/program.h"
#include "evenkeel/tests/training/small_data.h"
#include "evenkeel/tests/training/train_program.h"
#include "nlohmann/json.hpp"

namespace evenkeel {
namespace {

// The first time a driver and its libraries are loaded takes long.
constexpr absl::Duration kPatience = absl::Seconds(100);

struct Case {
  std::string name;
  std::vector<std::string> flags, on_gpu;
  double first_bound = 1e-4, bound = 5e-3;
  friend std::ostream& operator<<(std::ostream& out, const Case& c) { return out << c.name; }
};

const std::vector<std::string> kGpt = {"--model=gpt", "--preset=tiny", "--context=32",
                                       "--dropout=0.1"};
const Case kCases[] = {
    {"Mlp", {"--model=mlp", "--hidden=33,20"}, {}},
    {"MlpInPlainBuckets",
     {"--model=mlp", "--hidden=33", "--nozero", "--nograd_view", "--optimizer=sgd"},
     {}},
    {"MlpInViews",
     {"--model=mlp", "--hidden=33", "--zero", "--grad_view", "--clip=1", "--accumulate=2"},
     {}},
    {"MlpInFloat16", {"--model=mlp", "--hidden=40"}, {"--compute=float16"}, 1e-2, 5e-2},
    {"Cnn", {"--model=cnn", "--widths=4,6", "--warmup=0", "--shift=0", "--nomirror"}, {}},
    {"CnnInBFloat16",
     {"--model=cnn", "--widths=8,8", "--shift=0", "--nomirror"},
     {"--compute=bfloat16"},
     3e-2,
     1e-1},
    {"Gpt", kGpt, {}},
    {"GptInBFloat16", kGpt, {"--compute=bfloat16"}, 1e-2, 5e-2},
};

// Returns the losses of each step, and of the test at the end.
std::vector<double> Losses(std::vector<std::string> flags) {
  const bool is_gpt = flags[0] == "--model=gpt";
  const std::string metrics = TempPath("metrics.jsonl"), text = TempPath("text.txt");
  std::string words;
  for (int i = 0; i < 20000; ++i) absl::StrAppend(&words, i * i % 97, i % 7 == 0 ? ".\n" : " and ");
  WriteText(text, words);
  WriteText(metrics, "");
  const std::string data = is_gpt ? text : WriteSmallData("data", {.train = 240, .test = 50});
  for (const std::string& flag :
       {absl::StrCat("--data=", data), absl::StrCat("--metrics=", metrics),
        std::string("--max_steps=8"), std::string("--batch_size=6")}) {
    flags.push_back(flag);
  }
  const Ended ended = Train(flags, {.timeout = kPatience});
  EXPECT_EQ(ended.code, 0) << ended.out << ended.err;
  std::vector<double> losses;
  for (const std::string& line : Lines(ReadText(metrics))) {
    const auto event = nlohmann::json::parse(line);
    if (event["event"] == "step" || event["event"] == "test") losses.push_back(event["loss"]);
  }
  return losses;
}

std::vector<std::string> With(std::vector<std::string> flags,
                              const std::vector<std::string>& more) {
  flags.insert(flags.end(), more.begin(), more.end());
  return flags;
}

class TrainOnGpuTest : public testing::TestWithParam<Case> {
 protected:
  static void ExpectAlike(int ranks) {
    const std::string nproc = absl::StrCat("--nproc=", ranks);
    const Case& c = GetParam();
    const std::vector<double> cpu = Losses(With(c.flags, {"--device=cpu", nproc}));
    const std::vector<double> gpu = Losses(With(With(c.flags, c.on_gpu), {"--device=cuda", nproc}));
    ASSERT_EQ(cpu.size(), 9);
    ASSERT_EQ(gpu.size(), 9);
    for (size_t i = 0; i < cpu.size(); ++i)
      EXPECT_NEAR(gpu[i], cpu[i], i == 0 ? c.first_bound : c.bound) << i;
    EXPECT_LT(cpu.back(), cpu.front()) << "nothing is learnt";
  }
};

TEST_P(TrainOnGpuTest, ARankHasTheLossesOfTheCpu) {
  EK_SKIP_WITHOUT_GPUS(1);
  ExpectAlike(1);
}

TEST_P(TrainOnGpuTest, TwoRanksHaveTheLossesOfTheCpu) {
  EK_SKIP_WITHOUT_GPUS(2);
  ExpectAlike(2);
}

INSTANTIATE_TEST_SUITE_P(Models, TrainOnGpuTest, testing::ValuesIn(kCases),
                         [](const auto& info) { return info.param.name; });

TEST(TrainChoosesGpusTest, AsManyRanksAsThereAre) {
  EK_SKIP_WITHOUT_GPUS(1);
  const int gpus = *GpusForTest();
  const Ended ended = Train({"--model=mlp", absl::StrCat("--data=", WriteSmallData("data")),
                             "--max_steps=2", absl::StrCat("--metrics=", TempPath("chosen.jsonl"))},
                            {.timeout = kPatience});
  ASSERT_EQ(ended.code, 0) << ended.err;
  const auto run = nlohmann::json::parse(Lines(ReadText(TempPath("chosen.jsonl")))[0]);
  EXPECT_EQ(run["world_size"], gpus);
  EXPECT_EQ(run["backend"], "nccl");
  EXPECT_EQ(absl::StrContains(ended.out + ended.err, "1 GPU, so the run uses one rank"), gpus == 1);
}

}  // namespace
}  // namespace evenkeel
