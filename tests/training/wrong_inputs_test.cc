// Wrong inputs, and the program's response: one sentence, exit code 1, no training, and no new
// file.

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cstdint>
#include <filesystem>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "evenkeel/tests/training/program.h"
#include "evenkeel/tests/training/small_data.h"
#include "evenkeel/tests/training/train_program.h"

namespace evenkeel {
namespace {

using testing::HasSubstr;
using testing::SizeIs;
using testing::StartsWith;

// In flags and sentences $T is the test's folder.
struct WrongInput {
  const char* name;
  std::vector<std::string> flags;
  const char* says;  // The beginning of the line.
  std::map<std::string, std::string> environment = {};
};

std::string WithFolder(const std::string& text) {
  std::string folder = TempPath("");
  while (folder.ends_with('/')) folder.pop_back();
  return absl::StrReplaceAll(text, {{"$T", folder}});
}

// A token shard of llm.c's: its header says `count` tokens.
std::string Shard(uint32_t magic, uint32_t version, uint32_t count, int tokens) {
  std::string bytes(1024, '\0');
  const auto put = [&](size_t at, uint32_t value) {
    for (int i = 0; i < 4; ++i) bytes[at + i] = static_cast<char>(value >> (8 * i));
  };
  put(0, magic);
  put(4, version);
  put(8, count);
  for (int i = 0; i < tokens; ++i) bytes += {static_cast<char>(i), '\0'};
  return bytes;
}

constexpr uint32_t kShardMagic = 20240520;

// Files that the inputs name.
void WriteFiles() {
  WriteSmallData("images", {.train = 40, .test = 10});
  const std::string damaged = WriteSmallData("damaged", {.train = 40, .test = 10});
  const std::string images = ReadText(damaged + "/train-images-idx3-ubyte");
  WriteText(damaged + "/train-images-idx3-ubyte", images.substr(0, images.size() - 1));
  mkdir(TempPath("empty").c_str(), 0777);
  mkdir(TempPath("cifar").c_str(), 0777);
  for (int i = 1; i <= 5; ++i)
    WriteText(TempPath(absl::StrCat("cifar/data_batch_", i, ".bin")), std::string(3073, 0));
  WriteText(TempPath("cifar/test_batch.bin"), std::string(3072, 0));
  WriteText(TempPath("short.txt"), "too short");
  WriteText(TempPath("empty.txt"), "");
  WriteText(TempPath("text.txt"), std::string(100000, 'a'));
  WriteText(TempPath("magic_train.bin"), Shard(kShardMagic, 1, 600, 600));
  WriteText(TempPath("magic_val.bin"), Shard(7, 1, 600, 600));
  WriteText(TempPath("version_train.bin"), Shard(kShardMagic, 2, 600, 600));
  WriteText(TempPath("count_train.bin"), Shard(kShardMagic, 1, 601, 600));
  WriteText(TempPath("lonely.bin"), Shard(kShardMagic, 1, 600, 600));
  WriteText(TempPath("noise.safetensors"),
            "this is no safetensors file, but it is long enough for one");
  WriteText(TempPath("empty.safetensors"), "");
  WriteText(TempPath("file"), "a file");
}

const std::vector<WrongInput>& Inputs();

std::set<std::string> FilesThere() {
  std::set<std::string> files;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(TempPath("")))
    files.insert(entry.path());
  return files;
}

class WrongInputsTest : public testing::TestWithParam<WrongInput> {
 protected:
  static void SetUpTestSuite() {
    WriteFiles();
    const Ended ended =
        Train({"--model=gpt", "--preset=tiny", "--nproc=1", "--max_steps=1",
               WithFolder("--data=$T/text.txt"), WithFolder("--save=$T/gpt.safetensors")});
    ASSERT_EQ(ended.code, 0) << ended.err;
  }
};

TEST_P(WrongInputsTest, IsOneSentence) {
  const std::set<std::string> before = FilesThere();
  const WrongInput& input = GetParam();
  std::vector<std::string> flags = {"--model=mlp", "--nproc=2", WithFolder("--data=$T/images"),
                                    "--batch_size=5", "--epochs=1"};
  for (const std::string& flag : input.flags) flags.push_back(WithFolder(flag));
  const Ended ended = Train(flags, {.environment = input.environment});
  EXPECT_FALSE(ended.timed_out);
  EXPECT_EQ(ended.code, 1);
  EXPECT_EQ(ended.out, "");
  EXPECT_THAT(Lines(ended.err), SizeIs(1));
  EXPECT_THAT(ended.err, StartsWith(WithFolder(input.says)));
  EXPECT_EQ(FilesThere(), before);
}

INSTANTIATE_TEST_SUITE_P(All, WrongInputsTest, testing::ValuesIn(Inputs()),
                         [](const auto& info) { return std::string(info.param.name); });

TEST(DryRunTest, WritesNothing) {
  WriteFiles();
  const std::set<std::string> before = FilesThere();
  const Ended ended =
      Train({"--model=mlp", "--nproc=2", WithFolder("--data=$T/images"), "--batch_size=2",
             "--dry_run", WithFolder("--save=$T/w.safetensors"), WithFolder("--metrics=$T/m.jsonl"),
             WithFolder("--report=$T/r.html"), WithFolder("--checkpoint_dir=$T/checkpoints"),
             WithFolder("--tensorboard=$T/tb"), WithFolder("--prometheus=$T/x.prom")});
  EXPECT_EQ(ended.code, 0) << ended.err;
  EXPECT_THAT(ended.out, HasSubstr("rank 0 needs"));
  EXPECT_THAT(ended.out, HasSubstr("2 ranks need"));
  EXPECT_THAT(ended.out, HasSubstr("left: it fits\n40 steps in 4 epochs\n"));
  EXPECT_EQ(FilesThere(), before);
}

// Both find it by arithmetic: no machine has the memory, and none is taken.
TEST(MemoryTest, ARunThatCannotFitEndsBeforeItTakesMemory) {
  WriteFiles();
  for (const char* dry_run : {"--nodry_run", "--dry_run"}) {
    const absl::Time start = absl::Now();
    const Ended ended = Train({"--model=gpt", "--layers=400", "--width=1600", "--heads=25",
                               "--context=64", "--nproc=64", WithFolder("--data=$T/text.txt"),
                               "--batch_size=1", "--max_steps=1", "--backend=local", dry_run});
    EXPECT_EQ(ended.code, 1) << ended.out;
    EXPECT_THAT(Lines(ended.err), SizeIs(1)) << ended.err;
    EXPECT_THAT(ended.err, StartsWith("train: not enough memory: 64 ranks need "));
    EXPECT_THAT(ended.err, HasSubstr("(rank 0 needs "));
    EXPECT_THAT(ended.err, HasSubstr("; no --batch_size fits; "));
    EXPECT_LT(absl::Now() - start, absl::Seconds(30));
  }
}

// The address space is limited, from too little for the weights on: each rank that is there ends
// with a sentence. Twice the weights take 160 MB, and what comes after them as much again.
TEST(OutOfMemoryTest, IsASentence) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "a sanitizer's shadow needs more address space than there is";
#endif
  WriteFiles();
  const std::string command = WithFolder(absl::StrCat(
      "exec ", kTrain,
      " --model=mlp --hidden=4096,4096 --nproc=2 --batch_size=5 --max_steps=2 --data=$T/images"));
  int failed = 0;
  for (const char* backend : {"tcp", "local"}) {
    for (int megabytes = 400; megabytes <= 1000; megabytes += 300) {
      SCOPED_TRACE(absl::StrCat(backend, ", ", megabytes, " MB"));
      const std::string limited =
          absl::StrCat("ulimit -v ", megabytes * 1000, "; ", command, " --backend=", backend);
      const Ended ended = evenkeel::Run({"/bin/bash", "-c", limited});
      EXPECT_FALSE(ended.timed_out);
      if (ended.code == 0) continue;
      ++failed;
      EXPECT_EQ(ended.code, 1);
      const std::vector<std::string> lines = Lines(ended.err);
      EXPECT_THAT(lines.size(), testing::AllOf(testing::Ge(1u), testing::Le(2u))) << ended.err;
      for (const std::string& line : lines) EXPECT_THAT(line, StartsWith("train: "));
    }
  }
  EXPECT_GE(failed, 3);
}

const std::vector<WrongInput>& Inputs() {
  static const auto* const inputs = new std::vector<WrongInput>{
      // Flags that are not understood: gflags says which.
      {"UnknownFlag",
       {"--optimiser=sgd"},
       "train: unknown flag --optimiser; did you mean --optimizer? see --help"},
      {"NoNumber",
       {"--epochs=many"},
       "ERROR: illegal value 'many' specified for int32 flag 'epochs'"},
      {"TooLargeANumber",
       {"--batch_size=99999999999999999999"},
       "ERROR: illegal value '99999999999999999999' specified for int64 flag 'batch_size'"},
      {"NoBoolean",
       {"--zero=perhaps"},
       "ERROR: illegal value 'perhaps' specified for bool flag 'zero'"},
      {"AnArgument", {"extra"}, "train: unexpected argument \"extra\"; see --help"},
      // Values that are not possible.
      {"UnknownModel",
       {"--model=vgg"},
       "train: --model=vgg is not a valid value; choose mlp, cnn, gpt"},
      {"UnknownPreset",
       {"--model=gpt", "--preset=huge"},
       "train: --preset: huge is not a preset; choose tiny, mini, gpt2"},
      {"HeadsThatDoNotFit",
       {"--model=gpt", "--heads=3", "--data=$T/text.txt"},
       "train: gpt: 3 heads do not divide the width, 128"},
      {"TooLargeAModel",
       {"--model=gpt", "--layers=1024", "--width=65536", "--data=$T/text.txt"},
       "train: gpt: these sizes result in 52777455845376 parameters, more than"},
      {"NoDropout",
       {"--model=gpt", "--dropout=1", "--data=$T/text.txt"},
       "train: gpt: dropout must be at least 0 and below 1, got 1"},
      {"NoSuchPrecision",
       {"--model=gpt", "--compute=float8"},
       "train: --compute=float8 is not a valid value; choose float32, bfloat16, float16"},
      {"PrecisionForGpus",
       {"--model=cnn", "--device=cpu", "--compute=bfloat16"},
       "train: --compute=bfloat16 of --model=cnn requires GPUs, but this run uses the CPU"},
      {"LossScaledPrecisionForGpus",
       {"--model=mlp", "--device=cpu", "--compute=float16"},
       "train: --compute=float16 of --model=mlp requires GPUs, but this run uses the CPU"},
      {"NoRanks", {"--nproc=0"}, "train: --nproc=0 is out of range; choose a value from 1 to 1024"},
      {"NoBatch",
       {"--batch_size=0"},
       "train: --batch_size=0 is out of range; choose a value from 1 to 2147483647"},
      {"NegativeRate", {"--lr=-1"}, "train: --lr=-1 is out of range; it must be at least 0"},
      {"NotANumber", {"--lr=nan"}, "train: --lr=nan is out of range; it must be at least 0"},
      {"DecayOfNoKind",
       {"--lr_decay=square"},
       "train: --lr_decay=square is not a valid value; choose auto, none, linear, cosine"},
      {"NoBackend",
       {"--backend=mpi"},
       "train: --backend=mpi is not a valid value; choose auto, local, shm, tcp, hierarchical"},
      {"NoDeviceOfThatKind",
       {"--device=tpu"},
       "train: --device=tpu is not a valid value; choose auto, cpu, cuda"},
      {"NoSuchCheck",
       {"--verify=sometimes"},
       "train: --verify: unknown level of verification \"sometimes\": it is one of off, positions, "
       "every"},
      // Flags that contradict each other.
      {"SizesOfAnotherModel", {"--preset=tiny"}, "train: --preset is for --model=gpt, not mlp"},
      {"GpusOverSharedMemory",
       {"--device=cuda", "--backend=shm"},
       "train: --device=cuda conflicts with a --backend for the CPU; choose --backend=auto, or "
       "--device=cpu"},
      {"NcclOnTheCpu",
       {"--device=cpu", "--backend=nccl"},
       "train: --backend=nccl is for tensors on a GPU; choose --backend=auto, or --device=cuda"},
      {"GpusThatGoOn",
       {"--device=cuda", "--on_failure=continue", "--nozero"},
       "train: --on_failure=continue supports only ranks on the CPU; choose --device=cpu"},
      // The tests see no GPU; without CUDA the sentence goes on in another way.
      {"CudaWithoutAGpu", {"--device=cuda"}, "train: --device=cuda: "},
      {"NcclWithoutAGpu", {"--backend=nccl"}, "train: --backend=nccl: "},
      {"MomentumOfAdam",
       {"--momentum=0.9"},
       "train: --momentum is for --optimizer=sgd; adamw has its own"},
      {"ThreadsThatGoOn",
       {"--backend=local", "--on_failure=continue", "--nozero"},
       "train: --on_failure=continue is for ranks that are processes; choose --backend=auto"},
      {"GoingOnWithoutState",
       {"--on_failure=continue"},
       "train: --on_failure=continue cannot continue with --zero (the default), since the part of "
       "the optimizer's state on the lost rank is lost"},
      {"ShardsOfNothing",
       {"--nozero", "--shards=tensors"},
       "train: --shards=tensors is for --zero"},
      {"StopEarlyWithoutJoin", {"--nojoin", "--stop_early"}, "train: --stop_early needs --join"},
      {"DivisorWithoutJoin",
       {"--nojoin", "--divide_by=samples"},
       "train: --divide_by=samples needs --join"},
      {"UnevenWithoutJoin",
       {"--nojoin", "--rank_steps=1,2"},
       "train: without --join every rank needs the same number of batches, but rank 1 has 2 and "
       "rank 0 has 1"},
      {"StepsForMoreRanks",
       {"--rank_steps=1,2,3"},
       "train: --rank_steps has 3 numbers for 2 ranks"},
      {"FreezeBackwards",
       {"--freeze=fc1@5:3"},
       "train: --freeze: \"fc1@5:3\" is empty: step 3 does not come after step 5"},
      {"FreezeNothing",
       {"--freeze=conv9@0:3"},
       "train: --freeze: no parameter begins with \"conv9\"; the model has fc1.weight"},
      // Not enough data, or other data.
      {"MoreStepsThanData",
       {"--rank_steps=3,5"},
       "train: --rank_steps asks for 5 batches on rank 1, and the data has 4 for it"},
      {"MoreRanksThanData",
       {"--nproc=9"},
       "train: 40 samples in batches of 5 are 8 batches, too few for 9 ranks"},
      {"NoData",
       {"--data=$T/nowhere"},
       "train: no such file or folder: $T/nowhere; pass a folder with MNIST's"},
      {"EmptyFolder",
       {"--data=$T/empty"},
       "train: no file in the folder $T/empty; pass a folder with MNIST's"},
      {"DamagedImages",
       {"--data=$T/damaged"},
       "train: $T/damaged/train-images-idx3-ubyte: is too short: 40x28x28 bytes should follow the "
       "header, 31359 do"},
      {"DamagedCifar",
       {"--data=$T/cifar", "--model=cnn"},
       "train: $T/cifar/test_batch.bin: has 3072 bytes, which is not a multiple of the record "
       "size, 3073"},
      {"TextForImages",
       {"--data=$T/text.txt"},
       "train: --data=$T/text.txt contains text, but --model=mlp is for images"},
      {"ImagesForText",
       {"--model=gpt"},
       "train: --data=$T/images contains images, but --model=gpt is for text"},
      {"EmptyText",
       {"--model=gpt", "--data=$T/empty.txt"},
       "train: $T/empty.txt: a text of 0 bytes is too short"},
      {"ShortText",
       {"--model=gpt", "--data=$T/short.txt"},
       "train: $T/short.txt: a text of 9 bytes is too short: every 20th block of 4096 bytes is "
       "held out for testing"},
      {"ShardsOfAnotherProgram",
       {"--model=gpt", "--context=8", "--data=$T/magic_train.bin"},
       "train: $T/magic_val.bin: is not a token shard: it begins with 7, not 20240520"},
      {"ShardsOfAnotherVersion",
       {"--model=gpt", "--context=8", "--data=$T/version_train.bin", "--test_data=$T/lonely.bin"},
       "train: $T/version_train.bin: is a token shard of version 2, not 1"},
      {"ShardsCutShort",
       {"--model=gpt", "--context=8", "--data=$T/count_train.bin", "--test_data=$T/lonely.bin"},
       "train: $T/count_train.bin: is too short: 601 tokens of 2 bytes should follow the header, "
       "1200 bytes do"},
      {"ShardsWithoutTest",
       {"--model=gpt", "--context=8", "--data=$T/lonely.bin"},
       "train: $T/lonely.bin: no token shards to test with"},
      // Weights that are none.
      {"NoWeights",
       {"--init=$T/none.safetensors"},
       "train: --init: $T/none.safetensors: No such file or directory"},
      {"NoiseAsWeights",
       {"--init=$T/noise.safetensors"},
       "train: --init: $T/noise.safetensors: not a safetensors file"},
      {"EmptyWeights",
       {"--init=$T/empty.safetensors"},
       "train: --init: $T/empty.safetensors: not a safetensors file: 0 bytes are too few"},
      {"AFolderAsWeights",
       {"--init=$T/empty"},
       "train: --init: $T/empty: contains neither model.safetensors nor a checkpoint"},
      {"WeightsWithOtherHeads",
       {"--model=gpt", "--preset=tiny", "--heads=4", "--data=$T/text.txt",
        "--init=$T/gpt.safetensors"},
       "train: --init: $T/gpt.safetensors is a gpt with heads 2, but --heads is 4"},
      // Files that can't be written.
      {"SaveNowhere",
       {"--save=$T/nowhere/w.safetensors"},
       "train: --save=$T/nowhere/w.safetensors: cannot write to the folder $T/nowhere: No such "
       "file or directory"},
      {"SaveToAFolder", {"--save=$T/empty"}, "train: --save=$T/empty: $T/empty is a folder"},
      {"MetricsUnderAFile",
       {"--metrics=$T/file/m.jsonl"},
       "train: --metrics=$T/file/m.jsonl: cannot write to the folder $T/file"},
      {"PrometheusNowhere",
       {"--prometheus=$T/nowhere/x.prom"},
       "train: --prometheus=$T/nowhere/x.prom: cannot write to the folder $T/nowhere"},
      {"TensorBoardUnderAFile",
       {"--tensorboard=$T/file/tb"},
       "train: --tensorboard=$T/file/tb: cannot write to this folder"},
      {"FlightUnderAFile",
       {"--flight=$T/file/flight"},
       "train: --flight=$T/file/flight: cannot write to this folder"},
      {"ReportToAFolder", {"--report=$T/empty"}, "train: --report=$T/empty: $T/empty is a folder"},
      {"TraceNowhere",
       {"--trace=$T/nowhere/t.json"},
       "train: --trace=$T/nowhere/t.json: cannot write to the folder $T/nowhere"},
      // An environment that makes no sense.
      {"RankWithoutWorld",
       {},
       "train: the environment variable WORLD_SIZE is not set",
       {{"RANK", "0"}}},
      {"RankBeyondTheWorld",
       {},
       "train: RANK=5 does not fit WORLD_SIZE=2: ranks count from 0",
       {{"RANK", "5"},
        {"WORLD_SIZE", "2"},
        {"MASTER_ADDR", "127.0.0.1"},
        {"MASTER_PORT", "29999"}}},
  };
  return *inputs;
}

}  // namespace
}  // namespace evenkeel
