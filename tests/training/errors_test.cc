// Whatever is wrong with flags, data or files: one clear sentence, a non-zero exit, and no
// training.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <algorithm>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "evenkeel/tests/training/program.h"
#include "evenkeel/tests/training/small_data.h"
#include "evenkeel/tests/training/train_program.h"

namespace evenkeel {
namespace {

using testing::HasSubstr;
using testing::Not;
using testing::SizeIs;

class ErrorsTest : public testing::TestWithParam<const char*> {
 protected:
  static void SetUpTestSuite() {
    data_ = new std::string(WriteSmallData("data", {.train = 40, .test = 10}));
    weights_ = new std::string(TempPath("weights.safetensors"));
    const Ended ended = Train({"--model=mlp", "--hidden=8", "--nproc=1", "--data=" + *data_,
                               "--max_steps=1", "--batch_size=5", "--save=" + *weights_});
    ASSERT_EQ(ended.code, 0) << ended.err;
  }

  // Two ranks on the small data, with `more` flags, end with a sentence that has all of `words`.
  static void ExpectSentence(const std::vector<std::string>& more,
                             const std::vector<std::string>& words) {
    std::vector<std::string> flags = {"--model=mlp",      "--nproc=2",
                                      "--epochs=1",       "--batch_size=5",
                                      "--data=" + *data_, absl::StrCat("--backend=", GetParam())};
    flags.insert(flags.end(), more.begin(), more.end());
    const Ended ended = Train(flags);
    SCOPED_TRACE(absl::StrCat("stderr: ", ended.err));
    EXPECT_FALSE(ended.timed_out);
    EXPECT_NE(ended.code, 0);
    EXPECT_LT(ended.code, 128);  // Not by a signal.
    EXPECT_THAT(Lines(ended.err), SizeIs(1));
    EXPECT_THAT(ended.out, Not(HasSubstr("test_accuracy")));
    for (const std::string& word : words) EXPECT_THAT(ended.err, HasSubstr(word));
  }

  // A copy of the data to spoil.
  static std::string DataCopy(const std::string& name) {
    return WriteSmallData(name, {.train = 40, .test = 10});
  }

  static std::string* data_;
  static std::string* weights_;
};

std::string* ErrorsTest::data_;
std::string* ErrorsTest::weights_;

TEST_P(ErrorsTest, NoThreads) {
  for (const std::string ranks : {"--nproc=1", "--nproc=2"}) {
    // The limit is also the size of a thread's stack, and no machine has a petabyte for one.
    const Ended ended = evenkeel::Run(
        {"/bin/sh", "-c", R"(ulimit -s 1000000000000 && exec "$0" "$@")", kTrain, "--model=mlp",
         "--batch_size=5", "--data=" + *data_, ranks, absl::StrCat("--backend=", GetParam())});
    EXPECT_EQ(ended.code, 1) << ended.err;
    EXPECT_THAT(ended.err, HasSubstr("cannot start a thread for")) << ranks;
  }
}

TEST_P(ErrorsTest, WrongFlags) {
  ExpectSentence({"--version"}, {"unknown flag --version"});
  ExpectSentence({"--optimiser=sgd"}, {"optimiser"});
  ExpectSentence({"--epochs=many"}, {"epochs", "many"});
  ExpectSentence({"--batch_size=99999999999999999999"}, {"batch_size"});
  ExpectSentence({"--lr=fast"}, {"lr", "fast"});
  ExpectSentence({"--zero=perhaps"}, {"zero", "perhaps"});
  ExpectSentence({"--model=vgg"}, {"--model=vgg", "mlp, cnn, gpt"});
  ExpectSentence({"--batch_size=0"}, {"--batch_size=0"});
  ExpectSentence({"--nproc=0"}, {"--nproc=0"});
  ExpectSentence({"extra"}, {"\"extra\""});
  ExpectSentence({"--freeze=fc1@5:3"}, {"--freeze", "fc1@5:3"});
  ExpectSentence({"--freeze=conv9@0:3"}, {"--freeze", "conv9", "fc1.weight"});
}

TEST_P(ErrorsTest, DataThatIsNotThere) {
  ExpectSentence({"--data=" + TempPath("nowhere")}, {TempPath("nowhere"), "train-images"});
  const std::string folder = DataCopy("without_test");
  unlink((folder + "/t10k-labels-idx1-ubyte").c_str());
  ExpectSentence({"--data=" + folder}, {folder, "t10k-labels"});
}

TEST_P(ErrorsTest, DataThatIsDamaged) {
  const std::string folder = DataCopy("damaged");
  const std::string images = folder + "/train-images-idx3-ubyte";
  const std::string whole = ReadText(images);
  WriteText(images, whole.substr(0, whole.size() - 1));
  ExpectSentence({"--data=" + folder}, {images});
  WriteText(images, whole.substr(0, 3));
  ExpectSentence({"--data=" + folder}, {images});
  WriteText(images, "");
  ExpectSentence({"--data=" + folder}, {images});
  WriteText(images, whole);
  const std::string labels = folder + "/t10k-labels-idx1-ubyte";
  std::string wrong = ReadText(labels);
  wrong.back() = 10;
  WriteText(labels, wrong);
  ExpectSentence({"--data=" + folder}, {labels});
}

TEST_P(ErrorsTest, TooManyRanksForTheData) {
  ExpectSentence({"--nproc=9"}, {"40 samples", "batches of 5", "9 ranks"});
  ExpectSentence({"--rank_steps=3,5"}, {"--rank_steps", "rank 1", "5"});
  ExpectSentence({"--rank_steps=1,2,3"}, {"--rank_steps", "3 numbers for 2 ranks"});
}

TEST_P(ErrorsTest, UnevenBatchesWithoutJoin) {
  ExpectSentence({"--nojoin", "--rank_steps=1,2"}, {"--join", "rank 1 has 2", "rank 0 has 1"});
}

TEST_P(ErrorsTest, WeightsThatDoNotFit) {
  ExpectSentence({"--init=" + TempPath("no.safetensors")}, {"--init", "no.safetensors"});
  ExpectSentence({"--init=" + *weights_, "--hidden=9"}, {"--init", "fc1.weight", "9,784", "8,784"});
  ExpectSentence({"--init=" + *weights_, "--model=cnn"}, {"--init", "stem.weight"});
  ExpectSentence({"--hidden=8", "--model=cnn"}, {"--hidden", "--model=mlp"});
  const std::string whole = ReadText(*weights_);
  const std::string spoiled = TempPath("spoiled.safetensors");
  WriteText(spoiled, whole.substr(0, whole.size() - 4));
  ExpectSentence({"--init=" + spoiled, "--hidden=8"}, {"--init", spoiled});
  WriteText(spoiled, "this is no safetensors file, but long enough for one");
  ExpectSentence({"--init=" + spoiled, "--hidden=8"}, {"--init", spoiled});
  WriteText(spoiled, "");
  ExpectSentence({"--init=" + spoiled, "--hidden=8"}, {"--init", spoiled});
  std::string renamed = whole;
  const size_t name = renamed.find("fc2.bias");
  ASSERT_NE(name, std::string::npos);
  renamed.replace(name, 8, "fc3.bias");
  WriteText(spoiled, renamed);
  ExpectSentence({"--init=" + spoiled, "--hidden=8"}, {"--init", "fc2.bias"});
}

TEST_P(ErrorsTest, FilesThatCannotBeWritten) {
  ExpectSentence({"--save=" + TempPath("nowhere") + "/w.safetensors"}, {"--save", "nowhere"});
  ExpectSentence({"--metrics=" + TempPath("")}, {"--metrics", "folder"});
}

INSTANTIATE_TEST_SUITE_P(Backends, ErrorsTest, testing::Values("local", "shm"),
                         [](const auto& info) { return std::string(info.param); });

TEST(HelpTest, NamesEveryFlagWithItsDefaultAndNothingElse) {
  const Ended ended = Train({"--help"});
  EXPECT_EQ(ended.code, 0);
  EXPECT_EQ(ended.err, "");
  for (const char* flag : {"model",
                           "hidden",
                           "data",
                           "test_data",
                           "mirror",
                           "shift",
                           "preset",
                           "layers",
                           "width",
                           "heads",
                           "context",
                           "dropout",
                           "compute",
                           "loss_scale",
                           "widths",
                           "blocks",
                           "sync_batch_norm",
                           "accumulate",
                           "lr_decay",
                           "warmup",
                           "clip",
                           "shuffle",
                           "seed",
                           "device",
                           "nproc",
                           "backend",
                           "epochs",
                           "max_steps",
                           "batch_size",
                           "rank_steps",
                           "optimizer",
                           "lr",
                           "momentum",
                           "weight_decay",
                           "zero",
                           "shards",
                           "join",
                           "divide_by",
                           "balance",
                           "balance_log",
                           "balance_repeat",
                           "stop_early",
                           "on_failure",
                           "lost_shard",
                           "verify",
                           "flight",
                           "bucket_cap_mb",
                           "first_bucket_mb",
                           "comm_hook",
                           "power_sgd_rank",
                           "power_sgd_start",
                           "grad_view",
                           "auto_refresh_trainable",
                           "freeze",
                           "init",
                           "save",
                           "metrics",
                           "report",
                           "trace",
                           "tensorboard",
                           "prometheus",
                           "dry_run",
                           "checkpoint_dir",
                           "checkpoint_every",
                           "resume",
                           "keep"}) {
    const std::vector<std::string> lines = Lines(ended.out);
    const auto is_its_line = [&](const std::string& line) {
      return line.find(absl::StrCat("  --", flag, "=")) == 0 ||
             line.find(absl::StrCat("  --[no]", flag, " ")) == 0;
    };
    const auto line = std::find_if(lines.begin(), lines.end(), is_its_line);
    ASSERT_NE(line, lines.end()) << flag;
    EXPECT_THAT(*line, HasSubstr("default"));
  }
  EXPECT_THAT(ended.out, Not(HasSubstr("flagfile")));  // One of gflags' own.
  EXPECT_THAT(ended.out, Not(HasSubstr("is not defined")));
  EXPECT_EQ(Train({"--helpfull"}).out, ended.out);
}

}  // namespace
}  // namespace evenkeel
