// --sample_log of the trainer's program, and tools:samples: each sample is used once in an epoch.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "evenkeel/tests/training/program.h"
#include "evenkeel/tests/training/small_data.h"
#include "evenkeel/tests/training/train_program.h"

namespace evenkeel {
namespace {

using testing::HasSubstr;

// An epoch of 3 ranks, 4 samples each in a pass, ends with a step in which not all have samples.
constexpr int kSamples = 10 * 3 * 4 + 6;

Ended Samples(const std::string& folder, const std::string& flag = "--nopartial") {
  return Run({"tools/samples", flag, folder});
}

std::string TrainWith(const std::string& name, std::vector<std::string> flags, int code = 0) {
  const std::string folder = TempPath(name);
  const std::string data = WriteSmallData("data", {.train = kSamples, .test = 20});
  flags.insert(flags.begin(), {"--model=mlp", "--batch_size=4", "--data=" + data, "--epochs=2",
                               "--sample_log=" + folder});
  const Ended ended = Train(flags);
  EXPECT_EQ(ended.code, code) << ended.err;
  return folder;
}

TEST(SampleLogTest, EachSampleIsUsedOnce) {
  const std::vector<std::vector<std::string>> cases = {
      {"--nproc=3", "--backend=local"},
      {"--nproc=3", "--backend=tcp", "--nozero", "--on_failure=replace"},
      {"--nproc=3", "--backend=shm", "--nozero", "--on_failure=continue"},
      {"--nproc=2", "--backend=local", "--accumulate=3"},
      {"--nproc=2", "--backend=local", "--balance"},
      {"--nproc=1", "--noshuffle"}};
  for (size_t i = 0; i < cases.size(); ++i) {
    SCOPED_TRACE(cases[i].back());
    const Ended ended = Samples(TrainWith(absl::StrCat("log", i), cases[i]));
    EXPECT_EQ(ended.code, 0) << ended.out << ended.err;
    EXPECT_THAT(ended.out, HasSubstr(absl::StrCat("epoch 1: each of ", kSamples, " samples once")));
    EXPECT_THAT(ended.out, testing::Not(HasSubstr("has not ended")));
  }
}

TEST(SampleLogTest, ARunOfFewerStepsLacksSamples) {
  const std::string folder = TrainWith("short", {"--nproc=2", "--backend=local", "--max_steps=7"});
  EXPECT_EQ(Samples(folder).code, 1);
  EXPECT_THAT(Samples(folder).out, HasSubstr(absl::StrCat("56 of ", kSamples, " samples")));
  EXPECT_EQ(Samples(folder, "--partial").code, 0);
}

// The second command repeats the steps after the checkpoint, with other ranks.
TEST(SampleLogTest, AResumedRunUsesEachSampleOnce) {
  const std::string checkpoints = TempPath("checkpoints");
  TrainWith("resumed", {"--nproc=2", "--backend=local", "--max_steps=7", "--checkpoint_every=5",
                        "--keep=0", "--checkpoint_dir=" + checkpoints});
  const std::string folder = TrainWith(
      "resumed", {"--nproc=3", "--backend=local", "--resume=" + checkpoints + "/step-000000005"});
  const Ended ended = Samples(folder);
  EXPECT_EQ(ended.code, 0) << ended.out << ended.err;
  EXPECT_THAT(ended.out, HasSubstr("steps in 2 groups"));
}

TEST(SampleLogTest, ErrorsNameTheFolder) {
  TrainWith("file/below", {"--nproc=2", "--backend=local"});
  WriteText(TempPath("a_file"), "");
  const std::string data = WriteSmallData("data", {.train = kSamples, .test = 20});
  const Ended refused = Train({"--model=mlp", "--data=" + data, "--nproc=2", "--backend=local",
                               "--sample_log=" + TempPath("a_file")});
  EXPECT_EQ(refused.code, 1);
  EXPECT_THAT(refused.err, HasSubstr("--sample_log: cannot read the folder " + TempPath("a_file")));
  EXPECT_THAT(Samples(TempPath("absent")).err, HasSubstr("absent"));
  EXPECT_EQ(Samples(TempPath("absent")).code, 1);
  EXPECT_THAT(Samples(data).err, HasSubstr("no file has a log of samples"));
}

}  // namespace
}  // namespace evenkeel
