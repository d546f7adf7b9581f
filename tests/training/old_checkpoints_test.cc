// Checkpoints that an older version of the program wrote, tests/testdata/checkpoints: today's goes
// on from each, and ends as the older one did.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <nlohmann/json.hpp>
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

namespace fs = std::filesystem;

constexpr char kOld[] = "tests/testdata/checkpoints";

// As record.py has it.
void WriteOldText(const std::string& path) {
  constexpr const char* kWords[] = {"even", "keel", "steps", "ranks", "wait", "for",
                                    "no",   "one",  "and",   "all",   "sail"};
  std::string text;
  for (int64_t i = 0; i < 20000; ++i)
    absl::StrAppend(&text, kWords[i * i % 11], i % 7 == 6 ? "\n" : " ");
  WriteText(path, text);
}

class OldCheckpointsTest : public testing::TestWithParam<const char*> {
 protected:
  // A folder of its own, with the data that the flags name.
  void SetUp() override {
    folder_ = TempPath(absl::StrCat("old_", GetParam()));
    fs::remove_all(folder_);
    fs::create_directories(folder_);
    fs::copy(fs::path(kOld) / "images", folder_ + "/images", fs::copy_options::recursive);
    fs::copy(fs::path(kOld) / GetParam(), folder_, fs::copy_options::recursive);
    WriteOldText(folder_ + "/text.txt");
  }

  Ended TrainThere(const std::vector<std::string>& flags, const std::vector<std::string>& more) {
    std::vector<std::string> command = {fs::absolute(kTrain)};
    command.insert(command.end(), flags.begin(), flags.end());
    command.insert(command.end(), more.begin(), more.end());
    const Ended ended = evenkeel::Run(command, {.folder = folder_});
    EXPECT_EQ(ended.code, 0) << ended.err;
    EXPECT_THAT(ended.err, IsEmpty());
    return ended;
  }
  Weights In(const std::string& path) { return ReadWeights(absl::StrCat(folder_, "/", path)); }

  std::string folder_;
};

TEST_P(OldCheckpointsTest, EndAsTheyDidThen) {
  const nlohmann::json run =
      nlohmann::json::parse(ReadText(absl::StrCat(kOld, "/runs.json")))[GetParam()];
  const std::vector<std::string> flags = run["flags"];
  const Ended ended =
      TrainThere(flags, {"--resume=checkpoint", "--save=new.safetensors", "--metrics=new.jsonl"});
  EXPECT_THAT(ended.out, HasSubstr("resumed from checkpoint, after step 5"));

  // Kernels round as the CPU has them: where a run that begins anew comes to the old checkpoint's
  // weights, all the rest must be the same, too.
  TrainThere(flags, {"--checkpoint_dir=anew", "--checkpoint_every=5", "--keep=0"});
  const bool is_same_arithmetic = MaxDifference(In("anew/step-000000005/model.safetensors"),
                                                In("checkpoint/model.safetensors")) == 0;
  const double difference = MaxDifference(In("new.safetensors"), In("resumed.safetensors"));
  if (!is_same_arithmetic) {
    // Adam moves a weight whose gradient is near 0 by up to its rate, whichever way that rounds.
    EXPECT_LE(difference, 5e-3);
    return;
  }
  EXPECT_EQ(difference, 0);
  const std::vector<std::string> lines = Lines(ReadText(folder_ + "/new.jsonl"));
  ASSERT_FALSE(lines.empty());
  EXPECT_EQ(nlohmann::json::parse(lines.back())["state_hash"], run["state_hash"]);
}

INSTANTIATE_TEST_SUITE_P(D8c2cef, OldCheckpointsTest,
                         testing::Values("mlp_whole", "mlp_tensors", "mlp_slices", "cnn_slices",
                                         "gpt_slices"),
                         [](const auto& info) { return std::string(info.param); });

}  // namespace
}  // namespace evenkeel
